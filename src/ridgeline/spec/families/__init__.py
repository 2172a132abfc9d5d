"""One file for each model family: Hugging Face's ``config.json`` to a ModelSpec and back, and the names of tensors."""

from ridgeline.spec.families import (
    bert,
    bloom,
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    olmo2,
    opt,
    phi3,
    qwen,
    t5,
)
from ridgeline.spec.families.family import Family

_MODULES = (llama, llama4, granite, mistral, qwen, phi3, gemma, olmo2, gpt_oss, deepseek, falcon, gpt_neox, bloom,
            gpt2, opt, bert, t5)  # fmt: skip

FAMILIES: dict[str, Family] = {kind: family for module in _MODULES for kind, family in module.FAMILIES.items()}
"""``model_type`` → family."""
ALIASES = {"kimi_k2": "deepseek_v3", "llama4": "llama4_text"}
"""A ``model_type`` that some publish under another name → the family."""
