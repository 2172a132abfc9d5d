"""The back ends of an operator side by side on a GPU: what ``probe`` chooses by.

Each is checked against PyTorch's operators in fp32 first: one that fails or is wrong here is not timed, and so never
taken by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.kernels import functions, products
from ridgeline.nn.kernels.backends import (
    ADAPTERS,
    DENSE,
    EXPERTS,
    FLOAT8,
    OPERATORS,
    WRONG,
    Backend,
    Case,
    Kernels,
    able,
)
from ridgeline.nn.kernels.dispatch import is_hopper
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.model.grouped_experts import group_experts
from ridgeline.nn.model.loss import IGNORE
from ridgeline.nn.model.own_kernels import lora_trial
from ridgeline.nn.quant import mxfp4
from ridgeline.nn.quant.codec import E4M3
from ridgeline.nn.quant.codes import Stripes
from ridgeline.nn.quant.packed import Packed
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.backends import BACKENDS, OURS
from ridgeline.techniques.precision.fp8_linear_torch import StoredFp8Linear

_WARM, _CALLS = 3, 10

Result = Sequence[Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What operators are timed at."""

    rows: int = 8192
    hidden: int = 4096
    inner: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    key_heads: int = 8
    width: int = 128
    sequences: int = 32
    length: int = 2048
    chunk: int = 512
    """New tokens of each sequence of a step with prompts."""
    few: int = 64
    """Rows of a decode step."""
    experts: int = 8
    dtype: torch.dtype = torch.bfloat16
    low: torch.dtype = torch.bfloat16
    """Of operators that are there in 16 bits alone."""


SMALL = Sizes(64, 64, 96, 512, 4, 2, 16, 2, 48, 8, 16, 4, torch.float32)
"""For a CPU."""


@dataclass(frozen=True)
class Trial:
    """An operator with operands: ours, another back end's as its module loads it, and what is right."""

    case: Case
    ours: Callable[[], Result]
    theirs: Callable[[Any, Case], Callable[[], Result]]
    right: Callable[[], Result]
    others: tuple[Case, ...] = ()
    """Cases for back ends that cannot compute the first one."""


def backend_rows(device: torch.device, sizes: Sizes, report: Callable[[str], None]) -> Iterator[Row]:
    """Seconds and errors of every back end that is at hand, one row each: ours first."""
    for operator in BACKENDS:
        report(f"back ends of {operator}")
        try:
            torch.manual_seed(0)
            trial = _TRIALS[operator.partition(".")[0]](device, sizes, operator.endswith("decode"))
            right = [t.detach().float() for t in trial.right()]
        except Exception as e:  # after an illegal access of one back end, all that follow on the device
            yield {"operator": operator, "backend": OURS, "failed": (str(e) or type(e).__name__).splitlines()[0]}
            continue
        yield {"operator": operator, "backend": OURS, **_tried(device, partial(getattr, trial, "ours"), right)}
        for backend, case in _able(operator, trial):
            load = partial(_loaded, trial, backend, case)
            row: Row = {"operator": operator, "backend": backend.name, "version": backend.version}
            yield row | _tried(device, load, right)
        del trial, right


def _loaded(trial: Trial, backend: Backend, case: Case) -> Callable[[], Result]:
    return trial.theirs(backend.load(), case)


def _able(operator: str, trial: Trial) -> list[tuple[Backend, Case]]:
    """Optional back ends, each with the first case that it can compute."""
    found: dict[str, tuple[Backend, Case]] = {}
    for case in (trial.case, *trial.others):
        for backend in able(operator, case):
            found.setdefault(backend.name, (backend, case))
    return list(found.values())


def _tried(device: torch.device, load: Callable[[], Callable[[], Result]], right: Result) -> Row:
    """Seconds of what ``load`` gives, and its error; or why there are none."""
    try:
        call = load()
        found = [t.detach().float() for t in call()]
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
        if not error < WRONG:
            return {"failed": f"its error is {error:.2g}", "error": error}
        for _ in range(_WARM):
            call()
        return {"seconds": statistics.median(_once(device, call) for _ in range(_CALLS)), "error": error}
    except Exception as e:  # whatever a kernel that nobody has tried here may raise
        return {"failed": f"{type(e).__name__}: {e}".splitlines()[0][:300]}


def _once(device: torch.device, call: Callable[[], Result]) -> float:
    """Seconds of one call, its launches included: the host keeps ahead of all but the smallest."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _leaves(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]


def _wide(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().float().requires_grad_() for t in leaves]


def _norm(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """A residual addition with its norm, and the gradients."""
    x, u, w = leaves = _leaves(device, s.dtype, (s.rows, s.hidden), (s.rows, s.hidden), (s.hidden,))
    d, e = (torch.randn(s.rows, s.hidden, device=device, dtype=s.dtype) for _ in range(2))

    def both(made: tuple[Tensor, Tensor], given: Sequence[Tensor]) -> Result:
        total, y = made
        return y, *torch.autograd.grad((total, y), given, (d.to(total.dtype), e.to(y.dtype)))

    def right() -> Result:
        x, u, w = wide = _wide(leaves)
        return both((x + u, F.rms_norm(x + u, (s.hidden,), w, 1e-5)), wide)

    return Trial(
        Case(device, s.dtype, width=s.hidden),
        lambda: both(functions.add_norm(x, u, w, None, 1e-5, False, s.dtype), leaves),
        lambda kernel, case: lambda: both(kernel.add_norm(x, u, w, 1e-5), leaves),
        right,
    )


def _swiglu(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """The activation of a merged product, of few inputs so that the product costs little, and the gradients."""
    few = 64
    x, gate, up = leaves = _leaves(device, s.dtype, (s.rows, few), (s.inner, few), (s.inner, few))
    merged, d = torch.cat([gate.detach(), up.detach()]), torch.randn(s.rows, s.inner, device=device, dtype=s.dtype)

    def run(kernel: Any = None) -> Result:
        y = functions.gated_linear(x, merged, None, [gate, up, None, None], kernel)
        return y, *torch.autograd.grad(y, leaves, d)

    def right() -> Result:
        x, gate, up = wide = _wide(leaves)
        y = F.silu(F.linear(x, gate)) * F.linear(x, up)
        return y, *torch.autograd.grad(y, wide, d.float())

    return Trial(Case(device, s.dtype, width=s.inner), run, lambda kernel, case: lambda: run(kernel), right)


def _head_loss(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """The head, its loss and the gradients of both."""
    rows = s.rows // 2
    x, w = leaves = _leaves(device, s.dtype, (rows, s.hidden // 2), (s.vocabulary, s.hidden // 2))
    with torch.no_grad():
        w.mul_(s.hidden**-0.5)
    labels = torch.randint(0, s.vocabulary, (rows,), device=device)
    labels[::7] = IGNORE

    def both(loss: Tensor, given: Sequence[Tensor]) -> Result:
        return loss, *torch.autograd.grad(loss, given)

    def right() -> Result:
        x, w = wide = _wide(leaves)
        return both(F.cross_entropy(F.linear(x, w), labels, reduction="sum", ignore_index=IGNORE), wide)

    return Trial(
        Case(device, s.dtype),
        lambda: both(functions.linear_loss(x, w, None, labels, 4096, s.dtype), leaves),
        lambda kernel, case: lambda: both(kernel(x, w, None, labels), leaves),
        right,
    )


def _attention(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """Attention over pages of 16 tokens, or of 256 for those that take no others."""
    from ridgeline.nn.kernels.paged_attention import paged_attention

    new, blocks = 1 if decode else s.chunk, (16, 256)
    room = -(-s.length // blocks[1]) * blocks[1]
    q = torch.randn(s.sequences * new, s.heads, s.width, device=device, dtype=s.dtype)
    stores = [torch.randn(1, s.key_heads, s.sequences * room, s.width, device=device, dtype=s.dtype) for _ in range(2)]
    lengths = torch.full((s.sequences,), s.length, dtype=torch.int32, device=device)
    order = torch.randperm(s.sequences, device=device).int()
    repeat, counts = s.heads // s.key_heads, [new] * s.sequences
    pages = {
        block: make_pages(
            order[:, None] * (room // block) + torch.arange(room // block, device=device, dtype=torch.int32),
            lengths, counts, block, repeat, s.width,
        )
        for block in blocks
    }  # fmt: skip

    def right() -> Result:
        keys, values = (t.view(s.key_heads, s.sequences, room, s.width)[:, order.long(), : s.length] for t in stores)
        query = q.view(s.sequences, new, s.heads, s.width).transpose(1, 2)
        at = torch.arange(s.length, device=device)
        out = [
            F.scaled_dot_product_attention(
                query[i : i + 1].float(), keys[None, :, i].float(), values[None, :, i].float(), at <= at[-new:, None],
                enable_gqa=repeat > 1,
            )[0].transpose(0, 1)
            for i in range(s.sequences)
        ]  # fmt: skip
        return [torch.cat(out)]

    @torch.no_grad()
    def ours() -> Result:
        return [paged_attention(q, stores[0], stores[1], pages[blocks[0]])]

    def theirs(kernel: Any, case: Case) -> Callable[[], Result]:
        return torch.no_grad()(lambda: [kernel(q, stores[0], stores[1], pages[case.block], 0)])

    cases = [Case(device, s.dtype, width=s.width, block=block) for block in blocks]
    return Trial(cases[0], ours, theirs, right, tuple(cases[1:]))


def _float8(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """A cast and a product of a few rows with a weight in float8."""
    kernels, linear = Kernels(), nn.Linear(s.hidden, 2 * s.inner, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.randn(2 * s.inner, s.hidden, device=device, dtype=s.low), requires_grad=False)
    layer = StoredFp8Linear(linear)
    layer.kernels = kernels
    x = torch.randn(s.few, s.hidden, device=device, dtype=s.low)

    def run(name: str) -> Result:
        kernels.taken[FLOAT8] = name
        with torch.no_grad():
            return [layer(x)]

    def right() -> Result:
        return [F.linear(x.float(), layer.codes.view(E4M3).float() * layer.inverse)]

    return Trial(Case(device, s.low, width=s.hidden), partial(run, OURS),
                 lambda kernel, case: partial(run, OPERATORS.name), right)  # fmt: skip


def _experts(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """A decode step's rows through experts in MXFP4, all at once or one after the other."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(s.hidden // 2, s.hidden)] * 2 + [(s.hidden, s.hidden // 2)]
    weights = [[mxfp4.quantized(torch.randn(*shape, generator=generator) * shape[1] ** -0.5) for _ in range(s.experts)]
               for shape in shapes]  # fmt: skip

    def stack(packed: Sequence[Packed]) -> list[nn.Module]:
        made = [PackedLinear(p, device=device) for p in packed]
        for layer, p in zip(made, packed, strict=True):
            layer.codes = Stripes(p).to(device)  # on a CPU, too
        return list(made)

    gate, up, down = map(stack, weights)
    held = PackedExperts("silu", gate, up, down)
    if not group_experts(held):
        raise RuntimeError("the experts' codes do not lie together")
    x = torch.randn(s.few, s.hidden, device=device, dtype=s.low)
    expert = (torch.arange(s.few, device=device) % s.experts).sort().values
    counts = torch.bincount(expert, minlength=s.experts)

    def at_once() -> Result:
        with torch.no_grad():
            return [held.together(x, expert)]

    def one_by_one() -> Result:
        with torch.no_grad():
            return [held(x, counts.tolist())]  # which a step has on the device, too

    def right() -> Result:
        rows, found = x.float().split(counts.tolist()), []
        for part, packed in zip(rows, zip(*weights, strict=True), strict=True):
            dense = [p.dense(torch.float32).to(device) for p in packed]
            found.append(F.linear(F.silu(F.linear(part, dense[0])) * F.linear(part, dense[1]), dense[2]))
        return [torch.cat(found)]

    return Trial(Case(device, s.low, width=s.hidden), at_once, lambda kernel, case: one_by_one, right)


def _dense(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """A product of a few rows in 16 bits."""
    weight = torch.randn(2 * s.inner, s.hidden, device=device, dtype=s.low)
    x = torch.randn(s.few, s.hidden, device=device, dtype=s.low)

    def ours() -> Result:
        with torch.no_grad():
            return [products.product_of_few_rows(x, weight) if is_hopper(device) else F.linear(x, weight)]

    return Trial(Case(device, s.low, width=s.hidden), ours, lambda kernel, case: lambda: [F.linear(x, weight)],
                 lambda: [F.linear(x.float(), weight.float())])  # fmt: skip


def _lora(device: torch.device, s: Sizes, decode: bool) -> Trial:
    """What the adapters of a decode step's rows add to two merged projections."""
    from ridgeline.nn.kernels.grouped_lora import add_lora

    widths = (s.inner, s.inner)
    ours, right = lora_trial(add_lora, device, s.low, s.hidden, widths, s.few)
    return Trial(Case(device, s.low, width=s.hidden), lambda: [ours()], lambda kernel, case: lambda: [right()],
                 lambda: [right()])  # fmt: skip


_TRIALS = {"attention": _attention, "norm": _norm, "swiglu": _swiglu, "head_loss": _head_loss, FLOAT8: _float8,
           EXPERTS: _experts, DENSE: _dense, ADAPTERS: _lora}  # fmt: skip
