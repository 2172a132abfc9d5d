"""Norm Tweaking: adjust the norms of a quantized model block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Compress
from ridgeline.techniques.quantization.weight_only import TUNE
from ridgeline.techniques.registry import has
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import BlockJob, CompressBuild


class NormTweaking(Technique):
    """After a quantizer: train only the norms (and biases) of each block so that its output comes closer to that of the
    original model. Kept where it helps on held-out windows."""

    card: ClassVar[Card] = Card(
        name="norm_tweaking",
        title="Norm Tweaking",
        paper="arXiv:2309.02784",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="GLM-130B and OPT-66B in 2 bits at the level of their float models",
        tolerance=0.05,
        quality="each block's distance to the original never above the quantizer's, on windows held out",
        runs_in=frozenset({"compress"}),
        unpredicted=dict.fromkeys(("compress", "generate", "serve"), "it changes the values of the norms only"),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = TUNE

    distance: Literal["outputs", "channels"] = "outputs"
    """The loss: the squared error of the outputs or, as in the paper, the differences of each channel's mean and
    standard deviation, which hardly changes perplexity here (docs/compressing.md)."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate in the first block (the paper searches from 1e-5 for its large models)."""
    growth: float = Field(default=1.0, ge=0)
    """The last block's learning rate is 1 + growth times the first's, rising linearly."""
    passes: int = Field(default=4, ge=1)
    """Epochs over the calibration windows (the paper: 1)."""
    batch_size: int = Field(default=8, ge=1)
    """Windows per step."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it makes nothing smaller or faster."""
        return []

    def check(self, e: Experiment) -> None:
        """Something must be quantized, blocks must be whole, and there must be windows to hold out."""
        if isinstance(e.workload, Compress):
            self.needs(has(e, "weights"), "nothing is quantized, so there is nothing"
                       " to make up for", "add a quantizer (--with gptq:bits=2)")  # fmt: skip
            self.needs(e.workload.samples >= 4, f"of {e.workload.samples} windows none can be held out",
                       "use at least 4 calibration windows (--samples)")  # fmt: skip
        self.needs(e.model.num_experts == 0, f"{e.model.name} has experts, which pass one at a time, so its blocks"
                   " cannot be trained whole", "leave norm_tweaking out")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No change: norms keep their size."""
        return g

    def compress(self, run: CompressBuild) -> None:
        """After every block, with the original block's output as the target."""
        from ridgeline.techniques.quantization.norm_tweaking_torch import DISTANCES, tweak

        run.wants.add("teacher")
        layers = run.spec.num_layers

        def after(job: BlockJob) -> None:
            lr = self.lr * (1 + self.growth * job.index / max(1, layers - 1))
            tweak(job, DISTANCES[self.distance], lr, self.passes, self.batch_size)

        run.after_block.append(after)
