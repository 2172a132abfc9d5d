"""File formats of compressed weights: pure functions between records and named tensors. Only our own format supports
all kinds of quantized weights.

A format writes one module's weight as tensors under that module's name, describes it in ``config.json``, and reads it
back. A checkpoint's format is given by its ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, Stored
from ridgeline.spec.errors import UserError, unknown

Get = Callable[[str], Tensor | None]
"""A tensor of the checkpoint by its full name; None when it has none of that name."""


class Format(Protocol):
    """One format; an instance is a reader for the ``quantization_config`` it was created from, or a writer."""

    name: str

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Format:
        """A reader for a ``quantization_config`` of this method."""

    def write(self, module: str, packed: Packed, code: InputCode | None = None) -> dict[str, Tensor]:
        """The tensors that represent ``module.weight``; ``code``: how the module's input is quantized. Raises
        :class:`UserError` for what the format cannot express."""

    def config(self, layers: Mapping[str, Packed], dense: list[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """``quantization_config``, given the packed modules (their tensors may stand on the meta device), the linear
        modules that stay dense, and how inputs of modules are quantized (:class:`InputCode` by module name)."""

    def read(self, module: str, get: Get) -> Stored | None:
        """The weight of ``module``; None if the file stores it densely."""

    def input(self, module: str, get: Get) -> InputCode | None:
        """How the input of ``module`` is quantized at inference; None: it is not."""


def formats() -> dict[str, type[Format]]:
    """The formats that can be written, by name."""
    from ridgeline.nn.checkpoint.formats.compressed_tensors import CompressedTensors
    from ridgeline.nn.checkpoint.formats.gptq import GPTQFormat
    from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline

    return {kind.name: kind for kind in (CompressedTensors, GPTQFormat, Ridgeline)}


def writer(name: str) -> Format:
    """The format called ``name``."""
    known = formats()
    if name not in known:
        raise unknown("format", name, known)
    return known[name]()


def reader(config: dict[str, Any] | None) -> Format | None:
    """The format of a checkpoint with this ``quantization_config``; None for a dense one.

    Raises :class:`UserError` for a method that is not read here.
    """
    if not config:
        return None
    method = str(config.get("quant_method") or config.get("method", ""))
    if method == "mxfp4" or (method == "fp8" and config.get("weight_block_size")):
        return None  # blocks beside dense tensors, which are expanded as they are read
    for kind in formats().values():
        if method == kind.name:
            return kind.from_config(config)
    raise UserError(
        f"checkpoints of quant_method {method!r} are not read", f"read: {', '.join(formats())}, mxfp4, fp8 in blocks"
    )
