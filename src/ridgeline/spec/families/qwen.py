"""Qwen 2, Qwen 3 and Qwen3-MoE (arXiv:2407.10671, arXiv:2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read_window(c: Config) -> int | None:
    """Qwen's window applies from layer ``max_window_layers`` (default 28) on; ours to all layers or none."""
    first = c.get("max_window_layers", 28)
    window: int | None = c.get("sliding_window")
    if not c.get("use_sliding_window") or window is None or first >= c["num_hidden_layers"]:
        return None
    if first > 0:
        raise UserError(
            f"a sliding window from layer {first} of {c['num_hidden_layers']} on is not supported",
            "set max_window_layers to 0 (a window in every layer) or use_sliding_window to false",
        )
    return window


def _read_qwen2(c: Config) -> Config:
    return {**read_like_llama(c), "qkv_bias": True, "sliding_window": _read_window(c)}


def _read_qwen3(c: Config) -> Config:
    bias = bool(c.get("attention_bias", False))
    base = {**read_like_llama(c), "qkv_bias": bias, "out_bias": bias, "qk_norm": True}
    return {**base, "sliding_window": _read_window(c), "head_dim": c.get("head_dim") or 128}


def _read_qwen3_moe(c: Config) -> Config:
    """Every layer a mixture, as in the published models; a dense layer among them is not supported."""
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        raise UserError("qwen3_moe with dense layers between the mixtures is not supported")
    experts = c["num_experts"] if "num_experts" in c else c["num_local_experts"]  # transformers 5 renamed it
    return {
        **_read_qwen3({**c, "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]}),
        "intermediate_size": c["moe_intermediate_size"],
        "num_experts": experts,
        "experts_per_token": c["num_experts_per_tok"],
        "normalize_router": bool(c.get("norm_topk_prob", False)),
    }


def _write_window(s: ModelSpec) -> Config:
    """Qwen's window, which starts at layer ``max_window_layers``."""
    windowed = s.sliding_window is not None
    window: Config = {"use_sliding_window": windowed, "max_window_layers": 0 if windowed else s.num_layers}
    return {**window, "sliding_window": s.sliding_window}


def _write_qwen2(s: ModelSpec) -> Config:
    return {**write_like_llama(s), **_write_window(s), "architectures": ["Qwen2ForCausalLM"]}


def _write_qwen3(s: ModelSpec) -> Config:
    architecture: Config = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": s.qkv_bias}
    return {**write_like_llama(s), **_write_window(s), **architecture}


def _write_qwen3_moe(s: ModelSpec) -> Config:
    return {
        **_write_qwen3(s),
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": s.intermediate_size,
        "num_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "norm_topk_prob": s.normalize_router,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_MOE = {**BLOCK, "mlp.router": "mlp.gate", "mlp.experts": "mlp.experts"}

FAMILIES = {
    "qwen2": Family(_read_qwen2, _write_qwen2, STACK, BLOCK, REST),
    "qwen3": Family(_read_qwen3, _write_qwen3, STACK, BLOCK, REST),
    "qwen3_moe": Family(_read_qwen3_moe, _write_qwen3_moe, STACK, _MOE, REST),
}
