"""The operators of a pass as inference engines run them: products of the same input merged, sums within norms, and
weights in codes by Ridgeline's own kernels. Bytes are of one pass on one rank.
"""

from __future__ import annotations

from ridgeline.graph.graph import LATENT, Block, Graph, Op, changed
from ridgeline.predict.operators.codes import CODES
from ridgeline.predict.serving.engine_costs import FEW_ROWS, EngineCosts
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.lowbit import FLOAT8_ROWS, MANY_ROWS
from ridgeline.spec.model import ModelSpec

_MERGED = (
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    ("attention.q_a_proj", "attention.kv_a_proj"),
    ("attention.q_proj", "attention.kv_a_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared.gate_proj", "mlp.shared.up_proj"),
    ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
)
_AFTER_NORM = (
    "attention.q_proj", "attention.q_a_proj", "attention.q_b_proj", "attention.kv_b_proj", "mlp.router",
    *(f"mlp.{part}{first}_proj" for part in ("", "shared.", "experts.") for first in ("gate", "up")),
)  # fmt: skip
_ROTATED = ("attention.q_norm", "attention.k_norm", "attention.q_rope", "attention.k_rope")


def fuse(g: Graph, engine: EngineCosts, model: ModelSpec) -> Graph:
    """The graph with the fusions that serving engines make, and attention by the engine's kernels.

    Query, key and value in one product, gate and up in one, in Ridgeline's own engine also what adapters add to them, a
    residual addition with the norm after it (and the 8-bit
    copy that it writes), and the rotations of queries and keys (with their norms) in one kernel that also writes the
    cache. Fused residual and norm kernels are for RMS norms: layer norms stay separate. Models without rotary
    embeddings write the cache in a separate kernel, and biases of layers whose outputs are summed over ranks are added
    after the sum.
    """

    def each(b: Block) -> None:
        if engine.fused:
            _fuse(b, model, engine.casts)
        if engine.wide:
            b.forward = _widened(b.forward)
        b.forward = [
            changed(o, kernel=engine.kernel) if o.kind == "attention" and o.kernel != LATENT else o for o in b.forward
        ]

    g.each_block(each, layers_only=True)
    if engine.head_bits < 16 and any(o.weight_dtype == "int4" for b in g.blocks for o in b.forward):
        for b in g.blocks:
            b.forward = [_fewer_bits(o, engine.head_bits) if o.name == "head.out" else o for o in b.forward]
    return g


def _widened(ops: list[Op]) -> list[Op]:
    """Twice the bytes of everything but products, and conversions of the operands and results of large ones."""
    out: list[Op] = []
    for o in ops:
        if o.kind not in ("gemm", "bmm"):
            out.append(o if o.axis or o.kind == "attention" else changed(o, bytes=2 * o.bytes))
            continue
        *_, rows, columns, inner = o.shape
        batch = o.shape[0] if o.kind == "bmm" else 1
        out.append(o)
        if rows > FEW_ROWS:
            moved = 6.0 * batch * rows * (inner + columns)
            out.append(Op(f"{o.name}.convert", o.module, "softmax" if o.kind == "bmm" else "cast", bytes=moved,
                          dtype=o.dtype))  # fmt: skip
    return out


def _fewer_bits(op: Op, bits: float) -> Op:
    _, out, inner = op.shape
    return changed(op, weight_bytes=out * inner * bits / 8, bytes=op.bytes - out * inner * (2 - bits / 8))


def _fuse(b: Block, model: ModelSpec, casts: bool) -> None:
    ops = {o.name: o for o in b.forward}
    ops = _adapters_at_once(ops) if casts else ops
    keys = ops.get("attention.k_proj")
    for group in _MERGED:
        if all(name in ops for name in group):
            ops[group[0]] = _side_by_side([ops[name] for name in group])
            for name in group[1:]:
                del ops[name]
    ops = _by_codes(ops, b.forward[0].dtype) if casts else ops
    for name in [n for n, o in ops.items() if o.kind == "quantize"]:
        if casts:
            ops[name] = changed(ops[name], kind="cast", bytes=ops[name].bytes * 5 / 3)  # read twice: for scales first
        elif name.removesuffix(".quantize") in _AFTER_NORM:
            del ops[name]  # the norm before it writes 8 bits, or nothing does
        else:
            ops[name] = changed(ops[name], kind="cast")  # one pass: the scales are known or per token
    rotated = [ops.pop(name) for name in _ROTATED if name in ops]
    one = None
    if rotated:
        one = changed(rotated[-1], name="attention.rope_and_cache", bytes=sum(o.bytes for o in rotated))
    elif keys is not None:
        written = 4.0 * keys.shape[-3] * keys.shape[-2] * DTYPE_BYTES[b.forward[0].dtype]
        one = Op("attention.cache", "attention", "copy", bytes=written, dtype=keys.dtype)
    if one is not None:
        ops = _insert_before(ops, next(n for n in ops if n.startswith(("attention.flash", "attention.scores"))), one)
    for part, biased in (("attention", model.out_bias), ("mlp", model.mlp_bias)):
        if biased and f"{part}.reduce" in ops and (after := ops.get(f"{part}_residual")):
            added = changed(after, name=f"{part}.bias", bytes=after.bytes * 2 / 3)
            ops = _insert_before(ops, after.name, added)
    if model.norm != "rmsnorm":
        b.forward = list(ops.values())
        return
    for residual, norm in (("attention_residual", "mlp_norm"), ("mlp_residual", "attention_norm")):
        if residual in ops and norm in ops:
            ops[residual] = changed(ops[residual], bytes=ops[residual].bytes * 4 / 3)
            del ops[norm]
    b.forward = list(ops.values())


def _by_codes(ops: dict[str, Op], wide: str) -> dict[str, Op]:
    """Operators with products by weights in codes as Ridgeline's engine has them, inputs being in ``wide``: in 16 bits,
    with codes that a kernel reads, or, of many rows, with a weight that another one has expanded. Float8 codes are
    multiplied as such of more than a few rows, where the device does that."""
    out: dict[str, Op] = {}
    for name, o in ops.items():
        if o.kind != "gemm" or not o.weight_dtype or DTYPE_BYTES[wide] != 2:
            out[name] = o
            continue
        rows, _, inner = o.shape[-3:]
        count = max(1.0, o.experts)
        if o.weight_dtype == o.dtype == "fp8" and rows <= FLOAT8_ROWS * count:
            out.pop(f"{name}.quantize", None)
            # One row is multiplied by the kernel of 16-bit weights.
            o = changed(o, dtype=wide, bytes=o.bytes + rows * inner, kernel=CODES + "fp8" if rows > 1 else "")
        elif o.dtype == wide and rows > MANY_ROWS * count:
            whole = count * o.shape[-2] * inner * DTYPE_BYTES[wide]
            moved = o.weight_bytes + whole
            out[f"{name}.expand"] = Op(f"{name}.expand", o.module, "cast", bytes=moved, dtype=wide)
            o = changed(o, bytes=o.bytes - o.weight_bytes + whole, weight_bytes=whole, weight_dtype="")
        elif o.dtype == wide:
            o = changed(o, kernel=CODES + (o.kernel or o.weight_dtype))
        out[name] = o
    return out


def _adapters_at_once(ops: dict[str, Op]) -> dict[str, Op]:
    """Adapters as Ridgeline's own engine adds them to products of one input, merged or not: a product with all A, and
    one with all B that adds to the base's output in place."""
    out = dict(ops)
    alone = [(name.removesuffix(".lora_a"),) for name in ops if name.endswith(".lora_a")]
    for names in (*_MERGED, *alone):
        if any(f"{name}.lora_a" not in out for name in names):
            continue
        parts = {leaf: [out.pop(f"{name}.{leaf}") for name in names] for leaf in ("lora_a", "lora_b", "lora_add")}
        shrink = changed(_side_by_side(parts["lora_a"]), name=f"{names[0]}.lora_shrink")
        second = parts["lora_b"]
        rows, _, inner = second[0].shape
        shape = (rows, sum(o.shape[-2] for o in second), inner)
        read = sum(o.bytes for o in parts["lora_add"]) / 3  # what the base has written
        expand = changed(second[0], name=f"{names[0]}.lora_expand", shape=shape, flops=sum(o.flops for o in second),
                         bytes=sum(o.bytes for o in second) + read)  # fmt: skip
        out = _insert_behind(out, names[-1], [shrink, expand])
    return out


def _side_by_side(ops: list[Op]) -> Op:
    """Several products of the same input as one product: the input is read once."""
    rows, _, inner = ops[0].shape[-3:]
    shape = (*ops[0].shape[:-3], rows, sum(o.shape[-2] for o in ops), inner)
    traffic = sum(o.bytes for o in ops) - sum(_input_bytes(o) for o in ops[1:])
    return changed(ops[0], shape=shape, flops=sum(o.flops for o in ops), bytes=traffic,
                   weight_bytes=sum(o.weight_bytes for o in ops))  # fmt: skip


def _input_bytes(op: Op) -> float:
    """Bytes of a product's traffic that are its rows: 8-bit rows are half as large as its results."""
    rows, out, inner = op.shape[-3:]
    read, written = rows * inner, rows * out * (2 if op.dtype == "fp8" else 1)
    weights = 0.0 if op.weight_bytes else out * inner * op.experts
    return (op.bytes - op.weight_bytes) * read / (read + written + weights)


def _insert_before(ops: dict[str, Op], name: str, op: Op) -> dict[str, Op]:
    out: dict[str, Op] = {}
    for key, value in ops.items():
        if key == name:
            out[op.name] = op
        out[key] = value
    return out


def _insert_behind(ops: dict[str, Op], name: str, more: list[Op]) -> dict[str, Op]:
    out: dict[str, Op] = {}
    for key, value in ops.items():
        out[key] = value
        if key == name:
            out |= {op.name: op for op in more}
    return out
