"""Optimizers other than AdamW and SGD. Parameters may be divided (``DTensor``): each rank updates its part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ridgeline.graph.state_blocks import block_of
from ridgeline.nn.parallel.collectives import local
from ridgeline.nn.quant.codec import encode_blockwise8
from ridgeline.nn.quant.coded_adamw import Moment, Numbers, apply, apply_coded
from ridgeline.runtime import relative_update

Groups = list[dict[str, Any]]


class Optimizer(torch.optim.Optimizer):
    """Updates one parameter at a time, so that an update can also happen within the backward pass."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Apply the gradient of ``p``, which may be overwritten."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states into the current ones, which keep their dtypes and devices."""
        order = [p for g in self.param_groups for p in g["params"]]
        keys = [key for g in state_dict["param_groups"] for key in g["params"]]  # numbers or names, in the same order
        of = dict(zip(keys, order, strict=True))
        for key, theirs in state_dict["state"].items():
            mine = self.state[of[key]]
            for name, value in theirs.items():
                if isinstance(value, Tensor) and name in mine:
                    local(mine[name]).copy_(local(value))
                else:
                    mine[name] = value
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})


class SGD(Optimizer):
    """p ← p - η g, without momentum or weight decay."""

    def __init__(self, groups: Groups, lr: float) -> None:
        super().__init__([{"params": g["params"]} for g in groups], {"lr": lr})

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Apply the gradient of ``p``."""
        local(p.detach()).add_(local(p.grad), alpha=-group["lr"])  # type: ignore[arg-type]


class LionOptimizer(Optimizer):
    """p ← p - η (sign(β₁ m + (1 - β₁) g) + λ p);  m ← β₂ m + (1 - β₂) g  (arXiv:2302.06675, Program 1).

    The sign is not linear: gradients must be complete sums.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Apply the gradient of ``p``."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p.detach())
        weight, grad, m = local(p.detach()), local(p.grad), local(state["exp_avg"])
        beta1, beta2 = group["betas"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(m.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
        m.lerp_(grad, 1 - beta2)


class AdaLomoOptimizer(Optimizer):
    """Factored second moments and updates of normalized size (arXiv:2310.10195, Algorithm 1).

    For a matrix θ [m, n] with gradient g, and means instead of sums:

        r ← β r + (1 - β) mean over columns of g²        [m]
        c ← β c + (1 - β) mean over rows of g²           [n]
        u = g / √(r c / mean(r))
        θ ← θ - η max(ε, RMS(θ)) u / max(1, RMS(u))

    with β = 1 - t^(-decay) at step t = 1, 2, … (as in the authors' code, which uses another value at its first step).
    Vectors keep the full mean of g²; stacked matrices (experts) are treated as separate matrices. For divided matrices
    each rank holds the factors of its rows and columns; a step sums a vector along each divided side, and three
    numbers.
    """

    TINY = 1e-30
    """Added to g², so that a parameter that never had a gradient does not change."""

    def __init__(self, groups: Groups, lr: float, decay: float, least: float) -> None:
        plain = [{"params": g["params"]} for g in groups]
        super().__init__(plain, {"lr": lr, "decay": decay, "least": least})

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Apply the gradient of ``p``."""
        assert p.grad is not None
        whole = not isinstance(p, DTensor) or not divided(p)
        self.apply(p, group, whole and relative_update.fits(local(p.detach()), local(p.grad)))

    def apply(self, p: nn.Parameter, group: dict[str, Any], by_kernel: bool) -> None:
        """The same by our kernels, or by PyTorch's operators."""
        assert p.grad is not None
        weight, grad = local(p.detach()), local(p.grad)
        state = self.state[p]
        if not state:
            self._start(p, state)
        state["step"] += 1
        beta = 1 - float(state["step"]) ** -group["decay"]
        if by_kernel:
            held = {name: local(t) for name, t in state.items()}
            relative_update.by_kernel(weight, grad, held, 1 - beta, self.TINY, group["lr"], group["least"])
        else:
            self._by_operators(p, weight, grad.float(), beta, group)

    def _by_operators(self, p: nn.Parameter, weight: Tensor, grad: Tensor, beta: float, group: dict[str, Any]) -> None:
        state = self.state[p]
        cuts = [(dim, g) for dim, g in divided(p) if dim >= p.ndim - 2]  # otherwise each rank holds whole matrices
        if grad.ndim < 2:
            v = local(state["exp_avg_sq"]).lerp_(grad.square().add_(self.TINY), 1 - beta)
            update, rows = grad.mul_(v.rsqrt()), None
        else:
            update, rows = self._factored(p, state, grad, beta, cuts)
        sides = (-2, -1) if grad.ndim > 1 else (-1,)
        # Not t.double().square(), of which the largest matrix takes four times its own bytes.
        norms = [torch.linalg.vector_norm(t, dim=sides, dtype=torch.float64) for t in (update, weight)]
        sums = torch.stack(norms).square_()
        if rows is not None:  # ranks that have other columns contribute the same value
            same = math.prod(g.size() for dim, g in cuts if dim == p.ndim - 1)
            sums = torch.cat([sums, rows.double().sum(-1).unsqueeze(0) / same])
        for _, g in cuts:
            dist.all_reduce(sums, group=g)
        size = math.prod(p.shape[-2:])
        scale = 1.0 if rows is None else (sums[2] / p.shape[-2]).sqrt()
        rms = (sums[0] / size).sqrt() * scale
        length = group["lr"] * (sums[1] / size).sqrt().clamp(min=group["least"]) / rms.clamp(min=1.0) * scale
        length = length.to(update.dtype).reshape(*length.shape, *[1] * len(sides))
        weight.add_(update.mul_(length).to(weight.dtype), alpha=-1.0)

    def _factored(
        self,
        p: nn.Parameter,
        state: dict[str, Any],
        grad: Tensor,
        beta: float,
        cuts: list[tuple[int, dist.ProcessGroup]],
    ) -> tuple[Tensor, Tensor]:
        """(g / √(r c), r): the update without the factor √mean(r)."""
        rows = torch.linalg.vector_norm(grad, dim=-1).square_()
        columns = torch.linalg.vector_norm(grad, dim=-2).square_()
        for dim, g in cuts:
            dist.all_reduce(rows if dim == p.ndim - 1 else columns, group=g)
        r = local(state["rows"]).lerp_(rows.div_(p.shape[-1]).add_(self.TINY), 1 - beta)
        c = local(state["columns"]).lerp_(columns.div_(p.shape[-2]).add_(self.TINY), 1 - beta)
        return grad.mul_(r.rsqrt().unsqueeze(-1)).mul_(c.rsqrt().unsqueeze(-2)), r

    def _start(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros(())
        if p.ndim < 2:
            state["exp_avg_sq"] = torch.zeros_like(p.detach(), dtype=torch.float32)
            return
        for name, gone in (("rows", p.ndim - 1), ("columns", p.ndim - 2)):
            state[name] = factor(p, gone)


class AdamW8bitOptimizer(Optimizer):
    """AdamW with moments stored as one-byte codes, scaled by the largest magnitude of each block (arXiv:2110.02861).

    Blocks do not cross rows, so that they are the same however a matrix is divided by rows. ``wide``: parameters that
    keep fp32 moments, as do vectors and tensors of fewer than :data:`~ridgeline.graph.state_blocks.SMALL` elements
    (embeddings: rows that a batch does not touch would divide by a second moment that was rounded to zero, section 3).
    """

    MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
    """States, and whether they are signed."""

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float], block: int, wide: set[nn.Parameter]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self.block, self.wide = block, wide

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient; on a GPU those with fp32 moments all at once."""
        loss = closure() if closure else None
        for group in self.param_groups:
            whole = []
            for p in group["params"]:
                if p.grad is not None and self._fuses(p):
                    whole.append(p)
                elif p.grad is not None:
                    self.update(p, group)
            self._update_whole(whole, group)
        return loss

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Apply the gradient of ``p``."""
        assert p.grad is not None
        state, weight, grad = self.state[p], local(p.detach()), local(p.grad)
        block = self._block(p)
        n = self._next(p, group)
        m, v = (local(state[name]) for name, _ in self.MOMENTS)
        if block:
            peaks = (local(state[f"{name}_peaks"]) for name, _ in self.MOMENTS)
            first, second = map(Moment, (m, v), peaks)
            apply_coded(weight, grad, first, second, block, n)
        else:
            apply(weight, grad.float(), m, v, n)

    def _block(self, p: nn.Parameter) -> int:
        return 0 if p in self.wide else block_of(p.shape, local(p.detach()).shape[-1], self.block)

    def _next(self, p: nn.Parameter, group: dict[str, Any]) -> Numbers:
        """What the next step of ``p`` is made with, which is counted; its states are made before the first."""
        state = self.state[p]
        if not state:
            self._start(p, state, self._block(p))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        return Numbers(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], int(state["step"]))

    def _fuses(self, p: nn.Parameter) -> bool:
        """Whether PyTorch's fused AdamW updates it: on a GPU, where it and its moments are fp32."""
        weight, grad = local(p.detach()), local(p.grad)  # type: ignore[arg-type]
        return weight.is_cuda and weight.dtype == grad.dtype == torch.float32 and not self._block(p)

    def _update_whole(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Parameters that :meth:`_fuses` allows, in one launch for each number of steps that they have had."""
        numbers: dict[Numbers, list[nn.Parameter]] = {}
        for p in parameters:
            numbers.setdefault(self._next(p, group), []).append(p)
        for n, ps in numbers.items():
            weights, grads = [local(p.detach()) for p in ps], [local(p.grad) for p in ps]  # type: ignore[arg-type]
            m, v = ([local(self.state[p][name]) for p in ps] for name, _ in self.MOMENTS)
            steps = [torch.full((), float(n.step), device=weights[0].device)] * len(ps)
            torch._fused_adamw_(weights, grads, m, v, [], steps, lr=n.lr, beta1=n.beta1, beta2=n.beta2,
                                weight_decay=n.decay, eps=n.eps, amsgrad=False, maximize=False)  # fmt: skip

    def _start(self, p: nn.Parameter, state: dict[str, Any], block: int) -> None:
        state["step"] = torch.zeros(())
        for name, signed in self.MOMENTS:
            if not block:
                state[name] = torch.zeros_like(p.detach(), dtype=torch.float32)
                continue
            part = local(p.detach())
            codes, peaks = encode_blockwise8(torch.zeros(part.shape, device=part.device), signed, block)
            blocks = part.shape[-1] // block
            state[name] = _placed(codes, p, p.shape[-1])
            state[f"{name}_peaks"] = _placed(
                peaks.view(*part.shape[:-1], blocks), p, blocks * (p.shape[-1] // part.shape[-1])
            )


def _placed(part: Tensor, p: Tensor, width: int) -> Tensor:
    """This rank's part of a tensor [shape of ``p`` except for the last dimension, ``width``], divided like ``p``."""
    if not isinstance(p, DTensor):
        return part
    shape = torch.Size([*p.shape[:-1], width])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)


def factor(p: Tensor, gone: int) -> Tensor:
    """Zeros [shape of ``p`` without dimension ``gone``], fp32, divided like ``p``, and replicated where ``gone`` was
    divided."""
    shape = [*p.shape[:gone], *p.shape[gone + 1 :]]
    part = local(p.detach())
    mine = torch.zeros([*part.shape[:gone], *part.shape[gone + 1 :]], device=part.device)
    if not isinstance(p, DTensor):
        return mine
    placements: list[Placement] = []
    for placement in p.placements:
        dim = getattr(placement, "dim", None)
        if dim is None or dim == gone:
            placements.append(Replicate())
        elif dim < gone:
            placements.append(placement)
        else:
            placements.append(Shard(dim - 1))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, p.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def divided(p: Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    """(dimension, group) for every way in which a parameter is divided over ranks."""
    if not isinstance(p, DTensor):
        return []
    out = []
    for i, placement in enumerate(p.placements):
        if not isinstance(placement, (Replicate, Partial)) and p.device_mesh.size(i) > 1:
            out.append((placement.dim, p.device_mesh.get_group(i)))  # type: ignore[attr-defined]
    return out
