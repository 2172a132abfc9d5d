"""AdaLomo: LOMO with a factored second moment and updates of normalized size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op, Param
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ROW
from ridgeline.techniques.optimizers.lomo import check_recorded
from ridgeline.techniques.optimizers.replaced_optimizer import apply_in_backward, fuses, no_masters, scaled
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class AdaLomo(Technique):
    """Adaptive updates within the backward pass, from row and column means of squared gradients.

    Each update is normalized by its own size and scaled by its parameter's, so that neither the gradients' norm nor
    ``grad_clip`` has any effect; there is no weight decay (Algorithm 1). Where full gradients must be kept (see lomo)
    the updates follow the backward pass.
    """

    card: ClassVar[Card] = Card(
        name="adalomo",
        title="AdaLomo",
        paper="arXiv:2310.10195",
        taxonomy="training/optimizer/adalomo",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="AdamW's quality in instruction tuning of LLaMA 7B to 65B at about LOMO's memory",
        bound="falls",
        quality="another path to the minimum: the training loss must fall",
        example={"lr_ratio": 0.01, "least": 0.1},
        owns=frozenset({"optimizer"}),
        changes=frozenset({"relative_updates"}),
    )
    phase: ClassVar[Phase] = "optimizer"

    decay: float = Field(default=0.8, gt=0)
    """Exponent c of the second moment's decay rate, β = 1 - t^-c."""
    least: float = Field(default=1e-3, gt=0)
    """Lower bound on the root mean square of a parameter by which its updates are scaled."""
    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor on the workload's learning rate, which is relative to the parameters' size here."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """It must be the only optimizer; an overflow must be detected before anything is applied."""
        no_masters(self, e)
        self.needs(not (has(e, "loss_scale") and fuses(e)), "fp16 gradients may overflow, which must be known before"
                   " any of them is applied", "use mixed_precision:dtype=bf16")  # fmt: skip
        check_recorded(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """States are row and column means; where tensors are divided, their sums are reduced over the ranks. A GPU's
        kernels read each whole gradient three times and the parameter twice, and write it."""
        tp = e.parallel.get("tp", 1)
        kernels = e.cluster.device.kind == "gpu" and tp == 1 and all(p.state_shards == 1 for p, _ in g.params)
        g.optimizer, g.clips = ("adalomo", 24.0 if kernels else 44.0), False
        for b in g.blocks:
            for p in b.params:
                if p.trainable:
                    held, sums = _states(p, tp, e.stride("cp"))
                    p.state_bytes = held * p.state_shards / p.numel
                    if g.reduce_every_micro_batch and not fuses(e):
                        g.after_update += sums * b.repeat
                    else:
                        b.reduce += sums
        if fuses(e):
            apply_in_backward(g, 1)
        return g

    def build(self, run: TrainBuild) -> None:
        """Register hooks on the final parameters, or an ordinary optimizer where gradients are kept."""
        from ridgeline.runtime import optimizers
        from ridgeline.techniques.optimizers import lomo_torch as fused_update

        run.update.make_optimizer = lambda groups, w: optimizers.AdaLomoOptimizer(groups, w.lr, self.decay, self.least)
        scaled(run, self.lr_ratio)
        if fuses(run.experiment):
            fused_update.FusedUpdate(run, "none")
        else:
            run.gradients.clip = fused_update.unscale


def _states(p: Param, tp: int, stride: int) -> tuple[float, list[Op]]:
    """Bytes of a parameter's states on this rank, and the collectives of its update."""
    parts = round(math.prod(p.shape) / p.numel) / p.spread  # over tensor-parallel ranks
    shape = [float(n) for n in p.shape or (p.numel,)]
    cuts: list[tuple[int, str, int, int]] = []  # dimension, axis, ranks, stride
    shape[0] /= p.spread
    if p.state_shards > 1:
        cuts.append((0, "dp", p.state_shards, stride))
        shape[0] /= p.state_shards
    if parts > 1:
        row = any(f"{name}." in p.name for name in ROW) or p.name.rpartition(".")[2] in ROW
        dim = len(shape) - (1 if row or len(shape) < 2 else 2)
        cuts.append((dim, "tp", tp, 1))
        shape[dim] /= parts
    last = len(shape) - 1
    held = 4.0 * math.prod(shape) if last == 0 else 4.0 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    sums = []
    for dim, axis, ranks, step in cuts:
        if dim < last - 1:
            continue  # whole matrices on each rank
        if last > 0:
            side = shape[-1] if dim == last - 1 else shape[-2]
            sums.append(_sum("update.factors", 4.0 * math.prod(shape[:-2]) * side, axis, ranks, step))
        sums.append(_sum("update.sizes", (24.0 if last else 16.0) * math.prod(shape[:-2]), axis, ranks, step))
    return held, sums


def _sum(name: str, size: float, axis: str, ranks: int, stride: int) -> Op:
    return Op(name, "communication", "all_reduce", "backward", bytes=size, link_bytes=size, ranks=ranks, axis=axis,
              stride=stride)  # fmt: skip
