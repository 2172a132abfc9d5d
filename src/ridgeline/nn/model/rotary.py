"""Rotary position embedding (arXiv:2104.09864) in Hugging Face's half-split convention, and its scalings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.nn.kernels.dispatch import usable
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.rope import RopeScaling

Rope = tuple[Tensor, Tensor]
"""(cos, signed sin), each [S, 1, R], or [B, S, 1, R] where every sequence has its own positions; R ≤ D dimensions of
each head are rotated."""


class Rotary:
    """Creates the tables that :func:`rotate` reads.

    The tables are a cache, not state: they are neither parameters nor buffers, so a model that was built on the meta
    device, moved, cast or copied needs no special handling. They are computed on first use, per device and dtype.
    """

    def __init__(self, spec: ModelSpec, windowed: bool = False) -> None:
        """``windowed``: for layers with a sliding window, where they have a base of their own."""
        if windowed and spec.local_rope_theta is not None:
            spec = spec.model_copy(update={"rope_theta": spec.local_rope_theta, "rope_scaling": None})
        self._spec = spec
        self._tables: dict[tuple[torch.device, torch.dtype], Rope] = {}

    def cached(self) -> list[Tensor]:
        """The currently cached tables."""
        return [t for pair in self._tables.values() for t in pair]

    def inverse_frequencies(self, device: torch.device, length: int = 0) -> Tensor:
        """Angles per position, [R/2] float32 for R rotated dimensions, in a sequence of ``length`` positions (0:
        within the original ones)."""
        spec, s = self._spec, self._spec.rope_scaling
        exponent = torch.arange(0, spec.rotated, 2, dtype=torch.float32, device=device) / spec.rotated
        if s is not None and s.kind == "dynamic" and length > s.original_max_positions:
            grown = s.factor * length / s.original_max_positions - (s.factor - 1)
            base = spec.rope_theta * math.pow(grown, spec.rotated / (spec.rotated - 2))
            return 1.0 / base**exponent
        frequency = 1.0 / spec.rope_theta**exponent
        if s is None or s.kind == "dynamic":
            return frequency
        if s.kind == "longrope":
            factors = s.long_factor if length > s.original_max_positions else s.short_factor
            return frequency / torch.tensor(factors, device=device)
        keep = _kept(spec, s, frequency)
        return frequency * (keep + (1 - keep) / s.factor)

    def tables(
        self, positions: Tensor | None, start: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> Rope:
        """Tables for positions ``start .. start + length``, or for ``positions`` [S] or [B, S] if they are given.

        Scalings that depend on the length (dynamic, longrope) take that of the last position, as in transformers.
        """
        scaling = self._spec.rope_scaling
        by_length = scaling is not None and scaling.by_length and device.type != "meta"
        if positions is not None:
            return self._compute(positions, dtype, int(positions.max()) + 1 if by_length else 0)
        end = start + length
        if by_length and scaling is not None and end > scaling.original_max_positions:
            return self._compute(torch.arange(start, end, device=device), dtype, end)
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

    def _compute(self, positions: Tensor, dtype: torch.dtype, length: int = 0) -> Rope:
        angle = positions[..., None].float() * self.inverse_frequencies(positions.device, length)
        cos, sin = angle.cos(), angle.sin()
        scaling = self._spec.rope_scaling
        if scaling is not None and scaling.attention_factor != 1:
            cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
        # The sign of rotate_half is folded into the table: rotated = x·cos + swap(x)·sin, swap exchanging the halves.
        pair = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return pair[0].unsqueeze(-2).to(dtype), pair[1].unsqueeze(-2).to(dtype)


def _kept(spec: ModelSpec, s: RopeScaling, frequency: Tensor) -> Tensor:
    """How much of each frequency is kept (1) rather than divided by ``s.factor`` (0), [D/2] or a scalar."""
    if s.kind == "linear":
        return frequency.new_zeros(())
    if s.kind == "llama3":  # a linear blend in the turns that a frequency makes within the original positions
        turns = s.original_max_positions * frequency / (2 * math.pi)
        return ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    d = spec.rotated  # yarn: a linear blend in the dimension, between those that make beta_fast and beta_slow turns
    low, high = (
        d * math.log(s.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))
        for turns in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    place = torch.arange(d // 2, dtype=torch.float32, device=frequency.device)
    return 1 - ((place - low) / (high - low or 0.001)).clamp(0, 1)


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


def _rotated_on_gpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A copy of ``x`` [B, S, heads, D], turned by one kernel."""
    from ridgeline.nn.kernels.functions import rotate_  # which imports what stands beside this

    return rotate_(x.clone().flatten(2), cos, sin, x.shape[2], x.shape[3]).view(x.shape)


def rotate(x: Tensor, rope: Rope, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of ``x`` [B, S, heads, D] by the angles of ``rope``.

    ``interleaved``: neighboring dimensions belong together. The result has the even ones first: the same order in
    queries and keys changes no score.
    """
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    part = rope[0].shape[-1]
    if part < x.shape[-1]:
        return torch.cat((rotate(x[..., :part], rope), x[..., part:]), -1)
    if not torch.is_grad_enabled():
        cos, sin = rope
        if x.is_cuda and x.is_contiguous() and usable(x, cos, sin):
            return _rotated_on_gpu(x, cos, sin)
        # Fewer operators than _rotate, for a little more memory.
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
    y: Tensor = _Rotate.apply(x, *rope)  # type: ignore[no-untyped-call]
    return y
