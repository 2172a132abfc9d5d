"""`ridgeline hardware`: chips as designs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.base import Json, With, app, next_command, say
from ridgeline.cli.workload_options import Given, Task, workload_fields, workload_options

hardware = typer.Typer(no_args_is_help=True, help="Designs of chips: area, power, cost, and sweeps over many of them.")
app.add_typer(hardware, name="hardware")
PriceDate = Annotated[str, typer.Option("--prices", help="Date of the prices: 2023-10, paper, or a TOML file.")]
YieldModel = Annotated[str, typer.Option("--yield", help="Dies that can be sold: spare, plain or none (all).")]


@hardware.command()
def show(
    chip: Annotated[str, typer.Argument(help="Chip of the catalog, or a chip TOML file.")],
    prices: PriceDate = "2023-10",
    yield_: YieldModel = "spare",
    out: Annotated[Path | None, typer.Option(help="Also write the device file that it makes, for --on.")] = None,
    json: Json = False,
) -> None:
    """What a design gives and takes: peaks, area by block, dollars and watts."""
    import json as js

    from ridgeline import catalog
    from ridgeline.catalog import chips
    from ridgeline.hardware.device import chip_device
    from ridgeline.report.console import print_tables
    from ridgeline.report.files import write_atomic
    from ridgeline.search.chip_tables import chip_record, chip_tables

    design, at = chips.chip(chip), chips.prices(prices)
    if json:
        print(js.dumps(chip_record(design, at, yield_), indent=2))
    else:
        print_tables(*chip_tables(design, at, yield_))
    if out:
        text = catalog.device_toml(chip_device(design))
        say(f"wrote {write_atomic(out, '# Written by `ridgeline hardware show`; SI units.' + chr(10) + text)}")
        next_command("predict", "llama2-7b", "--on", out)


@hardware.command()
def chips() -> None:
    """List the catalog's chips."""
    from ridgeline.catalog import chips as known
    from ridgeline.report.console import print_tables
    from ridgeline.search.chip_tables import list_table

    print_tables(list_table([known.chip(name) for name in known.chips()]))


@hardware.command()
@workload_options
def sweep(
    space: Annotated[Path, typer.Argument(metavar="SPACE", help="TOML file: base, [vary] and [limit].")],
    model: Annotated[str, typer.Argument(help="Model: catalog name, config.json or checkpoint directory.")],
    task: Task = "generate",
    with_: With = None,
    *,
    given: Given,
    devices: Annotated[int, typer.Option(min=1, help="Chips of each design, in one node.")] = 1,
    front: Annotated[str, typer.Option(help="Metrics to judge designs by.")] = "dollars,tokens_per_s",
    best_plan: Annotated[bool, typer.Option(help="Search the best plan of each design.")] = False,
    prices: PriceDate = "2023-10",
    yield_: YieldModel = "spare",
    svg: Annotated[Path | None, typer.Option(help="Also write the picture.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the front's device files into this directory.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    json: Json = False,
) -> None:
    """Which designs does no other beat? Exit code 1 when none keeps the limits."""
    import json as js

    from ridgeline import experiments
    from ridgeline.catalog import chips as known
    from ridgeline.report import console
    from ridgeline.report.files import write_atomic
    from ridgeline.search import design_tables
    from ridgeline.search.design_space import read_space
    from ridgeline.search.designs import sweep as run

    found = read_space(space)
    cluster = _cluster(found.base, devices)
    e = experiments.make(model, cluster, workload_fields(model, task, given), with_ or [])
    axes = tuple(name.strip() for name in front.split(",") if name.strip())
    question = _question(e, found.limits, with_ or []) if best_plan else None
    with console.StepBar(f"{found.size} designs for {e.model.name}", 0) as bar:
        answer = run(found, e, known.prices(prices), yield_, axes, question, workers,  # type: ignore[arg-type]
                     lambda at, of: bar.progress.update(bar.task, completed=at, total=of))  # fmt: skip
    print(js.dumps(design_tables.as_dict(answer))) if json else None
    if not answer.front:
        say("no design keeps the limits: " + ", ".join(f"{n} {why}" for why, n in answer.dropped.most_common()))
        raise typer.Exit(1)
    if not json:
        console.print_tables(*design_tables.sweep_tables(answer))
    if svg:
        say(f"wrote {write_atomic(svg, design_tables.sweep_svg(answer))}")
    if out:
        _write_devices(answer, out)


@hardware.command()
def check(json: Json = False) -> None:
    """Published figures of LLMCompass, DFX, FlexFlow and NLP-Fast beside what the models here give."""
    import json as js
    from dataclasses import asdict

    from ridgeline.report.console import print_tables
    from ridgeline.validate.hardware_claims import claims, claims_table

    found = list(claims())
    if json:
        print(js.dumps([{**asdict(c), "error": c.error} for c in found], indent=2))
    else:
        print_tables(claims_table(found))


def _cluster(base: Any, devices: int) -> Any:
    from ridgeline.hardware.device import chip_device
    from ridgeline.spec.device import Cluster

    return Cluster(device=chip_device(base), devices_per_node=devices)


def _question(e: Any, limits: dict[str, float], with_: list[str]) -> Any:
    from ridgeline import experiments
    from ridgeline.search import Question
    from ridgeline.search.design_space import STATIC

    slo = {k: v for k, v in limits.items() if k not in STATIC}
    return Question(e.model, e.cluster, e.workload, "throughput", slo, experiments.plan_of(with_, "--with"))


def _write_devices(answer: Any, out: Path) -> None:
    from ridgeline import catalog
    from ridgeline.hardware.device import chip_device
    from ridgeline.report.files import write_atomic
    from ridgeline.search.design_tables import shown

    out.mkdir(parents=True, exist_ok=True)
    for d in shown(answer):
        text = f"# Written by `ridgeline hardware sweep`: {d.choice}\n" + catalog.device_toml(chip_device(d.chip))
        write_atomic(out / f"{d.chip.name}.toml", text)
    say(f"wrote {len(shown(answer))} device files to {out}")
