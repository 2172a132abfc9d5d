"""An Experiment → the analytic graph of one rank's step, before any technique rewrites it."""

from __future__ import annotations

from ridgeline.graph.graph import Block, Graph, GraphSizes, Op
from ridgeline.graph.layers import Builder
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Generate, Serve


def training_graph(e: Experiment) -> Graph:
    """One micro-batch of a training step on one rank, without techniques: fp32, unfused attention, no sharding."""
    batch, length = e.micro_batch_size, e.training.seq_len
    g = _graph(e.model, batch, length, length, e.dtype, training=True)
    g.accumulation = e.accumulation
    g.residual = float(batch * length * e.model.hidden_size * DTYPE_BYTES[e.dtype])
    if e.world > 1:  # the global gradient norm (fp64), and what a step reports: its loss, and whether to end
        for name, size in (("norm.reduce", 8.0), ("report.reduce", 24.0)):
            g.before_update.append(Op(name, "communication", "all_reduce", "update", bytes=size, link_bytes=size,
                                      ranks=e.world, axis="all"))  # fmt: skip
    g.optimizer_bytes = 8.0 if e.training.optimizer == "adamw" else 0.0
    return g


def prefill_graph(e: Experiment) -> Graph:
    """The forward pass over the prompts of one rank's share of the batch."""
    w = e.workload
    assert isinstance(w, (Generate, Serve))
    batch = e.micro_batch_size
    read = 1 if e.model.is_encoder_decoder else w.prompt_len  # by the decoder: its start token
    g = _graph(e.model, batch, read, read, e.dtype, training=False, last_only=True, source=w.prompt_len)
    g.kv_cache = _cached(e.model, batch, w, e.dtype)
    return g


def decode_graph(e: Experiment, context: int | None = None) -> Graph:
    """One decode step at ``context`` cached tokens (default: the mean over the output).

    A sliding window masks scores but saves no computation: all cached tokens are multiplied.
    """
    w = e.workload
    assert isinstance(w, (Generate, Serve))
    batch = e.micro_batch_size
    kv = context if context is not None else w.prompt_len + max(1, w.output_len) // 2
    if e.model.is_encoder_decoder:  # its start token in place of the prompt
        kv = max(1, kv - w.prompt_len) + 1
    g = _graph(e.model, batch, 1, kv, e.dtype, training=False, source=w.prompt_len, encodes=False)
    g.kv_cache = _cached(e.model, batch, w, e.dtype)
    g.decode_steps = max(0, w.output_len - 1)
    return g


def tokens_graph(m: ModelSpec, batch: int, q_len: int, kv_len: int, dtype: str) -> Graph:
    """A forward pass of ``batch`` sequences over their last ``q_len`` of ``kv_len`` tokens, with one row of logits
    each.

    A serving engine's iteration consists of these: prefill chunks (q_len > 1) and decode steps (q_len = 1). Layers with
    a sliding window attend to at most the window.
    """
    return _graph(m, batch, q_len, kv_len, dtype, training=False, last_only=True, windows=True)


def resized(g: Graph, old: ModelSpec, new: ModelSpec) -> Graph:
    """A forward graph of ``old`` that no technique has rewritten, as it would have been built for ``new``."""
    assert g.sizes is not None
    b = g.sizes
    out = _graph(new, b.batch, b.q_len, b.kv_len, b.dtype, training=False, last_only=b.last_only, windows=b.windows,
                 source=b.source, encodes=b.encodes)  # fmt: skip
    out.kv_cache = g.kv_cache * kv_cache_bytes(new, 1, 1, b.dtype) / kv_cache_bytes(old, 1, 1, b.dtype)
    out.decode_steps = g.decode_steps
    return out


def _cached(m: ModelSpec, batch: int, w: Generate | Serve, dtype: str) -> float:
    """Bytes of the cache of whole sequences; an encoder-decoder has one of the source beside the decoder's."""
    return kv_cache_bytes(m, batch, w.prompt_len + w.output_len + m.is_encoder_decoder, dtype)


def kv_cache_bytes(m: ModelSpec, batch: int, length: int, dtype: str) -> float:
    """Bytes of keys and values (or latents) of ``batch`` sequences of ``length`` tokens over all decoder layers."""
    each = float(m.cached_tensors * m.cached_heads * m.cached_dim)
    return each * m.num_layers * batch * length * DTYPE_BYTES[dtype]


def _graph(
    m: ModelSpec, batch: int, q_len: int, kv_len: int, dtype: str, *, training: bool, last_only: bool = False,
    windows: bool = False, source: int = 0, encodes: bool = True,
) -> Graph:  # fmt: skip
    """``source``: tokens of the encoder's input, 0: as many as the decoder's; ``encodes``: whether it is read."""
    source = source or kv_len

    def builder(name: str, repeat: int = 1, kind: tuple[bool, bool] = (False, False), layer: int = 0) -> Builder:
        windowed = windows and name == "layers" and m.is_windowed_layer(layer)
        b, q, kv = _windowed(m, batch, q_len, kv_len) if windowed else (batch, q_len, kv_len)
        if name == "encoder":
            q = kv = source
        made = Block(name, repeat, [], [], [], {}, kind=kind)
        return Builder(m, b, q, kv, dtype, training, made, layer, source, encodes)

    blocks = [_embed(builder("embed"))]
    for stack, count in (("encoder", m.encoder_layers), ("layers", m.num_layers)):
        kinds = m.layer_kinds(count)
        for kind in sorted(set(kinds)):
            first = kinds.index(kind)
            block = _layer(builder(stack, kinds.count(kind), kind, first), m.is_moe_layer(first), stack)
            if stack == "encoder" and not encodes:
                block.forward, block.workspace = [], 0.0
            blocks.append(block)
    blocks.append(_head(builder("head"), last_only))
    g = Graph(blocks, tokens=batch * q_len, length=q_len, dtype=dtype)
    g.sizes = GraphSizes(batch, q_len, kv_len, dtype, training, last_only, windows, source, encodes)
    if m.is_encoder_decoder:  # what relative positions add to the scores, the same in all layers of a stack
        pairs = q_len * kv_len + (source**2 if encodes else 0)
        g.buffers += float(m.num_heads * pairs * DTYPE_BYTES[dtype])
    if m.position == "rope":
        tables = 1 if m.local_rope_theta is None else 2
        g.buffers += 2.0 * tables * max(128, 1 << (kv_len - 1).bit_length()) * m.rotated * 4  # cos and sin
    return g


def _windowed(m: ModelSpec, batch: int, q_len: int, kv_len: int) -> tuple[int, int, int]:
    """(sequences, queries, keys) of attention within a window w: pieces of w queries with 2 w keys each."""
    w = m.sliding_window or kv_len
    if m.chunked_window and kv_len > w:  # pieces within a chunk; a single query sees half of one, on average
        return (batch * -(-q_len // w), w, w) if q_len > w else (batch, q_len, (w + q_len) // 2)
    if q_len <= w:
        return batch, q_len, min(kv_len, w + q_len - 1)
    return batch * -(-q_len // w), w, min(kv_len, 2 * w)


def _embed(b: Builder) -> Block:
    s, t, h = b.spec, b.tokens, b.spec.hidden_size
    b.param("embed.tokens.weight", (s.vocab_size, h))
    tables = [("embed.tokens", s.vocab_size)]
    if s.position == "learned":
        rows = s.max_positions + s.position_offset
        b.param("embed.positions.weight", (rows, h))
        tables.append(("embed.positions", rows))
    if s.token_types:
        b.param("embed.token_types.weight", (s.token_types, h))
        tables.append(("embed.token_types", s.token_types))
    for name, rows in tables:
        _lookup(b, name, name, rows, t)
    if s.is_encoder_decoder and b.encodes:
        _lookup(b, "embed.source", "embed.tokens", s.vocab_size, b.batch * b.source)
    if s.embedding_norm:
        b.norm("embed.norm", "embed.sum", h)
    if s.is_encoder_decoder:
        for stack in ("encoder", "decoder"):
            b.param(f"embed.{stack}_relative.weight", (s.relative_buckets, s.num_heads))
    return b.block


def _lookup(b: Builder, name: str, table: str, rows: int, tokens: int) -> None:
    """``tokens`` rows of a table of ``rows``."""
    h, w = b.spec.hidden_size, b.width
    b.block.forward.append(Op(name, "embed", "embedding", bytes=2.0 * tokens * h * w, dtype=b.dtype))
    if b.training:  # a dense gradient: zero the table, then add one row per token
        moved = (rows * h + 3.0 * tokens * h) * w
        b.block.backward.append(Op(f"{name}.dw", "embed", "embedding", "backward", 0, moved, b.dtype,
                                   param=f"{table}.weight", role="weight_gradient"))  # fmt: skip


def _layer(b: Builder, moe: bool, stack: str) -> Block:
    s, h = b.spec, b.spec.hidden_size
    feed = b.moe if moe else b.mlp
    if s.post_norm:
        b.attention("attention", "input")
        b.residual("attention_residual")
        b.norm("attention_norm", "attention_sum", h)
        feed("mlp", "mlp_input")
        b.residual("mlp_residual")
        b.norm("mlp_norm", "mlp_sum", h)
        return b.block
    if s.parallel_residual:
        b.norm("attention_norm", "input", h)
        b.attention("attention", "attention_input")
        if not s.shared_norm:
            b.norm("mlp_norm", "input", h)
        feed("mlp", "attention_input" if s.shared_norm else "mlp_input")
        b.residual("attention_residual")
        b.residual("mlp_residual")
        return b.block
    if s.input_norms:
        b.norm("attention_norm", "input", h)
    b.attention("attention", "attention_input")
    if s.output_norms:
        b.norm("attention_out_norm", "attention_out", h)
    b.residual("attention_residual")
    if s.is_encoder_decoder and stack == "layers":
        b.norm("cross_norm", "cross_input", h)
        b.attention("cross_attention", "cross_normed", cross=True)
        b.residual("cross_residual")
    if s.input_norms:
        b.norm("mlp_norm", "mlp_sum", h)
    feed("mlp", "mlp_input")
    if s.output_norms:
        b.norm("mlp_out_norm", "mlp_out", h)
    b.residual("mlp_residual")
    return b.block


def _head(b: Builder, last_only: bool) -> Block:
    s, h = b.spec, b.spec.hidden_size
    rows = b.batch if last_only else b.tokens
    if s.is_encoder_decoder:
        b.norm("encoder_norm", "encoder_sum", h, b.batch * b.source)
        if not b.encodes:
            b.block.forward.clear()
    if s.final_norm:
        b.norm("norm", "final_sum", h)
    if s.head == "classify":  # of each sequence's first token
        b.linear("head.dense", "head", b.batch, h, h, "head.input", bias=True)
        b.pointwise("head.act", "head", "activation", b.batch * h, b.batch * h, 2 * b.batch * h, b.batch * h)
        b.linear("head.out", "head", b.batch, s.num_labels, h, "head.acted", bias=True)
        return b.block
    if s.head == "project":
        b.linear("head.out", "head", b.tokens, s.projection_size, h, "head.input")
        return b.block
    if s.head == "mlm":
        b.linear("head.dense", "head", rows, h, h, "head.input", bias=True)
        b.pointwise("head.act", "head", "activation", rows * h, rows * h, 2 * rows * h, rows * h)
        b.save("head.pre_act", rows * h, ["head.act.bwd"])
        b.norm("head.norm", "head.acted", h, rows)
    weight = "embed.tokens.weight" if s.tie_embeddings else "head.out.weight"
    b.linear("head.out", "head", rows, s.vocab_size, h, "head.normed", weight=weight, shared=s.tie_embeddings)
    if s.head == "mlm":
        b.param("head.out.bias", (s.vocab_size,))
    if s.logits_soft_cap is not None:
        size = rows * s.vocab_size
        b.pointwise("head.soft_cap", "head", "activation", size, size, 2 * size, size)
        b.save("head.capped", size, ["head.soft_cap.bwd"])
    if b.training:
        # The gradient, softmax - onehot, replaces the logits in place: one [rows, V] tensor in total.
        logits = float(rows * s.vocab_size)
        b.block.forward.append(Op("loss", "head", "loss", bytes=8 * logits * 4, dtype="fp32"))
        b.block.backward.append(Op("loss.bwd", "head", "loss", "backward", 0, 2 * logits * 4, "fp32"))
        b.save("logits", logits, ["loss.bwd"], 4.0)
        b.block.backward_workspace = float(rows * h * b.width)  # the gradient of the head's input
    return b.block


def optimizer_ops(g: Graph, optimizer: str = "adamw", clip: bool = True) -> list[Op]:
    """The update: gradient norm and scaling, then one fused pass over parameters, gradients and moments.

    Bytes per element of AdamW: read parameter, gradient, two moments; write parameter and moments (7 × 4).
    """
    stages = g.stages  # of which an average rank holds one's parameters
    elements = sum(p.numel / max(p.grad_shards, p.state_shards) * n / stages for p, n in g.params if p.trainable)
    if not elements:
        return []
    name, moved = g.optimizer or (optimizer, 28.0 if optimizer == "adamw" else 12.0)
    tensors = round(sum(n for p, n in g.params if p.trainable) / stages)
    ops = [Op(name, "optimizer", "optimizer", "update", 0, elements * moved, "fp32", shape=(tensors,))]
    if clip and g.clips:
        ops.insert(0, Op("clip", "optimizer", "clip", "update", 0, elements * 4 * 3, "fp32", shape=(tensors,)))
    return ops
