"""Which models and plans a CPU decodes with all layers in one kernel: one place for the engine and for predictions.

The kernel is :mod:`ridgeline.nn.memory.decoder`.
"""

from __future__ import annotations

from ridgeline.spec.model import ModelSpec

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
"""In the kernel's order."""
_UNDERSTOOD = frozenset({
    "name", "family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_positions", "norm", "norm_eps", "activation", "gated", "position", "rope_theta",
    "rope_scaling", "position_offset", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tie_embeddings", "final_norm",
    "head", "num_labels", "sliding_window", "token_types", "embedding_norm", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "logits_scaling", "published_parameters", "source", "num_experts",
    "experts_per_token", "normalize_router", "moe_every", "window_every", "logits_soft_cap",
})  # fmt: skip
"""Fields of a model that the kernel implements, or that other parts of the model do."""
OTHER_PARTS = frozenset({
    "adapter_table", "divided_experts", "divided_linears", "divided_tensors", "pass_memory", "products",
    "resting_weights",
})  # fmt: skip
"""What a technique may not decide or change if the kernel is to compute the layers."""


def refusal(spec: ModelSpec) -> str:
    """Why the kernel does not compute a model's layers; empty: it does."""
    defaults = ModelSpec.model_fields
    given = {k: v for k, v in spec.model_dump().items() if k not in _UNDERSTOOD and v != defaults[k].default}
    if given:
        return f"{', '.join(given)}: not in the kernel"
    if spec.position == "alibi" or spec.activation not in ACTIVATIONS:
        return f"position {spec.position!r} with activation {spec.activation!r} is not in the kernel"
    return ""
