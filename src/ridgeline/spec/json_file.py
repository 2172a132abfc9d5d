"""JSON files of Hugging Face checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.spec.errors import UserError


def read_json(file: Path, fix: str = "download or save the checkpoint again") -> dict[str, Any]:
    """The object in a file; empty without one. Raises :class:`UserError` with the advice ``fix`` for anything else."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON: {e}", fix) from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a JSON object", fix)
    return found
