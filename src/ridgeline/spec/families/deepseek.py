"""DeepSeek V2, V3 and R1 (arXiv:2405.04434, 2412.19437, 2501.12948), and Kimi K2, which has V3's architecture: latent
attention, mixtures with shared experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    """What V2 and V3 have in common."""
    if c.get("moe_layer_freq", 1) != 1:
        raise UserError(f"{c['model_type']} with dense layers between the mixtures is not supported")
    bias, width = bool(c.get("attention_bias", False)), c["moe_intermediate_size"]
    head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    return {
        **read_like_llama({**c, "num_key_value_heads": None}),
        "head_dim": head,
        "rotary_dim": c["qk_rope_head_dim"],
        "rope_interleaved": True,
        "value_dim": c["v_head_dim"],
        "kv_lora_rank": c["kv_lora_rank"],
        "q_lora_rank": c["q_lora_rank"],
        "attention_multiplier": _multiplier(c, head),
        "qkv_bias": bias,
        "out_bias": bias,
        "intermediate_size": width,
        "dense_intermediate_size": c["intermediate_size"],
        "dense_layers": c.get("first_k_dense_replace", 0),
        "num_experts": c["n_routed_experts"] if "n_routed_experts" in c else c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "shared_intermediate_size": width * (c.get("n_shared_experts") or 0),
        "router_scale": float(c.get("routed_scaling_factor", 1.0)),
    }


def _multiplier(c: Config, head: int) -> float | None:
    """YaRN's factor on the scores, which DeepSeek keeps apart from that on the rotary tables."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    term = rope.get("mscale_all_dim") or 0.0
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not term:
        return None
    grown = 0.1 * term * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
    return float(head**-0.5 * grown**2)


def _read_v2(c: Config) -> Config:
    if c.get("norm_topk_prob") or c.get("scoring_func", "softmax") != "softmax":
        raise UserError("deepseek_v2 with norm_topk_prob or another scoring_func than softmax is not supported")
    method = c.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"deepseek_v2 with topk_method {method!r} is not supported",
                        "supported: greedy, group_limited_greedy")  # fmt: skip
    grouped = method == "group_limited_greedy"
    groups = {"router_groups": c["n_group"], "router_groups_chosen": c["topk_group"]} if grouped else {}
    return {**_read(c), "normalize_router": False, **groups}


def _read_v3(c: Config) -> Config:
    if c.get("scoring_func", "sigmoid") != "sigmoid" or c.get("topk_method", "noaux_tc") != "noaux_tc":
        raise UserError("deepseek_v3 with another scoring_func than sigmoid or topk_method than noaux_tc is not"
                        " supported")  # fmt: skip
    return {
        **_read(c),
        "family": "deepseek_v3",
        "rope_interleaved": bool(c.get("rope_interleave", True)),
        "normalize_router": bool(c.get("norm_topk_prob", True)),
        "router_scores": "sigmoid",
        "router_score_bias": True,
        "router_groups": c.get("n_group") or 1,
        "router_groups_chosen": c.get("topk_group") or 1,
    }


def _write(s: ModelSpec) -> Config:
    base = write_like_llama(s)
    rope, scale = base["rope_parameters"], s.query_scale
    rope.pop("partial_rotary_factor")
    if scale != 1 and s.rope_scaling is not None:
        rope["mscale_all_dim"] = (math.sqrt(scale) - 1) / (0.1 * math.log(s.rope_scaling.factor))
    return {
        **base,
        "head_dim": s.rotated,
        "qk_rope_head_dim": s.rotated,
        "qk_nope_head_dim": s.head_dim - s.rotated,
        "v_head_dim": s.context_size // s.num_heads,
        "kv_lora_rank": s.kv_lora_rank,
        "q_lora_rank": s.q_lora_rank,
        "attention_bias": s.qkv_bias,
        "intermediate_size": s.dense_size,
        "moe_intermediate_size": s.intermediate_size,
        "first_k_dense_replace": s.dense_layers,
        "n_routed_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "n_shared_experts": s.shared_intermediate_size // s.intermediate_size,
        "routed_scaling_factor": s.router_scale or 1.0,
        "norm_topk_prob": s.normalize_router,
        "n_group": s.router_groups,
        "topk_group": s.router_groups_chosen,
    }


def _write_v2(s: ModelSpec) -> Config:
    method = "greedy" if s.router_groups == 1 else "group_limited_greedy"
    return {**_write(s), "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _write_v3(s: ModelSpec) -> Config:
    own: Config = {"rope_interleave": s.rope_interleaved, "num_nextn_predict_layers": 0}
    return {**_write(s), "architectures": ["DeepseekV3ForCausalLM"], **own}


_BLOCK = {
    **BLOCK,
    "attention.q_a_proj": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b_proj": "self_attn.q_b_proj",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b_proj": "self_attn.kv_b_proj",
    "mlp": "mlp.gate",  # the bias on its scores
    "mlp.router": "mlp.gate",
    "mlp.experts": "mlp.experts",
    "mlp.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "mlp.shared.up_proj": "mlp.shared_experts.up_proj",
    "mlp.shared.down_proj": "mlp.shared_experts.down_proj",
}
_LEAVES = {"score_bias": "e_score_correction_bias"}

FAMILIES = {
    "deepseek_v2": Family(_read_v2, _write_v2, STACK, _BLOCK, REST),
    "deepseek_v3": Family(_read_v3, _write_v3, STACK, _BLOCK, REST, leaves=_LEAVES),
}
