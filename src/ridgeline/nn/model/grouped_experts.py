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
    if not (lay_codes_together(_first(experts)) and lay_codes_together(list(experts.down_proj))):
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


def _wholes(experts: PackedExperts) -> tuple[Stripes, Stripes] | None:
    """The codes of what reads the layer's input, and of the last projection, of all experts; None: they do not lie
    together."""
    first, last = whole_codes(_first(experts)), whole_codes(list(experts.down_proj))
    if first is None or last is None or first[1] is not None or last[1] is not None:
        return None
    return first[0], last[0]


class GroupedExperts:
    """Experts whose codes lie together. ``wholes``: see :func:`_wholes`."""

    def __init__(self, experts: PackedExperts, wholes: tuple[Stripes, Stripes]) -> None:
        self.count = len(experts.up_proj)
        self.bias = self._side_by_side(experts)
        # Those of the outer experts tell whether all still are where they were: hundreds would take a host too long.
        self._known = Known(self._outer(experts), wholes)

    def suits(self, experts: PackedExperts, rows: Tensor) -> bool:
        """Whether ``rows`` [n, h] are multiplied by codes: more of an expert are faster by its expanded weight."""
        return (
            rows.is_cuda
            and has_triton()
            and rows.dtype in (torch.bfloat16, torch.float16)
            and 0 < len(rows) <= MANY_ROWS * self.count
            and experts.bias_share == 1
            and not torch.is_grad_enabled()
            and self._wholes(experts) is not None
            and self._biases_hold(experts)
        )

    def __call__(self, experts: PackedExperts, rows: Tensor, expert: Tensor) -> Tensor:
        """``rows`` [n, h] sorted by ``expert`` [n] → [n, h]."""
        from ridgeline.nn.kernels.grouped_codes import starts_of

        wholes = self._wholes(experts)
        assert wholes is not None
        starts = starts_of(expert, self.count)
        inner = self._product(rows, starts, wholes[0], self.bias)
        if experts.gate_proj is None:
            inner = ACTIVATIONS[experts.activation](inner)
        elif experts.activation == "silu":
            inner = bias_activation(inner, None, "silu")
        else:
            inner = gated(experts.activation, *inner.chunk(2, -1))
        return self._product(inner, starts, wholes[1], experts.down_bias)

    def _product(self, x: Tensor, starts: Tensor, c: Stripes, bias: Tensor | None) -> Tensor:
        from ridgeline.nn.kernels.grouped_codes import grouped_product

        return grouped_product(x, starts, self.count, c.words, c.scale, c.zero, c.bits, c.center, c.group, c.stripe,
                               c.arrived, None if bias is None else bias.flatten())  # fmt: skip

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

    def _wholes(self, experts: PackedExperts) -> tuple[Stripes, Stripes] | None:
        """See :func:`_wholes`: as it is known, or found anew where that cannot be remembered."""
        whole: tuple[Stripes, Stripes] = self._known.whole
        return whole if self._known.holds(self._outer(experts)) else _wholes(experts)

    @staticmethod
    def _outer(experts: PackedExperts) -> list[nn.Module]:
        lists = (experts.gate_proj, experts.up_proj, experts.down_proj)
        return [each[at] for each in lists if each is not None for at in (0, -1)]
