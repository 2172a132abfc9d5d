"""Norms, the gated activation and the head's loss by Liger Kernel (arXiv:2410.10989), in Triton like ours.

Its rotary embedding is left out: it takes queries and keys by themselves, where ours turns them within the merged
product, so that it would cost two copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.nn.kernels.backends import Backend, Case, GatedKernel, LossKernel
from ridgeline.nn.model.loss import IGNORE

_WIDEST = 65536
"""Columns of a row that one of its programs takes."""


class _Norms:
    def __init__(self) -> None:
        from liger_kernel.ops import LigerFusedAddRMSNormFunction, LigerRMSNormFunction

        self._norm, self._add_norm = LigerRMSNormFunction, LigerFusedAddRMSNormFunction

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # "gemma": all of it in fp32, as ours; its gradient must not overwrite what others may read.
        y: Tensor = self._norm.apply(x, weight, eps, 0.0, "gemma", False)
        return y

    def add_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, total = self._add_norm.apply(update, x, weight, eps, 0.0, "gemma", False)
        return total, y


class _Gated(NamedTuple):
    forward_and_input: Any
    gradient: Any

    def forward(self, both: Tensor) -> Tensor:
        y: Tensor = self.forward_and_input(both)[1]
        return y

    def backward(self, both: Tensor, dy: Tensor) -> None:
        self.gradient(both, dy, in_place=True)


def _gated() -> GatedKernel:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward

    return _Gated(swiglu_fused_gate_up_forward, swiglu_fused_gate_up_backward)


def _head_loss() -> LossKernel:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction as Function

    def loss(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        # Sums of the head's gradient in fp32, as ours.
        found = Function.apply(x, weight, labels, bias, None, IGNORE, 0.0, 0.0, "sum", None, False, torch.float32)
        total: Tensor = found[0] if isinstance(found, tuple) else found
        return total.float()

    return loss


def _any(case: Case) -> str:
    return "it computes rows of up to 65536 columns" if case.width > _WIDEST else ""


def _norms(case: Case) -> str:
    if case.out not in (None, case.dtype):
        return "its norms write the dtype that they read (mixed_precision:weights=low has one dtype)"
    return _any(case)


NORM = Backend("liger", "liger-kernel", "liger_kernel", _Norms, _norms)
SWIGLU = Backend("liger", "liger-kernel", "liger_kernel", _gated, _any)
HEAD_LOSS = Backend("liger", "liger-kernel", "liger_kernel", _head_loss, lambda case: "")
