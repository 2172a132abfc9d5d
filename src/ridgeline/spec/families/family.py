"""What a model family is: how its ``config.json`` is read and written, and how its checkpoints name their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

Config = dict[str, Any]
"""The contents of a ``config.json``, or fields of :class:`ModelSpec`."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
"""Our activations as ``config.json`` spells them."""


def activation(name: str) -> str:
    """Our name of an activation. Raises :class:`UserError` for one that is not supported."""
    if name not in _ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported", f"supported: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


class Part(NamedTuple):
    """``taken`` of ``of`` equal parts of a tensor along dimension ``dim``, from the ``first`` on.

    With ``groups`` > 1 the dimension (0) consists of that many groups, and the parts are those of each group.
    """

    first: int
    taken: int
    of: int
    dim: int = 0
    groups: int = 1


def no_part(spec: ModelSpec, module: str) -> Part | None:
    """None: every tensor of a checkpoint is one of ours."""
    return None


@dataclass(frozen=True)
class Family:
    """One ``model_type``."""

    read: Callable[[Config], Config]
    """``config.json`` → fields of :class:`ModelSpec`."""
    write: Callable[[ModelSpec], Config]
    """The inverse."""
    stack: str
    """Prefix of its blocks in a checkpoint."""
    block: Mapping[str, str] | Callable[[ModelSpec], Mapping[str, str]] = field(default_factory=dict)
    """Our modules of a block → theirs. ``mlp.experts`` is followed by the expert's number."""
    rest: Mapping[str, str] = field(default_factory=dict)
    """Our modules outside of blocks → theirs."""
    part: Callable[[ModelSpec, str], Part | None] = no_part
    """Which part of their tensor a module of a block is; None: all of it."""
    transposed: bool = False
    """Whether the linear layers of blocks are stored [in, out] (GPT-2)."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Our names of an expert's projections → theirs, where they differ."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Our last names of parameters → theirs, where they differ."""
    expert: str = "{}"
    """How experts are named by their number."""
    encoder_stack: str = ""
    """Prefix of the encoder's blocks."""
    encoder_block: Callable[[ModelSpec], Mapping[str, str]] | None = None
    """Our modules of an encoder's block → theirs."""
    stacked: Callable[[ModelSpec, str], tuple[str, Part | None, bool]] | None = None
    """Where a layer's experts are always one tensor: our name → theirs, the part of it, and whether its last two
    dimensions are exchanged."""

    def modules(self, spec: ModelSpec, stack: str = "layers") -> Mapping[str, str]:
        """Our modules of one of ``spec``'s blocks of ``stack`` → theirs."""
        if stack == "encoder" and self.encoder_block is not None:
            return self.encoder_block(spec)
        return self.block(spec) if callable(self.block) else self.block
