"""Kernels whose thread blocks process a row in tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild
    from ridgeline.runtime.train_build import TrainBuild


class ThreadBlockFolding(Technique):
    """In the fused norms and softmax, fold the thread blocks that a wide row would need into one that iterates over
    tiles (EET): this supports rows of any width, such as hidden sizes of 12288 and scores of long sequences, with the
    registers of one tile. Serving gets the fused norms with it. CPU kernels iterate over rows in any case, and only the
    tile width changes."""

    card: ClassVar[Card] = Card(
        name="thread_block_folding",
        title="Thread block folding",
        paper="arXiv:2104.12470",
        taxonomy="inference/model/fused_layers",
        tasks=frozenset({"pretrain", "finetune", "serve"}),
        lossless=True,
        claim="hidden sizes to 12288 and lengths to 4096; EET runs a decoder layer 1.40-4.20x as fast as"
        " FasterTransformer 4.0 on an A100",
        unpredicted=dict.fromkeys(
            ("pretrain", "finetune", "serve"), "a tile that is read again comes out of the cache"
        ),
        needs={"fused_norms": "there are no fused norms to fold"},
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 6

    columns: int = Field(default=1024, ge=16)
    """Columns per tile, a power of two; narrower rows are not divided."""

    @field_validator("columns")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("tiles have a power of two of columns")
        return value

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a kernel's register use is not predicted."""
        return []

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The same operators and bytes: a tile that is read again comes from the cache."""
        return g

    def build(self, run: TrainBuild) -> None:
        """Fold the kernels of fused_layers."""
        from ridgeline.nn.model.fused import fold

        fold(run.model, self.columns)

    def serve(self, run: ServeBuild) -> None:
        """Fuse norms with the preceding residual additions, folded."""
        from ridgeline.nn.model.fused import fold, fuse_elementwise

        fuse_elementwise(run.model)
        fold(run.model, self.columns)
