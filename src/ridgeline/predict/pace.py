"""The pace of a training step: how operators inside one differ from the same operators timed one by one.

In a step that runs for minutes the card is hot and at its power limit, nothing is warm in the cache, and a framework
copies and casts around its kernels. One factor per group of kinds says how much longer operators then take. They are
fitted on public training runs on A100 (``benchmarks/predict_training.py``), the same for all models and GPUs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ridgeline.spec.device import Cluster


class Pace(NamedTuple):
    """Factors on the seconds of operators, and what a step costs beside them."""

    gemm: float = 1.0
    """All matrix products but fused attention."""
    attention: float = 1.0
    """Fused attention."""
    pointwise: float = 1.0
    """What only moves bytes: norms, activations, residual additions, losses, casts, the optimizer."""
    dispatch: float = 0.0
    """Seconds that the host spends to launch one operator; the device waits when it is faster."""
    spread: float = 0.0
    """Relative standard deviation of one rank's step time: a step ends with the slowest of its ranks."""

    def of(self, kind: str) -> float:
        """The factor of a kind of operator."""
        return self[GROUPS.index(group(kind))]

    def straggling(self, ranks: int) -> float:
        """Relative delay of the slowest of ``ranks``: the mean maximum of n normal draws is about √(2 ln n) σ."""
        return self.spread * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


GROUPS = ("gemm", "attention", "pointwise")
ALONE = Pace()
"""Operators as they are timed one by one."""
TRAINING = Pace(gemm=1.0, attention=1.0, pointwise=1.0, dispatch=8e-6, spread=0.004)
"""gemm, attention, pointwise: fitted on llm-foundry's and Megatron-LM's published runs. dispatch: an eager framework's
launch (assumption). spread: assumption, which fits the loss of 1-2 % from one node to a hundred."""


def group(kind: str) -> str:
    """The group of a kind of operator."""
    if kind in ("gemm", "bmm"):
        return "gemm"
    return "attention" if kind == "attention" else "pointwise"


def training_pace(cluster: Cluster) -> Pace:
    """The pace on this cluster: a CPU's, and a device's measured in real steps, needs no factors."""
    device = cluster.device
    if device.kind != "gpu":
        return ALONE
    return ALONE._replace(spread=TRAINING.spread) if device.rates else TRAINING
