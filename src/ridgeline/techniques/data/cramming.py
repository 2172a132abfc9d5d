"""Cramming: training within a budget."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Metric, Result
from ridgeline.techniques.parts import Part
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class Cramming(Technique):
    """Limit a run to a budget of minutes, joules or tokens: learning rate and batch size follow the fraction of the
    budget that is spent, and training ends when it is used up.

    The paper's recipe is for BERT; this technique takes only its budget protocol, for a causal model: one triangular
    cycle of the learning rate, and batches that grow. The workload's ``lr`` is the peak of the cycle, its ``steps`` are
    an upper limit. What was spent before an interruption stays spent. Predictions are for full batches.
    """

    card: ClassVar[Card] = Card(
        name="cramming",
        title="Cramming (budgeted training)",
        paper="arXiv:2212.14034",
        taxonomy="training/data/cramming",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="close to BERT on GLUE after one day on one consumer GPU",
        bound="falls",
        quality="another schedule: the training loss must fall",
        example={"tokens": 448, "start": 0.5, "ramp": 0.05},
    )
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = -1

    minutes: float | None = Field(default=None, gt=0)
    """Time budget from the first step on, including evaluations and checkpoints."""
    joules: float | None = Field(default=None, gt=0)
    """Energy budget of rank 0's machine: ``watts`` times seconds, or what its processors report (RAPL)."""
    tokens: int | None = Field(default=None, gt=0)
    """Token budget."""
    watts: float | None = Field(default=None, gt=0)
    """Power that the machine draws, for a budget in joules."""
    top: float = Field(default=0.5, gt=0, lt=1)
    """Fraction of the budget at which the learning rate peaks."""
    start: float = Field(default=0.25, gt=0, le=1)
    """Fraction of the batch size to start with."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Fraction of the budget after which batches are full size; 0: always."""

    def owns(self) -> frozenset[Part]:
        """With a ramp, it decides the batch size."""
        return frozenset({"batch_shape"}) if self.grows else frozenset()

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a budget is the user's decision."""
        return []

    def stored(self) -> dict[str, Any]:
        """All but the budget, which may be extended."""
        budget = ("minutes", "joules", "tokens", "watts")
        return {k: v for k, v in super().stored().items() if k not in budget}

    @property
    def grows(self) -> bool:
        """Whether the batch size grows."""
        return self.ramp > 0 and self.start < 1

    def check(self, e: Experiment) -> None:
        """Exactly one budget, and nothing that needs batches of constant size."""
        given = [n for n in ("minutes", "joules", "tokens") if getattr(self, n) is not None]
        self.needs(len(given) <= 1, f"{' and '.join(given)} are several budgets", "give one of them")
        self.needs(not (self.grows and "pp" in e.parallel and e.micro_batch_size == e.batch_size), "a pipeline's"
                   " batches cannot grow without micro-batches", "use micro_batch_size, or ramp=0")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Add the exchange in which ranks agree on what is spent."""
        if e.world > 1:
            g.before_update.append(Op("budget.reduce", "communication", "all_reduce", "update", bytes=8.0,
                                      link_bytes=8.0, ranks=e.world, axis="all"))  # fmt: skip
        return g

    def note(self, e: Experiment, result: Result) -> None:
        """How many steps the budget allows, assuming full batches; with growing batches there are somewhat more."""
        step = result.metrics["step_time_s"].value
        tokens = result.metrics["tokens_per_step"].value
        watts = self.watts or (e.cluster.device.watts or 0.0) * e.world
        steps = 0.0
        if self.tokens:
            steps = self.tokens / tokens
        elif self.joules and watts:
            steps = self.joules / (watts * step)
        elif not self.joules:
            steps = (self.minutes or 60.0) * 60 / step
        if steps:
            result.metrics["budget_steps"] = Metric(value=steps, unit="", better="", source="budget over a step")

    def build(self, run: TrainBuild) -> None:
        """Drive the schedule, the batch size and the end of the run by the spent fraction."""
        import torch
        import torch.distributed as dist

        from ridgeline.techniques.data.cramming_torch import Ramp, Spending, rapl_joules, triangle

        e = run.experiment
        done = [0.0]
        count = time.monotonic
        budget = (self.minutes or 60.0) * 60
        if self.tokens:
            budget, count = float(self.tokens), lambda: done[0]
        elif self.joules:
            budget = self.joules
            measured = rapl_joules() if self.watts is None else None
            watts = self.watts
            if measured is not None:
                count = measured
            elif watts is not None:
                count = lambda: watts * time.monotonic()  # noqa: E731
            else:
                raise UserError("cramming: this machine does not report its energy use", "give watts, e.g. watts=65")

        def agree(share: float) -> float:
            if run.world == 1:
                return share
            shared = torch.tensor(share if run.rank == 0 else 0.0, dtype=torch.float64, device=run.device)
            dist.all_reduce(shared)
            return float(shared)

        spending = Spending(budget, count, agree)
        run.hooks.states["budget"] = spending
        peak = run.update.schedule(e.training.warmup_steps)
        run.update.schedule = lambda step: peak * triangle(_inside(spending.share(step)), self.top)
        run.hooks.finished = spending.finished
        if self.grows:
            least = e.data_parallel * e.micro_batch_size if e.accumulation > 1 else e.data_parallel
            run.data.batches = run.hooks.states["ramp"] = Ramp(
                run.data.batches, e.batch_size, least, self.start, self.ramp, spending.share
            )
            run.data.ahead = False  # rows follow from what is spent
        batches = run.data.batches

        def used() -> None:
            step = spending.known[0]
            size = batches.rows(step) if isinstance(batches, Ramp) else e.batch_size
            done[0] += size * e.training.seq_len

        run.hooks.after_update.append(used)


def _inside(share: float) -> float:
    """Keep the first step's learning rate above zero."""
    return max(share, 0.01)
