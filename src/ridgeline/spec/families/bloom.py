"""BLOOM (arXiv:2211.05100): ALiBi, a norm on the embeddings, and a head's query, key and value beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.gpt_neox import FUSED, part_of_head

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    h, heads = c.get("hidden_size") or c["n_embed"], c.get("n_head") or c["num_attention_heads"]
    return {
        "family": "bloom",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c.get("n_layer") or c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": 4 * h,
        "max_positions": c.get("seq_length", 2048),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "gated": False,
        "position": "alibi",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "embedding_norm": True,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
    }


def _write(s: ModelSpec) -> Config:
    return {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "n_layer": s.num_layers,
        "n_head": s.num_heads,
        "seq_length": s.max_positions,
        "layer_norm_epsilon": s.norm_eps,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


_BLOCK = {
    "attention_norm": "input_layernorm",
    **dict.fromkeys(FUSED, "self_attention.query_key_value"),
    "attention.o_proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_REST = {
    "embed.tokens": "transformer.word_embeddings",
    "embed.norm": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "head.out": "lm_head",
}

FAMILIES = {"bloom": Family(_read, _write, "transformer.h", _BLOCK, _REST, part_of_head)}
