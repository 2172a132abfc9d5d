"""What the techniques share that put another optimizer in the place of the workload's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild

NAMES = ("adalomo", "adamw8bit", "lion", "lomo", "qft")


def alone(t: Technique, e: Experiment) -> None:
    """Check that nothing else replaces the optimizer, or keeps its states."""
    name = t.card.name
    for other in NAMES:
        t.needs(other == name or not e.plan.has(other), f"{other} is another optimizer", "keep one of the two")
    for other in ("zero_offload", "zero_infinity"):
        t.needs(not e.plan.has(other), f"{other} keeps and updates the workload's own optimizer states in host memory",
                f"drop {other}, or {name}")  # fmt: skip
    t.needs(
        e.plan.option("mixed_precision", "weights") != "low",
        "mixed_precision:weights=low updates a master copy of the weights by itself",
        'use weights=fp32, or store the weights in 16 bits (workload dtype = "bf16")',
    )


def scaled(run: TrainBuild, ratio: float) -> None:
    """Multiply the learning rate."""
    if ratio != 1.0:
        before = run.update.schedule
        run.update.schedule = lambda step: ratio * before(step)


def fuses(e: Experiment) -> bool:
    """Whether backward yields complete gradients one by one: not where several micro-batches add to them, nor where
    they are summed over ranks in buckets."""
    parallel = e.plan.has("data_parallel") or e.plan.has("pipeline")
    return e.accumulation == 1 and not parallel


def apply_in_backward(g: Graph, passes: int) -> None:
    """The update happens within the backward pass, which is run ``passes`` times."""
    g.fused_update, g.passes, g.clips = True, passes, False

    def twice(graph: Graph) -> None:  # sums of what each tensor-parallel rank has a part of
        again = [op for op in graph.before_update if op.name == "partial.reduce"]
        graph.before_update[:0] = again * (passes - 1)

    g.closing.append(twice)
