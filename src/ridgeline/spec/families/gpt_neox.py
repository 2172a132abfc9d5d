"""GPT-NeoX (arXiv:2204.06745), Pythia and Dolly: attention and MLP on one stream, rotary embedding of a part of each
head, queries, keys and values of each head beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, Part, activation
from ridgeline.spec.rope import read_rope, write_rope

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    bias = bool(c.get("attention_bias", True))
    rope = {"partial_rotary_factor": c.get("rotary_pct", 0.25), "rope_theta": c.get("rotary_emb_base", 10000), **c}
    return {
        "family": "gpt_neox",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c["intermediate_size"],
        "max_positions": c.get("max_position_embeddings", 2048),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_eps", 1e-5),
        "activation": activation(c.get("hidden_act", "gelu")),
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        "parallel_residual": bool(c.get("use_parallel_residual", True)),
        **read_rope(rope, partial=True),
    }


def _write(s: ModelSpec) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "layer_norm_eps": s.norm_eps,
        "hidden_act": ACTIVATION_NAMES[s.activation],
        "attention_bias": s.qkv_bias,
        "use_parallel_residual": s.parallel_residual,
        "rope_parameters": {"partial_rotary_factor": 1.0, **write_rope(s)},
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


FUSED = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def part_of_head(s: ModelSpec, module: str) -> Part | None:
    """Query, key and value of each head beside each other, as in Megatron."""
    return Part(FUSED.index(module), 1, 3, 0, s.num_heads) if module in FUSED else None


_BLOCK = {
    "attention_norm": "input_layernorm",
    **dict.fromkeys(FUSED, "attention.query_key_value"),
    "attention.o_proj": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_REST = {"embed.tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head.out": "embed_out"}

FAMILIES = {"gpt_neox": Family(_read, _write, "gpt_neox.layers", _BLOCK, _REST, part_of_head)}
