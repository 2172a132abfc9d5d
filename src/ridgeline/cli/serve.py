"""`ridgeline serve`: a checkpoint over an OpenAI-compatible API."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.base import With, app, number_of_bytes, require_package, say
from ridgeline.cli.engine_options import (
    BatchedTokens,
    ChatTemplate,
    Checkpoint,
    DeviceMemory,
    DiskFolder,
    DType,
    EngineOptions,
    HostMemory,
    Kernels,
    Length,
    Pool,
    SecretFile,
    Seqs,
    TlsCa,
    TlsCert,
    TlsClients,
    TlsKey,
    Tokenizer,
    build,
)
from ridgeline.serve.transfer.secret import VARIABLE, read_secret, require_secret
from ridgeline.serve.transfer.tls import Tls

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.engine_loop import EngineLoop
    from ridgeline.serve.remote_engine import RemoteEngine
    from ridgeline.serve.transfer.member import MemberOptions
    from ridgeline.serve.transfer.transfers import Transfers


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")] = 8000,
    root_path: Annotated[str, typer.Option(help="Prefix of all paths, as behind a proxy: /models/a.")] = "",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may ask from a browser: https://a.example, or *. Repeatable."),
    ] = None,
    with_: With = None,
    adapters: Annotated[Path | None, typer.Option(help="Directory of LoRA and other adapters to serve.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="RIDGELINE_API_KEY", help="API key that clients must send. Repeatable.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="API key for changing adapters and resetting the cache."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listening on other interfaces without an API key.")
    ] = False,
    served_model_name: Annotated[str | None, typer.Option(help="Model name in the API.")] = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Let the model call the functions in a chat's `tools`.")
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes calls, by vLLM's names: hermes (also Qwen), llama3_json, mistral, …"),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="Tell reasoning apart: deepseek_r1, qwen3 (<think> and </think>), openai_gptoss (channels)."),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Default sampling parameters: auto (the checkpoint's generation_config.json), vllm (none), or"
            " a folder with that file."
        ),
    ] = "auto",
    max_logprobs: Annotated[
        int, typer.Option(min=-1, help="Most log-probabilities at each place; -1: of the whole vocabulary.")
    ] = 20,
    enable_force_include_usage: Annotated[
        bool, typer.Option("--enable-force-include-usage", help="Report usage in every chunk of every stream.")
    ] = False,
    enable_per_request_metrics: Annotated[
        bool, typer.Option("--enable-per-request-metrics", help="Report in answers when their tokens came.")
    ] = False,
    return_tokens_as_token_ids: Annotated[
        bool,
        typer.Option("--return-tokens-as-token-ids", help="In log-probabilities write tokens as token_id: and the id."),
    ] = False,
    pooling: Annotated[
        str | None, typer.Option(help="What embeddings are made of: mean, last or cls (the checkpoint's own, or mean).")
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="What a fleet's router prefers to use it for: prefill, decode or mixed.")
    ] = None,
    transfer_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on which other servers fetch the caches of prompts; 0 for any.")
    ] = 0,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_clients: TlsClients = False,
    max_model_len: Length = None,
    dtype: DType = "auto",
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    kv_cache: Pool = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: DiskFolder = None,
    kernels: Kernels = None,
    max_num_queued_reqs: Annotated[int, typer.Option(min=1, help="Maximum number of queued outputs.")] = 512,
    max_num_queued_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of queued prompt tokens.")] = 1
    << 20,
    first_token_timeout: Annotated[
        float, typer.Option(min=0.1, help="Reject a request that is not scheduled within this many seconds.")
    ] = 300.0,
    ttft_slo: Annotated[
        float | None,
        typer.Option(min=0, help="Refuse requests whose first token is expected later than after this many seconds."),
    ] = None,
    scheduling_policy: Annotated[
        str,
        typer.Option(
            help="Who goes next, within a priority: priority (first come, first served), or fair (between API"
            " keys: the one that was served least)."
        ),
    ] = "priority",
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Launch each step before the last one's tokens are known (by default on a GPU).",
        ),
    ] = None,
    engine_process: Annotated[
        bool | None,
        typer.Option(
            "--engine-process/--no-engine-process",
            " /--disable-frontend-multiprocessing",
            help="Run the engine in a process of its own, beside HTTP and text (by default with two cores or more).",
        ),
    ] = None,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Report unhealthy if a step takes longer than this many seconds.")
    ] = 120.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to finish running requests after SIGTERM.")
    ] = 30.0,
    max_body: Annotated[str, typer.Option(help="Maximum size of a request body.")] = "8MiB",
    max_connections: Annotated[int, typer.Option(min=1, help="Maximum number of open connections.")] = 1000,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible API."""
    require_package("fastapi")
    from ridgeline.measure.environment import cores, spare_core
    from ridgeline.serve.address import loopback, path_prefix
    from ridgeline.serve.checkpoint_settings import Options
    from ridgeline.serve.fair_shares import POLICIES
    from ridgeline.serve.queue_limits import QueueLimits
    from ridgeline.serve.remote_engine import RemoteEngine
    from ridgeline.serve.transfer.member import MemberOptions
    from ridgeline.spec.errors import UserError, unknown
    from ridgeline.techniques.registry import bringing

    keys, admin_keys = _keys("API", api_key), _keys("ADMIN", [admin_key] if admin_key is not None else None)
    if not (keys or insecure or tls_clients or loopback(host)):
        raise UserError(f"--host {host} lets other machines in, and there is no key",
                        "give --api-key, --tls-clients, or --insecure")  # fmt: skip
    body, prefix = number_of_bytes("--max-body", max_body), path_prefix(root_path)
    options = Options(tool_call_parser, enable_auto_tool_choice, pooling, reasoning_parser, generation_config,
                      max_logprobs, enable_force_include_usage, enable_per_request_metrics,
                      return_tokens_as_token_ids)  # fmt: skip
    options.check()
    if scheduling_policy not in POLICIES:
        raise unknown("scheduling policy", scheduling_policy, POLICIES, "--scheduling-policy")
    if scheduling_policy == "fair" and len(keys) < 2:
        raise UserError("--scheduling-policy fair shares between API keys, and there are not two", "give two --api-key")
    secret = read_secret(fleet_secret_file, os.environ.get(VARIABLE))
    tls = Tls.of(tls_cert, tls_key, tls_ca, tls_clients)
    if tls is not None and (tls.cert or role is not None):
        tls.listening(mutual=role is not None or tls_clients)  # a wrong file is found before the checkpoint is loaded
    if role is None and not with_:
        _require_peers(tls)
    if role is not None:
        require_secret(role, secret)
    more = bringing("adapter_table") if adapters is not None or admin_keys else ()
    if role is not None:
        more = (*more, *(f"{name}:role={role}" for name in bringing("phase_pools")))
    asked = EngineOptions(checkpoint, with_, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache, dtype, more,
                          (device_memory, host_memory, disk), scheduling_policy, async_scheduling,
                          kernels)  # fmt: skip
    limits = QueueLimits(max_num_queued_reqs, max_num_queued_tokens, first_token_timeout, ttft_slo, stall_timeout)
    make, member = partial(build, asked), MemberOptions(secret, host, transfer_port, tls, say, stall_timeout)
    with ExitStack() as ended:
        apart = cores() > 1 if engine_process is None else engine_process
        remote = RemoteEngine(make, spare_core, member) if apart else None
        if remote is not None:
            ended.callback(remote.close)
        # These take long to import: meanwhile the other process loads the model.
        from ridgeline.serve.app import create_app
        from ridgeline.serve.server import make_service
        from ridgeline.serve.server import serve as run

        engine = remote.wait_ready() if remote is not None else make()
        service = make_service(engine, checkpoint, limits, served_model_name, tokenizer, chat_template, options)
        if adapters is not None:
            service.load_all(adapters)
        service.loop.rebuild = service.loop.rebuild or make
        transfers = _join(service.loop, engine, member)
        asgi = create_app(service, keys, admin_keys, body or 0, prefix, allowed_origins or ())
        say(f"{service.name}: {engine.max_model_len} tokens of context, {engine.blocks.count} blocks of cache")
        with nullcontext() if remote is not None else spare_core():
            well = run(asgi, service.loop, host, port, drain_timeout, say, max_connections, tls)
        if transfers is not None:
            transfers.close()
        if remote is not None:
            well = remote.close() and well
        elif not service.loop.asleep:
            service.loop.engine.close()
    if not well:
        raise typer.Exit(1)


def _require_peers(tls: Tls | None) -> None:
    """Raise :class:`UserError` for an authority at a server that exchanges nothing with others."""
    from ridgeline.spec.errors import UserError

    if tls is not None and tls.ca and not tls.clients:
        raise UserError("--tls-ca checks the certificates of a fleet's other servers, and this one has no --role;"
                        " clients are known by their keys",
                        "give --api-key KEY and leave --tls-ca out, --tls-clients to check clients with it, or"
                        " --role prefill|decode|mixed")  # fmt: skip


def _join(loop: EngineLoop, engine: Engine | RemoteEngine, options: MemberOptions) -> Transfers | None:
    """Make the server a member of a fleet, if its plan makes it one → the exchange of caches, where that is not in the
    engine's own process. Raises :class:`UserError` without a secret."""
    from ridgeline.serve.remote_engine import RemoteEngine
    from ridgeline.serve.transfer.member import FleetMember

    if not engine.role:
        _require_peers(options.tls)
        return None
    if isinstance(engine, RemoteEngine):
        transfers, port, fingerprint = None, engine.transfer_port, engine.fingerprint
    else:
        from ridgeline.serve.transfer.transfers import Transfers

        transfers = Transfers(
            engine, options, loop.post, loop.metrics.registry, lambda: loop.draining,
            lambda: loop.failure is None and loop.step_age <= options.stall,
        )  # fmt: skip
        port, fingerprint = transfers.port, transfers.fingerprint
    loop.member = FleetMember(loop, engine.role, options.secret, port, fingerprint)
    say(f"{engine.role}: caches of prompts on port {port}")
    return transfers


def _keys(kind: str, given: list[str] | None) -> list[str]:
    """The keys that were given. Raises :class:`UserError` for an empty one, as of a variable that is not set."""
    from ridgeline.spec.errors import UserError

    variable = f"RIDGELINE_{kind}_KEY"
    found = given if given is not None else [os.environ[variable]] if variable in os.environ else []
    if not all(key.strip() for key in found):
        raise UserError(f"the {kind.lower()} key is empty", f"give --{kind.lower()}-key KEY, or unset {variable}")
    return found
