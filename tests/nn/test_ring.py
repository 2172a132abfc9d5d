"""Ring attention against attention by its definition in fp64, its merge, its zigzag deal; and Li et al.'s two rings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.world import world

from ridgeline.nn.model.mask import Mask
from ridgeline.techniques.parallel.ring_attention_torch import Ring, backend, block_forward, merge, parts, zigzag

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 8


def whole(groups: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    shapes = ((HEADS, LENGTH), (groups, LENGTH), (groups, LENGTH), (HEADS, LENGTH))
    return tuple(torch.randn(BATCH, h, n, WIDTH, generator=g, dtype=dtype) for h, n in shapes)


def by_definition(q, k, v):
    """softmax(q·kᵀ/√D + causal)·v with every key head repeated for its queries."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def reference(groups):
    q, k, v, grad = whole(groups)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = by_definition(q, k, v)
    out.backward(grad)
    return [t.detach() for t in (out, q.grad, k.grad, v.grad)]


def ring_rank(rank, ranks, groups):
    mine = zigzag(LENGTH, ranks, rank)
    q, k, v, grad = (t.float()[:, :, mine].contiguous() for t in whole(groups))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = backend(Ring(dist.group.WORLD)).function(q, k, v, Mask(None, True))
    out.backward(grad)
    return mine, [t.detach() for t in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(("ranks", "groups"), [
    (2, 4), (2, 2), (2, 1), (4, 2), *(pytest.param(4, groups, marks=pytest.mark.nightly) for groups in (4, 1)),
])  # fmt: skip
def test_the_ring_is_attention(ranks, groups):
    want = reference(groups)
    seen = torch.zeros(LENGTH)
    for mine, got in world(ranks).run(ring_rank, ranks, groups):
        seen[mine] += 1
        for a, b in zip(got, want, strict=True):
            assert torch.allclose(a.double(), b[:, :, mine], atol=2e-5)
    assert (seen == 1).all()


def two_rings_rank(rank, ranks):
    """Li et al.'s own form (arXiv:2105.13120, section 3.1): keys go round for the scores, then values for the sums."""
    part = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
    q, k, v, _ = (t[:, :, part].contiguous() for t in whole(HEADS))
    ring = Ring(dist.group.WORLD)
    scores, key = {rank: q @ k.transpose(-1, -2)}, k
    for step in range(1, ranks):
        (key,), works = ring.send_on(key)
        for w in works:
            w.wait()
        scores[(rank - step) % ranks] = q @ key.transpose(-1, -2)
    place = torch.arange(LENGTH)
    table = torch.cat([scores[r] for r in range(ranks)], -1) / WIDTH**0.5
    weights = table.masked_fill(place[None, :] > place[part][:, None], float("-inf")).softmax(-1)
    out, value = torch.zeros_like(q), v
    for step in range(ranks):
        source = (rank - step) % ranks
        out += weights[..., source * LENGTH // ranks : (source + 1) * LENGTH // ranks] @ value
        if step + 1 < ranks:
            (value,), works = ring.send_on(value)
            for w in works:
                w.wait()
    return out


def test_blockwise_softmax_gives_what_the_two_phase_ring_gives():
    want = reference(HEADS)[0]
    two = torch.cat(world(2).run(two_rings_rank, 2), 2)
    assert torch.allclose(two, want, atol=1e-12)
    for mine, got in world(2).run(ring_rank, 2, HEADS):
        assert torch.allclose(got[0].double(), two[:, :, mine], atol=2e-6)


def test_merging_blocks_is_attending_to_all_keys():
    q, k, v, _ = (t.float() for t in whole(HEADS))
    want, want_lse = block_forward(q, k, v, False)
    out, lse = block_forward(q, k[:, :, :16].contiguous(), v[:, :, :16].contiguous(), False)
    more = block_forward(q, k[:, :, 16:].contiguous(), v[:, :, 16:].contiguous(), False)
    got, got_lse = merge(out.float(), lse, *more)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(got_lse, want_lse, atol=1e-5)
    # A block whose weight vanishes beside the other changes nothing and makes no NaN.
    tiny, _ = merge(out.float(), lse, more[0], torch.full_like(lse, -1e30))
    assert torch.equal(tiny, out.float())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work(ranks):
    length = 16 * ranks
    places = [zigzag(length, ranks, r) for r in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(length))
    pairs = [int((p + 1).sum()) for p in places]  # keys that each query sees
    assert max(pairs) - min(pairs) < 0.02 * max(pairs)
    plain = [int((torch.arange(r * 16, (r + 1) * 16) + 1).sum()) for r in range(ranks)]
    assert max(plain) > 1.4 * min(plain), "a plain deal would leave the first rank idle"

    # The halves that the ring multiplies at each step are exactly those that causality leaves.
    for r in range(ranks):
        for step in range(1, ranks):
            rows, keys = parts(step, r, 16)
            source = places[(r - step) % ranks]
            allowed = source[None, :] <= places[r][:, None]
            assert allowed[rows, keys].all()
            assert int(allowed.sum()) == (rows.stop - rows.start) * (keys.stop - keys.start)
