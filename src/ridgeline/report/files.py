"""Atomic writes: a reader never sees a partial report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ridgeline.spec.errors import UserError


def write_atomic(path: Path, text: str) -> Path:
    """Write beside ``path``, then rename over it. Raises :class:`UserError` when the place cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                f.write(text)
            os.chmod(draft, 0o644)  # mkstemp creates files that only their owner can read
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}", "choose another path") from None
    return path
