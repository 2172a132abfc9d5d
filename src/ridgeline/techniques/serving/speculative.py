"""Draft several tokens, verify them in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.result import Result
from ridgeline.spec.scheduling import Scheduling, Speculation
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild


class Speculative(Technique):
    """Draft the next tokens, compute them all in one pass, and keep those that agree.

    Drafts come from the sequence itself (what followed the last occurrence of its newest n-gram) or from a smaller
    model. A drafted token is accepted if it is the one that sampling chooses at its position, with that position's
    random number: outputs are the same, token for token, as without drafts. Where measurements show that drafts do not
    pay off, as in fuller batches, they are left out.
    """

    card: ClassVar[Card] = Card(
        name="speculative",
        title="Speculative decoding",
        paper="arXiv:2211.17192",
        taxonomy="inference/decoding/speculative",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="2-3x faster decoding of T5-XXL, with identical outputs",
        example={"acceptance": 0.7},
    )
    phase: ClassVar[Phase] = "loop"

    tokens: int = Field(default=4, ge=1, le=16)
    """Maximum number of tokens to draft."""
    ngram: int = Field(default=3, ge=1, le=8)
    """Longest n-gram that is looked up in the text so far; shorter ones follow."""
    draft: str = ""
    """Checkpoint directory of a smaller draft model with the same vocabulary."""
    acceptance: float | None = Field(default=None, ge=0, lt=1)
    """Probability that a drafted token is accepted, for predictions: it depends on the text, so give a measured value.
    None: predicted as if nothing were drafted."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what drafts save depends on the text, which cannot be predicted."""
        return []

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No change to operators; the simulated engine generates several tokens per pass."""
        return g

    def scheduling(self, s: Scheduling) -> None:
        """Pass the simulation its parameters."""
        if self.acceptance is not None:
            model = ModelSpec.from_path(Path(self.draft)) if self.draft else None
            s.speculation = Speculation(self.tokens, self.acceptance, model)

    def note(self, e: Experiment, result: Result) -> None:
        """State the assumptions."""
        known = self.acceptance is not None
        result.notes.append(f"speculative: each draft is kept with probability {self.acceptance:g}, as stated" if known
                            else "speculative: predicted as if nothing were drafted; state what share is kept with"
                            " acceptance")  # fmt: skip

    def serve(self, run: ServeBuild) -> None:
        """Draft where it pays off."""
        from ridgeline.nn.quant.packed_model import load_packed
        from ridgeline.runtime.serve_build import Drafts

        run.drafts = Drafts(self.tokens, self.ngram)
        if self.draft:
            model = load_packed(self.draft, next(run.model.parameters()).dtype, run.device).requires_grad_(False)
            mine, theirs = run.model.spec, model.spec
            self.needs(mine.vocab_size == theirs.vocab_size,
                       f"{self.draft} has {theirs.vocab_size} tokens, {mine.name} {mine.vocab_size}",
                       "draft with a model of the same vocabulary")  # fmt: skip
            run.drafts.model = model
