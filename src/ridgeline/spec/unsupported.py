"""Architectures that are not read: the nearest family that is, and what differs from it."""

from __future__ import annotations

from ridgeline.spec.errors import UserError

_ONE_PLUS = "norms that multiply by 1 + weight"
_AFTER = "norms on what each sub-layer adds"
_PARALLEL = "attention and MLP beside each other on one input"
_PARTIAL = "rotary embedding of a part of each head"
_LATENT = "multi-head latent attention, shared experts"

UNLIKE: dict[str, tuple[str, str]] = {
    "cohere": ("llama", f"{_PARALLEL}, LayerNorm without bias"),
    "deepseek_v2": ("qwen3_moe", _LATENT),
    "deepseek_v3": ("qwen3_moe", f"{_LATENT}, sigmoid routing within groups"),
    "falcon": ("gpt2", f"{_PARALLEL}, multi-query attention with rotary embedding or ALiBi"),
    "gemma": ("llama", f"{_ONE_PLUS}, embeddings times the root of the hidden size"),
    "gemma2": ("llama", f"{_ONE_PLUS}, {_AFTER}, soft caps on scores and logits, a window in every second layer"),
    "gemma3": ("qwen3", "an image encoder beside the text model"),
    "gemma3_text": ("qwen3", f"{_ONE_PLUS}, {_AFTER}, another rotary base in layers with a window"),
    "glm": ("llama", _PARTIAL),
    "glm4": ("llama", f"{_PARTIAL}, {_AFTER}"),
    "gpt_neox": ("gpt2", f"{_PARALLEL}, {_PARTIAL}"),
    "gptj": ("gpt2", f"{_PARALLEL}, {_PARTIAL}"),
    "granitemoe": ("granite", "a mixture of experts under Granite's multipliers"),
    "llama4": ("mixtral", "an image encoder beside the text model"),
    "llama4_text": ("mixtral", "a shared expert, sigmoid routing, layers without rotary embedding"),
    "mpt": ("bloom", "LayerNorm without bias, queries, keys and values in one weight"),
    "olmo2": ("qwen3", f"{_AFTER} and none before it, norms over the queries and keys of all heads together"),
    "phi": ("gpt2", f"{_PARALLEL}, {_PARTIAL}"),
    "stablelm": ("llama", f"LayerNorm, {_PARTIAL}"),
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
