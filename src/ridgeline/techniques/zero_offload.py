"""ZeRO-Offload: optimizer states and their update in host memory."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import host_copy


class ZeroOffload(Technique):
    """Keep master weights and optimizer states in host memory, send gradients there, update on the CPU.

    The device keeps its weights only. The copies run beside the backward pass; the update itself does not, unless it is
    delayed by one step, so that it runs beside the next one.
    """

    card: ClassVar[Card] = Card(
        name="zero_offload",
        title="ZeRO-Offload",
        paper="arXiv:2101.06840",
        taxonomy="training/offload/zero_offload",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="13B parameters on one V100, 10x larger than without; 40 TFLOP/s at 10B",
        runs=False,
    )
    phase: ClassVar[Phase] = "offload"

    delayed: bool = False
    """Apply each update one step late, beside the next step (the loss is then no longer the same)."""

    def check(self, e: Experiment) -> None:
        """Needs a device with a memory of its own, and no other home for the states."""
        self.needs(not e.plan.has("zero_infinity"), "zero_infinity already moves the optimizer's states",
                   "keep one of the two")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Copy gradients out behind each block's backward, and new weights in after the update."""
        offload_states(g)
        g.delayed_update = self.delayed
        return g


def offload_states(g: Graph) -> None:
    """Move the optimizer's states and step to the host, with the copies that this needs."""
    g.host_states = True
    weights = 0.0
    for b in g.blocks:
        grads = 0.0
        for p in b.params:
            if p.trainable:
                share = p.numel / max(p.grad_shards, p.state_shards)
                grads += share * min(p.grad_bytes, 2.0 if g.low_weights else 4.0)
                weights += share * p.bytes_per_element * b.repeat
        if grads:
            b.reduce.append(host_copy("offload.gradients", "d2h", grads, "backward"))
    copied: list[Op] = [host_copy("offload.weights", "h2d", weights / g.stages, "update")]
    g.after_update = copied + g.after_update
