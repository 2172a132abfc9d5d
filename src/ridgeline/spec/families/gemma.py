"""Gemma 1, 2 and 3 (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786), text models.

Norms multiply by 1 + weight; from Gemma 2 on also what each sub-layer adds is normalized, and windows alternate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama
from ridgeline.spec.families.windows import read_pattern, read_ropes, write_pattern, write_ropes

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    bias = bool(c.get("attention_bias", False))
    act = c.get("hidden_activation") or c.get("hidden_act") or "gelu_pytorch_tanh"
    # Gemma's first files say "gelu" and mean its approximation, as transformers reads them.
    base = read_like_llama({**c, "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act})
    return {
        **base,
        "head_dim": c.get("head_dim") or 256,
        "norm_offset": 1.0,
        "embedding_multiplier": float(c["hidden_size"]) ** 0.5,
        "embedding_multiplier_rounded": True,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _read_gemma2(c: Config, every: int = 2) -> Config:
    if c.get("use_bidirectional_attention"):
        raise UserError("Gemma with attention in both directions (an embedding model) is not supported")
    return {
        **_read(c),
        "output_norms": True,
        "attention_multiplier": float(c.get("query_pre_attn_scalar") or 256) ** -0.5,
        "attention_soft_cap": c.get("attn_logit_softcapping", 50.0),
        "logits_soft_cap": c.get("final_logit_softcapping", 30.0),
        **read_pattern(c, every),
    }


def _read_gemma3(c: Config) -> Config:
    rope = read_ropes(c, 1e6, float(c.get("rope_local_base_freq") or 1e4))
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    base = _read_gemma2({**caps, **c, "rope_parameters": None}, int(c.get("sliding_window_pattern") or 6))
    return {**base, **rope, "qk_norm": True}


def _write(s: ModelSpec) -> Config:
    act = "gelu_pytorch_tanh" if s.activation == "gelu_tanh" else s.activation
    config = {**write_like_llama(s), "attention_bias": s.qkv_bias, "hidden_activation": act, "hidden_act": act}
    ids: Config = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    return {**config, "architectures": ["GemmaForCausalLM"], **ids}


def _write_gemma2(s: ModelSpec) -> Config:
    scalar = round((s.attention_multiplier or 1.0) ** -2, 6)
    return {
        **{k: v for k, v in _write(s).items() if k != "hidden_act"},
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": s.attention_soft_cap,
        "final_logit_softcapping": s.logits_soft_cap,
        **write_pattern(s),
    }


def _write_gemma3(s: ModelSpec) -> Config:
    return {**_write_gemma2(s), "architectures": ["Gemma3ForCausalLM"], **write_ropes(s)}


_BLOCK2 = {
    **BLOCK,
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    "gemma": Family(_read, _write, STACK, BLOCK, REST),
    "gemma2": Family(_read_gemma2, _write_gemma2, STACK, _BLOCK2, REST),
    "gemma3_text": Family(_read_gemma3, _write_gemma3, STACK, _BLOCK2, REST),
}
