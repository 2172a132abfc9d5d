"""Mistral (arXiv:2310.06825) and Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import Config, Family
from ridgeline.spec.families.llama import BLOCK, REST, STACK, read_like_llama, write_like_llama

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def read(c: Config) -> Config:
    """Mistral's ``config.json``: Llama with a sliding window."""
    return {**read_like_llama(c), "sliding_window": c.get("sliding_window")}


def write(s: ModelSpec) -> Config:
    """The inverse of :func:`read`."""
    return {**write_like_llama(s), "architectures": ["MistralForCausalLM"], "sliding_window": s.sliding_window}


def _read_mixtral(c: Config) -> Config:
    return {**read(c), "num_experts": c["num_local_experts"], "experts_per_token": c["num_experts_per_tok"]}


def _write_mixtral(s: ModelSpec) -> Config:
    experts: Config = {"num_local_experts": s.num_experts, "num_experts_per_tok": s.experts_per_token}
    return {**write(s), "architectures": ["MixtralForCausalLM"], **experts}


_MIXTRAL = {**BLOCK, "mlp.router": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts"}
_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

FAMILIES = {
    "mistral": Family(read, write, STACK, BLOCK, REST),
    "mixtral": Family(_read_mixtral, _write_mixtral, STACK, _MIXTRAL, REST, experts=_EXPERT),
}
