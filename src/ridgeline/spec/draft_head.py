"""The shape of a model's draft head, and where one is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

CONFIG, TENSORS = "draft_head.json", "draft_head.safetensors"
FORMAT = 1
"""Version of the format."""
_WITHOUT: dict[str, Any] = {
    name: ModelSpec.model_fields[name].default
    for name in ("num_experts", "experts_per_token", "moe_bias", "moe_every", "moe_first", "dense_layers",
                 "dense_intermediate_size", "shared_intermediate_size", "router_scores", "router_score_bias",
                 "router_groups", "router_groups_chosen", "router_scale", "expert_capacity", "router_on_input",
                 "published_parameters", "tie_embeddings")
}  # fmt: skip
_EVERYWHERE: dict[str, Any] = {
    name: ModelSpec.model_fields[name].default
    for name in ("sliding_window", "window_every", "chunked_window", "nope_layers", "query_temperature",
                 "query_temperature_every", "local_rope_theta")
}  # fmt: skip


def head_spec(m: ModelSpec) -> ModelSpec:
    """One decoder layer like those of ``m``: dense and as wide as what a token uses where they are mixtures, and
    without a window unless all of them have one.

    Raises :class:`UserError` for a model that does not generate from left to right.
    """
    if not m.causal or m.is_encoder_decoder or m.head != "lm":
        raise UserError(f"{m.name} is no decoder with a language-model head: nothing drafts for it", "use a decoder")
    fields: dict[str, Any] = {"name": f"{m.name}-draft", "num_layers": 1, **_WITHOUT}
    if m.num_experts:
        fields["intermediate_size"] = m.intermediate_size * m.experts_per_token + m.shared_intermediate_size
    if m.window_every > 1:
        fields |= _EVERYWHERE
    return m.changed(**fields)


def head_parameters(own: ModelSpec) -> int:
    """Parameters of a head of this shape: its layer, and the linear layer that joins two hidden states."""
    h = own.hidden_size
    return 2 * h * h + h + sum(p.numel for p in own.block_parameters(0))


def is_head(folder: Path) -> bool:
    """Whether a folder holds a draft head."""
    return (folder / CONFIG).is_file()


def read_head_spec(folder: Path) -> ModelSpec:
    """The shape of the draft head in a folder. Raises :class:`UserError` for a file that cannot be read."""
    file, fix = folder / CONFIG, "train it again with `ridgeline finetune`"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise UserError(f"{file} has format {found['format']}, this version reads {FORMAT}", fix)
        return ModelSpec(**found["layer"])
    except OSError as e:
        raise UserError(f"cannot read {file}: {e.strerror}", fix) from None
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{file} does not describe a draft head: {type(e).__name__}: {e}", fix) from None
