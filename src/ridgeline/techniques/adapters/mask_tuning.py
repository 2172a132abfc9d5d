"""Mask tuning: choose which pre-trained weights to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.adapters.adapted import Adapting, adapt, check_targets, train_matrix, unwrapped
from ridgeline.techniques.technique import Card, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter


class MaskTuning(Adapting):
    """Learn a binary mask over each weight matrix instead of changing it: real-valued scores, compared with a
    threshold, whose gradients pass straight through. A task stores only one bit per weight."""

    card: ClassVar[Card] = Card(
        name="mask_tuning",
        title="Mask tuning",
        paper="arXiv:2004.12406",
        taxonomy="training/finetune/mask_tuning",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="masking BERT and RoBERTa performs comparably to fine-tuning, at one bit per weight and task",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        conflicts={"products": "{other} multiplies by weights of its own layers"},
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("adapter_scores",)
    from_zero: ClassVar[bool] = False

    start: float = 0.02
    """Initial scores: above the threshold, so that all weights are used."""
    threshold: float = 0.01
    """A weight is used when its score is above this."""
    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """The linear layers to mask: last names, ``all-linear``, or globs or regular expressions."""

    def check(self, e: Experiment) -> None:
        """Targets must exist, scores must start above the threshold, and weights must be plain tensors."""
        self.check_whole(e)
        self.needs(self.start > self.threshold, f"start {self.start:g} is not above threshold {self.threshold:g}: all"
                   " weights would be off", "use a higher start")  # fmt: skip
        check_targets(self, e, self.targets)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything; one score per weight trains, and every use masks one matrix."""

        def add(b: Block, op: Op, source: str) -> None:
            train_matrix(b, op, source, "adapter_masked", self.leaves, 1.25, 2.0)

        return adapt(g, e, self.targets, add)

    @property
    def reads_weight(self) -> bool:
        """Its effect is a change of the weight."""
        return True

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """A mask that keeps all weights."""
        from ridgeline.nn.adapters.mask import MaskLinear

        return MaskLinear(base, self.start, self.threshold)  # type: ignore[arg-type]

    def compact(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mask bits, packed eight to a byte, and the shape."""
        import torch

        from ridgeline.nn.adapters.mask import pack

        out = {}
        for key in [k for k in state if k.endswith(".adapter_scores")]:
            name, scores = key.removesuffix(".adapter_scores"), state[key]
            out[f"{name}.adapter_bits"] = pack(scores > self.threshold)
            out[f"{name}.adapter_shape"] = torch.tensor(scores.shape, dtype=torch.int32)
        return out

    def expand(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scores as far above or below the threshold as the initial scores were."""
        import torch

        from ridgeline.nn.adapters.mask import unpack

        out = {}
        for key in [k for k in state if k.endswith(".adapter_shape")]:
            name = key.removesuffix(".adapter_shape")
            rows, columns = state[key].tolist()
            on = unpack(state[f"{name}.adapter_bits"], (rows, columns))
            out[f"{name}.adapter_scores"] = torch.where(on, self.start, 2 * self.threshold - self.start)
        return out

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set the masked weights to zero."""
        out = unwrapped(state, self.leaves)
        for key in [k for k in state if k.endswith(".adapter_scores")]:
            name = key.removesuffix(".adapter_scores")
            out[f"{name}.weight"] = out[f"{name}.weight"] * (state[key] > self.threshold)
        return out
