"""The files that a workload reads: whether they are there, before anything is started, and whether they changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ridgeline.data.text import hidden, paths_of

STATE_LENGTH = 8


def require_text(workload: Any) -> None:
    """Raises :class:`UserError` where a text that ``workload`` names is no file or directory."""
    for source in _texts(workload):
        paths_of(source)


def input_state(workload: Any, beside: Iterable[Path] = ()) -> str:
    """A hash of name, size and time of change of every file that ``workload`` reads, and of the files and directories
    ``beside``; empty where there are none.

    Contents are not read: a file that was written again is another one.
    """
    named = [p for source in _texts(workload) for p in paths_of(source)]
    named += [Path(p) for name in ("checkpoint", "tokenizer", "trace") if (p := getattr(workload, name, None))]
    named += beside
    digest = hashlib.sha256()
    for file in (f for path in named for f in _files(path)):
        about = file.stat()
        digest.update(f"{file}\n{about.st_size} {about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:STATE_LENGTH] if named else ""


def _texts(workload: Any) -> Iterator[str]:
    for name in ("data", "eval_data"):
        source = getattr(workload, name, None)
        if source and not (workload.kind == "compress" and source == "self"):  # the model's own text
            yield source


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = (p for p in path.rglob("*") if not hidden(p, path))
    return sorted(p for p in files if p.is_file())
