"""BitFit: train biases only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, Param
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.adapters.adapted import Adapting, adapt, check_targets, unwrapped
from ridgeline.techniques.technique import Card, Phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ridgeline.nn.adapters.adapter import Adapter


class BitFit(Adapting):
    """Train a bias for every linear layer: added to the base's own, or starting at zero where it has none.

    Norms are unchanged: most decoders' norms have no bias.
    """

    card: ClassVar[Card] = Card(
        name="bitfit",
        title="BitFit",
        paper="arXiv:2106.10199",
        taxonomy="training/finetune/bitfit",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=False,
        claim="on small to medium data competitive with fine-tuning all of BERT, training 0.1 % of it",
        bound="falls",
        quality="another set of parameters trains: the training loss must fall below its starting value",
        owns=frozenset({"trainable"}),
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = 1
    leaves: ClassVar[tuple[str, ...]] = ("adapter_bias",)

    targets: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """The linear layers whose biases train: last names, ``all-linear``, or globs or regular expressions."""

    def check(self, e: Experiment) -> None:
        """Targets must exist; no other part of the base may train."""
        self.check_whole(e)
        check_targets(self, e, self.targets)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Freeze everything; one addition per target, whose gradient is a sum over rows."""
        return adapt(g, e, self.targets, _add)

    def around(self, base: nn.Module, seed: int = 0, layer: int = 0) -> Adapter:
        """A bias that starts at zero."""
        from ridgeline.techniques.adapters.bitfit_torch import BitFitLinear

        return BitFitLinear(base)

    def plain(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the biases to the base's. Raises :class:`UserError` where the base has no bias to add to."""
        out = unwrapped(state, self.leaves)
        for name, value in state.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "adapter_bias":
                if f"{layer}.bias" not in out:
                    raise UserError(f"{layer} has no bias in this family, so the plain model has no place for the one"
                                    " that was trained", "save the adapter instead of exporting the model")  # fmt: skip
                out[f"{layer}.bias"] = out[f"{layer}.bias"] + value
        return out


def _add(b: Block, op: Op, source: str) -> None:
    m, n, _ = op.shape
    size = float(m * n) * DTYPE_BYTES[op.dtype]
    name = f"{op.name}.adapter_bias"
    b.forward.insert(b.forward.index(op) + 1, Op(name, op.module, "residual", bytes=2 * size, dtype=op.dtype))
    b.backward.append(Op(f"{name}.sum", op.module, "reduce", "backward", 0, size, op.dtype, param=name))
    b.params.append(Param(name, n, "fp32", True, 4.0, shape=(n,), grad_bytes=4.0))
