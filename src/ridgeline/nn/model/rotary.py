"""Rotary position embedding (arXiv:2104.09864) in Hugging Face's half-split convention, with Llama 3.1's scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.spec.model import ModelSpec

Rope = tuple[Tensor, Tensor]
"""(cos, signed sin), each [S, 1, D], or [B, S, 1, D] where every sequence has its own positions."""


class Rotary:
    """Creates the tables that :func:`rotate` reads.

    The tables are a cache, not state: they are neither parameters nor buffers, so a model that was built on the meta
    device, moved, cast or copied needs no special handling. They are computed on first use, per device and dtype.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._tables: dict[tuple[torch.device, torch.dtype], Rope] = {}

    def cached(self) -> list[Tensor]:
        """The currently cached tables."""
        return [t for pair in self._tables.values() for t in pair]

    def inverse_frequencies(self, device: torch.device) -> Tensor:
        """Angles per position, [D/2] float32; long waves are slowed by Llama 3.1's scaling where the spec has it."""
        spec = self._spec
        exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=device) / spec.head_dim
        frequency = 1.0 / spec.rope_theta**exponent
        scaling = spec.rope_scaling
        if scaling is None:
            return frequency
        # Wave lengths below original/high keep their frequency, those above original/low are slowed by `factor`;
        # between the two, a linear blend in 1/wavelength.
        turns = scaling.original_max_positions * frequency / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
        return frequency * (keep + (1 - keep) / scaling.factor)

    def tables(
        self, positions: Tensor | None, start: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> Rope:
        """Tables for positions ``start .. start + length``, or for ``positions`` [S] or [B, S] if they are given."""
        if positions is not None:
            return self._compute(positions, dtype)
        end = start + length
        kept = self._tables.get((device, dtype))
        if kept is None or kept[0].shape[0] < end:
            # Powers of two, so that a growing sequence recomputes them rarely. Not in inference mode: what is made in
            # there could never be saved for a later backward.
            size = max(128, 1 << (end - 1).bit_length())
            with torch.inference_mode(False), torch.no_grad():
                kept = self._compute(torch.arange(size, device=device), dtype)
            if type(kept[0]) is Tensor:  # a fake tensor must not outlive the trace that made it
                self._tables[device, dtype] = kept
        return kept[0][start:end], kept[1][start:end]

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        angle = positions[..., None].float() * self.inverse_frequencies(positions.device)
        cos, sin = angle.cos(), angle.sin()
        # The sign of rotate_half is folded into the table: rotated = x·cos + swap(x)·sin, swap exchanging the halves.
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return pair[0].unsqueeze(-2).to(dtype), pair[1].unsqueeze(-2).to(dtype)


class _Rotate(torch.autograd.Function):
    """One multiplication and two fused multiply-adds instead of negate, concatenate, two multiplications and a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, -1), None, None  # the transpose of a rotation turns back


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate ``x`` [B, S, heads, D] by the angles of ``rope``."""
    if not torch.is_grad_enabled():  # fewer operators than _turn, for a little more memory
        cos, sin = rope
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
    y: Tensor = _Rotate.apply(x, *rope)  # type: ignore[no-untyped-call]
    return y
