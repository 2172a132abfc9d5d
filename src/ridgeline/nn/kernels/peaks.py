"""Largest magnitudes of tensors, which the kernel that writes a tensor finds for the product that encodes it.

They go with the tensor, forward and backward, so that neither kernel knows the other: who reads a tensor without them
finds them itself.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ridgeline.nn.kernels.dispatch import processors

Wish = Literal["", "whole", "lines"]
"""Of what a product wants to know the largest magnitudes: nothing, a whole operand, each of its rows and columns."""
PER_PROCESSOR = 4
"""Parts of a whole for each processor of a GPU: programs that are resident at once."""


class Peaks(NamedTuple):
    """Of a matrix [m, k], as bits of fp32 numbers (int32), in whose order NaN is above infinity."""

    first: Tensor
    """Of each row [m]; or of parts of the whole, in any number."""
    columns: Tensor | None
    """[k]; None: of the whole."""


class GatedGradient(NamedTuple):
    """The gradient [m, 2·k] of what SwiGLU reads, not computed yet: who encodes it does so from fewer bytes."""

    dy: Tensor
    """Of SwiGLU's result, [m, k]."""
    both: Tensor
    """What it read, [m, 2·k]: the gate, and what is gated."""


def on_gpu(t: Tensor) -> bool:
    """Whether kernels find peaks: those of GPUs do."""
    return t.is_cuda


def room(rows: int, columns: int, wish: Wish, device: torch.device) -> Peaks:
    """Memory for the peaks of a matrix [rows, columns]: zeros for those of lines, of which kernels keep the largest;
    nothing yet for parts."""
    if wish == "lines":
        both = torch.zeros(rows + columns, dtype=torch.int32, device=device)
        return Peaks(both[:rows], both[rows:])
    parts = min(rows, PER_PROCESSOR * processors(device))
    return Peaks(torch.empty(parts, dtype=torch.int32, device=device), None)


def wanted(t: Tensor, wish: Wish) -> Peaks | None:
    """Room for the peaks of a tensor shaped as ``t`` [..., k], if they are wished for and can be found."""
    if not wish or not t.numel() or not on_gpu(t):
        return None
    return room(t.numel() // t.shape[-1], t.shape[-1], wish, t.device)


def note(t: Tensor, peaks: Peaks | None) -> Tensor:
    """``t``, which is known from now on to have these peaks."""
    if peaks is not None and not t.is_inference():  # which has no version: a change could not be detected
        t.peaks = t._version, peaks  # type: ignore[attr-defined]
    return t


def known(t: Tensor, wish: Wish) -> Peaks | None:
    """The peaks of ``t`` as it is now; None: not known."""
    version, peaks = getattr(t, "peaks", None) or (-1, None)
    if peaks is None or t.is_inference() or version != t._version:
        return None
    return peaks if (peaks.columns is not None) == (wish == "lines") else None


def shared(t: Tensor, view: Tensor) -> Tensor:
    """``view``: ``t`` in another shape with the same rows, and so the same peaks."""
    version, peaks = getattr(t, "peaks", None) or (-1, None)
    if view is t or peaks is None or version != t._version:
        return view
    return note(view, peaks)
