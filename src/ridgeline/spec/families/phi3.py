"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): Mistral with fused projections, LongRoPE, and in Phi-4-mini
rotary embedding of a part of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families import mistral
from ridgeline.spec.families.family import Config, Family, Part
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":  # the name under which its first files have what is longrope now
        c = {**c, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    return {**read_like_llama(c, partial=True), "sliding_window": c.get("sliding_window")}


def _write(s: ModelSpec) -> Config:
    scaling = s.rope_scaling
    original = s.max_positions if scaling is None else scaling.original_max_positions
    config = {**mistral.write(s), "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": original}
    # transformers' default for padding is Phi-3's own token, which a smaller vocabulary does not have.
    return {**config, "pad_token_id": 32000 if s.vocab_size > 32000 else None}


def _part(s: ModelSpec, module: str) -> Part | None:
    q, kv = s.num_heads, s.num_kv_heads
    return {
        "attention.q_proj": Part(0, q, q + 2 * kv),
        "attention.k_proj": Part(q, kv, q + 2 * kv),
        "attention.v_proj": Part(q + kv, kv, q + 2 * kv),
        "mlp.gate_proj": Part(0, 1, 2),
        "mlp.up_proj": Part(1, 1, 2),
    }.get(module)


_BLOCK = {
    **BLOCK,
    **dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
}

FAMILIES = {"phi3": Family(_read, _write, STACK, _BLOCK, REST, _part)}
