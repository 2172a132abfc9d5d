"""The answer of automatic parallelization as tables, as data, and as a runnable file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.experiments import save, to_toml
from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, metric, percent, size
from ridgeline.search.auto.auto_parallel import AutoParallel
from ridgeline.search.auto.replan import Replan
from ridgeline.search.question import Question
from ridgeline.techniques.registry import brief

_TITLES = {
    "stage": "Stage", "layers": "Layers", "ranks": "Ranks", "mesh": "Mesh", "embed": "Embedding",
    "attention": "Attention", "mlp": "MLP", "head": "Head",
}  # fmt: skip


def tables(a: AutoParallel, q: Question) -> list[Table]:
    """The plan with its predicted step beside the best preset's, and the strategies of every stage."""
    return _tables(a, f"{q.model.name} on {q.cluster.label}")


def _tables(a: AutoParallel, title: str) -> list[Table]:
    m = a.quick.metrics
    plans = [
        [
            f"found by {a.method}",
            " ".join(brief(a.experiment.plan)),
            f"{a.experiment.accumulation} of {a.experiment.micro_batch_size}",
            metric(m["tokens_per_s"], "tokens/s"),
            metric(a.step, "s"),
            size(m["peak_bytes"]),
            percent(m["peak_bytes"] / a.quick.limit),
        ]
    ]
    if a.preset is not None:
        p = a.preset
        plans.append(
            [
                "best preset",
                " ".join(brief(p.experiment.plan)),
                f"{p.experiment.accumulation} of {p.experiment.micro_batch_size}",
                metric(p.metrics["tokens_per_s"], "tokens/s"),
                metric(p.metrics["step_time_s"], "s"),
                size(p.metrics["peak_bytes"]),
                percent(p.over),
            ]
        )
    first = Table(
        title,
        [Column("", align="left"), Column("Plan", align="left"), Column("Micro-batches"),
         Column("Throughput", "tokens_per_s"), Column("Step", "step_time_s"), Column("Memory", "peak_bytes"),
         Column("Of it")],
        plans,
    )  # fmt: skip
    first.notes.append(_effort(a))
    if a.gain is not None:
        first.notes.append(f"{a.gain:.3f}x as fast as the best preset, as predicted")
    rows = a.stages()
    second = Table("Stages and strategies", [Column(_TITLES[k], align="left") for k in rows[0]],
                   [[str(v) if v != "" else NONE for v in row.values()] for row in rows])  # fmt: skip
    return [first, second]


def replan_tables(r: Replan) -> list[Table]:
    """The new plan and its stages, with what the move takes and when it pays."""
    e = r.found.experiment
    found = _tables(r.found, f"{e.model.name}, the rest of its run on {e.cluster.label}")
    stays = f"the running plan cannot stay: {r.why}" if r.stays is None else (
        f"the running plan would take {metric(r.stays, 's')} a step there"
    )  # fmt: skip
    pays = "never" if r.pays_after is None else f"after {r.pays_after} steps"
    found[0].notes += [
        stays,
        f"{size(r.move.total)} of parameters and optimizer states move, {size(r.move.received)} to the rank that lacks"
        f" most, {size(r.move.read)} of all from a checkpoint: about {metric(r.move.seconds, 's')}",
        f"with {r.steps_left} steps left, {'change' if r.pays else 'do not change'} (it pays {pays})",
    ]  # fmt: skip
    return found


def replan_dict(r: Replan) -> dict[str, Any]:
    """The ``--json`` document of a plan for the rest of a run."""
    a = r.found
    return {
        "plan": a.experiment.plan.strings(), "on": a.experiment.cluster.label, "metrics": a.quick.metrics,
        "stages": a.stages(), "stays_s": r.stays, "why_not_stay": r.why, "move": asdict(r.move),
        "pays": r.pays, "pays_after_steps": r.pays_after, "steps_left": r.steps_left, "toml": to_toml(a.experiment),
    }  # fmt: skip


def _effort(a: AutoParallel) -> str:
    presets = f", {a.preset_seconds:.1f} s of them for the presets" if a.preset is not None else ""
    return f"{a.predictions} plans predicted in {a.seconds:.1f} s{presets}"


def as_dict(a: AutoParallel, q: Question) -> dict[str, Any]:
    """The ``--json`` document."""
    return {
        "model": q.model.name,
        "on": q.cluster.label,
        "method": a.method,
        "plan": a.experiment.plan.strings(),
        "micro_batch_size": a.experiment.micro_batch_size,
        "micro_batches": a.experiment.accumulation,
        "metrics": a.quick.metrics,
        "memory": a.quick.peak,
        "stages": a.stages(),
        "preset": None if a.preset is None else {
            "plan": a.preset.experiment.plan.strings(), "metrics": a.preset.metrics,
            "micro_batch_size": a.preset.experiment.micro_batch_size,
        },
        "gain": a.gain,
        "predictions": a.predictions,
        "seconds": a.seconds,
        "toml": to_toml(a.experiment),
    }  # fmt: skip


def write_plan(a: AutoParallel, folder: Path) -> Path:
    """A runnable experiment file."""
    named = a.experiment.model_copy(update={"name": a.method})
    return save(named, folder / f"{a.method}.toml")
