"""GPTQ: one-shot quantization with second-order information."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.techniques.quantization.weight_only import WeightOnly
from ridgeline.techniques.technique import Card

if TYPE_CHECKING:
    from ridgeline.runtime.compress_build import CompressBuild, Site


class GPTQ(WeightOnly):
    """Round weights column by column, each time compensating for the error in the remaining columns, using the second
    moments of the layer's inputs. Preserves the zeros of a pruned weight."""

    card: ClassVar[Card] = Card(
        name="gptq",
        title="GPTQ",
        paper="arXiv:2210.17323",
        taxonomy="training/compression/quantization",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="3-4 bits per weight with little loss; a 175B model in about 4 GPU hours; 3.25x (A100) to 4.5x (A6000) "
        "faster generation than fp16",
        tolerance=0.05,
        quality="layer error and perplexity below round-to-nearest at the same bits",
        example={"bits": 8, "group_size": 32},
        runs_in=frozenset({"compress", "generate", "serve"}),
    )

    act_order: bool = True
    """Process inputs in order of decreasing activity; groups keep the scales of their own columns ("static groups")."""
    damp: float = Field(default=0.01, gt=0)
    """Fraction of the mean diagonal that is added to H; increased tenfold, up to twice, where H is singular."""
    block: int = Field(default=128, ge=1)
    """Columns processed between updates of the remaining ones."""
    mse: bool = False
    """Shrink each group's range to minimize the error before the sweep."""

    def compress(self, run: CompressBuild) -> None:
        """Solve the layers of a site together: they share H."""
        run.wants.add("gram")
        run.at_site.append(lambda site: self.solve(run, site))

    def solve(self, run: CompressBuild, site: Site) -> None:
        """Solve for the quantized weights of one site and replace them."""
        from ridgeline.runtime.compress_build import store
        from ridgeline.runtime.solve.support import Given
        from ridgeline.runtime.solve.sweep import sweep

        assert site.gram is not None
        weight, keep = site.together(), site.keeps()
        fitted = run.affine(self.bits_of(site.name), self.group_size, self.symmetric, self.mse).fit(weight)
        solved = sweep(weight, site.gram, fitted, None if keep is None else Given(keep), self.act_order, self.damp,
                       self.block)  # fmt: skip
        packed = fitted.pack(solved.weight)
        store(site, packed, **solved.notes)
