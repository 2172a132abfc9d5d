"""Kernels of ours that no GPU, or not this one, has run yet: chosen as other back ends are, and tried at the engine's
own weights before it is ready. Where one fails or its results are others, PyTorch's operators compute instead.

Such kernels are proven by Triton's interpreter and compiler alone, which know neither a driver's mistakes nor the
assembler's (docs/gpu.md has one of the latter).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.adapters.lora_slots import AddLora, LoraSlots
from ridgeline.nn.kernels import products
from ridgeline.nn.kernels.adjacency import adjacent
from ridgeline.nn.kernels.backends import ADAPTERS, DENSE, EXPERTS, FLOAT8, LOW, WRONG, Case, Kernels
from ridgeline.nn.kernels.dispatch import is_hopper
from ridgeline.nn.kernels.lora_stack import LEAST_RANK, Stack, cut
from ridgeline.nn.model.attention import Attention
from ridgeline.nn.model.joined_weights import whole_layer
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.errors import UserError

ROWS = (13, 29, 61, 125)
"""Rows that are multiplied for a trial: of each of the launches for few rows."""
LORA_ROWS = (13, 90, 300)
"""The same of each of the launches for adapters."""
EACH = 4
"""Rows of an expert, on average: fewer than are multiplied in codes of their own."""

Found = Tensor | tuple[Tensor, ...]
Both = tuple[Callable[[], Found], Callable[[], Found]]
"""What computes something with our kernel, and what without. Of several tensors each is compared."""


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


def settle_lora(slots: LoraSlots, kernels: Kernels) -> bool:
    """Whether our kernels add adapters for all rows at once: chosen and tried at the model's shapes."""
    device, dtype = slots.device, slots.dtype
    if dtype not in LOW or kernels.find(ADAPTERS, Case(device, dtype)) is not None:
        return False
    trials = (lora_trial(slots.rows.add, device, dtype, width, widths, rows)
              for width, widths in slots.shapes() for rows in LORA_ROWS)  # fmt: skip
    _try(kernels, ADAPTERS, device, trials)
    return kernels.ours(ADAPTERS)


def lora_trial(
    add: AddLora, device: torch.device, dtype: torch.dtype, width: int, widths: tuple[int, ...], rows: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What three adapters of two ranks add to ``rows`` rows of ``width`` inputs, and to none of the last ones."""
    ranks, slices, capacity = (LEAST_RANK, 5, LEAST_RANK), len(widths), LEAST_RANK
    x = _random(device, dtype, rows, width)
    a = _random(device, dtype, len(ranks) * slices * capacity, width).view(len(ranks), -1, width)
    b = _random(device, dtype, len(ranks) * capacity, sum(widths)).view(len(ranks), capacity, -1)
    held = torch.tensor(ranks, dtype=torch.int32, device=device)[:, None].expand(-1, slices).contiguous()
    scales = torch.full((len(ranks), slices), width**-0.5, device=device)
    stack = Stack(a, b, held, scales, widths)
    ends = [0, rows // 4, rows // 2, rows - 1]
    segments = [(slot, ends[slot], ends[slot + 1]) for slot in range(len(ranks))]
    items = torch.tensor(cut(segments, rows), dtype=torch.int32, device=device)

    def ours() -> Tensor:
        y = torch.zeros(rows, sum(widths), device=device, dtype=dtype)
        add(x, y, items, stack)
        return y

    def right() -> Tensor:
        y = torch.zeros(rows, sum(widths), device=device)
        for slot, first, end in segments:
            begin = 0
            for i, n in enumerate(widths):
                mine = a[slot, i * capacity : i * capacity + ranks[slot]].float()
                up = b[slot, : ranks[slot], begin : begin + n].float()
                y[first:end, begin : begin + n] = x[first:end].float() @ mine.t() @ up * width**-0.5
                begin += n
        return y

    return ours, right


@lru_cache(maxsize=64)
def is_right(operator: str, device: torch.device, trial: Callable[[torch.device], Both]) -> bool:
    """Whether our kernel for ``operator``, a part of training steps, computes in a trial what PyTorch's operators do.
    Tried once in a process; says so in a warning if it does not. Raises :class:`UserError` where the GPU cannot be used
    after it."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        why = differs(device, *trial(device), f"leave the technique that needs {operator} out of the plan")
    if why:
        warnings.warn(f"PyTorch's operators compute {operator}, as our kernel {why}", stacklevel=2)
    return not why


def _try(kernels: Kernels, operator: str, device: torch.device, trials: Iterator[Both]) -> None:
    """Let PyTorch's operators compute ``operator`` if ours fails in one of the trials."""
    fix = f"start again with --kernels {operator}=torch"
    why = next(filter(None, (differs(device, *both, fix) for both in trials)), "")
    if why:
        kernels.taken[operator] = "torch"
        warnings.warn(f"PyTorch's operators compute {operator}, as our kernel {why}", stacklevel=3)


def differs(device: torch.device, ours: Callable[[], Found], right: Callable[[], Found], fix: str) -> str:
    """What is wrong with our kernel, run twice, beside what is ``right``; empty: nothing. Raises :class:`UserError`
    with the advice ``fix`` where nothing else can run on the GPU after it."""
    try:
        found, again = _each(ours()), _each(ours())
        torch.cuda.synchronize(device)
    except Exception as e:  # whatever a compiler or a driver makes of it
        why = f"fails here ({(str(e) or type(e).__name__).splitlines()[0][:200]})"
        try:
            torch.zeros(1, device=device).item()
        except Exception:
            raise UserError(f"our kernel {why}, and leaves the GPU unusable", fix) from e
        return why
    for mine, want in zip(found, _each(right()), strict=True):
        error = float((mine.float() - want.float()).norm() / want.float().norm())
        if not error < WRONG:  # NaN, too
            return f"is wrong here (error {error:.2g})"
    same = all(map(torch.equal, found, again))
    return "" if same else "gives other results the second time"


def _each(found: Found) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


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
