"""Falcon (arXiv:2311.16867): attention and MLP on one stream, few key heads, fused projections.

The 7B has one norm and one key head; the 40B and 180B two norms and a key head for each group of queries; Falcon 2
(11B) again one norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, Part, activation
from ridgeline.spec.families.gpt_neox import FUSED, part_of_head
from ridgeline.spec.rope import read_rope, write_rope

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    if c.get("alibi"):
        raise UserError("Falcon with ALiBi (falcon-rw) is not supported", "use a Falcon with rotary embedding")
    h, heads = c["hidden_size"], c.get("num_attention_heads") or c["n_head"]
    new = bool(c.get("new_decoder_architecture", False))
    grouped = (c.get("num_kv_heads") or c.get("n_head_kv") or heads) if new else heads
    parallel = new or bool(c.get("parallel_attn", True))
    norms = c.get("num_ln_in_parallel_attn") or (2 if new else 1)
    bias = bool(c.get("bias", False))
    return {
        "family": "falcon",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c.get("num_hidden_layers") or c["n_layer"],
        "num_heads": heads,
        "num_kv_heads": 1 if not new and c.get("multi_query", True) else grouped,
        "head_dim": h // heads,
        "intermediate_size": c.get("ffn_hidden_size") or 4 * h,
        "max_positions": c.get("max_position_embeddings", 2048),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": activation(c.get("activation") or "gelu"),
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
        "parallel_residual": parallel,
        "shared_norm": parallel and norms == 1,
        **read_rope({**c, "num_attention_heads": heads}),
    }


def _write(s: ModelSpec) -> Config:
    # The older architecture has one key head or as many as queries; one norm where the two are parallel.
    old = s.num_kv_heads in (1, s.num_heads) and s.shared_norm == s.parallel_residual
    return {
        "architectures": ["FalconForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_kv_heads": s.num_kv_heads,
        "ffn_hidden_size": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "layer_norm_epsilon": s.norm_eps,
        "activation": ACTIVATION_NAMES[s.activation],
        "new_decoder_architecture": not old,
        "multi_query": s.num_kv_heads == 1,
        "parallel_attn": s.parallel_residual,
        "num_ln_in_parallel_attn": None if old else (1 if s.shared_norm else 2),
        "bias": s.qkv_bias,
        "alibi": False,
        "rope_parameters": write_rope(s),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _part(s: ModelSpec, module: str) -> Part | None:
    """Each group of query heads is followed by its key and its value."""
    if module not in FUSED or s.num_kv_heads == s.num_heads:
        return part_of_head(s, module)
    queries = s.num_heads // s.num_kv_heads
    first, count = {FUSED[0]: (0, queries), FUSED[1]: (queries, 1), FUSED[2]: (queries + 1, 1)}[module]
    return Part(first, count, queries + 2, 0, s.num_kv_heads)


def block(s: ModelSpec) -> dict[str, str]:
    """The norms' names depend on their number."""
    two = s.parallel_residual and not s.shared_norm
    return {
        "attention_norm": "ln_attn" if two else "input_layernorm",
        **dict.fromkeys(FUSED, "self_attention.query_key_value"),
        "attention.o_proj": "self_attention.dense",
        "mlp_norm": "ln_mlp" if two else "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }


_REST = {"embed.tokens": "transformer.word_embeddings", "norm": "transformer.ln_f", "head.out": "lm_head"}

FAMILIES = {"falcon": Family(_read, _write, "transformer.h", block, _REST, _part)}
