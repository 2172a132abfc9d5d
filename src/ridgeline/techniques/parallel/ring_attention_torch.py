"""Ring attention: every rank keeps a part of the sequence, keys and values are passed around (arXiv:2310.01889).

Parts are assigned in zigzag order: the sequence is cut into 2·c pieces, and rank r holds pieces r and 2·c - 1 - r. Then
every rank has two blocks of the same size to compute at every step but the first, where contiguous parts would leave
the first rank idle under a causal mask.

Shapes: B batch, H query heads, G key/value heads, S local tokens (two pieces), D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ridgeline.nn.model.attention import AttentionBackend
from ridgeline.nn.model.flash_blocks import block_backward, block_forward
from ridgeline.nn.model.mask import Mask


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    """Positions [length / ranks] in the whole sequence of the tokens that ``rank`` holds, ascending."""
    piece = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return torch.cat((torch.arange(rank * piece, (rank + 1) * piece), torch.arange(last * piece, (last + 1) * piece)))


# ---- one block of keys -----------------------------------------------------------------------------------------------


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention outputs over two sets of keys; outputs and log-sum-exps in fp32."""
    total = torch.logaddexp(lse, more_lse)
    old, new = (lse - total).exp().unsqueeze(-1), (more_lse - total).exp().unsqueeze(-1)
    return out * old + more.float() * new, total


# ---- the ring --------------------------------------------------------------------------------------------------------


@dataclass
class Ring:
    """The ranks that share a sequence."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """Number of ranks in the ring."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Index of this rank in the ring."""
        return self.group.rank()

    def send_on(self, *tensors: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        """Start sending contiguous tensors to the next rank; returns the tensors that will come from the previous one,
        and the operations to wait for."""
        peers = dist.get_process_group_ranks(self.group)
        ahead, behind = peers[(self.rank + 1) % self.ranks], peers[(self.rank - 1) % self.ranks]
        coming = [torch.empty_like(t) for t in tensors]
        ops = [dist.P2POp(dist.isend, t, ahead, self.group) for t in tensors]
        ops += [dist.P2POp(dist.irecv, t, behind, self.group) for t in coming]
        return coming, dist.batch_isend_irecv(ops)


def parts(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Which of ``length`` local queries see which of the keys that arrive at ``step`` ≥ 1: halves, as assigned in
    zigzag order.

    Keys of a lower rank: all queries see their first piece. Keys of a higher rank: the second piece of queries sees
    both.
    """
    half = length // 2
    if step <= rank:
        return slice(0, length), slice(0, half)
    return slice(half, length), slice(0, length)


@dataclass
class Documents:
    """Which tokens may see each other, where several documents share a sequence."""

    numbers: Tensor
    """[B, whole sequence], the same on every rank."""
    ring: Ring

    def bias(self, step: int, rows: slice, keys: slice, like: Tensor) -> Tensor:
        """[B, 1, rows, keys] to add to the scores of this rank's queries with the keys that arrive at ``step``; at step
        0, for its own keys, it includes causality. Half the lowest number instead of -inf: see ``make_mask``."""
        ring, length = self.ring, self.numbers.shape[1]
        of = [zigzag(length, ring.ranks, r).to(like.device) for r in (ring.rank, (ring.rank - step) % ring.ranks)]
        mine, theirs = of[0][rows], of[1][keys]
        visible = self.numbers[:, mine, None] == self.numbers[:, None, theirs]
        if step == 0:
            visible = visible & (mine[:, None] >= theirs)
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        return bias.masked_fill_(~visible, torch.finfo(like.dtype).min / 2).unsqueeze(1)


class _RingAttention(torch.autograd.Function):
    """Causal attention over the whole sequence; only local tensors are kept between forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, documents: Documents | None) -> Tensor:
        everything = slice(0, q.shape[2])
        pair = torch.stack((k, v))
        works: list[dist.Work] = []
        if ring.ranks > 1:
            (coming,), works = ring.send_on(pair)
        own = documents.bias(0, everything, everything, q) if documents else None
        out, lse = block_forward(q, k, v, documents is None, own)
        out = out.float()
        for step in range(1, ring.ranks):
            _wait(works)
            pair = coming
            if step + 1 < ring.ranks:  # the next exchange runs while this block is computed
                (coming,), works = ring.send_on(pair)
            rows, keys = parts(step, ring.rank, q.shape[2])
            more, more_lse = block_forward(
                q[:, :, rows].contiguous(), pair[0, :, :, keys].contiguous(), pair[1, :, :, keys].contiguous(), False,
                documents.bias(step, rows, keys, q) if documents else None,
            )  # fmt: skip
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], more, more_lse)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.documents = ring, documents
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, documents, length = ctx.ring, ctx.documents, q.shape[2]
        grad = grad.contiguous()
        pair = torch.stack((k, v))
        works: list[dist.Work] = []
        if ring.ranks > 1:
            (coming,), works = ring.send_on(pair)
        own = documents.bias(0, slice(0, length), slice(0, length), q) if documents else None
        dq, dk, dv = (t.float() for t in block_backward(grad, q, k, v, out, lse, documents is None, own))
        travelling = None  # gradients of the current keys and values, in fp32, being passed back to their rank
        for step in range(1, ring.ranks):
            _wait(works)
            pair = coming
            if step + 1 < ring.ranks:
                (coming,), works = ring.send_on(pair)
            rows, keys = parts(step, ring.rank, length)
            found = block_backward(
                grad[:, :, rows].contiguous(), q[:, :, rows].contiguous(), pair[0, :, :, keys].contiguous(),
                pair[1, :, :, keys].contiguous(), out[:, :, rows].contiguous(), lse[:, :, rows].contiguous(), False,
                documents.bias(step, rows, keys, q) if documents else None,
            )  # fmt: skip
            dq[:, :, rows] += found[0]
            if travelling is None:
                travelling = torch.zeros(pair.shape, dtype=torch.float32, device=pair.device)
            else:  # they follow one step behind, with what the previous rank added
                (travelling,), moves = ring.send_on(travelling)
                _wait(moves)
            travelling[0, :, :, keys] += found[1]
            travelling[1, :, :, keys] += found[2]
        if travelling is not None:
            (home,), moves = ring.send_on(travelling)
            _wait(moves)
            dk, dv = dk + home[0], dv + home[1]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def backend(ring: Ring) -> AttentionBackend:
    """Causal attention over sequences whose tokens are divided over ``ring`` in zigzag order."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        assert mask.causal
        assert mask.bias is None
        documents = None if mask.documents is None else Documents(mask.documents, ring)
        y: Tensor = _RingAttention.apply(q, k, v, ring, documents)  # type: ignore[no-untyped-call]
        return y

    return AttentionBackend("ring", attend, separates=True)
