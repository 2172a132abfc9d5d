"""Operators of a GPU that several libraries compute, and the back ends of each. The first one is taken unless
`ridgeline probe` has measured another to be faster, or the workload's ``kernels`` asks for one.

The back ends themselves are in :mod:`ridgeline.nn.kernels.backends`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.spec.errors import unknown

OURS = "ridgeline"
"""Our own kernels: in Triton, or PyTorch's operators around them."""
BACKENDS: dict[str, tuple[str, ...]] = {
    "attention.decode": (OURS, "torch", "flash-attn", "flash-attn-3"),
    "attention.prefill": (OURS, "torch", "flash-attn", "flash-attn-3", "flashinfer"),
    "norm": (OURS, "liger"),
    "swiglu": (OURS, "liger"),
    "head_loss": (OURS, "liger"),
    "float8": (OURS, "torch"),
    "experts": (OURS, "torch"),
    "dense": ("torch", OURS),
    "adapters": (OURS, "torch"),
}
"""By operator: attention over the pages of a serving step with one new token for each sequence, and of steps with
prompts or drafts; the RMS norms and the gated activation of fused layers; the head with its loss, in chunks; of served
models, products of 9 to 128 rows in float8 on Hopper, quantized experts, all at once or one after the other, on
Hopper products of 2 to 128 rows in 16 bits, and what plain LoRA adapters add, for all rows at once or one adapter after
the other."""


def checked(asked: Mapping[str, Any]) -> dict[str, str]:
    """What a workload asks for, by operator; a name without a dot stands for all operators that begin with it, but for
    those that are named themselves (tables within tables: as TOML has dotted keys). Raises :class:`UserError` for
    unknown names."""
    found: dict[str, str] = {}
    for name, backend in sorted(_named(asked, ""), key=lambda pair: pair[0].count(".")):  # general ones first
        meant = [o for o in BACKENDS if o == name or o.startswith(f"{name}.")]
        if not meant:
            raise unknown("operator", name, BACKENDS, "kernels")
        able = [o for o in meant if backend in BACKENDS[o]]
        if not able:
            known = dict.fromkeys(b for o in meant for b in BACKENDS[o])
            raise unknown(f"back end of {name}", str(backend), known, "kernels")
        found |= dict.fromkeys(able, backend)
    return found


def _named(asked: Mapping[str, Any], within: str) -> Iterator[tuple[str, Any]]:
    """(whole name, back end) of everything in tables within tables."""
    for key, backend in asked.items():
        if isinstance(backend, Mapping):
            yield from _named(backend, f"{within}{key}.")
        else:
            yield within + key, backend


def order(operator: str, measured: Mapping[str, float]) -> list[str]:
    """Back ends of an operator, best first: by the seconds that were measured on the device, then as listed."""
    names = BACKENDS[operator]
    return sorted(names, key=lambda b: (measured.get(b, float("inf")), names.index(b)))
