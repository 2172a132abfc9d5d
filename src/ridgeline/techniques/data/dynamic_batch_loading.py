"""Dynamic batch loading: sample more from the domains whose loss lags behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.sizes import Size
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class DynamicBatchLoading(Technique):
    """Draw each row of a batch from a domain; periodically multiply the domains' weights by exp(loss - reference).

    Domains are the comma-separated sources in the workload's ``data``, or the files and subdirectories of a directory.
    Losses are those of held-out windows.
    """

    card: ClassVar[Card] = Card(
        name="dynamic_batch_loading",
        title="Dynamic batch loading (Sheared LLaMA)",
        paper="arXiv:2310.06694",
        taxonomy="training/data/dynamic_batch_loading",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="part of Sheared LLaMA: 1.3B and 2.7B models for 3 % of the compute of training them from scratch",
        bound="falls",
        quality="other data in each step: the training loss must fall",
        example={"domains": ("stdlib", "stdlib-code"), "limit": "60kB", "every": 2},
        unpredicted=dict.fromkeys(("pretrain", "finetune"), "a step costs the same whatever it reads"),
    )
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = -3
    """Applied after the data source is chosen and before batches are shaped."""

    domains: tuple[str, ...] = ()
    """Sources of text, if different from the workload's ``data``."""
    weights: tuple[float, ...] = ()
    """Initial weights; by default the domains' sizes."""
    reference: tuple[float, ...] = ()
    """Loss that each domain should reach, e.g. that of a larger model; by default its loss when training begins."""
    every: int = Field(default=50, ge=1)
    """Steps between two updates of the weights."""
    clipped: bool = True
    """Whether a loss below its reference counts as equal to it (as in the paper; its code does not clip)."""
    floor: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the weights that is spread equally over all domains."""
    limit: Size = 4_000_000
    """Amount of text to read from each domain, e.g. 4MB."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs plain text, a decoder, and one number per domain in each list."""
        self.needs(e.model.causal, f"{e.model.name} is an encoder, whose masked batches have one source",
                   "use a decoder")  # fmt: skip
        separate = e.training.separates_documents or e.training.instructions
        self.needs(not separate, "domains are cut into windows of running text, not into documents",
                   "drop document_mask, or train on text files")  # fmt: skip
        for name in ("weights", "reference"):
            given = getattr(self, name)
            self.needs(not (given and self.domains) or len(given) == len(self.domains),
                       f"{len(self.domains)} domains, but {len(given)} {name}", "give one for each")  # fmt: skip
        self.needs(all(w > 0 for w in self.weights), f"weights {self.weights} are not all positive",
                   "a domain with weight 0 is never sampled: leave it out")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """No change: a step costs the same whatever data it reads."""
        return g

    def note(self, e: Experiment, result: Result) -> None:
        """Evaluations are in addition to the step."""
        result.notes.append(f"every {self.every} steps one forward pass per domain comes to the predicted step time")

    def build(self, run: TrainBuild) -> None:
        """Replace the data by the domains, and update their weights between steps."""
        from ridgeline.spec.errors import UserError
        from ridgeline.techniques.data.dynamic_batch_loading_torch import DomainBatches, sources, updated

        w = run.experiment.training
        names = list(self.domains) or sources(w.data)
        if len(names) < 2:
            raise UserError(f"dynamic_batch_loading: data {w.data!r} is one domain",
                            "give several sources with commas between them, or a directory of several")  # fmt: skip
        for what in ("weights", "reference"):
            given = getattr(self, what)
            if given and len(given) != len(names):
                raise UserError(f"dynamic_batch_loading: {len(given)} values in {what}, but {len(names)} domains:"
                                f" {', '.join(names)}", "give one for each")  # fmt: skip
        batches = DomainBatches.read(run.data.tokens_of, run.data.batches.tokenizer, names, w.seq_len,
                                     run.experiment.batch_size, w.seed, int(self.limit), self.weights)  # fmt: skip
        batches.reference = list(self.reference)
        run.data.batches = run.hooks.states["domains"] = batches
        run.data.ahead = False  # weights follow from losses
        measured = [-1]

        def prepare(step: int) -> None:
            if step == measured[0] or step % self.every or (step == 0 and batches.reference):
                return
            measured[0] = step
            losses = [run.data.loss_of(batches.held_out_of(i)) for i in range(len(names))]
            if not batches.reference:
                batches.reference = losses
            elif step:
                batches.weights = updated(batches.weights, losses, batches.reference, self.clipped, self.floor)

        run.hooks.before_step.append(prepare)
