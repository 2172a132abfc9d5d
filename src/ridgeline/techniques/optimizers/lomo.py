"""LOMO: gradients are applied as soon as they are computed, and never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.optimizers.replaced_optimizer import apply_in_backward, fuses, no_masters
from ridgeline.techniques.registry import has, refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class Lomo(Technique):
    """SGD within the backward pass: a gradient is applied and freed as soon as it is complete.

    Needs one micro-batch per step, and zero rather than data_parallel on several ranks. Where full gradients must be
    kept (several micro-batches accumulate, a pipeline, the buckets of data_parallel) the step is plain SGD: the same
    loss, in one pass, with all gradients in memory; predictions reflect this.
    """

    card: ClassVar[Card] = Card(
        name="lomo",
        title="LOMO",
        paper="arXiv:2306.09782",
        taxonomy="training/optimizer/lomo",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="memory down to 10.8 % of DeepSpeed's; all parameters of a 65B model tuned on 8 RTX 3090",
        owns=frozenset({"optimizer"}),
    )
    phase: ClassVar[Phase] = "optimizer"

    norm: Literal["global", "tensor", "none"] = "global"
    """How the workload's ``grad_clip`` limits gradients: exactly, by their global norm, which costs a second backward
    pass for the norm alone; each tensor by its own norm; or not at all."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it is SGD, which changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """It must be the only optimizer; an overflow must be detected before anything is applied."""
        no_masters(self, e)
        half = has(e, "loss_scale")
        self.needs(
            not (half and fuses(e)) or (self.norm == "global" and e.training.grad_clip > 0),
            "fp16 gradients may overflow, which must be known before any of them is applied",
            "use norm=global with a grad_clip, which measures them first, or mixed_precision:dtype=bf16",
        )
        check_recorded(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No states; gradients only of the block that is running; a second pass to compute the norm."""
        g.optimizer_bytes, g.optimizer = 0.0, ("lomo", 12.0)
        if fuses(e):
            measures = self.norm == "global" and e.training.grad_clip > 0
            apply_in_backward(g, 2 if measures else 1)
        return g

    def build(self, run: TrainBuild) -> None:
        """Register hooks on the final parameters, or plain SGD where gradients are kept."""
        from ridgeline.runtime import optimizers
        from ridgeline.techniques.optimizers import lomo_torch as fused_update

        run.update.make_optimizer = lambda groups, w: optimizers.SGD(groups, w.lr)
        if fuses(run.experiment):
            fused_update.FusedUpdate(run, self.norm)
        elif self.norm == "tensor":
            run.gradients.clip = fused_update.clip_tensors
        elif self.norm == "none":
            run.gradients.clip = fused_update.unscale


def check_recorded(t: Technique, e: Experiment) -> None:
    """Refuse techniques that record a backward pass without updates in it."""
    if fuses(e):
        refuse(t, e, "recorded_step", "{other} records one backward pass as the step, but here updates are part of it",
               "drop {other}, or use micro_batch_size so that gradients are kept")  # fmt: skip
