"""Lion: updates by the sign of an interpolated momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.optimizers.replaced_optimizer import no_masters, scaled
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class Lion(Technique):
    """Every weight moves by the learning rate in the direction of a sign; one state instead of Adam's two.

    Weight decay is decoupled and, as in the workload, applies to matrices only.
    """

    card: ClassVar[Card] = Card(
        name="lion",
        title="Lion",
        paper="arXiv:2302.06675",
        taxonomy="training/optimizer/lion",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="half of Adam's states; up to 5x less pre-training compute on JFT; similar or better language models",
        bound="falls",
        quality="another path to the minimum: the training loss must fall",
        example={"lr_ratio": 1e-3},
        beside={"swap_advisor": {"budget": "740kB"}},
        owns=frozenset({"optimizer"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "optimizer"

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the momentum in the step's direction (β1)."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of the momentum (β2)."""
    lr_ratio: float = Field(default=1.0, gt=0)
    """Factor on the workload's learning rate; the paper uses 0.1 to 0.3 of AdamW's."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it changes the training result."""
        return []

    def check(self, e: Experiment) -> None:
        """It must be the only optimizer."""
        no_masters(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """One four-byte state; thirteen passes over tensors of four bytes per element."""
        g.optimizer_bytes, g.optimizer = 4.0, ("lion", 13 * 4.0)
        return g

    def build(self, run: TrainBuild) -> None:
        """Replace the engine's optimizer."""
        from ridgeline.runtime import optimizers

        betas = (self.beta1, self.beta2)
        run.update.make_optimizer = lambda groups, w: optimizers.LionOptimizer(groups, w.lr, betas)
        scaled(run, self.lr_ratio)
