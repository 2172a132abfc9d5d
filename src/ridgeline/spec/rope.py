"""Scaled rotary embeddings: the numbers of a ``config.json``'s ``rope_parameters``, read and written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator

from ridgeline.spec.errors import UserError

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

Config = dict[str, Any]
RopeKind = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]

_LATER = ("kind", "attention_factor", "beta_fast", "beta_slow", "truncate", "short_factor", "long_factor")
"""Fields that a dump leaves out at their defaults, so that the ids of experiments stored before them still hold."""


class RopeScaling(BaseModel):
    """How rotary frequencies are changed to reach beyond the positions that a model was pretrained with.

    ``linear`` (arXiv:2306.15595) divides all by ``factor``; ``dynamic`` raises the base as a sequence outgrows
    ``original_max_positions`` (NTK-aware scaling); ``yarn`` (arXiv:2309.00071) divides the slow ones and multiplies the
    tables by ``attention_factor``; ``llama3`` is Llama 3.1's; ``longrope`` (arXiv:2402.13753) divides each by its own
    factor, one set for sequences within ``original_max_positions`` and one for longer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    kind: RopeKind = "llama3"
    attention_factor: float = 1.0
    """Multiplies the tables of cosines and sines (yarn, longrope)."""
    beta_fast: float = 32.0
    """Turns within ``original_max_positions`` above which yarn leaves a frequency as it is."""
    beta_slow: float = 1.0
    """Turns below which yarn divides it by all of ``factor``."""
    truncate: bool = True
    """Whether yarn rounds these bounds to whole dimensions (gpt-oss does not)."""
    short_factor: tuple[float, ...] = ()
    """longrope's divisors, head_dim / 2 of them, for sequences within ``original_max_positions``."""
    long_factor: tuple[float, ...] = ()
    """longrope's divisors for longer sequences."""

    @model_validator(mode="after")
    def _consistent(self) -> RopeScaling:
        if self.factor <= 0 or self.attention_factor <= 0 or self.original_max_positions < 1:
            raise ValueError("a rope scaling's factors and original_max_positions must be positive")
        lengths = len(self.short_factor), len(self.long_factor)
        if lengths[0] != lengths[1] or (self.kind == "longrope") != (lengths[0] > 0):
            raise ValueError(
                f"rope scaling {self.kind!r} does not go with {lengths[0]} short and {lengths[1]} long factors"
            )
        return self

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        default = type(self).model_fields
        return {k: v for k, v in fields.items() if k not in _LATER or getattr(self, k) != default[k].default}

    @property
    def by_length(self) -> bool:
        """Whether sequences longer than ``original_max_positions`` have other frequencies than shorter ones."""
        return self.kind in ("dynamic", "longrope")

    def outgrown(self, length: int) -> bool:
        """Whether keys cached for one position less than ``length`` were rotated by other frequencies."""
        first = self.original_max_positions + 1
        return length >= first if self.kind == "dynamic" else self.kind == "longrope" and length == first


def read_rope(c: Config, partial: bool = False) -> Config:
    """Rotary settings; transformers ≥ 5 nests them in ``rope_parameters``, earlier ones keep two keys.

    ``partial``: whether the family can rotate a part of each head. Raises :class:`UserError` for what is not supported.
    """
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields: Config = {"rope_theta": float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0)}
    share = float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0)
    if share != 1 and not partial:
        raise UserError(f"rotary embedding of {share:.0%} of each head is not supported in {c.get('model_type')}",
                        "remove partial_rotary_factor from config.json")  # fmt: skip
    if share != 1:
        head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        fields["rotary_dim"] = int(head * share)
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    if kind == "default":
        return fields
    if kind not in _READ:
        raise UserError(f"rope scaling {kind!r} is not supported", f"supported: default, {', '.join(_READ)}")
    return {**fields, "rope_scaling": {"kind": kind, **_READ[kind](scaling, c)}}


def _llama3(r: Config, c: Config) -> Config:
    return {
        "factor": r["factor"],
        "low_freq_factor": r["low_freq_factor"],
        "high_freq_factor": r["high_freq_factor"],
        "original_max_positions": r["original_max_position_embeddings"],
    }


def _original(r: Config, c: Config) -> int:
    """Positions of the pretraining, wherever the file says them."""
    found = r.get("original_max_position_embeddings") or c.get("original_max_position_embeddings")
    return int(found or c["max_position_embeddings"])


def _dynamic(r: Config, c: Config) -> Config:
    return {"factor": r["factor"], "original_max_positions": c["max_position_embeddings"]}


def _yarn(r: Config, c: Config) -> Config:
    original = _original(r, c)
    factor = r.get("factor") or c["max_position_embeddings"] / original
    fields = {k: r[k] for k in ("beta_fast", "beta_slow") if r.get(k)}
    return {
        **fields,
        "factor": factor,
        "attention_factor": r.get("attention_factor") or _yarn_attention(factor, r),
        "truncate": r.get("truncate", True),
        "original_max_positions": original,
    }


def _yarn_attention(factor: float, r: Config) -> float:
    """The paper's 0.1 ln(factor) + 1, or DeepSeek's ratio of two such terms."""

    def term(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    over, under = r.get("mscale"), r.get("mscale_all_dim")
    return term(over) / term(under) if over and under else term(1.0)


def _longrope(r: Config, c: Config) -> Config:
    original = _original(r, c)
    factor = r.get("factor") or c["max_position_embeddings"] / original
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "attention_factor": r.get("attention_factor") or grown,
        "original_max_positions": original,
        "short_factor": tuple(r["short_factor"]),
        "long_factor": tuple(r["long_factor"]),
    }


_READ = {
    "llama3": _llama3,
    "linear": lambda r, c: {"factor": r["factor"]},
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
}


def write_rope(spec: ModelSpec) -> Config:
    """The ``rope_parameters`` that :func:`read_rope` reads back to the same."""
    s = spec.rope_scaling
    part: Config = {} if spec.rotary_dim is None else {"partial_rotary_factor": spec.rotary_dim / spec.head_dim}
    if s is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta, **part}
    rope: Config = {"rope_type": s.kind, "rope_theta": spec.rope_theta, "factor": s.factor, **part}
    if s.kind == "llama3":
        rope |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        rope |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    if s.kind == "longrope":
        rope |= {"short_factor": list(s.short_factor), "long_factor": list(s.long_factor)}
    if s.kind in ("yarn", "longrope"):
        rope["attention_factor"] = s.attention_factor
    if s.kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = s.original_max_positions
    return rope
