"""Updates within the backward pass: a gradient is applied and freed as soon as it is complete (arXiv:2306.09782)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.gradients import clip, clip_factor, combined_norm, holders, sum_partial
from ridgeline.runtime.optimizers import Optimizer, divided

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import Micro, TrainBuild

Clip = Literal["global", "tensor", "none"]


@torch.no_grad()
def tensor_factor(p: nn.Parameter, norm: Tensor, limit: float) -> Tensor | None:
    """Factor that scales one parameter's gradient to a norm of at most ``limit``; ``norm``: that of this rank's
    part."""
    cuts = divided(p)
    if cuts:
        square = norm.double().square()
        for _, group in cuts:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().to(norm.dtype)
    return clip_factor(norm, limit)


def clip_tensors(parameters: list[nn.Parameter], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Like :func:`ridgeline.runtime.gradients.clip`, but each gradient by its own norm."""
    for p in parameters:
        if p.grad is not None:
            grad = local(p.grad).div_(scale)
            factor = tensor_factor(p, torch._foreach_norm([grad])[0], limit)
            if factor is not None:
                grad.mul_(factor)


def unscale(parameters: list[nn.Parameter], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Like :func:`ridgeline.runtime.gradients.clip`, without a limit."""
    clip(parameters, norm, 0.0, scale)


@dataclass
class FusedUpdate:
    """Hooks on the final parameters of a run whose backward pass yields complete gradients.

    Clipping by the global norm takes two backward passes: the first only computes the norm, and a step whose norm is
    not finite ends there. Partial gradients (of parameters replicated over tensor-parallel ranks) are summed after the
    pass and applied then.
    """

    run: TrainBuild
    how: Clip
    """What the workload's gradient-norm limit applies to."""
    factor: Tensor | None = None
    last: bool = True
    measuring: bool = False
    norms: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    """The norm of all gradients, once known."""
    partial: list[nn.Parameter] = field(default_factory=list)
    _groups: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = self.run
        self.partial = [getattr(module, name) for module, name in run.gradients.partial]
        late = set(self.partial)
        self.trained = [p for p in run.root.parameters() if p.requires_grad]
        for p in self.trained:
            if p not in late:
                p.register_post_accumulate_grad_hook(self._ready)
        self.inner = run.execute
        run.execute = self.execute
        run.before_micro_batch(self._on_micro_batch)
        run.gradients.norm = self.norm

    @property
    def limit(self) -> float:
        """Largest gradient norm; 0: no limit."""
        return self.run.experiment.training.grad_clip

    @property
    def two_passes(self) -> bool:
        """Whether the norm must be known before anything is applied."""
        return self.how == "global" and self.limit > 0

    def _on_micro_batch(self, last: bool) -> None:
        self.last = last

    def execute(self, micros: list[Micro], factor: float) -> Tensor:
        """Forward and backward, including the updates; twice if the norm must be computed first."""
        self.factor = None
        loss: Tensor | None = None
        if self.two_passes:
            loss = self._pass(micros, factor, measuring=True)
            scale = self.run.update.scaler.scale if self.run.update.scaler else 1.0
            self.total = self._combined()
            if self.run.update.scaler and not bool(torch.isfinite(self.total)):
                return loss
            self.factor = clip_factor(self.total / scale, self.limit, scale)
        again = self._pass(micros, factor, measuring=False)
        if not self.two_passes:
            self.total = None  # summed when asked for
        return again if loss is None else loss

    def _pass(self, micros: list[Micro], factor: float, measuring: bool) -> Tensor:
        self.measuring = measuring
        self.norms.clear()
        loss = self.inner(micros, factor)
        if self.partial:
            assert self.run.mesh is not None
            sum_partial(self.partial, self.run.mesh.group("tp"))
        for p in self.trained:  # those, and those that no hook has seen
            if p.grad is not None:
                self._take(p)
        return loss

    def _ready(self, p: Tensor) -> None:
        if self.last:
            self._take(cast(nn.Parameter, p))

    @torch.no_grad()
    def _take(self, p: nn.Parameter) -> None:
        """Accumulate the norm of a gradient or apply it, and free it."""
        grad = local(cast(Tensor, p.grad))
        if self.measuring or not self.two_passes:
            self.norms[p] = torch._foreach_norm([grad])[0]
        if not self.measuring:
            factor = self.factor
            if self.how == "tensor":
                factor = tensor_factor(p, self.norms[p], self.limit)
            if factor is not None:
                grad.mul_(factor)
            group = self._group(p)
            group["lr"] = self.run.update.lr
            cast(Optimizer, self.run.update.optimizer).update(p, group)
        p.grad = None

    def _group(self, p: nn.Parameter) -> dict[str, Any]:
        if not self._groups:
            assert self.run.update.optimizer is not None
            self._groups = {q: g for g in self.run.update.optimizer.param_groups for q in g["params"]}
        return self._groups[p]

    def _combined(self) -> Tensor:
        groups: dict[int, list[Tensor]] = {}
        for p in self.trained:
            if p in self.norms:
                groups.setdefault(holders(p, self.run.world), []).append(self.norms[p])
        return combined_norm(groups, self.run.device, self.run.world)

    def norm(self, parameters: list[nn.Parameter], copies: dict[nn.Parameter, int], world: int) -> Tensor:
        """Like :func:`ridgeline.runtime.gradients.global_norm`, for gradients that have already been applied."""
        if self.total is None:
            self.total = self._combined()
        return self.total
