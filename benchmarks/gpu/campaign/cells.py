"""A cell: one configuration with its prediction, its measurement and its goals. And the files that hold them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.probe import datasheet
from ridgeline.spec.device import Device
from ridgeline.spec.errors import UserError

Figures = dict[str, Any]
"""Numbers by metric (SI units), and lists or texts that explain them."""


class NotInstalled(Exception):
    """What a cell compares with is not installed here."""


@dataclass(frozen=True)
class Cell:
    """One line of the campaign, or several metrics of one configuration."""

    name: str
    measure: Callable[[], Figures]
    """Runs in a process of its own (or one that it shares with cells of its part)."""
    predict: Callable[[], Figures] = dict
    """The same metrics, of the catalog's device: before anything runs."""
    goals: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By metric: ``>=`` or ``<=``, and the bound."""
    limit: float = 120.0
    """Seconds after which it is stopped."""


@dataclass(frozen=True)
class Setting:
    """Where the campaign runs."""

    on: str
    """The catalog's name of the device, whose data sheet gives peaks and predictions."""
    kind: str
    """cuda or cpu."""
    small: bool

    @property
    def device(self) -> Device:
        """Its data sheet."""
        if self.on == "local":
            catalog.allow_unprobed()
        return catalog.device(self.on)


def find_setting(on: str | None, small: bool, predicting: bool = False) -> Setting:
    """The device of this machine, or with ``predicting`` the one called ``on``. Raises :class:`UserError` without a
    GPU, unless it is to be ``small``."""
    import torch

    if predicting and on and not small:
        return Setting(on, "cuda", small)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        title = torch.cuda.get_device_name(0)
        known = None if on else datasheet(title, memory)
        if not on and known is None:
            raise UserError(f"the catalog has no device like {title!r}", "name one with --on: `ridgeline devices`")
        return Setting(on or (known.name if known else ""), "cuda", small)
    if not small:
        raise UserError("this machine has no GPU that PyTorch can use", "add --small to run the same in small on a CPU")
    return Setting(on or "local", "cpu", small)


def environment(setting: Setting) -> dict[str, Any]:
    """Hardware and software, with the GPU's and the commit."""
    import torch

    found = fingerprint() | {"on": setting.on, "small": setting.small, "threads": torch.get_num_threads()}
    if setting.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda,
                  "multiprocessors": properties.multi_processor_count}  # fmt: skip
        try:
            import triton

            found["triton"] = triton.__version__
        except ImportError:
            pass
    return found


def commit() -> str | None:
    """The commit of the working tree, with a plus if it was changed; None where git or the history is missing."""
    try:
        folder = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip()) if head.returncode == 0 else None


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read(path: Path) -> dict[str, Any]:
    """A part's file; empty if there is none. Raises :class:`UserError` for one that is no JSON."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as e:
        raise UserError(f"{path} is not a file of the campaign: {e}", "move it away, or choose another --out") from None


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file at once, so that a stop leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def met(goal: tuple[str, float], value: float) -> bool:
    """Whether a metric reaches its goal."""
    sign, bound = goal
    return value >= bound if sign == ">=" else value <= bound
