"""Shared code of the techniques that replace the workload's optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import has, refuse
from ridgeline.techniques.technique import Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


def no_masters(t: Technique, e: Experiment) -> None:
    """Check that no other technique updates a master copy of the weights."""
    refuse(t, e, "masters", "{other} updates a master copy of the weights by itself",
           'drop {other}, or use weights=fp32, or store 16-bit weights alone (workload dtype = "bf16")')  # fmt: skip


def scaled(run: TrainBuild, ratio: float) -> None:
    """Multiply the learning rate."""
    if ratio != 1.0:
        before = run.update.schedule
        run.update.schedule = lambda step: ratio * before(step)


def fuses(e: Experiment) -> bool:
    """Whether backward yields complete gradients one by one: not where several micro-batches accumulate, or where
    buckets sum them over ranks."""
    return e.accumulation == 1 and not has(e, "whole_gradients")


def apply_in_backward(g: Graph, passes: int) -> None:
    """Move the update into the backward pass, which is run ``passes`` times."""
    g.fused_update, g.passes, g.clips = True, passes, False

    def twice(graph: Graph) -> None:  # sums of tensors of which each tensor-parallel rank has a part
        again = [op for op in graph.before_update if op.name == "partial.reduce"]
        graph.before_update[:0] = again * (passes - 1)

    g.closing.append(twice)
