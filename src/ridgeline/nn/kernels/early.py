"""Kernels that start while the kernel before them still runs (programmatic dependent launch, from Hopper on; CUDA
programming guide, "Programmatic Dependent Launch and Synchronization"), in Triton.

A kernel with a constant ``EARLY`` is launched so by :class:`~ridgeline.nn.kernels.quick.Quick` where the device can.
It keeps two rules, so that it may stand behind and before any other kernel or copy, in a CUDA graph or not:

- every program of it comes to :func:`wait`, behind which everything that earlier kernels wrote can
  be read. As each kernel is finished only after it has waited, what was launched before the kernel before is finished
  too, and what any of them still read may be overwritten;
- before that it neither reads nor writes memory. It may have lines fetched into the second-level cache, which all
  processors share, and which holds what is written later, too: :func:`prefetch` never leaves anything stale.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)
"""Bytes of a line of the second-level cache."""
FEW = tl.constexpr(128)
"""Most rows of which each is worth fetching small things ahead: more of them share what the first has fetched."""


@triton.jit
def prefetch(place):
    """Have the line of each of these addresses, which must be valid, fetched into the second-level cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [place.to(tl.int64)], tl.int32, False, 1)


@triton.jit
def wait(EARLY: tl.constexpr):
    """Let the next kernel start, as soon as all programs of this one have come here, and wait for earlier ones."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
