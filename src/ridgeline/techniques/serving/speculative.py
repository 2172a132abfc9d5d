"""Draft several tokens, verify them in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.spec.draft_head import head_parameters, is_head, read_head_spec
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.result import Result
from ridgeline.spec.scheduling import Scheduling, Speculation
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import Drafts, ServeBuild


class Speculative(SchedulingTechnique):
    """Draft the next tokens, compute them all in one pass, and keep those that agree.

    Drafts come from the sequence itself (what followed the last occurrence of its newest n-gram), from a smaller model,
    or from a head that was trained for the model, which can draft a tree of alternatives (EAGLE-2, arXiv:2406.16858). A
    drafted token is accepted if it is the one that sampling chooses at its position, with that position's random
    number: outputs are the same, token for token, as without drafts. Where measurements show that drafts do not pay
    off, as in fuller batches, they are left out.
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
        owns=frozenset({"drafts"}),
    )
    phase: ClassVar[Phase] = "loop"

    tokens: int = Field(default=4, ge=1, le=16)
    """Maximum number of tokens to draft; of a tree, on each path."""
    ngram: int = Field(default=3, ge=1, le=8)
    """Longest n-gram that is looked up in the text so far; shorter ones follow."""
    draft: str = ""
    """Checkpoint directory of a smaller draft model with the same vocabulary, or of a head for this model."""
    branches: int = Field(default=1, ge=1, le=16)
    """With a head: tokens that it proposes behind each, of which as many paths go on; 1: a chain."""
    nodes: int | None = Field(default=None, ge=1, le=128)
    """Maximum number of tokens in a tree (16), the likeliest by the head's own probabilities."""
    acceptance: float | None = Field(default=None, ge=0, lt=1)
    """Probability that a drafted token is accepted (of a tree: one of those behind an accepted token), for predictions:
    it depends on the text, so give a measured value. None: predicted as if nothing were drafted."""

    @property
    def has_head(self) -> bool:
        """Whether a head drafts."""
        return bool(self.draft) and is_head(Path(self.draft))

    def reads(self) -> tuple[Path, ...]:
        """The draft model or head."""
        return (Path(self.draft),) if self.draft else ()

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what drafts save depends on the text, which cannot be predicted."""
        return []

    def check(self, e: Experiment) -> None:
        """Trees need a head, and a head needs the model's hidden states, in one process."""
        head = self.has_head
        self.needs(self.branches == 1 or head,
                   f"branches={self.branches} asks for trees, which only a draft head makes",
                   "give draft=DIR of a head (ridgeline finetune --with eagle), or branches=1")  # fmt: skip
        self.needs(self.nodes is None or self.branches > 1,
                   f"nodes={self.nodes} is the size of trees, and branches=1 drafts chains",
                   "give branches=2 or more, or leave nodes out")  # fmt: skip
        if not head:
            return
        axes = [axis for axis, degree in e.parallel.items() if degree > 1]
        self.needs(not axes, f"a draft head reads hidden states, which ranks divide here ({', '.join(axes)})",
                   "draft with a smaller model or from the text, or do not divide the model")  # fmt: skip
        refuse(self, e, "phase_pools", "{other} sends prompts' keys and values to other servers, without the hidden"
               " states that a draft head reads", "draft with a smaller model or from the text")  # fmt: skip

    def scheduling(self, s: Scheduling) -> None:
        """Pass the simulation its parameters."""
        model = None
        if self.draft:
            model = read_head_spec(Path(self.draft)) if self.has_head else ModelSpec.from_path(Path(self.draft))
            s.beside_parameters = head_parameters(model) if self.has_head else model.num_parameters
            s.draft_model = None if self.has_head else model
        if model is not None and self.has_head:  # keys and values, the hidden state, and whether the head has read it
            s.beside_elements = model.cached_tensors * model.cached_heads * model.cached_dim + model.hidden_size + 1
        if self.acceptance is not None:
            nodes = self._nodes if self.branches > 1 else 0
            s.speculation = Speculation(self.tokens, self.acceptance, model, nodes, self.branches, self.has_head)

    @property
    def _nodes(self) -> int:
        """Tokens of a tree: no more than its levels can have."""
        k = self.branches
        return min(self.nodes or 16, k + (self.tokens - 1) * k * k)

    def note(self, e: Experiment, result: Result) -> None:
        """State the assumptions."""
        known = self.acceptance is not None
        result.notes.append(
            f"speculative: each draft is kept with probability {self.acceptance:g}, as stated; none is made where that"
            " would not pay"
            if known
            else "speculative: predicted as if nothing were drafted; state what share is kept with acceptance"
        )

    def serve(self, run: ServeBuild) -> None:
        """Draft where it pays off."""
        from ridgeline.runtime.serve_build import Drafts

        run.drafts = Drafts(self.tokens, self.ngram)
        if self.draft:
            self._load(run, run.drafts)

    def _load(self, run: ServeBuild, drafts: Drafts) -> None:
        from ridgeline.nn.checkpoint.draft_head_files import load_head
        from ridgeline.nn.quant.packed_model import load_packed

        dtype = next(run.model.parameters()).dtype
        if self.has_head:
            drafts.head = load_head(Path(self.draft), run.model.spec, dtype, run.device)
            run.buffers += drafts.head.parameters()
            drafts.branches, drafts.nodes = self.branches, self._nodes if self.branches > 1 else self.tokens
            return
        model = load_packed(self.draft, dtype, run.device).requires_grad_(False)
        mine, theirs = run.model.spec, model.spec
        self.needs(mine.vocab_size == theirs.vocab_size,
                   f"{self.draft} has {theirs.vocab_size} tokens, {mine.name} {mine.vocab_size}",
                   "draft with a model of the same vocabulary")  # fmt: skip
        drafts.model = model
        run.buffers += [*model.parameters(), *model.buffers()]
