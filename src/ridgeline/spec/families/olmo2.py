"""OLMo 2 and 3 (arXiv:2501.00656): norms on what each sub-layer adds and none before it, and over the queries and keys
of all heads together; OLMo 3 with alternating windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama
from ridgeline.spec.families.windows import read_pattern, read_ropes, write_pattern, write_ropes

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    bias = bool(c.get("attention_bias", False))
    norms: Config = {"input_norms": False, "output_norms": True, "qk_norm": True, "joint_qk_norm": True}
    base = read_like_llama({"rms_norm_eps": 1e-5, **c})
    return {**base, **norms, "qkv_bias": bias, "out_bias": bias}


def _write(s: ModelSpec) -> Config:
    return {**write_like_llama(s), "architectures": ["Olmo2ForCausalLM"], "attention_bias": s.qkv_bias}


def _read_olmo3(c: Config) -> Config:
    base = _read({**c, "rope_parameters": None})
    return {**base, **read_pattern({"sliding_window": 4096, **c}, 4), **read_ropes(c, 5e5, 5e5)}


def _write_olmo3(s: ModelSpec) -> Config:
    return {**_write(s), "architectures": ["Olmo3ForCausalLM"], **write_pattern(s), **write_ropes(s)}


_BLOCK = {
    **BLOCK,
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

FAMILIES = {
    "olmo2": Family(_read, _write, STACK, _BLOCK, REST),
    "olmo3": Family(_read_olmo3, _write_olmo3, STACK, _BLOCK, REST),
}
