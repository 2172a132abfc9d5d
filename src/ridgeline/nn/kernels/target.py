"""The GPU that Triton compiles for. Imported only where Triton is installed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from triton import knobs
from triton.runtime import driver


def capability() -> int:
    """The device's compute capability (90: 9.0); 0 in Triton's interpreter, and of GPUs that are not NVIDIA's."""
    return 0 if _INTERPRETED else _of(driver.active, driver.active.get_current_device())


def shared_memory() -> int:
    """Bytes of shared memory that a program may have."""
    return SHARED.get(capability(), 99 << 10)


SHARED = {0: 227 << 10, 80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}
"""By compute capability; 99 KB of others (CUDA programming guide, "Technical Specifications per Compute Capability").
Triton's interpreter has as much as Hopper."""
_INTERPRETED = knobs.runtime.interpret
"""Read once: kernels are made when they are imported, for the interpreter or not."""


@lru_cache(maxsize=16)
def _of(active: Any, device: int) -> int:
    """Asked at every launch of some kernels, and slowly answered by a driver."""
    target = active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0  # AMD's architectures have names
