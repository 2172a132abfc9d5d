"""`ridgeline init`: a commented experiment file, by three questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.base import app, say
from ridgeline.cli.completion import clusters, models

TASKS = {
    "pretrain": """\
seq_len = {seq_len}            # tokens per sequence
batch_size = {batch}           # sequences per optimizer step, over all devices
# micro_batch_size = 1     # sequences per device in one forward pass; left out: no accumulation
# data = "my_texts/"       # a file, a directory, or stdlib (Python's own sources)
steps = 20
lr = 3e-4""",
    "finetune": """\
seq_len = {seq_len}            # tokens per sequence
batch_size = {batch}           # sequences per optimizer step, over all devices
# checkpoint = "CKPT/"     # Hugging Face checkpoint to start from
# data = "chat.jsonl"      # examples, or running text
steps = 20
lr = 2e-4""",
    "generate": """\
batch_size = 1             # sequences that decode together
prompt_len = 512
output_len = 128
# checkpoint = "CKPT/\"""",
    "serve": """\
rate = 1.0                 # requests per second; or concurrency = 16 for clients that never rest
prompt_len = 512           # mean
output_len = 128           # mean
requests = 200""",
}
FILE = """\
# {model} on {on}: {task}. Every field can be overridden on the command line: workload.batch_size=8
#   ridgeline predict {file}        what it gives, without the hardware
#   ridgeline explain {file}        why, and what would gain
{runs}
name = "{name}"
model = "{model}"          # a catalog name (`ridgeline models`), a config.json, or a checkpoint directory
on = "{on}"                # NAME, 8xNAME or 4x8xNAME (`ridgeline devices`); local: this machine
plan = [                   # `ridgeline techniques` lists them, `ridgeline plan` finds the best
{plan}
]

[workload]
kind = "{task}"
{workload}

# Several plans in one file are an ablation (`ridgeline ablate {file}`): instead of `plan`,
# [plans]
# baseline = []
# mine = [{first}]
"""


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("experiment.toml"),
    model: Annotated[str | None, typer.Option(help="Model; asked for if not given.", autocompletion=models)] = None,
    on: Annotated[str | None, typer.Option("--on", help="Cluster; asked for.", autocompletion=clusters)] = None,
    task: Annotated[str | None, typer.Option(help="Task: pretrain, finetune, generate or serve; asked for.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented experiment file by three questions: which model, on what, for which task."""
    from ridgeline import catalog
    from ridgeline.report.files import write_atomic
    from ridgeline.spec.errors import UserError, unknown

    if file.exists() and not overwrite:
        raise UserError(f"{file} is there already", "give another name, or --overwrite")
    model = model or typer.prompt("Model (catalog name, config.json or checkpoint directory)", default="llama2-7b")
    on = on or typer.prompt("Cluster (NAME, 8xNAME, 4x8xNAME; local: this machine)", default="8xa100-80g-sxm")
    task = task or typer.prompt(f"Task ({', '.join(TASKS)})", default="pretrain")
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    catalog.allow_unprobed()
    spec, cluster = catalog.model(model), catalog.cluster(on)
    write_atomic(file, _text(file, model, on, task, min(2048, spec.max_positions), 4 * cluster.size))
    say(f"wrote {file}; next: ridgeline predict {file}")


def _text(file: Path, model: str, on: str, task: str, seq_len: int, batch: int) -> str:
    from ridgeline.techniques.registry import default_plan, registry

    training = task in ("pretrain", "finetune")
    runs = f"#   ridgeline train {file}          do it\n" if training else ""
    plan = [name for name, cls in registry().items() if task in cls.card.tasks and cls.card.standard]
    plan = plan or list(default_plan(task))
    calls = "\n".join(f'    "{call}",' for call in plan)
    return FILE.format(
        model=model, on=on, task=task, file=file, name=file.stem, runs=runs, plan=calls,
        first=", ".join(f'"{call}"' for call in plan[:1]), workload=TASKS[task].format(seq_len=seq_len, batch=batch),
    )  # fmt: skip
