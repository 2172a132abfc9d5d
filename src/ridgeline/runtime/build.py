"""The interface of every engine for techniques."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ridgeline.spec.experiment import Experiment

if TYPE_CHECKING:
    from ridgeline.nn.model.attention import AttentionBackend
    from ridgeline.nn.model.transformer import Transformer


@dataclass
class Build:
    """An engine before it runs: its model, and what techniques add."""

    experiment: Experiment
    model: Transformer
    device: torch.device
    compute_dtype: torch.dtype | None = None
    """Autocast dtype of the forward pass; None: none."""
    fused_attention: str | AttentionBackend = "flash"
    """The attention backend without a score matrix."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Device memory that techniques hold in addition to the model's parameters."""
    metrics: dict[str, Callable[[], float]] = field(default_factory=dict)
    """What techniques report about a generation when it is over: shares, by the name of the metric."""
