"""Quantized experts of a served MoE layer: one grouped product per projection, on a GPU.

The experts' weights are stored consecutively, gate and up projection of an expert side by side; the layers of single
experts become views of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.kernels.functions import bias_activation
from ridgeline.nn.model.joined_weights import Known, lay_served_together, whole_codes, whole_layer
from ridgeline.nn.model.mlp import ACTIVATIONS, gated
from ridgeline.nn.quant.packed_model import PackedExperts


def group_experts(experts: PackedExperts) -> bool:
    """Compute all experts at once from now on, if their codes are alike; returns whether they are."""
    if not (lay_served_together(_first(experts)) and lay_served_together(list(experts.down_proj))):
        return False
    wholes = _wholes(experts)
    if wholes is None:
        return False
    experts.grouped = GroupedExperts(experts, wholes)
    return True


def _first(experts: PackedExperts) -> list[nn.Module]:
    """The projections that read the layer's input, expert by expert."""
    if experts.gate_proj is None:
        return list(experts.up_proj)
    return [part for pair in zip(experts.gate_proj, experts.up_proj, strict=True) for part in pair]


class Whole(Protocol):
    """The weights of all experts, one after the other."""

    def most_rows(self, device: torch.device) -> int:
        """Rows of an expert, on average, up to which :meth:`grouped` is the fastest way."""

    def grouped(self, x: Tensor, starts: Tensor, experts: int, bias: Tensor | None) -> Tensor:
        """``x`` [M, in] sorted by expert times their weights, plus ``bias`` [experts · out] → [M, out]. ``starts``: see
        :func:`~ridgeline.nn.kernels.grouped_codes.starts_of`."""


def _wholes(experts: PackedExperts) -> tuple[Whole, Whole] | None:
    """The weights of what reads the layer's input, and of the last projection, of all experts; None: they do not lie
    together, or are of a kind that is not multiplied so."""
    first, last = _whole(_first(experts)), _whole(list(experts.down_proj))
    return None if first is None or last is None else (first, last)


def _whole(parts: list[nn.Module]) -> Whole | None:
    if (layer := whole_layer(parts)) is not None:
        return layer if hasattr(layer, "grouped") and layer.bias is None else None
    codes = whole_codes(parts)
    return None if codes is None or codes[1] is not None else codes[0]


class GroupedExperts:
    """Experts whose codes lie together. ``wholes``: see :func:`_wholes`."""

    def __init__(self, experts: PackedExperts, wholes: tuple[Whole, Whole]) -> None:
        self.count = len(experts.up_proj)
        self.bias = self._side_by_side(experts)
        # Those of the outer experts tell whether all still are where they were: hundreds would take a host too long.
        self._known = Known(self._outer(experts), wholes)

    def suits(self, experts: PackedExperts, rows: Tensor) -> bool:
        """Whether ``rows`` [n, h] are multiplied so: where experts have more, one after the other is faster."""
        return (
            rows.is_cuda
            and has_triton()
            and not torch.is_grad_enabled()
            and rows.dtype in (torch.bfloat16, torch.float16)
            and 0 < len(rows) <= self.most_rows(experts)
            and experts.bias_share == 1
            and self._biases_hold(experts)
        )

    def most_rows(self, experts: PackedExperts) -> int:
        """The most rows that are multiplied so; 0: the weights do not lie together any more."""
        wholes = self._wholes(experts)
        device = next(experts.parameters()).device
        return 0 if wholes is None else self.count * min(w.most_rows(device) for w in wholes)

    def __call__(self, experts: PackedExperts, rows: Tensor, expert: Tensor) -> Tensor:
        """``rows`` [n, h] sorted by ``expert`` [n] → [n, h]."""
        from ridgeline.nn.kernels.grouped_codes import starts_of

        wholes = self._wholes(experts)
        assert wholes is not None
        starts = starts_of(expert, self.count)
        inner = wholes[0].grouped(rows, starts, self.count, _flat(self.bias))
        if experts.gate_proj is None:
            inner = ACTIVATIONS[experts.activation](inner)
        elif experts.activation == "silu":
            inner = bias_activation(inner, None, "silu")
        else:
            inner = gated(experts.activation, *inner.chunk(2, -1))
        return wholes[1].grouped(inner, starts, self.count, _flat(experts.down_bias))

    def _side_by_side(self, experts: PackedExperts) -> Tensor | None:
        """The biases of what reads the layer's input, of which the layer's own become parts."""
        gate, up = experts.gate_bias, experts.up_bias
        if gate is None or up is None:
            return up
        both = torch.cat((gate, up), 1)
        gate.data, up.data = both.chunk(2, 1)
        return both

    def _biases_hold(self, experts: PackedExperts) -> bool:
        gate, up = experts.gate_bias, experts.up_bias
        if gate is None or up is None:
            return up is self.bias
        assert self.bias is not None
        return gate.data_ptr() == self.bias.data_ptr() and up.untyped_storage().data_ptr() == self.bias.data_ptr()

    def _wholes(self, experts: PackedExperts) -> tuple[Whole, Whole] | None:
        """See :func:`_wholes`: as it is known, or found anew where that cannot be remembered."""
        whole: tuple[Whole, Whole] = self._known.whole
        return whole if self._known.holds(self._outer(experts)) else _wholes(experts)

    @staticmethod
    def _outer(experts: PackedExperts) -> list[nn.Module]:
        lists = (experts.gate_proj, experts.up_proj, experts.down_proj)
        return [each[at] for each in lists if each is not None for at in (0, -1)]


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()
