"""Settings of glibc's allocator, for CPUs, where PyTorch has no caching allocator."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of ``mallopt`` (malloc.h)."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it to the kernel after every step.

    PyTorch has no caching allocator on CPUs: large tensors are mapped and unmapped again and again, and every step pays
    the page faults. Returns whether the setting took (Linux with glibc only).
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        ok = libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        return bool(ok and libc.mallopt(_TOP_PAD, 64 * 2**20))
    except (OSError, AttributeError):
        return False
