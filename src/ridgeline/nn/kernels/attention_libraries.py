"""Attention over the pages of a serving step by other libraries: PyTorch's ``varlen_attn``, FlashAttention 2 and 3,
FlashInfer. Signatures and conditions are those of their sources (PyTorch 2.13, flash-attn 2.8, FlashAttention 3 of
2026, FlashInfer 0.7); none of these calls has run on a GPU yet.

The pool [1, G, slots, D] is pages as it lies: seen as [pages, block, G, D], a key head's part of a page is one piece.
Steps may be captured in a CUDA graph, where lengths are read on the device alone, which FlashInfer's call does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.nn.kernels.backends import LOW, Backend, Case
from ridgeline.nn.memory.step_pages import Pages, upload
from ridgeline.nn.model.mask import ScoreChanges
from ridgeline.nn.quant.quantized_kv import Codes

PageAttention = Callable[[Tensor, Tensor, Tensor, Pages, int], Tensor]
"""(queries [T, H, D], keys and values [1, G, slots, D], pages, newest tokens that a token sees or 0) → [T, H, D]."""
_FLASH_BLOCK = 256
"""FlashAttention 2 takes pages of a multiple of these tokens."""
_WORKSPACE = 128 * 2**20
"""Bytes that FlashInfer splits long caches in, as its documentation has it."""


def takes(keys: Tensor | Codes, window: int, changes: ScoreChanges | None) -> bool:
    """Whether a layer's attention is what all of these libraries compute: of plain keys, with their scores as they are,
    and with a window that slides."""
    return isinstance(keys, Tensor) and window >= 0 and changes is None


def by_pages(rows: Tensor, block: int) -> Tensor:
    """A store [1, G, slots, D] as pages [pages, block, G, D], without a copy."""
    groups, slots, width = rows.shape[1:]
    pages = slots // block
    return rows[0, :, : pages * block].view(groups, pages, block, width).permute(1, 2, 0, 3)


def _longest(pages: Pages) -> int:
    """Tokens that a table has room for: at least those of its longest sequence."""
    return pages.table.shape[1] * pages.block


def _left(window: int) -> int:
    return window - 1 if window else -1


def torch_attention() -> PageAttention:
    """PyTorch's. Raises :class:`AttributeError` for a version without block tables."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise AttributeError("varlen_attn has no block_table")

    def attend(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int) -> Tensor:
        out = varlen_attn(
            q, by_pages(keys, pages.block), by_pages(values, pages.block), pages.starts, None, pages.most,
            _longest(pages), window_size=(_left(window), 0), enable_gqa=q.shape[1] != keys.shape[1],
            seqused_k=pages.lengths, block_table=pages.table,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    return attend


def flash_attention() -> PageAttention:
    """FlashAttention 2's, which reads the lengths as sums over the sequences before."""
    from flash_attn import flash_attn_varlen_func

    def attend(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int) -> Tensor:
        ends = torch.nn.functional.pad(pages.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        out: Tensor = flash_attn_varlen_func(
            q, by_pages(keys, pages.block), by_pages(values, pages.block), pages.starts, ends, pages.most,
            _longest(pages), causal=True, window_size=(_left(window), 0 if window else -1), block_table=pages.table,
        )  # fmt: skip
        return out

    return attend


def flash_attention_3() -> PageAttention:
    """FlashAttention 3's, which is installed from its repository."""
    from flash_attn_interface import flash_attn_with_kvcache

    def attend(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q, by_pages(keys, pages.block), by_pages(values, pages.block), cache_seqlens=pages.lengths,
            page_table=pages.table, cu_seqlens_q=pages.starts, max_seqlen_q=pages.most, causal=True,
            window_size=(_left(window), 0 if window else -1),
        )  # fmt: skip
        return out

    return attend


def flashinfer() -> PageAttention:
    """FlashInfer's, planned once for a step and each width of its windows, from numbers that the host has: a step that
    is captured raises :class:`RuntimeError`."""
    import flashinfer as library

    planned: dict[int, tuple[Pages, Any]] = {}
    workspace: list[Tensor] = []

    def attend(q: Tensor, keys: Tensor, values: Tensor, pages: Pages, window: int) -> Tensor:
        if not pages.held:
            raise RuntimeError("FlashInfer plans attention on the host")
        held = planned.get(window)
        if held is None:
            if not workspace:
                workspace.append(torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device))
            held = planned[window] = (pages, library.BatchPrefillWithPagedKVCacheWrapper(workspace[0], "NHD"))
            _plan(held[1], pages, q, keys, window)
        elif held[0] is not pages:
            planned[window] = (pages, held[1])
            _plan(held[1], pages, q, keys, window)
        out: Tensor = held[1].run(q, (by_pages(keys, pages.block), by_pages(values, pages.block)))
        return out

    return attend


def _plan(wrapper: Any, pages: Pages, q: Tensor, keys: Tensor, window: int) -> None:
    """Sequences without new tokens are left out: FlashInfer expects some of each."""
    new, held, width = np.array(pages.new), np.array(pages.held), pages.table.shape[1]
    some = np.flatnonzero(new)
    used = -(-held[some] // pages.block)
    first = np.cumsum(used) - used
    at = np.arange(used.sum()) - np.repeat(first, used) + np.repeat(some * width, used)
    (places,) = upload(q.device, at)
    starts = np.concatenate(([0], np.cumsum(new[some]))).astype(np.int32)
    pointers = np.concatenate(([0], np.cumsum(used))).astype(np.int32)
    last = (held[some] - (used - 1) * pages.block).astype(np.int32)
    wrapper.plan(
        torch.from_numpy(starts), torch.from_numpy(pointers), pages.table.flatten()[places], torch.from_numpy(last),
        q.shape[1], keys.shape[1], q.shape[2], pages.block, causal=True, window_left=_left(window),
        q_data_type=q.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip


def _of_any(case: Case) -> str:
    if case.coded:
        return "the cache is quantized"
    if case.dtype not in LOW:
        return f"of {str(case.dtype).removeprefix('torch.')}: it computes in 16 bits"
    return "it needs compute capability 8.0" if case.capability < (8, 0) else ""


def _of_flash(case: Case) -> str:
    if case.width > 256 or case.width % 8:
        return f"heads of {case.width}: it computes those of a multiple of 8 up to 256"
    if case.block % _FLASH_BLOCK:
        return f"pages of {case.block} tokens: it reads those of a multiple of {_FLASH_BLOCK} (paged_kv:block_size=256)"
    return _of_any(case)


def _of_flash_3(case: Case) -> str:
    if case.width > 256 or case.width % 8:
        return f"heads of {case.width}: it computes those of a multiple of 8 up to 256"
    return _of_any(case) or ("" if case.capability[0] == 9 else "it needs compute capability 9.0")


def _of_flashinfer(case: Case) -> str:
    if case.width not in (64, 128, 256):
        return f"heads of {case.width}: it computes those of 64, 128 and 256"
    return _of_any(case)


TORCH = Backend("torch", "torch", "torch.nn.attention.varlen", torch_attention, _of_flash)
FLASH = Backend("flash-attn", "flash-attn", "flash_attn", flash_attention, _of_flash)
FLASH_3 = Backend("flash-attn-3", "flash_attn_3", "flash_attn_interface", flash_attention_3, _of_flash_3)
FLASHINFER = Backend("flashinfer", "flashinfer-python", "flashinfer", flashinfer, _of_flashinfer)
