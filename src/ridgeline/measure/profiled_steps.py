"""Steps under PyTorch's profiler, as rows per module, phase and operator that add up to the profiled time.

Time that no operator accounts for (Python, hooks, autograd's engine) is the row ``unattributed``.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.nn.kernels import native
from ridgeline.nn.model import attention
from ridgeline.nn.model.rotary import Rope
from ridgeline.spec.result import Check, Metric, Result, Row

MODULE, PHASE, HOST, KERNEL = "module::", "phase::", "host::", "kernel::"
"""Beginnings of the names of ranges: a module's forward, a phase, work on the host whose own time is a row, and one of
our compiled kernels, which PyTorch's profiler does not see by itself."""
STEP = f"{PHASE}step"
_COLLECTIVES = ("FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::reduce", "c10d::", "gloo:", "nccl:")
_KINDS = {
    "mm": "gemm", "addmm": "gemm", "linear": "gemm", "_grouped_mm": "gemm", "bmm": "bmm", "baddbmm": "bmm",
    "_softmax": "softmax", "_softmax_backward_data": "softmax", "embedding": "embedding", "index_select": "embedding",
    "embedding_dense_backward": "embedding", "copy_": "copy", "_to_copy": "cast", "clone": "copy",
    "_fused_adamw_": "optimizer", "linalg_vector_norm": "norm", "silu": "activation", "silu_backward": "activation",
    "gelu": "activation", "gelu_backward": "activation", "sum": "reduce", "native_layer_norm": "norm",
    "native_layer_norm_backward": "norm", "_linear_pointwise": "gemm",
}  # fmt: skip

_COMPILED = {
    "lowbit_linear": "gemm", "lowbit_expand": "cast", "dense_linear": "gemm", "paged_attention": "attention",
    "norm": "norm", "decode": "layers", "finite": "sampling", "sample": "sampling",
}  # fmt: skip
"""Our compiled kernels for inference, by the functions of :mod:`ridgeline.nn.kernels.native`, and their kinds."""
_COMPILED_CALLS = {
    "add_norm": "norm", "add_norm_backward": "norm", "activation": "activation", "activation_backward": "activation",
    "rotate": "rope", "softmax": "softmax", "softmax_backward": "softmax", "cross_entropy": "loss",
    "adamw": "optimizer",
}  # fmt: skip
"""Those of training, by their names in ``native.call`` without "rl_"."""

# fmt: off
_VIEWS = frozenset({
    "t", "transpose", "as_strided", "view", "_unsafe_view", "reshape", "expand", "detach", "detach_", "slice",
    "select", "unsqueeze", "squeeze", "permute", "alias", "narrow", "split", "split_with_sizes", "unbind",
    "flatten", "unflatten", "chunk", "view_as", "expand_as", "resolve_conj", "resolve_neg", "lift_fresh", "empty",
    "empty_like", "empty_strided", "set_", "resize_", "_reshape_alias", "item", "_local_scalar_dense", "is_nonzero",
    "to", "contiguous", "result_type", "record_stream", "_has_compatible_shallow_copy_type",
})
# fmt: on
"""Operators that return a view, allocate, or only call others: they move no data themselves."""


@dataclass
class ProfileNode:
    """One interval of the profiler's tree."""

    name: str
    start: float
    seconds: float
    sequence: int
    shapes: list[list[int]]
    widths: list[int]
    children: list[ProfileNode] = field(default_factory=list)

    @property
    def self_seconds(self) -> float:
        """Time not spent in children."""
        return max(0.0, self.seconds - sum(c.seconds for c in self.children))


class StepProfiler:
    """Profiles steps of ``model``, each in a session of its own: what the profiler records breaks up the freed memory
    that large tensors would reuse, and a second step under it would pay page faults that no real step pays.

    ``trace``: file for the Chrome trace of the last step.
    """

    def __init__(self, model: nn.Module, device: torch.device, trace: str | None) -> None:
        self.model, self.device, self.trace = model, device, trace
        self.activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self.roots: dict[str, list[ProfileNode]] = {}
        """What was recorded, by phase."""

    @contextmanager
    def step(self, phase: str = "") -> Iterator[None]:
        """Around one step; ``phase``: of all of it."""
        with (
            scopes(self.model),
            profile(activities=self.activities, record_shapes=True) as profiler,
            record_function(STEP),
            record_function(f"{PHASE}{phase}") if phase else nullcontext(),
        ):
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.roots.setdefault(phase, []).extend(tree(profiler))
        if self.trace:
            Path(self.trace).parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(self.trace)
        del profiler
        gc.collect()


def record_breakdown(result: Result, rows: list[Row], total: float, bare: float, name: str, unit: str) -> None:
    """Add the rows of ``total`` profiled seconds to the result, and what profiling did to the ``bare`` seconds.

    ``name``: of the metric with the profiled seconds; ``unit``: what they are of.
    """
    parts = sum(r.seconds for r in rows)
    lost = sum(r.seconds for r in rows if r.kind == "unattributed")
    result.breakdown = sorted(rows, key=lambda r: (r.kind == "unattributed", -r.seconds))
    result.metrics[name] = Metric(value=total, unit="s", better="lower", source=f"mean of profiled {unit}s")
    result.metrics["profiler_overhead"] = Metric(value=total / bare, better="lower", source=f"profiled / bare {unit}")
    result.metrics["unattributed_share"] = Metric(value=lost / total, better="lower", source="profiler")
    result.checks.append(
        Check(
            name=f"rows add up to the profiled {unit}",
            passed=abs(parts - total) < 1e-6 * total,
            expected=total,
            got=parts,
            tolerance=1e-6,
        )
    )


@contextmanager
def scopes(model: nn.Module) -> Iterator[None]:
    """Mark every module's forward with a profiler range named after its path, and rotary embedding with its own."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.ModuleDict):
                _mark(module, name, stack)
        names = vars(attention)
        plain: Callable[[Tensor, Rope, bool], Tensor] = names["rotate"]

        def rotate(x: Tensor, rope: Rope, interleaved: bool = False) -> Tensor:
            with record_function(f"{MODULE}attention.rope"):
                return plain(x, rope, interleaved)

        stack.callback(names.update, rotate=plain)
        names["rotate"] = rotate
        _mark_kernels(stack)
        yield


def _mark_kernels(stack: ExitStack) -> None:
    """Mark every call of a compiled kernel."""
    names = vars(native)

    def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(f"{KERNEL}{name or args[0].removeprefix('rl_')}"):
                return function(*args)

        return call

    plain = {name: names[name] for name in _COMPILED} | {"call": names["call"]}
    stack.callback(names.update, plain)
    names.update({name: marked(function, "" if name == "call" else name) for name, function in plain.items()})


def _mark(module: nn.Module, name: str, stack: ExitStack) -> None:
    open_ranges: list[Any] = []

    def enter(*_: Any) -> None:
        span = record_function(f"{MODULE}{name}")
        span.__enter__()
        open_ranges.append(span)

    def leave(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


# ---- the profiler's events ----------------------------------------------------------------------------------------


def tree(profiler: profile) -> list[ProfileNode]:
    """The profiler's event tree of all threads as plain nodes (seconds)."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    return [_node(e) for e in results.experimental_event_tree()]


def _node(event: Any) -> ProfileNode:
    extra = event.extra_fields
    shapes: list[list[int]] = []
    widths: list[int] = []
    for value in getattr(extra, "inputs", None) or []:
        for meta in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(meta, "sizes"):
                shapes.append(list(meta.sizes))
                widths.append(meta.dtype.itemsize if isinstance(meta.dtype, torch.dtype) else 4)
    return ProfileNode(
        event.name,
        event.start_time_ns * 1e-9,
        max(0, event.duration_time_ns) * 1e-9,
        getattr(extra, "sequence_number", -1),
        shapes,
        widths,
        [_node(c) for c in event.children],
    )


def attribute(roots: list[ProfileNode], steps: float) -> tuple[list[Row], float]:
    """Rows per (phase, module, operator), summed over the profiled steps and divided by ``steps``, and their seconds.

    Forward operators belong to the innermost open module. A backward operator belongs to the module whose forward made
    its autograd node: both carry the same sequence number. Work of the optimizer and of collectives is its own module.
    """
    spans = [n for n in _walk(roots) if n.name == STEP]
    owners: dict[int, str] = {}
    for span in spans:
        _own(span, "", owners)
    table: dict[tuple[str, str, str, str], Row] = {}
    for span in spans:
        _collect(span, "forward", "loss", owners, table)
    total = sum(s.seconds for s in spans) / steps
    rows = list(table.values())
    for row in rows:
        row.seconds /= steps
        row.count /= steps
        row.flops /= steps
        row.bytes /= steps
    known = sum(r.seconds for r in rows)
    rows.sort(key=lambda r: -r.seconds)
    rows.append(
        Row(phase="other", module="unattributed", operator="unattributed", kind="unattributed",
            seconds=max(0.0, total - known))
    )  # fmt: skip
    return rows, total


def _walk(nodes: list[ProfileNode]) -> Iterator[ProfileNode]:
    for n in nodes:
        yield n
        yield from _walk(n.children)


def _own(node: ProfileNode, module: str, owners: dict[int, str]) -> None:
    """Note which module made each autograd node, by sequence number (the last forward operator to show it)."""
    if node.name.startswith("autograd::engine"):
        return  # recomputed forwards inside backward make nodes of their own
    if node.name.startswith(MODULE):
        module = node.name.removeprefix(MODULE)
    elif node.sequence >= 0 and module:
        owners[node.sequence] = module
    for child in node.children:
        _own(child, module, owners)


def _collect(
    node: ProfileNode, phase: str, module: str, owners: dict[int, str], table: dict[tuple[str, str, str, str], Row]
) -> None:
    name = node.name
    if name.startswith(MODULE):
        module = name.removeprefix(MODULE)
    elif name == f"{PHASE}optimizer":
        phase, module = "optimizer", "optimizer"
    elif name in (f"{PHASE}prefill", f"{PHASE}decode"):
        phase, module = name.removeprefix(PHASE), "model"
    elif name.startswith(HOST):
        phase, module = "host", name.removeprefix(HOST)
        _row(table, phase, module, "python", "host").seconds += node.self_seconds
    elif name.startswith("autograd::engine::evaluate_function"):
        phase, module = "backward", owners.get(node.sequence, module if phase == "backward" else "loss")
    elif name.startswith(_COLLECTIVES):
        phase, module = "communication", "communication"
    if name.startswith(("aten::", "mkldnn::", KERNEL, "c10d::", "gloo:", "nccl:", "fsdp::")):
        operator = name.split("::")[-1]
        kinds = _COMPILED | _COMPILED_CALLS if name.startswith(KERNEL) else _KINDS
        kind = "collective" if phase == "communication" else kinds.get(operator, "elementwise")
        if operator.startswith("_scaled_dot_product"):
            kind = "attention"
        row = _row(table, phase, label(module), operator, kind)
        row.seconds += node.self_seconds
        row.flops += flops(operator, node.shapes)
        if operator not in _VIEWS and not any(_moves_data(c) for c in node.children):
            row.bytes += sum(_numel(s) * w for s, w in zip(node.shapes, node.widths, strict=True))
    for child in node.children:
        _collect(child, phase, module, owners, table)


def _row(table: dict[tuple[str, str, str, str], Row], phase: str, module: str, operator: str, kind: str) -> Row:
    """The row of a key, with one call more."""
    row = table.setdefault(
        (phase, module, operator, kind),
        Row(phase=phase, module=module, operator=operator, kind=kind, seconds=0.0, count=0),
    )
    row.count += 1
    return row


def _moves_data(node: ProfileNode) -> bool:
    """Whether the operator or one that it calls touches tensor data; views, allocations and wrappers do not."""
    if node.name.startswith(("aten::", "mkldnn::")) and node.name.split("::")[-1] not in _VIEWS:
        return True
    return any(_moves_data(c) for c in node.children)


def label(path: str) -> str:
    """``layers.3.attention.q_proj`` → ``attention.q_proj``: the same part of every layer is one row."""
    return re.sub(r"^(layers|encoder)\.\d+\.?", "", path) or "block"


def _numel(shape: list[int]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def flops(operator: str, shapes: list[list[int]]) -> float:
    """Matrix-multiply FLOPs of one operator from its input shapes (PyTorch's counter gives 0 for CPU attention)."""
    if operator == "mm" and len(shapes) >= 2:
        return 2.0 * _numel(shapes[0]) * shapes[1][1]
    if operator == "_linear_pointwise" and len(shapes) >= 2:
        return 2.0 * _numel(shapes[0]) * shapes[1][0]
    if operator == "addmm" and len(shapes) >= 3:
        return 2.0 * _numel(shapes[1]) * shapes[2][1]
    if operator == "bmm" and len(shapes) >= 2:
        return 2.0 * _numel(shapes[0]) * shapes[1][2]
    if operator.startswith("_scaled_dot_product") and operator.endswith("backward") and len(shapes) >= 3:
        return 2.5 * flops("_scaled_dot_product", shapes[1:])
    if operator.startswith("_scaled_dot_product") and len(shapes) >= 2 and len(shapes[0]) == 4:
        return 4.0 * _numel(shapes[0]) * shapes[1][2]
    return 0.0
