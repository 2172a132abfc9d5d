"""QMoE: the experts of a mixture in less than one bit per parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.quantization.weight_only import QUANTIZE, narrow
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site

WORD_BITS = 0.737
"""Bits of the words per weight where 88.5 % of the weights are zero, as of Gaussian rows rounded to their extremes."""
ROW_BITS = 72
"""Bits of a row beside its words: two values, an offset, and half a word that reaches beyond its end on average."""

BATCH_ELEMENTS = 1 << 24
"""Numbers in the weights and second moments of experts that are solved side by side. Of narrow experts most of the time
goes into calls, which a batch shares; those of about a million weights keep a CPU busy one by one."""


class QMoE(Technique):
    """Round every expert to three values per row under the second moments of the tokens routed to it, and store it in
    words of a fixed dictionary. Everything else stays as it is, or as another technique of the plan leaves it.

    A weight takes less than one bit where at least 83 % are zero: in Gaussian rows of about 700 inputs or more, later
    where inputs are correlated, for then more is made up for in other weights (measured: 1.00 bit at 1024 inputs)."""

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
    """Before what quantizes all that is left."""

    grid: Literal["ternary", "2bit"] = "ternary"
    """Values of a weight: its row's minimum, zero and maximum, in words of the dictionary (needs --format ridgeline);
    or four of its own row's, as plain 2-bit integers."""
    damp: float = Field(default=0.1, gt=0)
    """Share of the mean diagonal that is added to H, which few tokens stand behind."""
    min_tokens: int = Field(default=1, ge=1)
    """Experts that fewer calibration tokens reach are rounded to nearest instead."""
    batch: int = Field(default=16, ge=1)
    """Experts that are solved side by side, all of them in memory; fewer where their weights and second moments are
    more than 64 MiB together: wide ones gain nothing."""

    @property
    def own_format(self) -> bool:
        """Words of the dictionary do."""
        return self.grid == "ternary"

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what it costs in quality is not predicted, so a search would always take it."""
        return []

    def check(self, e: Experiment) -> None:
        """There must be experts."""
        self.needs(e.model.num_experts > 0, f"{e.model.name} has no experts", "use gptq for a dense model")

    def bytes_per_weight(self, width: int) -> float:
        """Expected bytes of one weight of a row of ``width``; below one bit for ternary rows from 274 inputs on."""
        return (2 + 18 / width if self.grid == "2bit" else WORD_BITS + ROW_BITS / width) / 8

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Experts shrink to their expected bytes; kernels expand them on the way in."""
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
        """Each expert's projections that read one input are solved as one, and several experts' side by side."""
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
