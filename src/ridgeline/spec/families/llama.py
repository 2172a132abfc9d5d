"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783), and what the families after it have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, activation
from ridgeline.spec.rope import read_rope, write_rope

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

STACK = "model.layers"
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
REST = {"embed.tokens": "model.embed_tokens", "norm": "model.norm", "head.out": "lm_head"}


def read_like_llama(c: Config, partial: bool = False) -> Config:
    """What Llama's descendants share: sizes, RMSNorm, a gated MLP, rotary embedding."""
    heads = c["num_attention_heads"]
    return {
        "family": c["model_type"],
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "intermediate_size": c["intermediate_size"],
        "max_positions": c.get("max_position_embeddings", 2048),
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "activation": activation(c.get("hidden_act", "silu")),
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        **read_rope(c, partial),
    }


def write_like_llama(s: ModelSpec) -> Config:
    """The inverse of :func:`read_like_llama`."""
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.norm_eps,
        "hidden_act": ACTIVATION_NAMES[s.activation],
        "rope_parameters": write_rope(s),
    }


def read(c: Config) -> Config:
    """Llama's ``config.json``."""
    bias = bool(c.get("attention_bias", False))
    return {**read_like_llama(c), "qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(c.get("mlp_bias", False))}


def write(s: ModelSpec) -> Config:
    """The inverse of :func:`read`."""
    biases: Config = {"attention_bias": s.qkv_bias, "mlp_bias": s.mlp_bias}
    return {**write_like_llama(s), "architectures": ["LlamaForCausalLM"], **biases}


FAMILIES = {"llama": Family(read, write, STACK, BLOCK, REST)}
