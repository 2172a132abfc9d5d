"""In-step factors: how operators inside a training step differ from the same operators timed in isolation.

In a step that runs for minutes the card is hot and at its power limit, caches are cold, and a framework copies and
casts around its kernels. One factor per group of kinds says how much longer operators then take. They are fitted on
public training runs on A100 (``benchmarks/predict_training.py``), the same for all models and GPUs. Differences between
models and stacks are modeled separately: the kernel of attention, how many kernels a chain of small operators takes,
what is converted between number formats, what overlaps with what.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ridgeline.graph.graph import BIASED, PORTABLE, Op
from ridgeline.spec.device import Cluster, Device


class InStepFactors(NamedTuple):
    """Factors on the seconds of operators, and additional costs of a step."""

    gemm: float = 1.0
    """All matrix products except fused attention."""
    attention: float = 1.0
    """Fused attention."""
    biased: float = 1.0
    """Fused attention that adds a bias to its scores."""
    portable: float = 1.0
    """Fused attention with Ampere kernels on a newer device."""
    pointwise: float = 1.0
    """Memory-bound operators: norms, activations, residual additions, losses, casts; eager frameworks run several
    kernels for each."""
    fused: float = 1.0
    """The same where they are fused into one kernel, by hand or by a compiler."""
    dispatch: float = 0.0
    """Seconds that the host takes to launch one operator; the device waits when it is faster."""
    spread: float = 0.0
    """Relative standard deviation of one rank's step time: a step ends with the slowest of its ranks."""

    def of(self, op: Op) -> float:
        """The factor of an operator."""
        name = group(op.kind, op.kernel)
        return getattr(self, name) if name else 1.0

    def straggling(self, ranks: int) -> float:
        """Relative delay of the slowest of ``ranks``: the expected maximum of n normal variables is about √(2 ln n)
        σ."""
        return self.spread * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


_GROUP = {"gemm": "gemm", "bmm": "gemm", "attention": "attention", "optimizer": "", "clip": "", "quantize": ""}
_A100_FLOPS_PER_JOULE = 312e12 / 400
_THROTTLE = 0.31
_MOST_THROTTLED = 1.2
GROUPS = ("gemm", "attention", "biased", "pointwise", "fused")
ALONE = InStepFactors()
"""Operators as timed in isolation."""
TRAINING = InStepFactors(
    gemm=1.075, attention=1.075, biased=1.82, portable=1.6, pointwise=2.30, fused=1.50, dispatch=5e-5, spread=0.004
)
"""gemm, biased, pointwise: fitted on llm-foundry's published runs, which all have ALiBi. Kernels that take a bias are
of FlashAttention's first generation; the second is twice as fast (arXiv:2307.08691, figure 4). fused: on Megatron-LM's.
attention: as hot as gemm (assumption). portable: FlashAttention-3 is 1.5 to 2 times as fast forward, 1.5 to 1.75
backward (arXiv:2407.08608). dispatch: Python, autograd and the several kernels of one operator in an eager
framework; a 7B Llama of Hugging Face decodes a token in 25 ms whatever the GPU, 16 operators a layer (assumption; the
published fine-tuning runs of one short sequence agree). spread: assumption, which fits the loss of 1-2 % from one node
to a hundred."""
FUSED_DISPATCH = 8e-6
"""Seconds to launch one fused kernel (assumption)."""


def group(kind: str, kernel: str = "") -> str:
    """The group of a kind of operator; empty for those whose fusion is already counted."""
    return kernel if kernel in (BIASED, PORTABLE) else _GROUP.get(kind, "pointwise")


def training_factors(cluster: Cluster, fused: bool) -> InStepFactors:
    """Factors for this cluster: a CPU's, and a device's measured in real steps, are all 1."""
    device = cluster.device
    if device.kind != "gpu":
        return ALONE
    if device.rates:
        return ALONE._replace(spread=TRAINING.spread)
    hot = TRAINING._replace(gemm=TRAINING.gemm * throttle(device))
    return hot._replace(pointwise=TRAINING.fused, dispatch=FUSED_DISPATCH) if fused else hot


def throttle(device: Device) -> float:
    """How much longer matrix products take once the power limit has lowered the clock.

    A short measurement runs at the boost clock, a training run does not: the more FLOP/s per watt the datasheet
    promises, the less is sustained. 1 on an A100, on whose runs the factors are fitted, and 1.2 on an H100, which gives
    the published 41 and 43 % of the peak of Llama 3 405B at 8192 tokens (arXiv:2407.21783, table 4).
    """
    peak = device.peak_flops.get("bf16") or device.peak_flops.get("fp16") or 0.0
    if not device.watts or not peak:
        return 1.0
    factor: float = (peak / device.watts / _A100_FLOPS_PER_JOULE) ** _THROTTLE
    return min(_MOST_THROTTLED, max(1.0, factor))
