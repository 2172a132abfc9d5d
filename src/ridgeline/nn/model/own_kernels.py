"""Kernels of ours that no GPU, or not this one, has run yet: chosen as other back ends are, and tried at the engine's
own weights before it is ready. Where one fails or its results are others, PyTorch's operators compute instead.

Such kernels are proven by Triton's interpreter and compiler alone, which know neither a driver's mistakes nor the
assembler's (docs/gpu.md has one of the latter).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.adjacency import adjacent
from ridgeline.nn.kernels.backends import DENSE, EXPERTS, FLOAT8, LOW, WRONG, Case, Kernels
from ridgeline.nn.kernels.dispatch import is_hopper
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.joined_weights import whole_layer
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.errors import UserError

ROWS = (13, 29, 61, 125)
"""Rows that are multiplied for a trial: of each of the launches for few rows."""
EACH = 4
"""Rows of an expert, on average: fewer than are multiplied in codes of their own."""

Both = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""What computes something with our kernel, and what without."""


def settle(model: nn.Module, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Choose who computes a served model's products of few rows and quantized experts, and try ours. ``dtype``: of its
    activations. Another model of the same engine may have found that ours cannot. Raises :class:`UserError` where the
    workload asks for what cannot."""
    if dtype not in LOW:
        return
    layers = [m for m in model.modules() if isinstance(m, products.Joined)]
    if layers and is_hopper(device) and _is_ours(kernels, FLOAT8, device, dtype):
        whole = [*layers, *_wholes(model)]
        _try(kernels, FLOAT8, device, _float8_trials(whole, kernels, device, dtype))
    _settle_dense(model, kernels, device, dtype)
    experts = [m for m in model.modules() if isinstance(m, PackedExperts) and m.grouped is not None]
    if not experts:
        return
    if _is_ours(kernels, EXPERTS, device, dtype):
        _try(kernels, EXPERTS, device, _experts_trials(experts, device, dtype))
    if not kernels.ours(EXPERTS):
        for module in experts:
            module.grouped = None


def _is_ours(kernels: Kernels, operator: str, device: torch.device, dtype: torch.dtype) -> bool:
    return kernels.ours(operator) and kernels.find(operator, Case(device, dtype)) is None


def _settle_dense(model: nn.Module, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Products in 16 bits are PyTorch's unless ours was measured to be faster, or is asked for."""
    if DENSE not in kernels.taken:  # of another engine
        products.FEW_ROWS.discard(device)
    weights = {w.shape: w for w in _weights(model) if w.dtype == dtype}
    asked = DENSE in kernels.asked or kernels.measured.get(DENSE)
    if not (asked and weights and is_hopper(device) and _is_ours(kernels, DENSE, device, dtype)):
        return
    trials = (
        (partial(products.product_of_few_rows, x, w), partial(F.linear, x, w))
        for w in weights.values()
        for x in (_random(device, dtype, rows, w.shape[1]) for rows in ROWS)
        if w.shape[1] * w.itemsize % 16 == 0
    )
    _try(kernels, DENSE, device, trials)
    (products.FEW_ROWS.add if kernels.ours(DENSE) else products.FEW_ROWS.discard)(device)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Of a served model's plain linear layers, as they are multiplied."""
    for module in model.modules():
        if isinstance(module, products.ServedLinear):
            yield module.weight
        for parts in _merged(module):
            if all(isinstance(p, products.ServedLinear) for p in parts):
                whole = adjacent([p.weight for p in parts])  # type: ignore[misc]
                if whole is not None:
                    yield whole


def _merged(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The layers of a module that are multiplied as one."""
    parts: list[nn.Module | None] = []
    if isinstance(module, Attention):
        parts = [module.q_proj, module.k_proj, module.v_proj]
    elif isinstance(module, MLP):
        parts = [module.gate_proj, module.up_proj]
    if parts:
        yield [p for p in parts if p is not None]


def _try(kernels: Kernels, operator: str, device: torch.device, trials: Iterator[Both]) -> None:
    """Let PyTorch's operators compute ``operator`` if ours fails in one of the trials."""
    why = next(filter(None, (differs(operator, device, *both) for both in trials)), "")
    if why:
        kernels.taken[operator] = "torch"
        warnings.warn(f"PyTorch's operators compute {operator}, as our kernel {why}", stacklevel=3)


def differs(operator: str, device: torch.device, ours: Callable[[], Tensor], right: Callable[[], Tensor]) -> str:
    """What is wrong with our kernel, run twice, beside what is ``right``; empty: nothing. Raises :class:`UserError`
    where nothing else can run on the GPU after it."""
    try:
        found, again = ours(), ours()
        torch.cuda.synchronize(device)
    except Exception as e:  # whatever a compiler or a driver makes of it
        why = f"fails here ({(str(e) or type(e).__name__).splitlines()[0][:200]})"
        try:
            torch.zeros(1, device=device).item()
        except Exception:
            raise UserError(f"our kernel {why}, and leaves the GPU unusable",
                            f"start again with --kernels {operator}=torch") from e  # fmt: skip
        return why
    want = right().float()
    error = float((found.float() - want).norm() / want.norm())
    if not error < WRONG:  # NaN, too
        return f"is wrong here (error {error:.2g})"
    return "" if torch.equal(found, again) else "gives other results the second time"


def _wholes(model: nn.Module) -> Iterator[products.Joined]:
    """Layers that are merged: as they are multiplied."""
    for module in model.modules():
        for parts in _merged(module):
            if (whole := whole_layer(parts)) is not None:
                yield whole


def _float8_trials(
    layers: list[products.Joined], kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Iterator[Both]:
    """Of one layer of each shape."""
    shapes = {(layer.in_features, layer.out_features): layer for layer in layers}
    for (width, _), layer in shapes.items():
        for rows in ROWS:
            x = _random(device, dtype, rows, width)
            yield partial(layer, x), partial(_without, kernels, layer, x)


def _without(kernels: Kernels, layer: nn.Module, x: Tensor) -> Tensor:
    """The same by PyTorch's operators."""
    held = dict(kernels.taken)
    kernels.taken[FLOAT8] = "torch"
    y: Tensor = layer(x)
    kernels.taken = held
    return y


def _experts_trials(experts: list[PackedExperts], device: torch.device, dtype: torch.dtype) -> Iterator[Both]:
    """Of one layer of each kind: rows for all experts but some, one after the other and at once."""
    kinds = {(type(m.down_proj[0]), len(m.up_proj), *(p.shape for p in m.parameters())): m for m in experts}
    for module in kinds.values():
        count = len(module.up_proj)
        rows = min(EACH * count, int(module.most_rows()))
        x = _random(device, dtype, rows, _width(module))
        expert = (torch.arange(rows, device=device) % max(1, count - 1)).sort().values
        counts = torch.bincount(expert, minlength=count).tolist()
        if module.groupable(x):
            yield partial(module.together, x, expert), partial(module, x, counts)


def _width(experts: PackedExperts) -> int:
    """Inputs of a layer's experts."""
    first = experts.up_proj[0]
    return int(getattr(first, "in_features", 0) or first.codes.width)  # type: ignore[union-attr, arg-type]


def _random(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Tensor:
    """The same numbers in every run."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, width, generator=generator, device=device, dtype=torch.float32).to(dtype)
