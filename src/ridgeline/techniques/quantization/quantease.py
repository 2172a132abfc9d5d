"""QuantEase: quantization by cyclic coordinate descent on the layer error."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, changed
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.techniques.quantization.weight_only import CODED, WeightOnly, coded_weights
from ridgeline.techniques.technique import Card, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site

_HELD = 4 + 2 * 8
"""Bytes in memory per outlier weight: its value, its row and its column."""


class QuantEase(WeightOnly):
    """Repeatedly move one weight of each row after another to the best grid value given all others; by default starting
    from GPTQ's solution, which can then only improve. Some weights may be kept in 16 bits as outliers."""

    card: ClassVar[Card] = Card(
        name="quantease",
        title="QuantEase",
        paper="arXiv:2309.01885",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="up to 15 % better than GPTQ; Falcon-180B in under 3 hours",
        tolerance=0.05,
        quality="layer error at most GPTQ's when started from it",
        example={"bits": 8, "group_size": 32},
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    start: Literal["gptq", "cold"] = "gptq"
    """Start from GPTQ's solution, or as in the paper from the weights themselves (then use passes=25)."""
    passes: int = Field(default=8, ge=1)
    """Number of passes over all weights."""
    outliers: float = Field(default=0.0, ge=0, lt=0.5)
    """Fraction of the weights (or, if structured, of the inputs) that are kept in 16 bits."""
    structured: bool = False
    """Keep whole inputs in 16 bits instead of single weights."""
    damp: float = Field(default=0.01, gt=0)
    """Damping of the GPTQ start."""
    mse: bool = False
    """Shrink each group's range to minimize the error first."""

    @property
    def own_format(self) -> bool:
        """Whether outlier weights are stored."""
        return self.outliers > 0

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: gptq has the same storage format."""
        return []

    def groups_experts(self, e: Experiment) -> bool:
        """Outliers are added expert by expert."""
        return not self.outliers and super().groups_experts(e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the weights; outliers are added at run time, by value, row and column."""

        def add(b: Block) -> None:
            extra = {p.name: self.outliers * p.numel * _HELD for p in b.params if p.name.endswith(CODED)}
            for p in b.params:
                p.bytes_per_element += self.outliers * _HELD if p.name in extra else 0.0
            b.forward = [changed(o, bytes=o.bytes + extra[o.param], weight_bytes=o.weight_bytes + extra[o.param])
                         if o.param in extra else o for o in b.forward]  # fmt: skip

        g = super().rewrite(g, e)
        return g.each_block(add, layers_only=True) if self.outliers else g

    def note(self, e: Experiment, result: Result) -> None:
        """Add the outliers' storage: each has an index (4 bytes) and a value (2 bytes)."""
        super().note(e, result)
        result.metrics["checkpoint_bytes"].value += 6 * self.outliers * coded_weights(e)
        result.metrics["bits_per_weight"].value += 48 * self.outliers

    def compress(self, run: CompressBuild) -> None:
        """Solve the layers of a site together: they share H."""
        run.wants.add("gram")
        run.at_site.append(lambda site: self._solve(run, site))

    def _solve(self, run: CompressBuild, site: Site) -> None:
        from ridgeline.nn.quant.packed import Packed
        from ridgeline.runtime.compress_build import store
        from ridgeline.runtime.solve.support import Given
        from ridgeline.runtime.solve.sweep import sweep
        from ridgeline.techniques.quantization.quantease_torch import descend, largest

        assert site.gram is not None
        keep, grid = site.keeps(), run.affine(self.bits_of(site.name), self.group_size, self.symmetric, self.mse)
        # Both solvers exclude inputs that are never active; the grids that they fit must agree on that.
        weight = site.together().masked_fill(site.gram.diagonal() == 0, 0)
        start, notes = None, {}
        if self.start == "gptq":
            rest, support = weight, None if keep is None else Given(keep)
            if self.outliers:  # whose error is not to be compensated
                count = round(self.outliers * (weight.shape[1] if self.structured else weight.numel()))
                rest = weight - largest(weight.t(), count, self.structured).t()
            solved = sweep(rest, site.gram, grid.fit(rest), support, act_order=True, damp=self.damp)
            start, notes = solved.weight, solved.notes
        found = descend(weight, site.gram, grid, start, keep, self.passes, self.outliers, self.structured)
        packed = found.fitted.pack(found.on_grid, found.outliers)
        assert isinstance(packed, Packed)
        store(site, packed, objective=[found.errors[0], found.errors[-1]], **notes)
