"""The GPU that Triton compiles for. Imported only where Triton is installed."""

from __future__ import annotations

from triton import knobs
from triton.runtime import driver


def capability() -> int:
    """The device's compute capability (90: 9.0); 0 in Triton's interpreter."""
    return 0 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)
