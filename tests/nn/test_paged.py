"""Attention over the extents of a pool, however they are read."""

import pytest
import torch
import torch.nn.functional as F

from ridgeline.nn.memory import kv_pool as paged
from ridgeline.nn.memory.kv_pool import BatchLayout, PagedCache, Piece
from ridgeline.nn.model.attention import BACKENDS
from ridgeline.nn.model.mask import Mask

EXTENTS = [(40, 30), (3, 5), (100, 9), (80, 12), (10, 2)]
"""(first slot, slots) of one sequence, in order."""


@pytest.mark.parametrize("gathered", [1, 10, 1000], ids=["each by itself", "the short ones together", "all together"])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("kind", ["", "int8"])
def test_extents_are_one_sequence(monkeypatch, gathered, new, kind):
    monkeypatch.setattr(paged, "GATHERED", gathered)
    generator = torch.Generator().manual_seed(0)
    layout = BatchLayout()
    cache = PagedCache(layout, (1, 2, 128, 16), torch.float32, torch.device("cpu"), kind)
    k, v = (torch.randn(1, 2, 128, 16, generator=generator) for _ in range(2))
    for store, rows in zip(cache.stores, (k, v), strict=True):
        store.write(torch.arange(128), rows)
    slots = torch.cat([torch.arange(first, first + n) for first, n in EXTENTS])
    q, own_k, own_v = (torch.randn(1, heads, new, 16, generator=generator) for heads in (4, 2, 2))
    layout.slots = torch.arange(120, 120 + new)
    extents = [*EXTENTS, (120, 1)] if new == 1 else EXTENTS  # what one new token sees lies in the pool, its own too
    layout.pieces = [Piece(0, new, extents, own=new > 1)]
    found = cache.attend(BACKENDS["flash"], q, own_k, own_v, Mask(None, False))

    seen = torch.cat((slots, layout.slots))
    keys, values = (store.read(seen, torch.float32) for store in cache.stores)
    mask = torch.ones(new, len(seen), dtype=torch.bool).tril(len(slots))
    want = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
