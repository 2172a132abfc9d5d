"""gpt-oss (arXiv:2508.10925): attention sinks, a window in every second layer, a mixture with biases."""

from __future__ import annotations

from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import read_like_llama


def _read(c: Config) -> Config:
    """Its YaRN-scaled rotary embedding changes no size and is left out."""
    kinds = c.get("layer_types") or ["sliding_attention", "full_attention"]
    moe = {"num_experts": c["num_local_experts"], "experts_per_token": c["num_experts_per_tok"], "moe_bias": True}
    plain = {k: v for k, v in c.items() if k not in ("rope_scaling", "rope_parameters")}
    return {
        **read_like_llama({"rope_theta": 150000.0, **plain}),
        "qkv_bias": True,
        "out_bias": True,
        "sliding_window": c.get("sliding_window"),
        "window_every": 2 if "full_attention" in kinds else 1,
        "attention_sinks": True,
        **moe,
    }


FAMILIES = {"gpt_oss": Family(_read)}
