"""Files' names of precisions, mapped to techniques."""

from __future__ import annotations

from ridgeline.predict.serving.engine_costs import ALIASES
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

_WIDE = ("bf16", "fp16", "f16", "float16", "bfloat16", "half", "auto", "16")
_INT8 = ("int8", "int8_wo", "w8a16")
_FP8 = ("fp8", "fp8_block", "fp8_static", "fp8_e4m3", "fp8_kv", "mxfp8", "w8a8")
_FOUR_BITS = ("fp4", "nvfp4", "mxfp4", "int4", "int4_wo", "awq", "awq_marlin", "gptq", "gptq_marlin", "w4a8", "w4a16",
              "w4a16_mxfp4", "w4a8_mxfp4_mxfp8")  # fmt: skip
_GROUPS_OF_32 = ("q4_k_m", "q4_0")


def plan_of(model: ModelSpec, precision: str, backend: str) -> list[str]:
    """The techniques behind a precision's name, and behind how an engine attends by default. Raises
    :class:`UserError` for a precision that is not known."""
    attention = ["flash_attention"] if ALIASES.get(backend, backend) == "hf" else []  # sdpa, its default since 4.36
    return [*attention, *_of_precision(model, precision, backend)]


def _of_precision(model: ModelSpec, precision: str, backend: str) -> list[str]:
    name = precision.lower().replace("-", "_")
    if name in _WIDE:
        return []
    if name in _INT8:
        return ["rtn:bits=8"]
    if name in _FP8:  # TensorRT-LLM's fp8 checkpoints ask for an fp8 cache
        cache = ["kv_quant"] if backend == "trtllm" or name == "fp8_kv" else []
        return ["mxfp4", *cache] if model.family == "gpt_oss" else ["fp8", *cache]
    if name in _GROUPS_OF_32:
        return ["rtn:bits=4,group_size=32"]
    if name in _FOUR_BITS:
        return ["mxfp4"] if model.family == "gpt_oss" else ["mxfp4:layers=all"]
    raise UserError(f"precision {precision!r} is not known", "use bf16, fp16, fp8, int8 or fp4")
