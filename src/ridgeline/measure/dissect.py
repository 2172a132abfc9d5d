"""Dissection: an experiment's steps under PyTorch's profiler, split into module × phase × operator that add up.

Timing and dissection are separate passes: the bare steps give the undisturbed time, the profiled ones the shares; the
ratio of the two is the profiler's own disturbance and is printed. Time that no operator accounts for (Python, hooks,
autograd's engine) is the row ``unattributed``, so that the table always adds up to the profiled step.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.measure.cells.training_cell import record_memory, timed
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Metric, Result, Row
from ridgeline.train.trainer import Trainer

MODULE, PHASE = "module::", "phase::"
_COLLECTIVES = ("FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::reduce", "c10d::", "gloo:", "nccl:")
_KINDS = {
    "mm": "gemm", "addmm": "gemm", "linear": "gemm", "_grouped_mm": "gemm", "bmm": "bmm", "baddbmm": "bmm",
    "_softmax": "softmax", "_softmax_backward_data": "softmax", "embedding": "embedding", "index_select": "embedding",
    "embedding_dense_backward": "embedding", "copy_": "copy", "_to_copy": "cast", "clone": "copy",
    "_fused_adamw_": "optimizer", "linalg_vector_norm": "norm", "silu": "activation", "silu_backward": "activation",
    "gelu": "activation", "gelu_backward": "activation", "sum": "reduce", "native_layer_norm": "norm",
    "native_layer_norm_backward": "norm",
}  # fmt: skip


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
class ProfilerNode:
    """One interval of the profiler's tree."""

    name: str
    start: float
    seconds: float
    sequence: int
    shapes: list[list[int]]
    widths: list[int]
    children: list[ProfilerNode] = field(default_factory=list)

    @property
    def self_seconds(self) -> float:
        """Time not spent in children."""
        return max(0.0, self.seconds - sum(c.seconds for c in self.children))


def dissect_cell(
    e: Experiment, device: torch.device, rank: int, ranks: int, options: dict[str, Any], report: Any
) -> dict[str, Any]:
    """Bare steps, profiled steps, one metered step; returns a measured Result with its breakdown (as plain data).

    Options: ``trace`` (Chrome trace file to write), ``profiled`` (steps under the profiler).
    """
    start = time.perf_counter()
    trainer = Trainer(e, device, rank, ranks)
    result = timed(trainer, time.perf_counter() - start, options, report)
    report({"stage": "profiling"})
    count = int(options.get("profiled", 3))
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    roots: list[ProfilerNode] = []
    for _ in range(count):
        # One step a session, bare steps between: the profiler's own records break up the freed memory that large
        # tensors would reuse, and a second step under it would pay page faults that no real step pays.
        for _ in range(2):
            trainer.step()
        with (
            scopes(trainer.run.model),
            profile(activities=activities, record_shapes=True) as profiler,
            record_function(f"{PHASE}step"),
        ):
            _phased_step(trainer)
        roots += tree(profiler)
        if options.get("trace") and rank == 0:
            Path(options["trace"]).parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(options["trace"])
        del profiler
        gc.collect()
    rows, total = attribute(roots, count)
    result.breakdown = rows
    step = statistics.median(s.seconds for s in result.samples[len(result.samples) // 2 :])
    _finish(result, rows, total, step)
    report({"stage": "memory"})
    record_memory(result, trainer)
    return result.model_dump(mode="json", by_alias=True)


def _finish(result: Result, rows: list[Row], total: float, step: float) -> None:
    parts = sum(r.seconds for r in rows)
    loose = next((r.seconds for r in rows if r.kind == "unattributed"), 0.0)
    tokens = result.samples[0].tokens
    result.metrics["step_time_s"] = Metric(value=step, unit="s", better="lower", source="median of bare steps")
    result.metrics["tokens_per_s"] = Metric(value=tokens / step, unit="tokens/s", better="higher", source="bare steps")
    result.metrics["profiled_step_s"] = Metric(value=total, unit="s", better="lower", source="mean of profiled steps")
    result.metrics["profiler_overhead"] = Metric(value=total / step, better="lower", source="profiled / bare step")
    result.metrics["unattributed_share"] = Metric(value=loose / total, better="lower", source="profiler")
    result.checks.append(
        Check(
            name="rows add up to the profiled step",
            passed=abs(parts - total) < 1e-6 * total,
            expected=total,
            got=parts,
            tolerance=1e-6,
        )
    )


def _phased_step(trainer: Trainer) -> None:
    """One training step with its phases marked."""
    step = trainer.steps_done
    with record_function(f"{PHASE}forward+backward"):
        trainer.forward_backward(step)
    with record_function(f"{PHASE}optimizer"):
        trainer.update(step)
    trainer.steps_done += 1
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


@contextmanager
def scopes(model: nn.Module) -> Iterator[None]:
    """Mark every module's forward with a profiler range named after its path."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.ModuleDict):
                _mark(module, name, stack)
        yield


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


def tree(profiler: profile) -> list[ProfilerNode]:
    """The profiler's event tree of all threads as plain nodes (seconds)."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    return [_node(e) for e in results.experimental_event_tree()]


def _node(event: Any) -> ProfilerNode:
    extra = event.extra_fields
    shapes: list[list[int]] = []
    widths: list[int] = []
    for value in getattr(extra, "inputs", None) or []:
        for meta in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(meta, "sizes"):
                shapes.append(list(meta.sizes))
                widths.append(meta.dtype.itemsize if isinstance(meta.dtype, torch.dtype) else 4)
    return ProfilerNode(
        event.name,
        event.start_time_ns * 1e-9,
        max(0, event.duration_time_ns) * 1e-9,
        getattr(extra, "sequence_number", -1),
        shapes,
        widths,
        [_node(c) for c in event.children],
    )


def attribute(roots: list[ProfilerNode], steps: int) -> tuple[list[Row], float]:
    """Rows per (phase, module, operator), each a mean over the profiled steps, and the mean step in seconds.

    Forward operators belong to the innermost open module. A backward operator belongs to the module whose forward made
    its autograd node: both carry the same sequence number. Work of the optimizer and of collectives is its own module.
    """
    spans = [n for n in _walk(roots) if n.name == f"{PHASE}step"]
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


def _walk(nodes: list[ProfilerNode]) -> Iterator[ProfilerNode]:
    for n in nodes:
        yield n
        yield from _walk(n.children)


def _own(node: ProfilerNode, module: str, owners: dict[int, str]) -> None:
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
    node: ProfilerNode, phase: str, module: str, owners: dict[int, str], table: dict[tuple[str, str, str, str], Row]
) -> None:
    name = node.name
    if name.startswith(MODULE):
        module = name.removeprefix(MODULE)
    elif name == f"{PHASE}optimizer":
        phase, module = "optimizer", "optimizer"
    elif name.startswith("autograd::engine::evaluate_function"):
        phase, module = "backward", owners.get(node.sequence, module if phase == "backward" else "loss")
    elif name.startswith(_COLLECTIVES):
        phase, module = "communication", "communication"
    if name.startswith(("aten::", "c10d::", "gloo:", "nccl:", "fsdp::")):
        operator = name.split("::")[-1]
        kind = "collective" if phase == "communication" else _KINDS.get(operator, "elementwise")
        if operator.startswith("_scaled_dot_product"):
            kind = "attention"
        key = (phase, label(module), operator, kind)
        row = table.setdefault(
            key, Row(phase=key[0], module=key[1], operator=operator, kind=kind, seconds=0.0, count=0)
        )
        row.seconds += node.self_seconds
        row.count += 1
        row.flops += flops(operator, node.shapes)
        if operator not in _VIEWS and not any(_moves_data(c) for c in node.children):
            row.bytes += sum(_numel(s) * w for s, w in zip(node.shapes, node.widths, strict=True))
    for child in node.children:
        _collect(child, phase, module, owners, table)


def _moves_data(node: ProfilerNode) -> bool:
    """Whether the operator or one that it calls touches tensor data; views, allocations and wrappers do not."""
    if node.name.startswith("aten::") and node.name.removeprefix("aten::") not in _VIEWS:
        return True
    return any(_moves_data(c) for c in node.children)


def label(path: str) -> str:
    """``layers.3.attention.q_proj`` → ``attention.q_proj``: the same part of every layer is one row."""
    return re.sub(r"^layers\.\d+\.?", "", path) or "block"


def _numel(shape: list[int]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def flops(operator: str, shapes: list[list[int]]) -> float:
    """Matrix-multiply FLOPs of one operator from its input shapes (PyTorch's counter gives 0 for CPU attention)."""
    if operator == "mm" and len(shapes) >= 2:
        return 2.0 * _numel(shapes[0]) * shapes[1][1]
    if operator == "addmm" and len(shapes) >= 3:
        return 2.0 * _numel(shapes[1]) * shapes[2][1]
    if operator == "bmm" and len(shapes) >= 2:
        return 2.0 * _numel(shapes[0]) * shapes[1][2]
    if operator.startswith("_scaled_dot_product") and operator.endswith("backward") and len(shapes) >= 3:
        return 2.5 * flops("_scaled_dot_product", shapes[1:])
    if operator.startswith("_scaled_dot_product") and len(shapes) >= 2 and len(shapes[0]) == 4:
        return 4.0 * _numel(shapes[0]) * shapes[1][2]
    return 0.0
