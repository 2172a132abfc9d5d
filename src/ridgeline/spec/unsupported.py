"""Architectures that are not read: the nearest family that is, and what differs from it."""

from __future__ import annotations

from ridgeline.spec.errors import UserError

_PARALLEL = "attention and MLP beside each other on one input"

UNLIKE: dict[str, tuple[str, str]] = {
    "cohere": ("llama", f"{_PARALLEL}, LayerNorm without bias"),
    "deepseek_v32": ("deepseek_v3", "attention to a selection of the tokens"),
    "glm4_moe": ("deepseek_v3", "grouped-query attention"),
    "glm4_moe_lite": ("deepseek_v3", "other layers in its files"),
    "kimi_linear": ("deepseek_v3", "linear attention in most layers"),
    "gemma3": ("gemma3_text", "an image encoder beside the text model"),
    "glm": ("phi3", "rotary embedding of neighboring dimensions"),
    "glm4": ("gemma2", "rotary embedding of neighboring dimensions, SwiGLU"),
    "gptj": ("gpt_neox", "rotary embedding of neighboring dimensions"),
    "granitemoe": ("granite", "a mixture of experts under Granite's multipliers"),
    "mpt": ("bloom", "LayerNorm without bias, queries, keys and values in one weight"),
    "phi": ("gpt_neox", "separate projections, a bias on the logits"),
    "stablelm": ("phi3", "LayerNorm"),
    "starcoder2": ("mistral", "LayerNorm, an MLP without gate, biases"),
}
"""``model_type`` → (nearest family, what differs)."""


def refuse(kind: str) -> UserError | None:
    """The error for a known ``model_type`` that is not supported; None for one that is not known at all."""
    if kind not in UNLIKE:
        return None
    family, differs = UNLIKE[kind]
    return UserError(
        f"model_type {kind!r} in config.json is not supported: nearest is {family}, but {kind} has {differs}",
        f"take a model of a family that is (`ridgeline models`); to predict sizes alone, describe it as {family}",
    )
