"""Every parameter tensor of a model, from its architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


class Parameter(NamedTuple):
    """One parameter tensor: its dotted name in the torch twin, its shape, and the block it belongs to."""

    name: str
    shape: tuple[int, ...]
    block: str  # "embed", "encoder.<i>", "layers.<i>" or "head"

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


def parameters(s: ModelSpec) -> Iterator[Parameter]:
    """Every parameter tensor in model order, named as in the torch twin; a tied head is not repeated."""
    h = s.hidden_size
    yield Parameter("embed.tokens.weight", (s.vocab_size, h), "embed")
    if s.position == "learned":
        yield Parameter("embed.positions.weight", (s.max_positions + s.position_offset, h), "embed")
    if s.token_types:
        yield Parameter("embed.token_types.weight", (s.token_types, h), "embed")
    if s.embedding_norm:
        yield from _norm(s, "embed.norm", h, "embed")
    if s.is_encoder_decoder:
        yield Parameter("embed.encoder_relative.weight", (s.relative_buckets, s.num_heads), "embed")
        yield Parameter("embed.decoder_relative.weight", (s.relative_buckets, s.num_heads), "embed")
        for i in range(s.encoder_layers):
            yield from of_block(s, i, "encoder")
        yield from _norm(s, "encoder_norm", h, "head")
    for i in range(s.num_layers):
        yield from of_block(s, i, "layers")
    if s.final_norm:
        yield from _norm(s, "norm", h, "head")
    if s.head == "mlm":
        yield Parameter("head.dense.weight", (h, h), "head")
        yield Parameter("head.dense.bias", (h,), "head")
        yield from _norm(s, "head.norm", h, "head")
    if s.head == "classify":
        yield Parameter("head.dense.weight", (h, h), "head")
        yield Parameter("head.dense.bias", (h,), "head")
        yield Parameter("head.out.weight", (s.num_labels, h), "head")
        yield Parameter("head.out.bias", (s.num_labels,), "head")
    elif s.head == "project":
        yield Parameter("head.out.weight", (s.projection_size, h), "head")
    elif not s.tie_embeddings:
        yield Parameter("head.out.weight", (s.vocab_size, h), "head")
    if s.head == "mlm":
        yield Parameter("head.out.bias", (s.vocab_size,), "head")


def of_block(s: ModelSpec, index: int, stack: str = "layers") -> Iterator[Parameter]:
    """The parameters of one transformer block of ``stack`` ("layers" or "encoder")."""
    h, block = s.hidden_size, f"{stack}.{index}"
    if s.input_norms:
        yield from _norm(s, f"{block}.attention_norm", h, block)
    yield from _attention(s, f"{block}.attention", block)
    if s.output_norms:
        yield from _norm(s, f"{block}.attention_out_norm", h, block)
    if s.is_encoder_decoder and stack == "layers":
        yield from _norm(s, f"{block}.cross_norm", h, block)
        yield from _attention(s, f"{block}.cross_attention", block)
    if s.input_norms and not s.shared_norm:
        yield from _norm(s, f"{block}.mlp_norm", h, block)
    yield from _feed_forward(s, index, block)
    if s.output_norms:
        yield from _norm(s, f"{block}.mlp_out_norm", h, block)


def _feed_forward(s: ModelSpec, index: int, block: str) -> Iterator[Parameter]:
    h = s.hidden_size
    f = s.intermediate_size
    if s.is_moe_layer(index):
        e = s.num_experts
        yield Parameter(f"{block}.mlp.router.weight", (e, h), block)
        if s.router_score_bias:
            yield Parameter(f"{block}.mlp.score_bias", (e,), block)
        if s.gated:
            yield Parameter(f"{block}.mlp.experts.gate_proj", (e, f, h), block)
        yield Parameter(f"{block}.mlp.experts.up_proj", (e, f, h), block)
        yield Parameter(f"{block}.mlp.experts.down_proj", (e, h, f), block)
        if s.moe_bias:
            yield Parameter(f"{block}.mlp.router.bias", (e,), block)
            if s.gated:
                yield Parameter(f"{block}.mlp.experts.gate_bias", (e, f), block)
            yield Parameter(f"{block}.mlp.experts.up_bias", (e, f), block)
            yield Parameter(f"{block}.mlp.experts.down_bias", (e, h), block)
        if s.shared_intermediate_size:
            yield from _mlp(s, f"{block}.mlp.shared", s.shared_intermediate_size, block)
    else:
        yield from _mlp(s, f"{block}.mlp", s.dense_size, block)


def _mlp(s: ModelSpec, prefix: str, f: int, block: str) -> Iterator[Parameter]:
    h = s.hidden_size
    if s.gated:
        yield from _linear(f"{prefix}.gate_proj", f, h, s.mlp_bias, block)
    yield from _linear(f"{prefix}.up_proj", f, h, s.mlp_bias, block)
    yield from _linear(f"{prefix}.down_proj", h, f, s.mlp_bias, block)


def _latent(s: ModelSpec, prefix: str, rank: int, block: str) -> Iterator[Parameter]:
    h, out = s.hidden_size, s.context_size + s.q_size - s.num_heads * s.rotated
    if s.q_lora_rank is None:
        yield from _linear(f"{prefix}.q_proj", s.q_size, h, False, block)
    else:
        yield from _linear(f"{prefix}.q_a_proj", s.q_lora_rank, h, s.qkv_bias, block)
        yield Parameter(f"{prefix}.q_a_norm.weight", (s.q_lora_rank,), block)
        yield from _linear(f"{prefix}.q_b_proj", s.q_size, s.q_lora_rank, False, block)
    yield from _linear(f"{prefix}.kv_a_proj", rank + s.rotated, h, s.qkv_bias, block)
    yield Parameter(f"{prefix}.kv_a_norm.weight", (rank,), block)
    yield from _linear(f"{prefix}.kv_b_proj", out, rank, False, block)
    yield from _linear(f"{prefix}.o_proj", h, s.context_size, s.out_bias, block)


def _attention(s: ModelSpec, prefix: str, block: str) -> Iterator[Parameter]:
    h = s.hidden_size
    if s.kv_lora_rank is not None:
        yield from _latent(s, prefix, s.kv_lora_rank, block)
        return
    yield from _linear(f"{prefix}.q_proj", s.q_size, h, s.qkv_bias, block)
    yield from _linear(f"{prefix}.k_proj", s.kv_size, h, s.qkv_bias, block)
    yield from _linear(f"{prefix}.v_proj", s.kv_size, h, s.qkv_bias, block)
    yield from _linear(f"{prefix}.o_proj", h, s.q_size, s.out_bias, block)
    if s.qk_norm and s.qk_norm_weight:
        joint = s.joint_qk_norm
        yield Parameter(f"{prefix}.q_norm.weight", (s.q_size if joint else s.head_dim,), block)
        yield Parameter(f"{prefix}.k_norm.weight", (s.kv_size if joint else s.head_dim,), block)
    if s.attention_sinks:
        yield Parameter(f"{prefix}.sinks", (s.num_heads,), block)


def _linear(name: str, out: int, in_: int, bias: bool, block: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out, in_), block)
    if bias:
        yield Parameter(f"{name}.bias", (out,), block)


def _norm(s: ModelSpec, name: str, size: int, block: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,), block)
    if s.norm == "layernorm" and s.norm_bias:
        yield Parameter(f"{name}.bias", (size,), block)
