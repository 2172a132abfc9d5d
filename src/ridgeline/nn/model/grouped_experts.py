"""The experts of a served mixture whose weights are low-bit codes: one product for each projection, on a GPU.

Their codes are laid one after the other, gate and up projection of an expert side by side; the layers of single experts
keep their parts of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.kernels.functions import bias_activation
from ridgeline.nn.model.joined_weights import Known, lay_codes_together, whole_codes
from ridgeline.nn.model.mlp import ACTIVATIONS, gated
from ridgeline.nn.quant.codes import Stripes
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.lowbit import MANY_ROWS


def group_experts(experts: PackedExperts) -> bool:
    """Compute all experts at once from now on, if their codes are alike; returns whether they are."""
    first = _first(experts)
    down = list(experts.down_proj)
    if not (lay_codes_together(first) and lay_codes_together(down)):
        return False
    wholes = whole_codes(first), whole_codes(down)
    if wholes[0] is None or wholes[1] is None or wholes[0][1] is not None or wholes[1][1] is not None:
        return False
    experts.grouped = GroupedExperts(experts, wholes[0][0], wholes[1][0])
    return True


def _first(experts: PackedExperts) -> list[nn.Module]:
    """The projections that read the layer's input, expert by expert."""
    if experts.gate_proj is None:
        return list(experts.up_proj)
    return [part for pair in zip(experts.gate_proj, experts.up_proj, strict=True) for part in pair]


class GroupedExperts:
    """Experts whose codes are ``first`` (what reads the layer's input) and ``last``, each for all of them."""

    def __init__(self, experts: PackedExperts, first: Stripes, last: Stripes) -> None:
        self.first, self.last, self.count = first, last, len(experts.up_proj)
        self.bias = self._side_by_side(experts)
        # Those of the outer experts tell whether all still are where they were: hundreds would take a host too long.
        self._known = Known(self._outer(experts), first)

    def suits(self, experts: PackedExperts, rows: Tensor) -> bool:
        """Whether ``rows`` [n, h] are multiplied by codes: more of an expert are faster by its expanded weight."""
        return (
            rows.is_cuda
            and has_triton()
            and rows.dtype in (torch.bfloat16, torch.float16)
            and 0 < len(rows) <= MANY_ROWS * self.count
            and experts.bias_share == 1
            and not torch.is_grad_enabled()
            and self._known.holds(self._outer(experts))
            and self._biases_hold(experts)
        )

    def __call__(self, experts: PackedExperts, rows: Tensor, expert: Tensor) -> Tensor:
        """``rows`` [n, h] sorted by ``expert`` [n] → [n, h]."""
        from ridgeline.nn.kernels.grouped_codes import starts_of

        starts = starts_of(expert, self.count)
        inner = self._product(rows, starts, self.first, self.bias)
        if experts.gate_proj is None:
            inner = ACTIVATIONS[experts.activation](inner)
        elif experts.activation == "silu":
            inner = bias_activation(inner, None, "silu")
        else:
            inner = gated(experts.activation, *inner.chunk(2, -1))
        return self._product(inner, starts, self.last, experts.down_bias)

    def _product(self, x: Tensor, starts: Tensor, c: Stripes, bias: Tensor | None) -> Tensor:
        from ridgeline.nn.kernels.grouped_codes import grouped_product

        return grouped_product(x, starts, self.count, c.words, c.scale, c.zero, c.bits, c.center, c.group, c.stripe,
                               c.arrived, None if bias is None else bias.flatten())  # fmt: skip

    def _side_by_side(self, experts: PackedExperts) -> Tensor | None:
        """The biases of ``first``, of which the layer's own become parts."""
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

    @staticmethod
    def _outer(experts: PackedExperts) -> list[nn.Module]:
        lists = (experts.gate_proj, experts.up_proj, experts.down_proj)
        return [each[at] for each in lists if each is not None for at in (0, -1)]
