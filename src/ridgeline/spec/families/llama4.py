"""Llama 4's text model (Llama-4-Scout, Llama-4-Maverick; model card of April 2025): attention in chunks but in every
fourth layer, which has no rotary embedding; a mixture with one routed and one shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config, Family, Part
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama
from ridgeline.spec.families.windows import WHOLE, layer_types

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

_CHUNKED = "chunked_attention"


def _read(config: Config) -> Config:
    c: Config = config.get("text_config") or config  # the whole model's file has its image encoder beside it
    layers, experts = c["num_hidden_layers"], c["num_local_experts"]
    bias, tuned = bool(c.get("attention_bias", False)), bool(c.get("attn_temperature_tuning", True))
    step, every, window = c.get("interleave_moe_layer_step", 1), _every(c, layers), c.get("attention_chunk_size", 8192)
    if c.get("moe_layers") not in (None, list(range(step - 1, layers, step))):
        raise UserError("llama4_text with moe_layers other than every N-th is not supported")
    if every > 1 and not window:
        raise UserError("llama4_text without attention_chunk_size is not supported")
    return {
        **read_like_llama({"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **c}),
        "family": "llama4_text",
        "dense_intermediate_size": c["intermediate_size_mlp"],
        "qkv_bias": bias,
        "out_bias": bias,
        "rope_interleaved": True,
        "qk_norm": bool(c.get("use_qk_norm", True)),
        "qk_norm_weight": not c.get("use_qk_norm", True),
        "sliding_window": window,
        "chunked_window": True,
        "window_every": every,
        "nope_layers": every > 1,
        "query_temperature": c.get("attn_scale", 0.1) if tuned and every > 1 else None,
        "query_temperature_every": c.get("floor_scale", 8192) if tuned and every > 1 else None,
        "num_experts": experts,
        "experts_per_token": c.get("num_experts_per_tok", 1),
        "moe_every": step,
        "router_scores": "sigmoid",
        "router_on_input": True,
        "normalize_router": False,
        "shared_intermediate_size": c["intermediate_size"],
    }


def _every(c: Config, layers: int) -> int:
    """Every how many layers one attends to everything, without rotary embedding; 1: none does."""
    rotated = c.get("no_rope_layers") or [int((i + 1) % c.get("no_rope_layer_interval", 4) != 0) for i in range(layers)]
    kinds = c.get("layer_types") or [_CHUNKED if r else WHOLE for r in rotated]
    every = rotated.index(0) + 1 if 0 in rotated else 1
    if list(kinds) != _types(layers, every) or list(rotated[:layers]) != [int(k == _CHUNKED) for k in kinds]:
        raise UserError("llama4_text is supported with layers that attend to everything, without rotary embedding, in"
                        " every N-th place only", "check layer_types and no_rope_layers in config.json")  # fmt: skip
    return every


def _types(layers: int, every: int) -> list[str]:
    return [kind if kind == WHOLE else _CHUNKED for kind in layer_types(layers, every)]


def _write(s: ModelSpec) -> Config:
    tuned: Config = {"attn_temperature_tuning": s.query_temperature is not None}
    if s.query_temperature is not None:
        tuned |= {"attn_scale": s.query_temperature, "floor_scale": s.query_temperature_every}
    kinds = _types(s.num_layers, s.window_every)
    return {
        **write_like_llama(s),
        **tuned,
        "architectures": ["Llama4ForCausalLM"],
        "attention_bias": s.qkv_bias,
        "intermediate_size_mlp": s.dense_size,
        "use_qk_norm": s.qk_norm,
        "attention_chunk_size": s.sliding_window,
        "layer_types": kinds,
        "no_rope_layers": [int(kind == _CHUNKED) for kind in kinds],
        "num_local_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "interleave_moe_layer_step": s.moe_every,
    }


def _stacked(s: ModelSpec, name: str) -> tuple[str, Part | None, bool]:
    """All experts of a layer in one tensor [E, in, out], gate before up."""
    if name == "down_proj":
        return name, None, True
    return "gate_up_proj", Part(0 if name == "gate_proj" else 1, 1, 2, 2), True


_BLOCK = {
    **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in BLOCK.items()},
    "mlp.router": "feed_forward.router",
    "mlp.experts": "feed_forward.experts",
    "mlp.shared.gate_proj": "feed_forward.shared_expert.gate_proj",
    "mlp.shared.up_proj": "feed_forward.shared_expert.up_proj",
    "mlp.shared.down_proj": "feed_forward.shared_expert.down_proj",
}

FAMILIES = {"llama4_text": Family(_read, _write, STACK, _BLOCK, REST, stacked=_stacked)}
