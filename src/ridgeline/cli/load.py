"""``load``: requests to a running server, and what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, app, command_line, keep, say

if TYPE_CHECKING:
    from ridgeline.spec.result import Result


@app.command()
def load(
    url: Annotated[str, typer.Argument(help="Address of a server with the OpenAI API: http://HOST:PORT[/v1].")],
    rate: Annotated[str | None, typer.Option(help="Requests per second; several with commas: a sweep.")] = None,
    arrival: Annotated[
        str, typer.Option(help="poisson, burst[:SHAPE], even, trace:FILE, or closed:N (N clients, no rate).")
    ] = "poisson",
    input_len: Annotated[
        str, typer.Option(help="Prompt tokens: 512, uniform:100-900, lognormal:512,0.8 or gamma:512,0.8 (mean,cv).")
    ] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens to generate, written likewise.")] = "128",
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many per rate (default: a minute's, at least 100; a trace: all).")
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Limits of a good request: ttft=500ms,tpot=50ms.")] = None,
    model: Annotated[str, typer.Option(help="Model to ask for (default: the only one).")] = "",
    api: Annotated[str | None, typer.Option(help="completions or chat.")] = None,
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="The server's API key.")] = "",
    data: Annotated[str | None, typer.Option(help="Prompts from text: a file, a directory, stdlib.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json or checkpoint: cuts text to the token.")] = None,
    vocab_size: Annotated[int, typer.Option(min=2, help="Random token ids are below this.")] = 256,
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens of a prompt that all share.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs of exactly the asked length.")] = True,
    extra_body: Annotated[str, typer.Option(help="More fields of each request, as JSON.")] = "{}",
    warmup: Annotated[int, typer.Option(min=1, help="Requests before those that count, one by one.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a request has failed.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and prompts.")] = 0,
    run: Annotated[
        int | None, typer.Option(min=0, help="Prompts differ from run to run; a run's number gives its prompts again.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report with pictures.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write every request as a line of JSON.")] = None,
    json: Json = False,
) -> None:
    """Send load to a server: TTFT, TPOT, ITL, throughput, goodput.

    Open loop: requests go when they are due, answered or not, and latency counts from then. Ctrl-C keeps what is there.
    """
    import secrets

    from ridgeline.measure.load.ask import extra_fields, make_prompts, workloads
    from ridgeline.measure.load.endpoint import find_endpoint
    from ridgeline.measure.load.run_load import Settings, label, measure_load, write_records
    from ridgeline.report.console import StepBar, print_loads

    asked = workloads(rate, arrival, input_len, output_len, requests, slo, seed)
    run = secrets.randbelow(1 << 31) if run is None else run
    endpoint = find_endpoint(url, model, _api(api), key, ignore_eos, extra_fields(extra_body))
    prompts, made_of = make_prompts(endpoint.api, data, tokenizer, vocab_size, shared_prefix, seed, run)
    settings = Settings(warmup, timeout, shared_prefix, made_of, run)
    done: list[Any] = []
    for i, w in enumerate(asked):
        with StepBar(label(endpoint.model, w), 0) as bar:
            result, drive = measure_load(endpoint, w, prompts.at_rate(i), settings, progress=bar.message)
        result.command = _command()
        done.append((result, drive))
        if drive.interrupted:
            break
    results: list[Result] = [r for r, _ in done]
    if records:
        write_records(records, [d for _, d in done])
    keep(*results)
    if report:
        from ridgeline.report.html import load_html

        load_html(results, report)
        say(f"report: {report}")
    if json:
        print("[" + ",\n".join(r.to_json() for r in results) + "]" if len(asked) > 1 else results[0].to_json())
    else:
        print_loads(results)
    if results[-1].status == "interrupted":
        raise typer.Exit(130)
    if any(r.status != "ok" for r in results):
        raise typer.Exit(1)


def _api(api: str | None) -> Any:
    from ridgeline.spec.errors import unknown

    if api not in (None, "completions", "chat"):
        raise unknown("api", str(api), ("completions", "chat"))
    return api


def _command() -> str:
    import re

    return re.sub(r"(--key[ =])\S+", r"\1…", command_line())
