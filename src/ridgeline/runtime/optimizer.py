"""The optimizer of the workload, and the interface with which techniques replace it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ridgeline.spec.workload import Training

MakeOptimizer = Callable[[list[dict[str, Any]], Training], torch.optim.Optimizer]
"""Parameter groups (``params``, ``weight_decay``) and the workload → an optimizer."""


def parameter_groups(parameters: list[torch.nn.Parameter], w: Training) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not; parameters on different meshes cannot share one fused update."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for p in parameters:
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        groups.setdefault((p.ndim < 2, mesh), []).append(p)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [{"params": ps, "weight_decay": 0.0 if vector else w.weight_decay} for (vector, _), ps in ordered]


def make_optimizer(groups: list[dict[str, Any]], w: Training) -> torch.optim.Optimizer:
    """SGD without momentum or weight decay, or PyTorch's fused AdamW."""
    if w.optimizer == "sgd":
        return torch.optim.SGD([{"params": g["params"]} for g in groups], lr=w.lr)
    return torch.optim.AdamW(groups, lr=w.lr, betas=(w.beta1, w.beta2), fused=True)


def learning_rate(w: Training, step: int) -> float:
    """Linear warm-up, then cosine to ``min_lr_ratio`` of the peak."""
    if step < w.warmup_steps:
        return w.lr * (step + 1) / w.warmup_steps
    span = max(1, w.steps - w.warmup_steps)
    share = min(1.0, (step - w.warmup_steps) / span)
    return w.lr * (w.min_lr_ratio + (1 - w.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * share)))
