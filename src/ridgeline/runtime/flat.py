"""16-bit parameters with fp32 master copies: fp32 gradient sums, and one batched update.

The update reads the fp32 gradients, updates the fp32 master weights and moments, and writes the 16-bit weights in the
same pass (LightSeq2, arXiv:2110.05722, section 3.2: one kernel over contiguous reduced-precision parameters). For
parameters that are divided over ranks (``DTensor``) each rank updates its part. With ``compact`` states the master copy
is fp16 with a scale per tensor, the first moment fp8 (e4m3) and the second fp16, likewise scaled: 5 bytes per parameter
instead of 12 (FP8-LM, arXiv:2310.18313, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ridgeline.nn.kernels import functions
from ridgeline.nn.kernels.dispatch import usable
from ridgeline.nn.parallel.collectives import local, placed
from ridgeline.nn.quant.codec import E4M3, decode, quantize
from ridgeline.spec.workload import Training


@torch.no_grad()
def lower(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Round the fp32 parameters of ``model`` to ``dtype``; their gradients will be summed in fp32.

    Returns the fp32 values of this rank's part of those that train. The integer codes of a quantized base and their
    scales are unchanged. Divided parameters are replaced by new ones, so this must run before anything stores
    references to them.
    """
    masters: dict[nn.Parameter, Tensor] = {}
    lowered: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p in lowered:  # another reference to a shared one
                module.register_parameter(name, lowered[p])
                continue
            if p.dtype != torch.float32 or name == "scales":
                continue
            wide = local(p.detach())
            new = p
            if isinstance(p, DTensor):
                new = nn.Parameter(placed(wide.to(dtype), p), requires_grad=p.requires_grad)
                module.register_parameter(name, new)
            else:
                p.data = wide.to(dtype)
            lowered[p] = new
            if new.requires_grad:
                new.grad_dtype = torch.float32
                masters[new] = wide
    return masters


@dataclass
class FlatWeights:
    """The master copies of 16-bit parameters before there is an optimizer, and the buffers in which its gradients are
    summed."""

    masters: dict[nn.Parameter, Tensor]
    """fp32 values of this rank's part of each parameter; the optimizer takes ownership, and may store them in fewer
    bits."""
    compact: bool = False
    gradients: Tensor | None = None
    places: dict[nn.Parameter, int] = field(default_factory=dict)
    """Offset of each parameter in the flat buffers, once there is an optimizer: decayed parameters come first, so that
    each of its groups is contiguous."""

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Context of a micro-batch: gradients are views of one buffer."""
        if self.places and next(iter(self.places)).grad is None:
            if self.gradients is None:
                size = sum(local(p.detach()).numel() for p in self.places)
                self.gradients = torch.zeros(size, device=local(next(iter(self.places)).detach()).device)
            else:
                self.gradients.zero_()
            for p, start in self.places.items():
                part = local(p.detach())
                p.grad = placed(self.gradients[start : start + part.numel()].view_as(part), p)
        yield

    def optimizer(self, groups: list[dict[str, Any]], w: Training) -> torch.optim.Optimizer:
        """The one batched update, as :data:`~ridgeline.runtime.optimizer.MakeOptimizer`."""
        return FlatOptimizer(self, groups, w)


class FlatOptimizer(torch.optim.Optimizer):
    """AdamW (or SGD without momentum) over :class:`FlatWeights`, whose states are views of flat buffers."""

    def __init__(self, weights: FlatWeights, groups: list[dict[str, Any]], w: Training) -> None:
        adam = w.optimizer == "adamw"
        chosen = [g if adam else {**g, "weight_decay": 0.0} for g in groups]
        super().__init__(chosen, {"lr": w.lr, "betas": (w.beta1, w.beta2), "eps": 1e-8, "weight_decay": 0.0})
        self.weights, self.adam = weights, adam
        master = self._flatten()
        self.flat: dict[str, Tensor] = {}
        if not weights.compact:
            self.flat = {"master": master}
            if adam:
                self.flat |= {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        for p, start in weights.places.items():
            state, part = self.state[p], local(p.detach())
            for name, whole in self.flat.items():
                state[name] = placed(whole[start : start + part.numel()].view_as(part), p)
            if weights.compact:
                self._shrink(state, "master", master[start : start + p.numel()].view_as(p), torch.float16)
                if adam:
                    zeros = torch.zeros(p.shape, device=p.device)
                    self._shrink(state, "exp_avg", zeros, E4M3)
                    self._shrink(state, "exp_avg_sq", zeros, torch.float16)
            state["step"] = torch.zeros(())

    def _flatten(self) -> Tensor:
        """Move the masters into one buffer [elements], and make the full parameters views of another."""
        held, places = self.weights.masters, self.weights.places
        ordered = sorted(held, key=lambda p: p.ndim < 2)
        master = torch.cat([held.pop(p).flatten() for p in ordered])
        whole = [p for p in ordered if not isinstance(p, DTensor)]
        low = torch.cat([p.detach().flatten() for p in whole]) if whole else None
        start = filled = 0
        for p in ordered:
            places[p] = start
            start += local(p.detach()).numel()
            if low is not None and not isinstance(p, DTensor):
                p.data = low[filled : filled + p.numel()].view_as(p)
                filled += p.numel()
        return master

    @staticmethod
    def _shrink(state: dict[str, Tensor], name: str, value: Tensor, dtype: torch.dtype) -> None:
        codes, scale = quantize(value, dtype)
        if dtype == E4M3:  # as bytes: collectives and checkpoint formats do not all know float8
            codes = codes.view(torch.uint8)
        if name in state:
            state[name].copy_(codes)
            state[f"{name}_scale"].copy_(scale)
        else:
            state[name], state[f"{name}_scale"] = codes, scale

    @staticmethod
    def _grow(state: dict[str, Tensor], name: str) -> Tensor:
        codes = state[name]
        return decode(codes.view(E4M3) if codes.dtype == torch.uint8 else codes, state[f"{name}_scale"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for p in with_gradient:
                self.state[p]["step"] += 1
            if self.weights.compact:
                for p in with_gradient:
                    self._compact_step(p, group)
            else:
                for first, size, grad in self._pieces(with_gradient):
                    self._piece_step(first, size, grad, int(self.state[first]["step"]), group)
        return loss

    def _pieces(self, parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """(first parameter, elements, flat gradient) of the longest contiguous runs, including gradients."""
        run: list[nn.Parameter] = []

        def whole() -> tuple[nn.Parameter, int, Tensor]:
            assert run[0].grad is not None
            grad, size = local(run[0].grad), sum(local(p.detach()).numel() for p in run)
            return run[0], size, grad.as_strided((size,), (1,), grad.storage_offset())

        for p in parameters:
            if not local(p.detach()).numel():  # fewer rows than ranks
                continue
            if run and not self._follows(run[-1], p):
                yield whole()
                run = []
            run.append(p)
        if run:
            yield whole()

    def _follows(self, a: nn.Parameter, b: nn.Parameter) -> bool:
        places = self.weights.places
        if places[b] != places[a] + local(a.detach()).numel() or self.state[a]["step"] != self.state[b]["step"]:
            return False
        assert a.grad is not None
        assert b.grad is not None
        return _adjacent(local(a.detach()), local(b.detach())) and _adjacent(local(a.grad), local(b.grad))

    def _piece_step(self, first: nn.Parameter, size: int, grad: Tensor, step: int, group: dict[str, Any]) -> None:
        start, low = self.weights.places[first], local(first.detach())
        low = low.as_strided((size,), (1,), low.storage_offset())
        states = {name: whole[start : start + size] for name, whole in self.flat.items()}
        if not self.adam:
            low.copy_(states["master"].add_(grad, alpha=-group["lr"]))
            return
        master, m, v = states["master"], states["exp_avg"], states["exp_avg_sq"]
        (beta1, beta2), eps = group["betas"], group["eps"]
        if usable(low, master, grad):
            decay = group["weight_decay"]
            functions.adamw_(low, master, grad, m, v, group["lr"], beta1, beta2, eps, decay, step)
            return
        _adamw(master, grad, m, v, step, group)
        low.copy_(master)

    def _compact_step(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[p]
        master, grad = self._grow(state, "master"), p.grad
        assert grad is not None
        if self.adam:
            m, v = self._grow(state, "exp_avg"), self._grow(state, "exp_avg_sq")
            _adamw(master, grad, m, v, int(state["step"]), group)
            self._shrink(state, "exp_avg", m, E4M3)
            self._shrink(state, "exp_avg_sq", v, torch.float16)
        else:
            master.add_(grad, alpha=-group["lr"])
        self._shrink(state, "master", master, torch.float16)
        p.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the current one: its tensors stay views of the flat buffers, in their own dtypes."""
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        mine = [p for g in self.param_groups for p in g["params"]]
        if len(saved) != len(mine):
            raise ValueError(f"the saved optimizer has {len(saved)} parameters, this one {len(mine)}")
        for i, p in zip(saved, mine, strict=True):
            for name, value in state_dict["state"][i].items():
                local(self.state[p][name]).copy_(local(value))
        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})


def _adjacent(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` directly follows ``a`` in the same memory."""
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and b.storage_offset() == a.storage_offset() + a.numel()


def _adamw(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """One AdamW step on fp32 tensors with unfused operators."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    p.mul_(1 - lr * group["weight_decay"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
