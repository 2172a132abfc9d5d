"""Imports of large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """Context in which a process imports what it keeps: no search for garbage goes through that, now or later.

    PyTorch and what a trainer needs of it take a fifth less time to import, and a full search later skips half a
    million objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
