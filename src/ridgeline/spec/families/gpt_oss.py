"""gpt-oss (arXiv:2508.10925): attention sinks, a window in every second layer, a mixture with biases whose weights are
published in MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config, Family, Part
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama
from ridgeline.spec.families.windows import read_pattern, write_pattern

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096}  # fmt: skip


def _read(c: Config) -> Config:
    if (c.get("swiglu_limit", 7.0), c.get("swiglu_alpha", 1.702)) != (7.0, 1.702):
        raise UserError("gpt_oss with another swiglu_limit or swiglu_alpha than 7.0 and 1.702 is not supported")
    given = c.get("rope_parameters") or c.get("rope_scaling")
    bias = bool(c.get("attention_bias", True))
    return {
        **read_like_llama({"rope_theta": 150000.0, "rms_norm_eps": 1e-5, **c, "rope_scaling": given or _YARN}),
        "activation": "swigluoai",
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_sinks": True,
        "num_experts": c["num_local_experts"],
        "experts_per_token": c["num_experts_per_tok"],
        "moe_bias": True,
        **read_pattern(c, 2),
    }


def _write(s: ModelSpec) -> Config:
    return {
        **write_like_llama(s.model_copy(update={"activation": "silu"})),
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": s.qkv_bias,
        "num_local_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        **write_pattern(s),
    }


def _stacked(s: ModelSpec, name: str) -> tuple[str, Part | None, bool]:
    """All experts of a layer in one tensor [E, in, out]; gate and up alternate."""
    projection, _, kind = name.rpartition("_")
    bias = kind == "bias"
    if projection == "down":
        return ("down_proj_bias", None, False) if bias else ("down_proj", None, True)
    part = Part(0 if projection == "gate" else 1, 1, 2, 1 if bias else 2, s.intermediate_size)
    return ("gate_up_proj_bias" if bias else "gate_up_proj"), part, not bias


_BLOCK = {**BLOCK, "attention": "self_attn", "mlp.router": "mlp.router", "mlp.experts": "mlp.experts"}

FAMILIES = {"gpt_oss": Family(_read, _write, STACK, _BLOCK, REST, stacked=_stacked)}
