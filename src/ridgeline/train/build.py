"""The builder that the training engine hands to each technique in canonical order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ridgeline.nn.loss import token_loss
from ridgeline.spec.experiment import Experiment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ridgeline.nn.transformer import Transformer


class LossModel(nn.Module):
    """The model with its loss, so that one forward call holds everything a wrapper must see."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of token losses (fp32 scalar) for ids and labels of shape [batch, seq]."""
        hidden = self.model(input_ids, return_hidden=True)
        assert self.model.head is not None
        loss, _ = token_loss(hidden, self.model.head, labels)
        return loss


@dataclass
class Build:
    """What every engine offers a technique."""

    experiment: Experiment
    model: Transformer
    device: torch.device
    compute_dtype: torch.dtype | None = None
    """Autocast dtype of the forward pass; None: none."""


@dataclass
class TrainBuild(Build):
    """What the training engine offers a technique. ``root`` is what holds the parameters, ``call`` what is called."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    """One-dimensional data-parallel mesh; None with one process."""
    trainable: Callable[[str], bool] = lambda name: True
    """Which parameters train, by name; asserted again after every phase."""
    loss_scale: float = 1.0
    """Multiplies the loss before backward (to undo a wrapper's averaging)."""
    sync: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()
    """Context of one micro-batch's forward and backward; argument: whether it is the step's last."""
    keep_gradients: bool = False
    """Zero gradients after the update instead of dropping them: they lie in buffers that a technique owns."""
    after_evaluation: Callable[[], None] = lambda: None
    """What to undo after a forward pass that no backward follows."""
    root: LossModel = field(init=False)
    call: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.root = LossModel(self.model)
        self.call = self.root

    def assert_trainable(self) -> None:
        """Set ``requires_grad`` of every parameter from ``trainable``; some wrappers silently reset it."""
        for name, p in self.root.named_parameters():
            if p.is_floating_point():
                p.requires_grad_(self.trainable(name))
