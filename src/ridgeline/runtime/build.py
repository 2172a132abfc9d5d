"""The interface of every engine for techniques."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ridgeline import catalog
from ridgeline.nn.kernels.backends import Kernels
from ridgeline.spec.errors import UserError
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

    @cached_property
    def kernels(self) -> Kernels:
        """The choice of back ends for the engine's operators. Raises :class:`UserError` where the workload asks for
        some and the engine runs on a CPU."""
        asked = self.experiment.workload.kernels
        if self.device.type == "cpu" and asked:
            raise UserError("the workload's kernels are those of a GPU, and this runs on a CPU", "leave them out")
        if self.device.type != "cuda":
            return Kernels()
        given = self.experiment.cluster.device
        probed = given if given.kernels or not catalog.local_device_path().is_file() else catalog.device("local")
        return Kernels(asked, probed.kernels)

    def note_products(self) -> None:
        """Note whose kernels multiply by codes."""
        from ridgeline.nn.quant.packed_linear import PackedLinear
        from ridgeline.nn.quant.ternary import TernaryLinear

        if any(isinstance(module, (PackedLinear, TernaryLinear)) for module in self.model.modules()):
            self.kernels.own("products with codes", self.device)
