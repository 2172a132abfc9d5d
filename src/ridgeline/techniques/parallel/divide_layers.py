"""The analytic implementation of dividing the operators of a transformer's blocks over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ridgeline.graph.graph import Block, Op, Param, Saved
from ridgeline.spec.model import COLUMN, LATENT, ROW, ModelSpec
from ridgeline.techniques.parallel.divide_operators import (
    ATTENTION_CORE,
    split_bytes,
    split_gemm,
)

_CORES, _MLPS = ("attention", "cross_attention"), ("mlp", "mlp.shared")
_KEYS = frozenset(f"{core}.{name}" for core in _CORES for name in ("k", "v", "k_raw", "k_norm.stats"))
_DIVIDED = frozenset((
    *(f"{core}.{name}" for core in _CORES
      for name in ("q", "probs", "probs.mask", "probs.dropped", "context", "q_raw", "q_norm.stats")),
    *(f"{mlp}.{name}" for mlp in _MLPS for name in ("up", "gate", "inner", "acted")),
    "logits",
))  # fmt: skip
"""What is saved of a layer's heads and columns; _KEYS: of the heads of keys and values."""


def divide_block(
    b: Block, m: ModelSpec, t: int, stream: float, tokens: int, kept: Callable[[str], bool] = lambda name: False
) -> None:
    """Divide shapes, parameters and saved activations of a block of model ``m`` over ``t`` ranks; insert all-reduces of
    ``stream`` bytes where partial sums arise.

    ``kept``: whether a parameter, by name, and in forward the MLP's operators beside it are left as they are.
    """
    kv, joint = min(t, m.num_kv_heads), m.joint_qk_norm
    turned = 1 if m.is_latent else kv  # whose rotated key is the same for all heads
    mixed = any(kept(p.name) for p in b.params)
    b.forward = [op if mixed and op.module == "mlp" else _divide(op, t, kv, turned) for op in b.forward]
    b.backward = [_divide(op, t, kv, turned) for op in b.backward]
    for p in b.params:
        if not kept(p.name):
            _divide_param(p, t, kv, joint)
    b.forward, b.backward = _reduced(b, t, stream)
    if joint:  # the ranks sum their squares, and in backward the gradients of these
        b.forward, b.backward = (_square_sums(ops, t, tokens * 4.0) for ops in (b.forward, b.backward))
    _divide_saved(b, t, kv)
    b.workspace /= t
    b.backward_workspace /= t


def _square_sums(ops: list[Op], t: int, size: float) -> list[Op]:
    out: list[Op] = []
    for op in ops:
        if op.name.endswith(("q_norm", "k_norm", "q_norm.bwd", "k_norm.bwd")):
            out.append(Op(f"{op.name}.reduce", "communication", "all_reduce", op.direction, bytes=size, link_bytes=size,
                          ranks=t, axis="tp"))  # fmt: skip
        out.append(op)
    return out


@lru_cache(maxsize=1024)
def _leaf(name: str) -> tuple[str, str]:
    """("attention.q_proj.lora_a.dx") → ("q_proj", "lora_a.dx")."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part in COLUMN or part in ROW), -1)
    return (parts[at], ".".join(parts[at + 1 :])) if at >= 0 else ("", name)


def _divide(op: Op, t: int, kv: int, turned: int) -> Op:
    layer, tail = _leaf(op.name)
    if layer:
        by = kv if layer in ("k_proj", "v_proj") else t
        return _divide_linear(op, layer in COLUMN, tail, by)
    suffix = op.name.partition(".")[2]
    if op.module == "attention" and suffix in ATTENTION_CORE:
        by = turned if suffix.startswith("k_rope") else t
        shape = (op.shape[0] // t, *op.shape[1:]) if op.shape else ()
        return split_bytes(op, by, shape=shape)
    if suffix in ("q_norm", "k_norm", "q_norm.bwd", "k_norm.bwd"):
        return split_bytes(op, t if suffix[0] == "q" else kv)
    if suffix in ("act", "act.bwd", "shared.act", "shared.act.bwd") and op.module == "mlp":
        return split_bytes(op, t)
    if op.name.startswith("head.out"):
        return _divide_linear(op, True, op.name.removeprefix("head.out").removeprefix("."), t)
    if op.kind == "loss" or op.name in ("embed.tokens", "embed.tokens.dw"):
        return split_bytes(op, t)
    return op


_SIDES = {  # the dimension of an operator's (m, n, k) that a layer's output (True) or input (False) is
    True: {"": "n", "dx": "k", "dw": "m"},
    False: {"": "k", "dx": "n", "dw": "n"},
}


def _divide_linear(op: Op, column: bool, tail: str, by: int) -> Op:
    """Divide the operators of one linear layer and of its adapter along the output (column) or the input (row)."""
    part = tail.rpartition(".")[2]
    if op.kind == "gemm":
        if tail.startswith("lora_a" if column else "lora_b"):
            return op  # the dimension that faces the undivided stream is replicated
        return split_gemm(op, **{_SIDES[column][part if part in ("dx", "dw") else ""]: by})
    whole = ("accumulate",) if column else ("db", "lora_add", "bwd")
    return op if part in whole else split_bytes(op, by)


_OF_VOCABULARY = ("embed.tokens.weight", "head.out.weight", "head.out.bias", "head.out.codes")
"""Parameters that are divided by words."""


def is_partial(name: str, sequence: bool, joint: bool) -> bool:
    """Whether each rank's gradient of a parameter is partial: it saw only its heads, its experts' columns, or its
    tokens. ``joint``: norms over all heads are divided with them."""
    layer, tail = _leaf(name)
    if name.split(".")[-2] in LATENT:
        return True
    if layer:
        held = tail == ("lora_a" if layer in COLUMN else "lora_b")
        return held or (sequence and layer in ROW and tail == "bias")
    if name.endswith((".experts.down_bias", "router.bias")):
        return True
    if ".experts." in name or name in _OF_VOCABULARY:
        return False
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return not joint
    return sequence or name.endswith("router.weight")


def _divide_param(p: Param, t: int, kv: int, joint: bool) -> None:
    layer, tail = _leaf(p.name)
    by = 1
    if layer:
        column = layer in COLUMN
        by = kv if layer in ("k_proj", "v_proj") else t
        if tail == ("lora_a" if column else "lora_b") or (tail in ("bias", "spans") and not column):
            by = 1
    elif (
        p.name in _OF_VOCABULARY
        or p.name.endswith(".sinks")
        or p.name.endswith((".experts.gate_bias", ".experts.up_bias"))
    ):
        by = t
    elif joint and p.name.endswith(("q_norm.weight", "k_norm.weight")):
        by = t if p.name.endswith("q_norm.weight") else kv
    p.numel /= by


def _divide_saved(b: Block, t: int, kv: int) -> None:
    for name, saved in b.saved.items():
        by = kv if name in _KEYS else t if name in _DIVIDED else 1
        if by > 1:
            b.saved[name] = Saved(saved.bytes / by, saved.users)


_READERS = {
    "attention": (".q_proj.dx", ".k_proj.dx", ".v_proj.dx", ".q_a_proj.dx", ".kv_a_proj.dx"),
    "mlp": (".gate_proj.dx", ".up_proj.dx"),
    "head": (".out.dx",),
}
"""The gradients whose sum is that of a part's input."""


def _reduced(b: Block, t: int, stream: float) -> tuple[list[Op], list[Op]]:
    """The block's operators with an all-reduce wherever the ranks hold partial sums of the residual stream."""

    def reduce(name: str, direction: str, size: float = stream) -> Op:
        return Op(name, "communication", "all_reduce", direction, bytes=size, link_bytes=size, ranks=t, axis="tp")

    forward: list[Op] = []
    ends = [op.name for op in b.forward if op.name in ("mlp.down_proj", "mlp.combine", "mlp.shared.add")][-1:]
    for op in b.forward:
        forward.append(op)
        layer = op.name.rpartition(".")[2]
        if op.kind == "gemm" and layer == "o_proj":
            forward.append(reduce(f"{op.name.rpartition('.')[0]}.reduce", "forward"))
        elif op.name in ends:  # experts' outputs are summed once, when combined
            forward.append(reduce("mlp.reduce", "forward"))
        elif op.name == "embed.tokens":
            forward.append(reduce("embed.reduce", "forward"))
    if any(op.kind == "loss" for op in b.forward):  # the row maxima, sums and targets of a divided vocabulary
        rows = b.saved["logits"].bytes / 4 / next(op.shape[1] * t for op in forward if op.name == "head.out")
        forward += [reduce("loss.peak", "forward", 4 * rows), reduce("loss.reduce", "forward", 8 * rows)]
    backward = list(b.backward)
    for label, names in _READERS.items():
        last = max((i for i, op in enumerate(backward) if op.name.endswith(names)), default=-1)
        if last >= 0:
            backward.insert(last + 1, reduce(f"{label}.input.reduce", "backward"))
    return forward, backward
