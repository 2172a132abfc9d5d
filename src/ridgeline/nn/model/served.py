"""Served models on GPUs with fewer kernels: merged projections, the experts of a mixture at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.backends import Kernels
from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.kernels.products import Joined, choose_served_products
from ridgeline.nn.model import own_kernels
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.fused import expand_merged, fuse_elementwise, gated_of_codes, project_merged
from ridgeline.nn.model.grouped_experts import group_experts
from ridgeline.nn.model.joined_weights import Known, held_alike, lay_served_together
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.packed_model import PackedExperts, expand_expert


def fuse_served(model: Transformer, kernels: Kernels | None = None) -> None:
    """Let a served model whose weights are on a GPU launch fewer kernels: merged projections, and residual additions
    within norms; and multiply one row by a kernel for that. Elsewhere nothing changes. ``kernels``: who computes what
    has several back ends (:mod:`~ridgeline.nn.model.own_kernels`)."""
    if not has_triton() or not all(p.is_cuda for p in model.parameters()):
        return
    for module in model.modules():
        if isinstance(module, Joined):
            module.kernels = kernels
    fuse_elementwise(model)
    choose_served_products(model)
    join_served(model)
    if kernels is not None:
        weight = next(model.parameters())
        own_kernels.settle(model, kernels, weight.device, weight.dtype)


def join_served(model: Transformer) -> None:
    """Merge the projections of a served model that read one input."""
    for module in model.modules():
        if isinstance(module, Attention):
            parts: list[nn.Module] = [module.q_proj, module.k_proj, module.v_proj]
            normed = module.q_norm is not None and not held_alike(parts)
            merged = not normed and lay_served_together(parts)
            module.project = partial(project_merged, known=Known(parts)) if merged else module.project
        elif isinstance(module, MLP) and module.gate_proj is not None and module.activation == "silu":
            parts = [module.gate_proj, module.up_proj]
            merged = lay_served_together(parts)
            module.expand = partial(expand_merged, known=Known(parts)) if merged else module.expand
        elif isinstance(module, PackedExperts):
            merged = group_experts(module)
            if module.activation == "silu" and module.gate_proj is not None:
                merged = _join_pairs(module) or merged
        else:
            continue
        if merged:
            torch.cuda.empty_cache()  # the parts' memory, which is too small for the next layer's whole


def _join_pairs(experts: PackedExperts) -> bool:
    """Merge each expert's gate and up projection, for rows that are multiplied expert by expert."""
    assert experts.gate_proj is not None
    pairs = [list(pair) for pair in zip(experts.gate_proj, experts.up_proj, strict=True)]
    if not (experts.gate_bias is experts.up_bias is None and all(map(lay_served_together, pairs))):
        return False
    experts.expand = partial(expand_merged_expert, known=[Known(pair) for pair in pairs])
    return True


def expand_merged_expert(experts: PackedExperts, e: int, rows: Tensor, known: list[Known]) -> Tensor:
    """:func:`~ridgeline.nn.quant.packed_model.expand_expert` of SwiGLU by one product."""
    assert experts.gate_proj is not None
    y = gated_of_codes(rows, [experts.gate_proj[e], experts.up_proj[e]], known[e])
    return expand_expert(experts, e, rows) if y is None else y
