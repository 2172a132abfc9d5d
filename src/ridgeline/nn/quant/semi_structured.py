"""2:4 weights on sparse tensor cores, through PyTorch's semi-structured kernels (cuSPARSELt, CUTLASS)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIDE = 64
"""Both dimensions of a weight must be multiples of this."""


def is_2_4(weight: Tensor) -> bool:
    """Whether of every four neighboring inputs of each row of ``weight`` [out, in] at least two are zero."""
    out, width = weight.shape
    return width % 4 == 0 and bool(((weight == 0).view(out, -1, 4).sum(-1) >= 2).all())


def use_sparse_cores(model: nn.Module) -> int:
    """Compress the 2:4 weights of a model's ``*_proj`` linears for sparse tensor cores; returns how many.

    Only 16-bit weights on CUDA devices from Ampere on have such kernels; elsewhere nothing changes.
    """
    count = 0
    for name, module in model.named_modules():
        if not (name.endswith("_proj") and isinstance(module, nn.Linear)):
            continue
        weight = module.weight
        fits = weight.is_cuda and weight.dtype in (torch.float16, torch.bfloat16)
        fits = fits and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        if fits and weight.shape[0] % SIDE == weight.shape[1] % SIDE == 0 and is_2_4(weight.detach()):
            sparse = torch.sparse.to_sparse_semi_structured(weight.detach())
            module.weight = nn.Parameter(sparse, requires_grad=False)
            count += 1
    return count
