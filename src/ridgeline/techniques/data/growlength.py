"""GrowLength: start training with short sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class GrowLength(Technique):
    """Train on short sequences first and on longer ones later, at constant tokens per batch and per micro-batch.

    The tokens and their order are the same as without it: rows of the packed stream are cut into pieces. Predicted
    times are averages over the run, memory is that of full length.
    """

    card: ClassVar[Card] = Card(
        name="growlength",
        title="GrowLength",
        paper="arXiv:2310.00576",
        taxonomy="training/data/growlength",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="lower loss in the same time than training at a fixed length, for a 160M model from 128 to 1024 tokens",
        bound="falls",
        quality="early steps see shorter contexts: the training loss must fall",
        example={"lengths": (8,), "shares": (0.4,)},
        owns=frozenset({"batch_shape"}),
    )
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = -2
    """Before techniques that record or budget batches."""

    lengths: tuple[int, ...] = ()
    """Tokens per sequence of the stages before the last, which uses the workload's ``seq_len``, e.g. 128+256+512; by
    default an eighth, a quarter and a half of it."""
    shares: tuple[float, ...] = ()
    """Fraction of the run's tokens in each of those stages; by default all stages have equal fractions."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def stages(self, e: Experiment) -> list[tuple[int, float]]:
        """(tokens per sequence, fraction of the steps) of every stage."""
        full = e.training.seq_len
        lengths = self.lengths or tuple(full // n for n in (8, 4, 2) if full % n == 0 and full // n >= 2)
        shares = self.shares or (1 / (len(lengths) + 1),) * len(lengths)
        return [*zip(lengths, shares, strict=True), (full, 1 - sum(shares))]

    def at_length(self, e: Experiment, length: int) -> Experiment:
        """The experiment of one stage: more, shorter sequences."""
        w = e.training
        times = w.seq_len // length
        micro = None if w.micro_batch_size is None else w.micro_batch_size * times
        update: dict[str, Any] = {"seq_len": length, "batch_size": e.batch_size * times, "micro_batch_size": micro}
        return e.model_copy(update={"workload": w.model_copy(update=update)})

    def segments(self, e: Experiment) -> list[tuple[float, Experiment]]:
        """One segment per stage."""
        return [(share, self.at_length(e, n) if n != e.training.seq_len else e) for n, share in self.stages(e)]

    def check(self, e: Experiment) -> None:
        """Stages must grow, divide the full length, and work with every other technique."""
        full = e.training.seq_len
        shares = self.shares
        given = len(self.lengths)
        self.needs(not shares or len(shares) == given, f"{given} lengths and {len(shares)} shares",
                   "give one for each length, or none")  # fmt: skip
        self.needs(all(s > 0 for s in shares) and sum(shares) < 1, f"shares {shares} leave nothing for full length",
                   "use positive shares with a sum below 1")  # fmt: skip
        lengths = [n for n, _ in self.stages(e)]
        self.needs(len(lengths) > 1, f"seq_len {full} has no halves to begin with", "give lengths")
        for n in lengths[:-1]:
            self.needs(n >= 2 and full % n == 0 and n < full, f"length {n} does not divide seq_len {full}",
                       f"use smaller divisors of {full}")  # fmt: skip
        self.needs(lengths == sorted(lengths), f"lengths {lengths[:-1]} do not grow", "sort them")
        self.needs(not getattr(e.workload, "instructions", None), "conversations cannot be cut into shorter rows",
                   "drop growlength, or train on text")  # fmt: skip
        for n in lengths[:-1]:
            for t in techniques_of(e.plan):
                if t.card.name != self.card.name:
                    try:
                        t.check(self.at_length(e, n))
                    except Incompatible as refusal:
                        raise Incompatible(f"growlength: at length {n}: {refusal.what}", refusal.fix) from None

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No change: each stage has its own graph."""
        return g

    def build(self, run: TrainBuild) -> None:
        """Cut the batches into shorter sequences."""
        from ridgeline.techniques.data.growlength_torch import GrowingLength

        e = run.experiment
        stages = self.stages(e)
        done, starts = 0.0, []
        for _, share in stages:
            starts.append(round(done * e.training.steps))
            done += share
        run.data.batches = GrowingLength(run.data.batches, tuple(n for n, _ in stages), tuple(starts))
