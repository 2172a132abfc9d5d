"""Activations on the wire: plain, or in 8 bits with a scale for each block of a row (blockwise dynamic codes,
arXiv:2110.02861; named ``blockwise8``).

Blocks never cross rows, so that a row has the same codes whatever rows it is sent with: a replayed prompt is the one
that was sent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.nn.quant.codec import decode_blockwise8, encode_blockwise8
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.wire import Wire, block_size


def encode_rows(name: str, x: Tensor, wire: Wire) -> dict[str, Tensor]:
    """``x`` [..., H] as tensors to send."""
    if wire == "plain":
        return {name: x.detach().contiguous().cpu()}
    codes, peaks = encode_blockwise8(x, block=block_size(x.shape[-1]))
    return {f"{name}.codes": codes.cpu(), f"{name}.peaks": peaks.cpu()}


def decode_rows(name: str, tensors: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What :func:`encode_rows` made, in ``dtype``. Raises :class:`BadPeer` for other shapes, and for values that are
    not finite."""
    count = math.prod(shape)
    if name in tensors:
        x = _expect(name, tensors[name], shape, None)
    else:
        block = block_size(shape[-1])
        codes = _expect(f"{name}.codes", tensors.get(f"{name}.codes"), shape, torch.uint8)
        peaks = _expect(f"{name}.peaks", tensors.get(f"{name}.peaks"), (count // block,), torch.float32)
        x = decode_blockwise8(codes, peaks, block=block)
    if not bool(torch.isfinite(x).all()):
        raise BadPeer(f"it sent {name} with values that are not finite")
    return x.to(dtype)


def _expect(name: str, t: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    if t is None:
        raise BadPeer(f"it sent no {name}")
    if tuple(t.shape) != shape or (t.dtype != dtype if dtype else t.dtype not in (torch.float32, torch.bfloat16)):
        due = f"{list(shape)} of {dtype or 'a floating type'}"
        raise BadPeer(f"it sent {name} {list(t.shape)} of {t.dtype} where {due} was due")
    return t
