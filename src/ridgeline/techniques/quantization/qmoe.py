"""QMoE: the experts of a mixture in less than one bit per parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import QUANTIZE, groups_codes, narrow
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site

WORD_BITS = 0.737
"""Bits of the codewords per weight where 88.5 % of the weights are zero, as for Gaussian rows rounded to their
extremes."""
ROW_BITS = 72
"""Bits per row in addition to its codewords: two values, an offset, and on average half a codeword that extends beyond
its end."""

BATCH_ELEMENTS = 1 << 24
"""Number of elements in the weights and second moments of experts that are solved together. For narrow experts most of
the time is call overhead, which a batch amortizes; experts of about a million weights keep a CPU busy individually."""


class QMoE(Technique):
    """Round every expert to three values per row using the second moments of the tokens routed to it, and store it in
    codewords of a fixed dictionary. Everything else is unchanged, or as another technique of the plan leaves it.

    A weight takes less than one bit where at least 83 % are zero: in Gaussian rows of about 700 inputs or more, later
    where inputs are correlated, for then more is made up for in other weights (measured: 1.00 bit at 1024 inputs).
    """

    card: ClassVar[Card] = Card(
        name="qmoe",
        title="QMoE sub-1-bit experts",
        paper="arXiv:2310.16795",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="less than 1 bit per parameter (0.8), 20x smaller, decoded on the fly with less than 5 % overhead",
        tolerance=0.09,
        quality="layer error below round-to-nearest on the same three values; decoding is exact",
        runs_in=frozenset({"compress"}),
        needs_model={"family": "mixtral", "num_experts": 4, "experts_per_token": 2},
        owns=frozenset({"experts"}),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = QUANTIZE - 1
    """Before techniques that quantize everything that is left."""

    grid: Literal["ternary", "2bit"] = "ternary"
    """Possible values of a weight: its row's minimum, zero and maximum, in codewords of the dictionary (needs --format
    ridgeline); or four per row, as plain 2-bit integers."""
    damp: float = Field(default=0.1, gt=0)
    """Fraction of the mean diagonal that is added to H, which is estimated from few tokens."""
    min_tokens: int = Field(default=1, ge=1)
    """Experts reached by fewer calibration tokens are rounded to nearest instead."""
    batch: int = Field(default=16, ge=1)
    """Number of experts that are solved together, all of them in memory; fewer where their weights and second moments
    exceed 64 MiB in total, since wide experts do not benefit."""

    @property
    def own_format(self) -> bool:
        """Whether weights are stored in codewords of the dictionary."""
        return self.grid == "ternary"

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: the loss in quality is not predicted, so a search would always choose it."""
        return []

    def check(self, e: Experiment) -> None:
        """The model must have experts."""
        self.needs(e.model.num_experts > 0, f"{e.model.name} has no experts", "use gptq for a dense model")

    def groups_experts(self, e: Experiment) -> bool:
        """Words of the dictionary are read expert by expert."""
        return self.grid == "2bit" and groups_codes(e, 2, 0)

    def bytes_per_weight(self, width: int) -> float:
        """Expected bytes per weight in a row of ``width``; below one bit for ternary rows from 274 inputs on."""
        return (2 + 18 / width if self.grid == "2bit" else WORD_BITS + ROW_BITS / width) / 8

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Experts shrink to their expected bytes; kernels dequantize them on load."""
        wide, dtype = DTYPE_BYTES[e.dtype], "int4" if self.grid == "2bit" else "ternary"

        def shrink(b: Block) -> None:
            each: dict[str, float] = {}
            for p in b.params:
                if ".experts." in p.name and p.name.endswith("_proj"):
                    each[p.name] = self.bytes_per_weight(p.shape[-1])
                    p.bytes_per_element, p.dtype, p.trainable = each[p.name], dtype, False
            b.forward = [narrow(o, each[o.param], wide, dtype) if o.kind == "gemm" and o.param in each else o
                         for o in b.forward]  # fmt: skip

        return g.each_block(shrink, layers_only=True)

    def compress(self, run: CompressBuild) -> None:
        """An expert's projections that read the same input are solved together, and several experts at a time."""
        from ridgeline.runtime.compress_build import Together

        run.wants.add("gram")
        run.at_site.append(Together(lambda sites: self._solve(run, sites), self.batch, BATCH_ELEMENTS))

    def _solve(self, run: CompressBuild, sites: list[Site]) -> None:
        import torch

        from ridgeline.runtime.compress_build import store
        from ridgeline.runtime.solve import grid
        from ridgeline.runtime.solve.support import Given
        from ridgeline.runtime.solve.sweep import sweep_stack

        if ".experts." not in sites[0].name:
            return
        weights, keeps, grams = [site.together() for site in sites], [site.keeps() for site in sites], []
        for site in sites:
            assert site.gram is not None
            grams.append(site.gram if site.tokens >= self.min_tokens else torch.eye(len(site.gram)))
        support = None
        if any(keep is not None for keep in keeps):
            support = Given(torch.cat([torch.ones_like(w, dtype=torch.bool) if keep is None else keep
                                       for w, keep in zip(weights, keeps, strict=True)]))  # fmt: skip
        kind: grid.Grid = (
            run.affine(2, 0, symmetric=False) if self.grid == "2bit" else grid.TernaryGrid(run.scale_dtype)
        )
        fitted = kind.fit(torch.cat(weights))
        solved = sweep_stack(torch.stack(weights), grams, fitted, support, act_order=True, damp=self.damp)
        found = torch.cat([s.weight for s in solved])
        record = fitted.pack(found)
        assert record is not None
        rows = len(weights[0])
        for i, (site, s) in enumerate(zip(sites, solved, strict=True)):
            own = record.rows(i * rows, (i + 1) * rows)
            store(site, own, found[i * rows : (i + 1) * rows], **s.notes, rounded=site.tokens < self.min_tokens)
