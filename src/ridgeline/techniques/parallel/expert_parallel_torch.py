"""The torch implementation of expert parallelism: tokens are sent to the ranks that hold their experts, and back
(arXiv:2006.16668).

Shapes: N tokens of this rank, k experts per token, E experts, d ranks, h hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ridgeline.nn.model.moe import Experts


class _AllToAll(torch.autograd.Function):
    """Rows [n, h] in blocks of ``sent[r]`` for each rank r → the blocks of ``received[r]`` rows from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.lengths = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.lengths), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


@dataclass
class TokenExchange:
    """Runs a layer's experts on the ranks that hold them: rank r holds those from r · E/d on.

    Without ``capacity`` every token reaches its experts (dropless): the ranks first exchange the number of rows. With
    it, an expert takes at most ⌈capacity · N · k / E⌉ rows from each rank; the rest is dropped, the blocks have a fixed
    size, and no counts are exchanged.
    """

    group: ProcessGroup
    capacity: float | None = None

    def __call__(self, experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
        """``rows`` [N·k, h] sorted by expert, ``counts`` [E] of rows per expert → the experts' outputs, in the same
        order."""
        return self._dropless(experts, rows, counts) if self.capacity is None else self._bounded(experts, rows, counts)

    def _dropless(self, experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
        d, held = self.group.size(), len(counts) // self.group.size()
        mine = torch.tensor(counts, device=rows.device)
        coming = torch.empty_like(mine)
        dist.all_to_all_single(coming, mine, group=self.group)
        by_rank = coming.view(d, held)
        sent = mine.view(d, held).sum(1).tolist()
        received = by_rank.sum(1).tolist()
        arrived = _AllToAll.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        # By rank, then by expert → by expert, then by rank.
        expert = torch.arange(held, device=rows.device).repeat(d).repeat_interleave(by_rank.flatten())
        order = expert.argsort(stable=True)
        out = experts(arrived[order], by_rank.sum(0).tolist())
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        returned: Tensor = _AllToAll.apply(out[place], received, sent, self.group)  # type: ignore[no-untyped-call]
        return returned

    def _bounded(self, experts: Experts, rows: Tensor, counts: list[int]) -> Tensor:
        d, total = self.group.size(), len(counts)
        held, room = total // d, math.ceil((self.capacity or 1.0) * rows.shape[0] / total)
        n = torch.tensor(counts, device=rows.device)
        expert = torch.arange(total, device=rows.device).repeat_interleave(n)
        rank_in = torch.arange(rows.shape[0], device=rows.device) - (n.cumsum(0) - n)[expert]
        kept = rank_in < room
        slots = (expert * room + rank_in)[kept]
        sheet = rows.new_zeros(total * room, rows.shape[1]).index_copy(0, slots, rows[kept])
        block = [held * room] * d
        arrived = _AllToAll.apply(sheet, block, block, self.group)  # type: ignore[no-untyped-call]
        by_expert = arrived.view(d, held, room, -1).transpose(0, 1).reshape(arrived.shape)
        out = experts(by_expert, [d * room] * held)
        by_rank = out.view(held, d, room, -1).transpose(0, 1).reshape(out.shape)
        returned = _AllToAll.apply(by_rank, block, block, self.group)  # type: ignore[no-untyped-call]
        return rows.new_zeros(rows.shape).index_copy(0, kept.nonzero().flatten(), returned[slots].to(rows.dtype))
