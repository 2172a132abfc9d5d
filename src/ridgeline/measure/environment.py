"""The environment fingerprint that every measured result carries."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import ridgeline


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Hash of Ridgeline's own sources: results of different code are not the same measurement."""
    digest = hashlib.sha256()
    root = Path(ridgeline.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit of the checkout that this code is run from, marked if files differ; None: it is no checkout."""
    import subprocess

    command = ["git", "-C", str(Path(ridgeline.__file__).parent), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def spare_core() -> Iterator[None]:
    """Let torch compute on all cores but one, which is left to a server's HTTP and text.

    Without it every parallel operator of the engine spins while one of its threads waits for a core.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, cores() - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fingerprint() -> dict[str, Any]:
    """Hardware and software facts, without importing torch (its version is read from the package metadata)."""
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    packages = {}
    for name in ("torch", "numpy", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "ridgeline": ridgeline.__version__,
        "code": code_hash(),
        **packages,
    }


def load_average() -> float | None:
    """One-minute load of the machine, to warn when something else is running; None where unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
