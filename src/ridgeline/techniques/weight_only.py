"""What weight-only quantizers share: bits and groups, what they refuse, and what their weights weigh."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Phase, Technique
PRUNE, FOLD, QUANTISE, TUNE = 10, 20, 30, 40
"""Order of compression within phase adapt: supports before grids, folded scales between, norms last."""


class WeightOnly(Technique):
    """Linear layers of the blocks (experts too, not the router) as integers with a scale per group of inputs."""

    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = QUANTISE

    bits: int = Field(default=4, ge=2, le=8)
    """Bits of one weight."""
    group_size: int = Field(default=128, ge=0)
    """Inputs that share a scale; 0: the whole row."""
    symmetric: bool = True
    """Whether the range is centred on zero; False: a zero point per group is stored too."""

    def check(self, e: Experiment) -> None:
        """Groups must divide the rows; one weight format at a time."""
        others = [c.name for c in e.plan.calls if c.name != self.card.name and _is_weight_format(c.name)]
        self.needs(not others, f"{', '.join(others)} already decides how weights are stored", "keep one of them")
        for name, (_, width) in _widths(e).items():
            if self.group_size:
                self.needs(width % self.group_size == 0,
                           f"group_size {self.group_size} does not divide {name}'s input width {width}",
                           f"use a divisor of {width}, or 0 for whole rows")  # fmt: skip

    def bytes_per_weight(self, width: int, scale_bytes: float) -> float:
        """Stored bytes of one weight of a row of ``width``, its share of scale and zero included."""
        group = self.group_size or width
        return self.bits / 8 + (scale_bytes + (0 if self.symmetric else self.bits / 8)) / group

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Weights shrink to their stored bytes; kernels expand them on the way in."""
        wide = DTYPE_BYTES[e.dtype]
        dtype = "int4" if self.bits <= 4 else "int8"

        def shrink(b: Block) -> None:
            each: dict[str, float] = {}
            for p in b.params:
                if p.dtype == "ternary":  # qmoe's
                    continue
                if p.name.endswith(("_proj.weight", ".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")):
                    each[p.name] = self.bytes_per_weight(p.shape[-1], 2.0)
                    p.bytes_per_element, p.dtype, p.trainable = each[p.name], dtype, False
            b.forward = [narrow(o, each[o.param], wide, dtype) if o.kind == "gemm" and o.param in each else o
                         for o in b.forward]  # fmt: skip

        return g.each_block(shrink, layers_only=True)


def narrow(op: Op, each: float, wide: float, dtype: str) -> Op:
    """The product with weights of ``each`` bytes instead of ``wide``; rows and results stay as they are."""
    rows, out, inner = op.shape[-3:]
    weights = max(0.0, op.bytes - (rows * out + rows * inner) * wide)
    return changed(op, bytes=op.bytes - weights * (1 - each / wide), weight_dtype=dtype)


def _is_weight_format(name: str) -> bool:
    from ridgeline.techniques.registry import registry

    return name in ("rtn", "mxfp4", "fp8") or issubclass(registry()[name], WeightOnly)


def _widths(e: Experiment) -> dict[str, tuple[int, int]]:
    from ridgeline.spec.targets import linears
    from ridgeline.techniques.registry import techniques

    spec = e.model
    for t in techniques(e.plan):
        spec = t.resized(spec)
    found = linears(spec)
    if spec.num_experts:
        h, f = spec.hidden_size, spec.intermediate_size
        found |= {"an expert's up_proj": (f, h), "an expert's down_proj": (h, f)}
    return found
