"""Updates of integer layers within the backward pass, and the optimizer that holds their momentum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.tiered_store import making
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.workload import Training
from ridgeline.techniques.optimizers.qft_linear_torch import (
    IntegerEmbedding,
    IntegerLinear,
    IntegerWeight,
    at_once,
    by_kernels,
    encode_rows,
    lion_rows,
    lion_rows_by_kernel,
)

BETAS = (0.9, 0.99)
"""Default of arXiv:2302.06675, section 4."""


class IntegerLion(torch.optim.Optimizer):
    """Lion for the parameters that stay fp32; it also holds the momentum of integer layers, which update themselves."""

    def __init__(self, groups: list[dict[str, Any]], layers: list[IntegerWeight], w: Training) -> None:
        codes = {"params": [p for layer in layers for p in layer.parts()], "weight_decay": w.weight_decay}
        super().__init__([*groups, codes], {"lr": w.lr})
        for p in (p for g in groups for p in g["params"]):
            self.state[p] = {"momentum": torch.zeros_like(p)}
        for layer in layers:
            self.state[layer.codes] = {
                "momentum": torch.zeros_like(layer.codes),
                "momentum_scale": torch.zeros_like(layer.scale),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the fp32 parameters; integer layers have already been updated."""
        for group in self.param_groups:
            lr = group["lr"]
            ps = [p for p in group["params"] if p.grad is not None]  # none of an integer layer's has one
            if not ps:
                continue
            grads, m = [p.grad for p in ps], [self.state[p]["momentum"] for p in ps]
            directions = torch._foreach_lerp(grads, m, BETAS[0])
            torch._foreach_sign_(directions)
            torch._foreach_mul_(ps, 1 - lr * group["weight_decay"])
            torch._foreach_add_(ps, directions, alpha=-lr)
            torch._foreach_lerp_(m, grads, 1 - BETAS[1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the fp32 states; checkpoints write integer momentum in place and leave it out here."""
        kept = {p: s for p, s in self.state.items() if not p.is_floating_point()}
        super().load_state_dict(state_dict)
        for p, s in kept.items():
            if not self.state.get(p):
                self.state[p] = s


def _unclipped(parameters: list[nn.Parameter], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Leave gradients unclipped."""


@dataclass
class IntegerUpdates:
    """Consumes each matrix's gradient in backward: quantizes it, and in the last micro-batch updates momentum and
    weights.

    Between micro-batches the accumulated gradient is stored as codes. Gradients are not clipped, as the size of Lion's
    step does not depend on them; their norm is computed nevertheless.
    """

    run: TrainBuild
    layers: list[IntegerWeight] = field(default_factory=list)
    last: bool = True
    step: int = 0
    squares: Tensor | float = 0.0
    """Of this step's gradients so far, on their device."""
    _held: dict[IntegerWeight, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = self.run
        self._generator = torch.Generator("cpu" if run.device.type == "meta" else run.device)
        self._place: dict[IntegerWeight, int] = {}
        run.before_micro_batch(self._on_micro_batch)
        run.hooks.before_step.append(self._begin)
        inner = run.gradients.norm

        def norm(parameters: list[nn.Parameter], copies: dict[nn.Parameter, int], world: int) -> Tensor:
            rest = inner(parameters, copies, world)
            return (rest.double().square() + self.squares).sqrt().float()

        run.gradients.norm = norm
        run.gradients.clip = _unclipped
        run.update.make_optimizer = lambda groups, w: IntegerLion(groups, self.layers, w)

    def code(self) -> None:
        """Replace every linear of the layers, the head and the token embedding by integer layers."""
        model = self.run.model
        tied = self.run.experiment.model.tie_embeddings
        for module in [*model.layers.modules(), model.head, model.embed]:
            if module is None:
                continue
            for leaf, child in list(module.named_children()):
                layer: IntegerWeight | None = None
                if isinstance(child, nn.Linear) and (leaf.endswith("_proj") or (leaf == "out" and not tied)):
                    layer = IntegerLinear(child, self.take)
                elif isinstance(child, nn.Embedding) and leaf == "tokens" and not tied:
                    layer = IntegerEmbedding(child, self.take)
                if layer is not None:
                    setattr(module, leaf, layer)
                    self._place[layer] = len(self.layers)
                    self.layers.append(layer)

    def _begin(self, step: int) -> None:
        self.step, self.squares = step, 0.0

    def _on_micro_batch(self, last: bool) -> None:
        self.last = last

    @torch.no_grad()
    def take(self, layer: IntegerWeight, dw: Tensor) -> None:
        """Consume a matrix's gradient [out, in] of one micro-batch."""
        run = self.run
        assert run.update.optimizer is not None
        held = self._held.pop(layer, None)
        if not self.last:
            with making("gradients"):
                self._held[layer] = held or (torch.zeros_like(layer.codes), torch.zeros_like(layer.scale))
        self._generator.manual_seed(
            (run.experiment.training.seed * 1_000_003 + self.step) * 65_537 + self._place[layer]
        )  # a resumed run draws the same numbers
        state = run.update.optimizer.state[layer.codes]
        kernels = self.last and by_kernels(dw, *layer.parts())
        step = max(1, at_once(dw.device.type) // dw.shape[1])
        for at in range(0, len(dw), step):
            rows = slice(at, at + step)
            g = dw[rows] if kernels and held is None else dw[rows].float()
            if held is not None:
                g = g.addcmul(held[0][rows], held[1][rows])
            if not self.last:
                self._held[layer][0][rows], self._held[layer][1][rows] = encode_rows(g)
                continue
            self.squares = self.squares + self._update(
                layer, rows, g, state["momentum"][rows], state["momentum_scale"][rows], kernels
            )

    def _update(
        self, layer: IntegerWeight, rows: slice, g: Tensor, momentum: Tensor, scale: Tensor, kernels: bool
    ) -> Tensor:
        """Lion's step on some rows, with their gradient as codes; returns the sum of its squares."""
        how: dict[str, Any] = {"lr": self.run.update.lr, "decay": self.run.experiment.training.weight_decay,
                               "betas": BETAS, "generator": self._generator}  # fmt: skip
        if kernels:
            return lion_rows_by_kernel(layer, rows, g, momentum, scale, **how)
        codes, by = encode_rows(g)
        squares = g.double().square().sum()
        lion_rows(layer, rows, torch.mul(codes, by), momentum, scale, **how)
        return squares
