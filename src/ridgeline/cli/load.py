"""`ridgeline load`: load on a running server, and its latency and throughput."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, app, command_line, ctrl_c_noted, keep, require_writable, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from ridgeline.measure.load.endpoint import Endpoint
    from ridgeline.measure.load.prompts import Prompts
    from ridgeline.measure.load.run_load import Settings
    from ridgeline.spec.result import Result
    from ridgeline.spec.workload import Serve


@app.command()
def load(
    url: Annotated[str, typer.Argument(help="URL of an OpenAI-compatible server: http://HOST:PORT[/v1].")],
    rate: Annotated[str | None, typer.Option(help="Requests per second; comma-separated for a sweep.")] = None,
    arrival: Annotated[
        str, typer.Option(help="poisson, burst[:SHAPE], even, trace:FILE, or closed:N (N clients, no rate).")
    ] = "poisson",
    input_len: Annotated[
        str, typer.Option(help="Prompt tokens: 512, uniform:100-900, lognormal:512,0.8 or gamma:512,0.8 (mean,cv).")
    ] = "512",
    output_len: Annotated[str, typer.Option(help="Output tokens, in the same notation.")] = "128",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per rate (default: one minute's, at least 100; all of a trace).")
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Service level objectives for goodput: ttft=500ms,tpot=50ms.")] = None,
    model: Annotated[str, typer.Option(help="Model name to request (default: the only one served).")] = "",
    api: Annotated[str | None, typer.Option(help="Endpoint: completions or chat.")] = None,
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = "",
    data: Annotated[str | None, typer.Option(help="Text to cut prompts from: a file, a directory, stdlib.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json or checkpoint, for exact prompt lengths.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=2, help="Upper bound of random token ids.")] = 256,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Length of the shared prompt prefix, in tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Request outputs of exactly the given length.")] = True,
    extra_body: Annotated[str, typer.Option(help="Extra fields for each request, as JSON.")] = "{}",
    warmup: Annotated[int, typer.Option(min=1, help="Warm-up requests, sent one by one and not counted.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.1, help="Request timeout in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of arrivals, lengths and prompts.")] = 0,
    run: Annotated[
        int | None,
        typer.Option(min=0, help="Run number: prompts differ between runs, and the same number repeats them."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="URL of a second server: both get the same load, in turns, and are compared.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often both get it, with other prompts (--against).")] = 5,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write every request as a JSON line.")] = None,
    json: Json = False,
) -> None:
    """Send load to a server: TTFT, TPOT, ITL, throughput, goodput.

    Open loop: requests are sent when they are due, whatever is still unanswered, and latency counts from
    then. Ctrl-C keeps the results so far. With --against, two servers get the same load in turns, and
    each metric's ratio is shown with its 95 % interval over the rounds.
    """
    import secrets

    from ridgeline.measure.load.ask import extra_fields, make_prompts, workloads
    from ridgeline.measure.load.endpoint import find_endpoint
    from ridgeline.measure.load.run_load import Settings, label, measure_load, write_records
    from ridgeline.report.console import StepBar, print_loads

    require_writable("--records", file=records)
    require_writable("--report", file=report)
    loads = workloads(rate, arrival, input_len, output_len, requests, slo, seed, shared_prefix)
    run = secrets.randbelow(1 << 31) if run is None else run
    endpoint = find_endpoint(url, model, _api(api), key, ignore_eos, extra_fields(extra_body))
    prompts, prompt_source = make_prompts(endpoint.api, data, tokenizer, vocab_size, shared_prefix, seed, run)
    settings = Settings(warmup, timeout, prompt_source, run)
    if against is not None:
        other = find_endpoint(against, model, _api(api), key, ignore_eos, extra_fields(extra_body))
        with ctrl_c_noted() as noted:
            _side_by_side((endpoint, other), (url, against), loads, rounds, prompts, settings, records, report, json,
                          noted)  # fmt: skip
        return
    done: list[Any] = []
    with ctrl_c_noted() as noted:
        for i, w in enumerate(loads):
            try:
                with StepBar(label(endpoint.model, w), 0) as bar:
                    result, drive = measure_load(endpoint, w, prompts.at_rate(i), settings, progress=bar.message)
            except KeyboardInterrupt:  # in its warm-up: there is nothing of it
                if not done:
                    raise
                break
            result.command = _command()
            done.append((result, drive))
            if drive.interrupted or noted():
                break
        results: list[Result] = [r for r, _ in done]
        keep(*results)  # before files, which may not be writable
        if records:
            write_records(records, [d for _, d in done])
        if report:
            from ridgeline.report.html import load_html

            load_html(results, report)
            say(f"report: {report}")
        if json:
            print("[" + ",\n".join(r.to_json() for r in results) + "]" if len(loads) > 1 else results[0].to_json())
        else:
            print_loads(results)
    if len(results) < len(loads) or results[-1].status == "interrupted":
        raise typer.Exit(130)
    if any(r.status != "ok" for r in results):
        raise typer.Exit(1)


def _side_by_side(
    both: tuple[Endpoint, Endpoint], names: tuple[str, str], loads: list[Serve], rounds: int, prompts: Prompts,
    settings: Settings, records: Path | None, report: Path | None, json: bool, stop: Callable[[], bool],
) -> None:  # fmt: skip
    from ridgeline.measure.load.run_load import label, write_records
    from ridgeline.measure.load.side_by_side import compared, measure_both
    from ridgeline.report.console import StepBar, print_comparison
    from ridgeline.spec.errors import UserError

    if len(loads) > 1:
        raise UserError(f"--against compares two servers under one load, and --rate asks for {len(loads)}",
                        "give one rate")  # fmt: skip
    with StepBar(f"{label(both[0].model, loads[0])}, two servers", 0) as bar:
        done = measure_both(*both, loads[0], prompts.at_rate, settings, rounds, bar.message, stop)
    if not done:
        raise typer.Exit(130)
    found = compared(done, names)
    found.commands.append(_command())
    results = [pair for one in done for pair in one]
    keep(*(r for r, _ in results))
    if records:
        write_records(records, [d for _, d in results])
    if report:
        from ridgeline.report.html import comparison_html

        comparison_html(found, report)
        say(f"report: {report}")
    print(found.model_dump_json(indent=2)) if json else print_comparison(found)
    if len(done) < rounds:
        raise typer.Exit(130)
    if any(r.status != "ok" for r, _ in results):
        raise typer.Exit(1)


def _api(api: str | None) -> Any:
    from ridgeline.spec.errors import unknown

    if api not in (None, "completions", "chat"):
        raise unknown("api", str(api), ("completions", "chat"))
    return api


def _command() -> str:
    import re

    return re.sub(r"(--key[ =])\S+", r"\1…", command_line())
