"""Launches of Triton kernels in less time of the host: Triton binds, describes and looks up each anew, and reads
settings of the environment. Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ridgeline.nn.kernels.dispatch import library_was_last
from ridgeline.nn.kernels.target import capability

_OWN = JITFunction.__module__
EARLIEST = 90
"""Compute capability from which kernels may start early (:mod:`~ridgeline.nn.kernels.early`)."""


@triton.jit
def _nothing():
    pass


COMPILED = tl.constexpr(isinstance(_nothing, JITFunction))
"""Whether kernels are, and not in Triton's interpreter, which has no assembly."""


def blocks(n: int, size: int) -> int:
    """Blocks of ``size`` that hold ``n``: Triton's function is made for kernels too, and slower."""
    return -(-n // size)


def power(n: int) -> int:
    """The least power of two that is at least ``n`` (1 or more), likewise."""
    return 1 << (n - 1).bit_length()


def tile(n: int, columns: int) -> tuple[bool, int]:
    """Whether rows of ``n`` are processed in tiles of ``columns``, and how many numbers a program holds of each."""
    folded = 0 < columns < n
    return folded, columns if folded else power(n)


def warps(size: int) -> int:
    """So many that a thread holds at most 16 of ``size`` numbers of a row."""
    return min(16, max(4, size // 512))


class Quick:
    """A kernel that is launched as ``kernel[grid](…)``, the first time of a kind by Triton, later by what that has
    compiled.

    Of a kind are launches on one device with the same constants and options, whose numbers are alike in what Triton
    compiles for: 1, a multiple of 16, more than 32 bits; tensors in their dtype, and whether they begin at a multiple
    of 16 bytes. A kernel's constant ``EARLY`` is given here, with the option for it, as the device can.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self.constant = [p.is_constexpr for p in kernel.params]
        self.early = any(p.name == "EARLY" for p in kernel.params)
        self.known: dict[tuple[Any, ...], tuple[Any, tuple[str, ...]]] = {}

    def __getitem__(self, grid):
        return partial(self.launch, grid)

    def completed(self, named: dict[str, Any]) -> dict[str, Any]:
        """Constants and options with those by which a kernel may start early. Not behind a served model's product by
        a library (:func:`~ridgeline.nn.kernels.dispatch.note_library`): there is nothing to gain, and steps of 8
        sequences of Llama 3.2 1B took 1.8 % longer on an H100."""
        library = library_was_last()
        if not self.early:
            return named
        if library or capability() < EARLIEST:
            return named | {"EARLY": False}
        return named | {"EARLY": True, "launch_pdl": True}

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> Any:
        """Launch it; constants and options may be given by name."""
        if torch.compiler.is_compiling():  # which knows Triton's kernels, and nothing of early starts
            return self.kernel[grid](*args, **named)
        named = self.completed(named)
        if JITFunction.run.__module__ != _OWN or self._observed():  # traced, compiled ahead of time, profiled
            return self.kernel[grid](*args, **named)
        active = driver.active
        device = active.get_current_device()
        facts: list[Any] = [device, *named.items()]
        for value, constant in zip(args, self.constant, strict=False):
            if constant:
                facts.append(value)
            elif isinstance(value, Tensor):
                facts += value.dtype, value.data_ptr() & 15 == 0
            elif type(value) is int:
                facts.append((value == 1) + 2 * (value & 15 == 0) + 4 * (-(1 << 31) <= value < 1 << 31))
            else:
                facts.append(type(value))
        key = tuple(facts)
        found = self.known.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **named)
            if compiled is not None:
                self.known[key] = compiled, tuple(p.name for p in self.kernel.params[len(args) :])
            return compiled
        compiled, rest = found
        given = (*args, *(named[n] for n in rest)) if rest else args
        stream = active.get_current_stream(device)
        sides = (*grid, 1, 1)[:3]
        compiled.run(*sides, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
        return compiled

    def _observed(self) -> bool:
        """Whether someone is called at launches, whom Triton tells about them."""
        runtime = knobs.runtime
        chains = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(self.kernel.pre_run_hooks or any(chain is not None and chain.calls for chain in chains))


def quick(kernel: Any) -> Any:
    """:class:`Quick` of a kernel; the kernel itself in Triton's interpreter."""
    return Quick(kernel) if isinstance(kernel, JITFunction) else kernel
