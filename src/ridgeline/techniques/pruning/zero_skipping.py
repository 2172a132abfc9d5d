"""Zero skipping: do not multiply values that the previous operation left at zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build


class ZeroSkipping(Technique):
    """In the last projection, skip inputs that the preceding ReLU set to zero and, if enabled, in attention, blocks of
    keys whose probabilities are nearly zero. Exact at threshold 0. The fraction of FLOPs skipped is reported."""

    card: ClassVar[Card] = Card(
        name="zero_skipping",
        title="Zero skipping",
        paper="doi:10.1109/PACT52795.2021.00013",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"generate"}),
        lossless=True,
        claim="part of NLP-Fast, whose optimizations together raise throughput up to 2.92x on a CPU, 1.59x on a GPU",
        needs_model={"activation": "relu", "gated": False},
        changes=frozenset({"products"}),
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 3

    threshold: float = Field(default=0.0, ge=0)
    """Inner activations of at most this magnitude are skipped."""
    rows: int = Field(default=8, ge=1)
    """Maximum number of tokens for which individual activations are skipped: larger batches use one dense product."""
    most: float = Field(default=0.35, gt=0, le=1)
    """Largest fraction of active entries at which skipping pays off: individual entries cost more than in a dense
    product."""
    attention: bool = False
    """Whether attention skips too (its scores are then computed by unfused operators)."""
    probability: float = Field(default=0.0, ge=0, lt=1)
    """Blocks of keys are skipped if all their probabilities are at most this."""
    block: int = Field(default=64, ge=1)
    """Number of keys in a block."""
    zeros: float = Field(default=0.9, ge=0, lt=1)
    """Fraction of inner activations that predictions assume to be zero."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it pays off only where activations are sparse, which depends on the model, not on the plan."""
        return []

    def check(self, e: Experiment) -> None:
        """There must be a ReLU before a dense projection, or attention skipping must be enabled."""
        m = e.model
        sparse = m.activation == "relu" and not m.num_experts
        self.needs(sparse or self.attention, f"{m.name}'s feed-forward layers have no ReLU that would leave zeros, or "
                   "have experts", "use attention=true to skip in attention alone, or a model such as OPT")  # fmt: skip
        if self.attention:
            refuse(self, e, "fused_attention", "a fused kernel never shows its probabilities",
                   "leave out {other}, or attention=true")  # fmt: skip
        if sparse:
            refuse(self, e, "weights", "{other} stores the projection in codes, whose columns do not come singly")

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """For few tokens, the last projection shrinks to its expected active part. Attention's savings depend on the
        text and are not predicted."""
        if e.model.activation != "relu" or e.model.num_experts or g.tokens > self.rows or 1 - self.zeros > self.most:
            return g
        wide = DTYPE_BYTES[e.dtype]

        def skip(b: Block) -> None:
            b.forward = [self._shrunk(o, wide) if o.name.endswith("mlp.down_proj") else o for o in b.forward]

        return g.each_block(skip, layers_only=True)

    def _shrunk(self, op: Op, wide: float) -> Op:
        rows, out, inner = op.shape
        weights = out * inner * wide
        read = weights * min(1.0, rows * (1 - self.zeros))  # every row reads its own columns
        return changed(op, flops=op.flops * (1 - self.zeros), bytes=op.bytes - weights + read)

    def apply(self, run: Build) -> None:
        """Transpose the last projections and count the FLOPs that they skip."""
        from torch import nn

        from ridgeline.nn.model.mlp import MLP
        from ridgeline.techniques.pruning.zero_skipping_torch import SkippingLinear, Tally, skipping_attention

        if run.experiment.model.activation == "relu":
            inner = Tally()
            for module in list(run.model.modules()):
                if isinstance(module, MLP) and isinstance(module.down_proj, nn.Linear):
                    module.down_proj = SkippingLinear(module.down_proj, self.threshold, self.rows, inner, self.most)  # type: ignore[assignment]
            run.metrics["skipped_inner_flops"] = lambda: inner.share
        if self.attention:
            keys = Tally()
            run.model.set_attention(skipping_attention(self.probability, self.block, keys))
            run.metrics["skipped_attention_flops"] = lambda: keys.share
