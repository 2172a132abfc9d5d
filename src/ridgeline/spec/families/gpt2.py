"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, Part, activation

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    h, heads = c["n_embd"], c["n_head"]
    return {
        "family": "gpt2",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c.get("n_inner") or 4 * h,
        "max_positions": c.get("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": activation(c.get("activation_function", "gelu_new")),
        "gated": False,
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
    }


def _write(s: ModelSpec) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": s.vocab_size,
        "n_embd": s.hidden_size,
        "n_layer": s.num_layers,
        "n_head": s.num_heads,
        "n_inner": s.intermediate_size,
        "n_positions": s.max_positions,
        "layer_norm_epsilon": s.norm_eps,
        "activation_function": ACTIVATION_NAMES[s.activation],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


_FUSED = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
"""Side by side in one tensor [in, 3 · hidden]."""


def _part(s: ModelSpec, module: str) -> Part | None:
    return Part(_FUSED.index(module), 1, 3, -1) if module in _FUSED else None


_BLOCK = {
    "attention_norm": "ln_1",
    **dict.fromkeys(_FUSED, "attn.c_attn"),
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_REST = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head.out": "lm_head",
}

FAMILIES = {"gpt2": Family(_read, _write, "transformer.h", _BLOCK, _REST, _part, transposed=True)}
