"""8-bit AdamW: both moments as one-byte codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Param
from ridgeline.graph.state_blocks import block_of
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ROW
from ridgeline.techniques.optimizers.replaced_optimizer import no_masters, scaled
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild
    from ridgeline.spec.workload import Training


class AdamW8bit(Technique):
    """AdamW with moments in the dynamic 8-bit data type, scaled by the largest magnitude of each block.

    Blocks do not cross rows (the largest divisor of the row length up to ``block``). Embeddings, vectors and tensors of
    fewer than 4096 elements keep fp32 moments.
    """

    card: ClassVar[Card] = Card(
        name="adamw8bit",
        title="8-bit AdamW",
        paper="arXiv:2110.02861",
        taxonomy="training/optimizer/adamw8bit",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="32-bit optimizers' quality at a quarter of their states, 8.5 GB less for a 1.5B language model",
        bound="falls",
        tolerance=0.01,
        quality="AdamW's losses within 1 %",
        example={"lr_ratio": 1e-3},
        beside={"swap_advisor": {"budget": "800kB"}},
        owns=frozenset({"optimizer"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "optimizer"

    block: int = Field(default=256, ge=16)
    """Elements that share a scale; the paper has 2048."""
    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor on the workload's learning rate."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """It must be the only optimizer."""
        no_masters(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Two bytes and the blocks' scales instead of eight. A GPU's one kernel reads parameter, gradient, codes and
        scales, and writes all but the gradient, and moments in fp32 are those of the fused AdamW; elsewhere every
        moment is decoded and encoded in passes of their own.
        """
        tp = e.parallel.get("tp", 1)
        moved = elements = 0.0
        for p, n in g.params:
            block = block_of(p.shape, _width(p, tp), self.block) if p.shape else 0
            block = 0 if p.name.startswith("embed.") else block
            p.state_bytes = 2 + 8 / block if block else 8.0
            if p.trainable:
                mine = p.numel / max(p.grad_shards, p.state_shards) * n
                elements, moved = elements + mine, moved + mine * (16 + 16 / block if block else 28)
        fused = e.cluster.device.kind == "gpu" and elements
        g.optimizer = ("adamw8bit", moved / elements if fused else 120.0)
        return g

    def build(self, run: TrainBuild) -> None:
        """Replace the engine's optimizer."""
        from ridgeline.runtime import optimizers

        def make(groups: list[dict[str, Any]], w: Training) -> optimizers.AdamW8bitOptimizer:
            wide = {p for name, p in run.root.named_parameters() if ".embed." in f".{name}"}
            return optimizers.AdamW8bitOptimizer(groups, w.lr, (w.beta1, w.beta2), self.block, wide)

        run.update.make_optimizer = make
        scaled(run, self.lr_ratio)


def _width(p: Param, tp: int) -> int:
    """Number of columns of this rank's part."""
    divided = round(math.prod(p.shape) / p.numel / p.spread) > 1 and any(f"{name}." in f"{p.name}." for name in ROW)
    return p.shape[-1] // (tp if divided else 1)
