"""The options of `ridgeline serve` that are its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")]
RootPath = Annotated[str, typer.Option(help="Prefix of all paths, as behind a proxy: /models/a.")]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(help="Origin whose pages may ask from a browser: https://a.example, or *. Repeatable."),
]
Adapters = Annotated[Path | None, typer.Option(help="Directory of LoRA and other adapters to serve.")]
ApiKey = Annotated[
    list[str] | None, typer.Option(envvar="RIDGELINE_API_KEY", help="API key that clients must send. Repeatable.")
]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="API key for changing adapters and resetting the cache."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow listening on other interfaces without an API key.")]
ServedModelName = Annotated[str | None, typer.Option(help="Model name in the API.")]
EnableAutoToolChoice = Annotated[
    bool, typer.Option("--enable-auto-tool-choice", help="Let the model call the functions in a chat's `tools`.")
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(help="How the model writes calls, by vLLM's names: hermes (also Qwen), llama3_json, mistral, …"),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(help="Tell reasoning apart: deepseek_r1, qwen3 (<think> and </think>), openai_gptoss (channels)."),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="Default sampling parameters: auto (the checkpoint's generation_config.json), vllm (none), or"
        " a folder with that file."
    ),
]
MaxLogprobs = Annotated[
    int, typer.Option(min=-1, help="Most log-probabilities at each place; -1: of the whole vocabulary.")
]
EnableForceIncludeUsage = Annotated[
    bool, typer.Option("--enable-force-include-usage", help="Report usage in every chunk of every stream.")
]
EnablePerRequestMetrics = Annotated[
    bool, typer.Option("--enable-per-request-metrics", help="Report in answers when their tokens came.")
]
ReturnTokensAsTokenIds = Annotated[
    bool,
    typer.Option("--return-tokens-as-token-ids", help="In log-probabilities write tokens as token_id: and the id."),
]
Pooling = Annotated[
    str | None, typer.Option(help="What embeddings are made of: mean, last or cls (the checkpoint's own, or mean).")
]
Role = Annotated[
    str | None, typer.Option(help="What a fleet's router prefers to use it for: prefill, decode or mixed.")
]
TransferPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Port on which other servers fetch the caches of prompts; 0 for any.")
]
MaxNumQueuedReqs = Annotated[int, typer.Option(min=1, help="Maximum number of queued outputs.")]
MaxNumQueuedTokens = Annotated[int, typer.Option(min=1, help="Maximum number of queued prompt tokens.")]
FirstTokenTimeout = Annotated[
    float, typer.Option(min=0.1, help="Reject a request that is not scheduled within this many seconds.")
]
TtftSlo = Annotated[
    float | None,
    typer.Option(min=0, help="Refuse requests whose first token is expected later than after this many seconds."),
]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="Who goes next, within a priority: priority (first come, first served), or fair (between API"
        " keys: the one that was served least)."
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Launch each step before the last one's tokens are known (by default on a GPU).",
    ),
]
EngineProcess = Annotated[
    bool | None,
    typer.Option(
        "--engine-process/--no-engine-process",
        " /--disable-frontend-multiprocessing",
        help="Run the engine in a process of its own, beside HTTP and text (by default with two cores or more).",
    ),
]
StallTimeout = Annotated[
    float, typer.Option(min=0.1, help="Report unhealthy if a step takes longer than this many seconds.")
]


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds")
    return seconds


DrainTimeout = Annotated[
    float, typer.Option(min=0, callback=_finite, help="Seconds to finish running requests after SIGTERM.")
]
MaxBody = Annotated[str, typer.Option(help="Maximum size of a request body.")]
MaxConnections = Annotated[int, typer.Option(min=1, help="Maximum number of open connections.")]
