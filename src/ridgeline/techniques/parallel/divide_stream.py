"""The analytic implementation of keeping the residual stream of tensor-parallel ranks in parts, along the sequence or
the batch."""

from __future__ import annotations

from ridgeline.graph.graph import Block, Op, Saved, changed
from ridgeline.techniques.parallel.divide_operators import split_bytes

_STREAM = ("input", "attention_input", "cross_input", "cross_normed", "mlp_sum", "mlp_input", "attention_sum",
           "final_sum", "head.normed", "head.input", "embed.sum")  # fmt: skip


_WHOLE = frozenset(("attention.q_a_proj.dw", "attention.kv_a_proj.dw", "mlp.router.dw"))
"""The layers that every rank applies to the whole sequence, whose input stays gathered."""


def divide_stream(b: Block, t: int, size: float) -> None:
    """Replace the all-reduces of a block whose layers are divided over ``t`` ranks, by a reduce-scatter and an
    all-gather of ``size`` bytes each; divide the residual stream's operators and saved activations."""
    b.forward = _gathered([_rewritten(op, t) for op in b.forward], _INPUTS, size, t, "forward")
    b.backward = _gathered([_rewritten(op, t) for op in b.backward], _OUTPUTS, size, t, "backward")
    b.backward += _regathers(b, size, t)
    for name, saved in b.saved.items():
        norm = name.endswith("norm.stats") and "attention." not in name
        if saved.users & _WHOLE:
            continue
        if name in _STREAM or name.endswith("residual.mask") or norm:
            b.saved[name] = Saved(saved.bytes / t, saved.users)


def _rewritten(op: Op, t: int) -> Op:
    if op.kind == "all_reduce" and op.axis == "tp" and not op.name.startswith("loss"):
        return changed(op, name=f"{op.name}_scatter", kind="reduce_scatter")
    outside = op.module in ("norm", "residual") or op.name.endswith(("o_proj.db", "down_proj.db"))
    return split_bytes(op, t) if outside and not op.axis else op


_INPUTS = {"attention": ("attention.q_proj", "attention.q_a_proj"), "head": ("head.out",),
           "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.router")}  # fmt: skip
"""The first operator of each part that reads the whole sequence."""
_OUTPUTS = {"attention": ("attention.o_proj",), "mlp": ("mlp.down_proj", "mlp.combine"), "embed": ("embed.tokens",)}
"""The layers whose output is scattered: their gradient arrives in parts."""


def _gathered(ops: list[Op], before: dict[str, tuple[str, ...]], size: float, t: int, direction: str) -> list[Op]:
    """The operators with an all-gather before the first one of each part."""
    out: list[Op] = []
    waiting = dict(before)
    for op in ops:
        label = op.name.partition(".")[0]
        if label in waiting and not op.axis and op.name.startswith(waiting[label]):
            del waiting[label]
            out.append(Op(f"{label}.gather", "communication", "all_gather", direction, bytes=size, link_bytes=size,
                          ranks=t, axis="tp"))  # fmt: skip
        out.append(op)
    return out


def _readers(label: str, names: tuple[str, ...]) -> tuple[str, frozenset[str], frozenset[str]]:
    """(part, the gradients of its inputs, the gradients of the weights that read them) of its first layers."""
    layers = [f"{label}.{name}" for name in names]
    weights = frozenset(f"{layer}{tail}.dw" for layer in layers for tail in ("", ".lora_a"))
    return label, frozenset(f"{layer}.dx" for layer in layers), weights


_READERS = (
    _readers("attention", ("q_proj", "k_proj", "v_proj")),
    _readers("mlp", ("gate_proj", "up_proj")),
    _readers("head", ("out",)),
)


def _regathers(b: Block, size: float, t: int) -> list[Op]:
    """The divided inputs of column-parallel layers, gathered again for their weight gradients."""
    found = []
    there = {o.name for o in b.backward}
    for label, inputs, weights in _READERS:
        if weights.isdisjoint(there):
            continue
        beside = "" if inputs.isdisjoint(there) else next(o.name for o in b.backward if o.name in inputs)
        found.append(Op(f"{label}.regather", "communication", "all_gather", "backward", bytes=size, link_bytes=size,
                        ranks=t, axis="tp", behind=beside, role="regather"))  # fmt: skip
    return found
