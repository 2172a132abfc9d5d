"""Pruning to an exact shape with learned masks: hard-concrete gates under Lagrange multipliers (arXiv:2310.06694,
section 2.1; the gates are those of arXiv:1712.01312)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.structure import Kind, Place, cut, groups, scale, trainable
from ridgeline.spec.model import ModelSpec

BETA = 2 / 3
"""Temperature of the gates."""
LOW, HIGH = -0.1, 1.1
"""Range to which the sigmoid is stretched before it is clipped to [0, 1], so that gates can be exactly closed or
open."""
START, LEAST, MOST = 5.0, math.log(0.01), math.log(100)
"""Initial mean of log α (hardly anything closed), and its bounds."""
SHARPER = 0.8
"""Factor on log α / β when gates are deterministic."""


class Gates(nn.Module):
    """Hard-concrete gates [rows, units]: z = clip(σ((logit ε + log α) / β) · 1.2 - 0.1, 0, 1), ε uniform."""

    def __init__(self, rows: int, units: int, left: int, generator: torch.Generator) -> None:
        super().__init__()
        self.left = left
        """Number of units of each row to keep in the end."""
        self.log_alpha = nn.Parameter(START + 0.01 * torch.randn(rows, units, generator=generator))
        self.multipliers = nn.Parameter(torch.zeros(2, rows))
        self.clamp()

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp log α to where its gradient does not vanish."""
        self.log_alpha.clamp_(LEAST, MOST)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Random gates [rows, units]."""
        noise = torch.rand(self.log_alpha.shape, generator=generator).clamp_(1e-6, 1 - 1e-6)
        stretched = torch.sigmoid((noise.logit() + self.log_alpha) / BETA) * (HIGH - LOW) + LOW
        return stretched.clamp(0, 1)

    def open_share(self) -> Tensor:
        """Expected fraction of open gates in each row, [rows]."""
        return torch.sigmoid(self.log_alpha - BETA * math.log(-LOW / HIGH)).mean(1)

    def penalty(self, progress: float) -> Tensor:
        """λ₁ (s - t) + λ₂ (s - t)², summed over rows: s is the open fraction, t the target, which starts at 1."""
        target = 1 - (1 - self.left / self.log_alpha.shape[1]) * progress
        excess = self.open_share() - target
        return (self.multipliers[0] * excess + self.multipliers[1] * excess**2).sum()

    def final(self) -> tuple[Tensor, Tensor]:
        """(units to keep, int64 [rows, left] ascending; gates [rows, units], 0 for all others)."""
        stay = self.log_alpha.topk(self.left, dim=1).indices.sort(1).values
        soft = (torch.sigmoid(self.log_alpha / BETA * SHARPER) * (HIGH - LOW) + LOW).clamp(0, 1)
        return stay, torch.zeros_like(soft).scatter(1, stay, soft.gather(1, stay))


@dataclass(frozen=True)
class Shearing:
    """Hyperparameters of the training of masks and weights."""

    steps: int
    batch: int
    """Windows per step."""
    warmup: float
    """Fraction of the steps during which targets move from 1 to the final shape."""
    lr: float
    mask_lr: float
    """Learning rate of log α, and of the multipliers, which ascend."""
    seed: int = 0


def shear(
    model: Transformer, windows: Tensor, target: ModelSpec, how: Shearing, report: Callable[[dict[str, Any]], None]
) -> Transformer:
    """A model of the shape of ``target``, cut from ``model``, whose weights change in the process.

    Masks and weights train together on the mean token loss of batches of ``windows`` [n, seq]; then exactly
    ``target``'s number of units of each kind is kept, those with the largest log α, and their gates are folded into the
    weights.
    """
    spec = model.spec
    generator = torch.Generator().manual_seed(how.seed)
    gates = _gates(spec, target, generator)
    parameters = trainable(model)
    masks = nn.ModuleDict(gates)
    update = torch.optim.AdamW(parameters.values(), lr=how.lr, betas=(0.9, 0.95))
    move = torch.optim.Adam([g.log_alpha for g in gates.values()], lr=how.mask_lr)
    climb = torch.optim.Adam([g.multipliers for g in gates.values()], lr=how.mask_lr, maximize=True)
    order: Iterator[Tensor] = iter(())
    for step in range(how.steps):
        batch = next(order, None)
        if batch is None:
            order = iter(torch.randperm(len(windows), generator=generator).split(how.batch))
            batch = next(order)
        ids = windows[batch]
        z = {name: g.draw(generator) for name, g in gates.items()}
        logits = functional_call(model, masked(spec, dict(parameters), z), (ids[:, :-1],))
        loss = token_loss(logits, nn.Identity(), ids[:, 1:])[0] / ids[:, 1:].numel()
        progress = min(1.0, (step + 1) / max(1, round(how.warmup * how.steps)))
        (loss + sum(g.penalty(progress) for g in gates.values())).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in (update, move, climb):
            optimizer.step()
            optimizer.zero_grad()
        for g in gates.values():
            g.clamp()
        if step % 10 == 0 or step + 1 == how.steps:
            shares = ", ".join(f"{name} {g.open_share().mean().item():.0%}" for name, g in gates.items())
            report({"stage": f"masks, step {step + 1} of {how.steps}: loss {loss.item():.3f}, open: {shares}"})
    del masks
    return _finished(model.requires_grad_(False), gates)


def _gates(spec: ModelSpec, target: ModelSpec, generator: torch.Generator) -> dict[str, Gates]:
    """Gates of every kind in which the shapes differ, by kind; gates of layers under "layers"."""
    n = spec.num_layers
    wanted = {
        "hidden": (1, spec.hidden_size, target.hidden_size), "heads": (n, spec.num_kv_heads, target.num_kv_heads),
        "inner": (n, spec.intermediate_size, target.intermediate_size), "layers": (1, n, target.num_layers),
    }  # fmt: skip
    return {kind: Gates(*sizes, generator) for kind, sizes in wanted.items() if sizes[1] != sizes[2]}


def masked(spec: ModelSpec, parameters: dict[str, Tensor], z: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with gates ``z`` applied to what units, and whole layers, contribute. Differentiable."""
    for place, group in groups(spec).items():
        if place[0] in z:
            scale(group, z[place[0]][max(0, place[1])], parameters)
    if "layers" in z:
        for layer in range(spec.num_layers):
            for part in groups(spec)["hidden", -1].parts:
                if part.carries and part.parameter.startswith(f"layers.{layer}."):
                    parameters[part.parameter] = parameters[part.parameter] * z["layers"][0, layer]
    return parameters


@torch.no_grad()
def _finished(model: Transformer, gates: dict[str, Gates]) -> Transformer:
    """The model cut to the kept units, with gates folded in."""
    final = {kind: g.final() for kind, g in gates.items()}
    folded = masked(model.spec, dict(model.named_parameters()), {kind: z for kind, (_, z) in final.items()})
    for name, p in model.named_parameters():
        p.copy_(folded[name])
    keep: dict[Place, Tensor] = {}
    kinds: tuple[Kind, ...] = ("hidden", "heads", "inner")
    for kind in kinds:
        if kind in final:
            for row, stay in enumerate(final[kind][0]):
                keep[kind, -1 if kind == "hidden" else row] = stay
    layers = final["layers"][0][0].tolist() if "layers" in final else None
    return cut(model, keep, layers)
