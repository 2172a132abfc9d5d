"""Which layers have a sliding window: ``layer_types`` of a ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import Config
from ridgeline.spec.rope import read_rope, write_rope

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

WINDOWED, WHOLE = "sliding_attention", "full_attention"


def layer_types(layers: int, every: int) -> list[str]:
    """The kinds of layers where every ``every``-th attends to everything (1: none does)."""
    return [WHOLE if every > 1 and (i + 1) % every == 0 else WINDOWED for i in range(layers)]


def read_pattern(c: Config, every: int) -> Config:
    """The window and the pattern of layers that have it; ``every`` where the file has no ``layer_types``.

    Raises :class:`UserError` for a pattern other than full attention in every N-th layer.
    """
    window: int | None = c.get("sliding_window")
    kinds, layers = c.get("layer_types"), c["num_hidden_layers"]
    if window is None or (kinds and set(kinds) == {WHOLE}):
        return {"sliding_window": None}
    if kinds:
        every = kinds.index(WHOLE) + 1 if WHOLE in kinds else 1
        if list(kinds) != layer_types(layers, every):
            raise UserError(
                "layer_types in config.json is not supported: full attention is not in every N-th layer",
                "a model with sliding windows in all layers but every N-th",
            )
    return {"sliding_window": window, "window_every": every}


def read_ropes(c: Config, theta: float, local: float) -> Config:
    """Rotary settings of layers that attend to everything and of those with a window, whose embedding is unscaled.

    Newer files have the parameters of each kind of layer, older ones ``rope_theta`` and ``rope_scaling`` of the first;
    ``theta`` and ``local`` are the bases where a file has none.
    """
    rope = c.get("rope_parameters") or {}
    own = rope.get(WINDOWED) or {}
    if own.get("rope_type", "default") != "default":
        raise UserError(f"rope scaling {own['rope_type']!r} in layers with a sliding window is not supported")
    fields = read_rope({"rope_theta": theta, **c, "rope_parameters": rope.get(WHOLE, rope)})
    base = float(own.get("rope_theta") or local)
    same = base == fields["rope_theta"] and "rope_scaling" not in fields
    return {**fields, "local_rope_theta": None if same else base}


def write_ropes(s: ModelSpec) -> Config:
    """The inverse of :func:`read_ropes`."""
    local = {"rope_type": "default", "rope_theta": s.local_rope_theta or s.rope_theta}
    return {"rope_parameters": {WHOLE: write_rope(s), WINDOWED: local}}


def write_pattern(s: ModelSpec) -> Config:
    """The inverse of :func:`read_pattern`."""
    if s.sliding_window is None:
        return {"sliding_window": None, "layer_types": [WHOLE] * s.num_layers}
    return {"sliding_window": s.sliding_window, "layer_types": layer_types(s.num_layers, s.window_every)}
