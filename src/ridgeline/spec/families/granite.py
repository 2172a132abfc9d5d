"""Granite 3 (model cards of ibm-granite): Llama with four multipliers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families import llama
from ridgeline.spec.families.family import Config, Family

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _read(c: Config) -> Config:
    return {**llama.read(c), **{k: c.get(k, 1.0) for k in _MULTIPLIERS}}


def _write(s: ModelSpec) -> Config:
    numbers = {k: getattr(s, k) for k in _MULTIPLIERS}
    return {**llama.write(s), "architectures": ["GraniteForCausalLM"], **numbers}


FAMILIES = {"granite": Family(_read, _write, llama.STACK, llama.BLOCK, llama.REST)}
