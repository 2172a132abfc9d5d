"""Feed-forward splitting: the inner activations of the feed-forward layer are computed and used piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.kernels.piece_sizes import cache_share, feed_forward_piece, workspaces
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build


class FeedForwardSplitting(Technique):
    """Compute the feed-forward layer in pieces of rows and columns that stay in cache, y += act(x·W1[:, j])·W2[j, :]:
    the inner activations of a long prompt never exist at once (NLP-Fast's partitioning)."""

    card: ClassVar[Card] = Card(
        name="feed_forward_splitting",
        title="Feed-forward splitting",
        paper="doi:10.1109/PACT52795.2021.00013",
        taxonomy="training/model/partitioning",
        tasks=frozenset({"generate"}),
        lossless=True,
        claim="part of NLP-Fast, whose optimizations together raise throughput up to 2.92x on a CPU, 1.59x on a GPU",
        example={"rows": 2, "columns": 16},
        conflicts={
            "weights": "{other} stores the projections in codes, whose columns do not come singly",
            "products": "{other} computes the projections' products itself",
            "divided_linears": "{other} sums the projections' results over ranks",
            "low_rank": "{other} adds to the projections' results",
        },
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 4

    rows: int | None = Field(default=None, ge=1)
    """Number of tokens in a piece; None: from the sizes of the layer and the device's cache."""
    columns: int | None = Field(default=None, ge=1)
    """Number of inner activations in a piece; None: likewise."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what it gains in time depends on caches, which predictions of whole models do not follow."""
        return []

    def check(self, e: Experiment) -> None:
        """The feed-forward layers must be dense."""
        m = e.model
        self.needs(not m.num_experts, f"{m.name}'s feed-forward layers have experts, whose tokens are few already",
                   "leave it out, or use a dense model")  # fmt: skip

    def piece(self, e: Experiment, tokens: int) -> tuple[int, int]:
        """(rows, columns) of a piece of the inner activations of ``tokens`` tokens."""
        m = e.model
        rows, columns = feed_forward_piece(
            tokens, m.hidden_size, m.intermediate_size, 2 if m.gated else 1, DTYPE_BYTES[e.dtype],
            cache_share(e.cluster.device),
        )  # fmt: skip
        return min(tokens, self.rows or rows), min(m.intermediate_size, self.columns or columns)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The same FLOPs; temporaries of one piece; weights are read for every block of rows, the input and the sum for
        every block of columns."""
        rows, columns = self.piece(e, g.tokens)
        downward, across = -(-g.tokens // rows), -(-e.model.intermediate_size // columns)
        if downward * across == 1:
            return g

        def split(b: Block) -> None:
            other = max(0.0, b.workspace - max(workspaces(b)))
            b.forward = [self._split(o, downward, across) for o in b.forward]
            b.workspace = max(workspaces(b)) + other

        return g.each_block(split, layers_only=True)

    @staticmethod
    def _split(op: Op, downward: int, across: int) -> Op:
        name, pieces = op.name.removeprefix("mlp."), downward * across
        if op.name == "mlp.act":
            return changed(op, pieces=pieces)
        if op.name not in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            return op
        m, n, k = op.shape
        width = op.bytes / (m * n + m * k + n * k)
        again = (downward - 1) * n * k + (across - 1) * (2 * m * n if name == "down_proj" else m * k)
        return changed(op, bytes=op.bytes + again * width, pieces=pieces)

    def apply(self, run: Build) -> None:
        """Replace the feed-forward layers."""
        from ridgeline.nn.model.mlp import MLP
        from ridgeline.techniques.kernels.feed_forward_splitting_torch import SplitMLP

        for block in run.model.layers.values():
            if isinstance(block.mlp, MLP):
                block.mlp = SplitMLP(block.mlp, lambda tokens: self.piece(run.experiment, tokens))
