"""OPT (arXiv:2205.01068)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, activation

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    if not c.get("do_layer_norm_before", True) or c.get("word_embed_proj_dim", h) != h:
        raise UserError("OPT with post-normalization or projected embeddings (opt-350m) is not supported")
    bias = bool(c.get("enable_bias", True))
    return {
        "family": "opt",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c["ffn_dim"],
        "max_positions": c["max_position_embeddings"],
        "position_offset": 2,
        "norm": "layernorm",
        "activation": activation(c.get("activation_function", "relu")),
        "gated": False,
        "position": "learned",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
    }


def _write(s: ModelSpec) -> Config:
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "word_embed_proj_dim": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "ffn_dim": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "activation_function": ACTIVATION_NAMES[s.activation],
        "enable_bias": s.qkv_bias,
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


_BLOCK = {
    "attention_norm": "self_attn_layer_norm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_REST = {
    "embed.tokens": "model.decoder.embed_tokens",
    "embed.positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head.out": "lm_head",
}

FAMILIES = {"opt": Family(_read, _write, "model.decoder.layers", _BLOCK, _REST)}
