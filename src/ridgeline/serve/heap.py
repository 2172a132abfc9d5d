"""The C library's heap, for processes whose threads hand memory to one another."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8  # malloc.h


def one_heap() -> None:
    """Have all threads share one malloc arena. A request goes through several threads, and with an arena for each the
    holes that glibc leaves add up, by some 0.4 KB a request."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
