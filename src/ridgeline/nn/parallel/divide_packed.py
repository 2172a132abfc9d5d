"""Layers divided over ranks for inference: plain modules with their part of a weight, dense or quantized.

All ranks have the same rows. Attention and feed-forward layers are divided as in Megatron-LM (arXiv:1909.08053),
mixtures in the same way, or into whole experts; in both cases one all-reduce of a sub-layer's output [..., h] completes
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.moe import MoE
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.nn.parallel.collectives import rms_norm_of_parts
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import Dense, PackedExperts
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.model import COLUMN, ROW

OUT, IN = 0, 1
"""Dimensions of a weight [out, in]."""


class RowPart(nn.Module):
    """A linear layer divided by input: the ranks' products are summed, and the bias is added once."""

    def __init__(self, part: nn.Module, bias: Tensor | None, group: ProcessGroup) -> None:
        super().__init__()
        self.part_proj = part  # named as what it is, so that what replaces projections finds it
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] → [..., out]."""
        y = _summed(self.part_proj, self.group, x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _summed(inner: Any, group: ProcessGroup, x: Tensor) -> Tensor:
    y: Tensor = inner(x)
    dist.all_reduce(y, group=group)
    return y


def divide(block: nn.Module, group: ProcessGroup, experts: bool = True) -> None:
    """Keep this rank's heads and feed-forward columns of one layer. ``experts``: also of a mixture's experts; otherwise
    they are left whole.

    Raises :class:`Incompatible` for weights in a format that cannot be divided.
    """
    for name, child in block.named_children():
        if name not in ("attention", "mlp"):
            continue
        if isinstance(child, Attention):
            _cut_heads(child, group)
        if not isinstance(child, MoE):
            for leaf, module in list(child.named_children()):
                if leaf in COLUMN:
                    setattr(child, leaf, cut(module, OUT, group))
                elif leaf in ROW:
                    bias = getattr(module, "bias", None)
                    setattr(child, leaf, RowPart(cut(module, IN, group), bias, group))
        elif experts:
            for leaf, dim in (("gate_proj", OUT), ("up_proj", OUT), ("down_proj", IN)):
                _cut_experts(child.experts, leaf, dim, group)
            for leaf in ("gate_bias", "up_bias"):
                if getattr(child.experts, leaf) is not None:
                    setattr(child.experts, leaf, nn.Parameter(_part(getattr(child.experts, leaf), 1, group), False))
            child.experts.bias_share = 1 / group.size()
            _cut_shared(child, group)
            child.forward = partial(_summed, child.forward, group)  # type: ignore[method-assign]


def _cut_shared(moe: MoE, group: ProcessGroup) -> None:
    """This rank's part of the MLP beside the experts, whose output is summed with theirs."""
    for leaf, module in [] if moe.shared is None else list(moe.shared.named_children()):
        setattr(moe.shared, leaf, cut(module, IN if leaf in ROW else OUT, group))


def _cut_heads(attention: Attention, group: ProcessGroup) -> None:
    """What attention holds for each head, beside its projections."""
    attention.keep_slopes(group.rank(), group.size())
    if attention.sinks is not None:
        attention.sinks = nn.Parameter(_part(attention.sinks, 0, group), False)
    if attention.joint_norm:
        for norm in (attention.q_norm, attention.k_norm):
            assert isinstance(norm, RMSNorm)
            size = norm.weight.shape[0]
            norm.weight = nn.Parameter(_part(norm.weight, 0, group), False)
            norm.forward = partial(rms_norm_of_parts, norm, size, group)  # type: ignore[method-assign]


def cut(module: nn.Module, dim: int, group: ProcessGroup) -> nn.Module:
    """This rank's part of a linear layer: some of its outputs, with their biases, or of its inputs, without the bias.

    Raises :class:`Incompatible` for weights in a format that cannot be divided.
    """
    at, of = group.rank(), group.size()
    if isinstance(module, PackedLinear):
        return module.part(dim, at, of)
    if isinstance(module, Dense):
        return Dense(_part(module.weight, dim, group))
    if not is_linear(module):
        raise _whole(module)
    if type(module.weight.detach()) is not Tensor:  # for sparse cores
        raise _whole(module.weight.detach())
    weight = _part(module.weight, dim, group)
    bias = None if module.bias is None or dim == IN else nn.Parameter(_part(module.bias, 0, group), False)
    small = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    small.weight = nn.Parameter(weight, False)
    small.register_parameter("bias", bias)
    return small


def _whole(what: object) -> Incompatible:
    return Incompatible(f"weights in the form of {type(what).__name__} are not divided over ranks",
                        "serve the dense checkpoint, or use one process")  # fmt: skip


def _part(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """A copy of this rank's part, so that the full weight can be freed."""
    return whole.detach().chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _cut_experts(experts: nn.Module, leaf: str, dim: int, group: ProcessGroup) -> None:
    held = getattr(experts, leaf)
    if isinstance(held, nn.ModuleList):
        setattr(experts, leaf, nn.ModuleList([cut(each, dim, group) for each in held]))
    elif held is not None:
        setattr(experts, leaf, nn.Parameter(_part(held, 1 + dim, group), False))


@dataclass
class HeldExperts:
    """Runs this rank's experts, ``count`` from number ``first`` on, over rows that every rank has."""

    first: int
    count: int

    def __call__(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """``rows`` [N·k, h] sorted by expert, ``counts`` [E] of rows per expert → the outputs of this rank's experts in
        their rows, zeros elsewhere: the sum over all ranks is the full result."""
        start, mine = sum(counts[: self.first]), counts[self.first : self.first + self.count]
        stop = start + sum(mine)
        out = torch.zeros_like(rows)
        if stop > start:
            out[start:stop] = experts(rows[start:stop], mine)
        return out


def hold_experts(moe: MoE, group: ProcessGroup) -> None:
    """Keep of a layer's experts those of this rank, rank r those from r · E/d on. Ranks route alike: they have the same
    rows and the same router."""
    count = moe.num_experts // group.size()
    first = count * group.rank()
    experts: nn.Module = moe.experts
    if isinstance(experts, PackedExperts):
        for name, each in list(experts.named_children()):
            setattr(experts, name, each[first : first + count])  # type: ignore[index]
    for name, p in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, nn.Parameter(_part(p, 0, group), False))
    _cut_shared(moe, group)
    moe.run = HeldExperts(first, count)
    moe.forward = partial(_summed, moe.forward, group)  # type: ignore[method-assign]
