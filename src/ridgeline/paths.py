"""Where Ridgeline keeps its own files. ``RIDGELINE_HOME`` moves everything under one directory."""

from __future__ import annotations

import os
from pathlib import Path


def _home(variable: str, default: str, inside: str) -> Path:
    home = os.environ.get("RIDGELINE_HOME")
    if home:
        return Path(home) / inside
    return Path(os.environ.get(variable) or Path.home() / default) / "ridgeline"


def config_dir() -> Path:
    """Device profiles: ``~/.config/ridgeline``."""
    return _home("XDG_CONFIG_HOME", ".config", "config")


def cache_dir() -> Path:
    """Tokenizers and tokenized text, safe to delete: ``~/.cache/ridgeline``."""
    return _home("XDG_CACHE_HOME", ".cache", "cache")


def data_dir() -> Path:
    """The store of runs: ``~/.local/share/ridgeline``."""
    return _home("XDG_DATA_HOME", ".local/share", "data")
