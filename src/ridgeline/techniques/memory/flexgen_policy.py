"""FlexGen's placement as a linear program (arXiv:2303.06865, section 4.3): the shares of weights, cache and activations
on the device, in host memory and on disk that minimize the time of a block of batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("weights", "cache", "activations")
TIERS = ("device", "host", "disk")
NAMES = tuple(f"{kind}_{tier}" for kind in KINDS for tier in TIERS)
Shares = dict[str, float]
"""A share in 0 to 1 by name; the three of each kind sum to 1."""


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one pass over a block of batches, by what would take them."""

    compute: float
    """With everything on the device."""
    copies: float = 0.0
    """Over the host link, if no weights were on the device."""
    weights_read: float = 0.0
    """From disk, if all weights were there."""
    attention: float = 0.0
    """In which the device waits for attention on the host, if the whole cache were outside it."""
    cache_moved: float = 0.0
    """To and from disk, if the whole cache were there."""
    activations_copied: float = 0.0
    """Over the host link, if no hidden states between layers were on the device."""
    activations_moved: float = 0.0
    """To and from disk, if all of them were there."""

    def streams(self, x: Shares, serial: bool) -> tuple[float, float, float]:
        """Seconds of computation, host link and disk, which work at the same time; ``serial``: but for copies, which
        take the processor that computes (and what is read from disk is where it computes)."""
        compute = self.compute + self.attention * (x["cache_host"] + x["cache_disk"])
        disk = self.weights_read * x["weights_disk"] + self.cache_moved * x["cache_disk"]
        disk += self.activations_moved * x["activations_disk"]
        if serial:
            return compute + self.copies * x["weights_host"], 0.0, disk
        link = self.copies * (x["weights_host"] + x["weights_disk"])
        return compute, link + self.activations_copied * (x["activations_host"] + x["activations_disk"]), disk


@dataclass(frozen=True)
class PolicyCosts:
    """What the linear program weighs. Every time is linear in the shares."""

    prefill: PassCosts
    decode: PassCosts
    steps: int
    """Decode steps."""
    weights: float
    """Bytes of all layers' weights."""
    cache: float
    """Bytes of keys and values at full length."""
    activations: float
    """Bytes of the hidden states of all batches between two layers, in the prefill."""
    device_bytes: float
    """Device memory for them, after workspace and what is always there."""
    host_bytes: float = math.inf
    """Host memory for them."""
    cache_on_disk: bool = True
    """Whether the cache has a form on disk."""
    serial: bool = False
    """Whether copies take the processor that computes."""

    def seconds(self, x: Shares) -> float:
        """Seconds of the whole block: in each pass, the slowest stream."""
        return max(self.prefill.streams(x, self.serial)) + self.steps * max(self.decode.streams(x, self.serial))

    def fits(self, x: Shares) -> bool:
        """Whether the shares are within the memories."""
        sizes = {"weights": self.weights, "cache": self.cache, "activations": self.activations}
        held = {tier: sum(x[f"{kind}_{tier}"] * sizes[kind] for kind in KINDS) for tier in ("device", "host")}
        slack = 1 + 1e-9
        return held["device"] <= self.device_bytes * slack and held["host"] <= self.host_bytes * slack


def place(c: PolicyCosts) -> Shares | None:
    """The shares that minimize :meth:`PolicyCosts.seconds` within the memories, and of these the ones with the least
    work in all streams, for no overlap is perfect; None where none fit."""
    from scipy.optimize import linprog

    zero = dict.fromkeys(NAMES, 0.0)
    rows: list[list[float]] = []
    bounds: list[float] = []
    work = [0.0] * len(NAMES)
    for i, (costs, times) in enumerate(((c.prefill, 1), (c.decode, c.steps))):
        base = costs.streams(zero, c.serial)
        slopes = [costs.streams({**zero, name: 1.0}, c.serial) for name in NAMES]
        for k, constant in enumerate(base):  # the pass takes at least constant + Σ slope · share
            rows.append([*(s[k] - constant for s in slopes), -1.0 if i == 0 else 0.0, -1.0 if i == 1 else 0.0])
            bounds.append(-constant)
        work = [w + times * (sum(s) - sum(base)) for w, s in zip(work, slopes, strict=True)]
    scale = max(c.weights + c.cache + c.activations, 1.0)
    for tier, room in (("device", c.device_bytes), ("host", c.host_bytes)):
        if math.isfinite(room):
            sizes = {f"{kind}_{tier}": getattr(c, kind) / scale for kind in KINDS}
            rows.append([*(sizes.get(name, 0.0) for name in NAMES), 0.0, 0.0])
            bounds.append(room / scale)
    sums = [[float(name.startswith(kind)) for name in NAMES] + [0.0, 0.0] for kind in KINDS]
    shares = [(0, int(c.cache_on_disk or name != "cache_disk")) for name in NAMES]
    seconds = [*[0.0] * len(NAMES), 1.0, float(c.steps)]
    equal = {"A_eq": sums, "b_eq": [1.0] * len(KINDS), "bounds": [*shares, (0, None), (0, None)], "method": "highs"}
    found = linprog(seconds, A_ub=rows, b_ub=bounds, **equal)
    if found.status != 0:
        return None
    least = linprog([*work, 0.0, 0.0], A_ub=[*rows, seconds], b_ub=[*bounds, found.fun * (1 + 1e-6)], **equal)
    found = least if least.status == 0 else found
    return {name: min(1.0, max(0.0, float(v))) for name, v in zip(NAMES, found.x, strict=False)}
