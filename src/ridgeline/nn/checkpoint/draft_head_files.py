"""Draft heads in a folder of their own: ``draft_head.json`` and ``draft_head.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ridgeline.nn.checkpoint.files import write_tensors
from ridgeline.nn.model.draft_head import DraftHead
from ridgeline.spec.draft_head import CONFIG, FORMAT, TENSORS, head_spec, read_head_spec
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec


def save_head(folder: Path, spec: ModelSpec, state: Mapping[str, Tensor], base: str = "") -> None:
    """Write the head of a model of ``spec``: ``state`` is that of a :class:`DraftHead`. ``base``: the model's
    checkpoint, for the reader."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, state)
    about = {"format": FORMAT, "base": base, "layer": head_spec(spec).model_dump(mode="json")}
    part = folder / f".{CONFIG}.partial"
    part.write_text(json.dumps(about, indent=2), encoding="utf-8")
    part.replace(folder / CONFIG)


def load_head(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> DraftHead:
    """The head in ``folder``, for a model of ``spec``.

    Raises :class:`UserError` for one of another shape, and for files that are damaged.
    """
    mine, theirs = head_spec(spec), read_head_spec(folder)
    for name in type(mine).model_fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        if name not in ("name", "source", "max_positions") and a != b:
            raise UserError(f"the head in {folder} has {name} = {b}, one for {spec.name} has {a}",
                            "give the head that was trained for this model")  # fmt: skip
    head, file = DraftHead.empty(spec, device, dtype), folder / TENSORS
    try:
        found = load_file(file)
        head.load_state_dict({n: t.to(device, dtype) for n, t in found.items()})
    except (OSError, SafetensorError, RuntimeError) as e:
        raise UserError(f"{file} is no draft head of this shape: {str(e).splitlines()[0]}",
                        "train it again with `ridgeline finetune`") from None  # fmt: skip
    return head.requires_grad_(False).eval()
