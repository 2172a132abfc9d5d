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

from ridgeline.graph.graph import AFTER_AMPERE, BIASED, PORTABLE, Op
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.spec.device import Cluster, Device


class InStepFactors(NamedTuple):
    """Factors on the seconds of operators, and additional costs of a step."""

    gemm: float = 1.0
    """All matrix products except fused attention."""
    attention: float = 1.0
    """Fused attention."""
    biased: float = 1.0
    """Fused attention that adds a bias to its scores, with heads of 128."""
    narrow: float = 1.0
    """The same with heads of up to 64, relative to 128."""
    portable: float = 1.0
    """Fused attention with Ampere kernels on a newer device."""
    pointwise: float = 1.0
    """Memory-bound operators: norms, activations, residual additions, losses, casts; eager frameworks run several
    kernels for each."""
    fused: float = 1.0
    """The same where they are fused into one kernel, by hand or by a compiler."""
    dispatch: float = 0.0
    """Seconds that the host takes to launch one operator; the device waits when it is faster."""
    sustained: float = 1.0
    """Share of the peak that matrix products sustain at the power limit."""
    spread: float = 0.0
    """Relative standard deviation of one rank's step time: a step ends with the slowest of its ranks."""

    def seconds(self, op: Op, alone: float, device: Device) -> float:
        """Seconds of an operator that takes ``alone`` by itself."""
        name = group(op.kind, op.kernel)
        took: float = alone * getattr(self, name) if name else alone
        if name == BIASED and op.shape and op.shape[-1] <= NARROW:
            took *= self.narrow
        if name == BIASED and device.architecture.lower() in AFTER_AMPERE:  # no faster there than the second generation
            took = max(took, alone * self.portable)
        if name == "gemm" and self.sustained < 1.0:
            lasting = self.sustained * peak_flops(device, op.dtype) * (2 if op.sparse else 1)
            return max(took, op.flops / lasting)
        return took

    def straggling(self, ranks: int) -> float:
        """Relative delay of the slowest of ``ranks``: the expected maximum of n normal variables is about √(2 ln n)
        σ."""
        return self.spread * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


_GROUP = {"gemm": "gemm", "bmm": "gemm", "attention": "attention", "optimizer": "", "clip": "", "quantize": "",
          "accumulate": ""}  # fmt: skip
_HOT, _HOT_ALONE = 0.60, 0.72
"""Share of its peak that an H100 SXM sustains at its power limit, as one of many and alone (see
:func:`sustained_share`)."""
_FLOPS_PER_JOULE = {"hopper": 989.4e12 / 700, "blackwell": 2250e12 / 1000}
"""Peak by power limit of the cards of an architecture that the share is stated for; Blackwell's share is assumed to be
Hopper's. Cards of earlier architectures have watts to spare."""
GROUPS = ("gemm", "attention", "biased", "pointwise", "fused")
NARROW = 64
"""Width of a head up to which FlashAttention's first generation is closer to the second."""
ALONE = InStepFactors()
"""Operators as timed in isolation."""
TRAINING = InStepFactors(
    gemm=1.075,
    attention=1.075,
    biased=1.66,
    narrow=0.8,
    portable=1.78,
    pointwise=2.45,
    fused=1.50,
    dispatch=5e-5,
    spread=0.004,
)
"""biased, narrow, pointwise: fitted on llm-foundry's published runs, which all have ALiBi. Kernels that take a bias are
of FlashAttention's first generation; the second is twice as fast with heads of 128, less with 64 (arXiv:2307.08691,
figure 4). gemm, fused: on Megatron-LM's, which llm-foundry's alone would have at 1.02 and 1.7, and others worse.
attention: as hot as gemm (assumption). portable: as hot, and FlashAttention-3 is 1.74 times as fast forward (the mean
of figure 5's ten ratios from 1k to 16k tokens, heads of 128, in arXiv:2407.08608), 1.5 to 1.75 backward (its section
4.1), which counts two and a half times. dispatch: Python, autograd and the several kernels of one operator in an eager
framework; a 7B Llama of Hugging Face decodes a token in 25 ms whatever the GPU, 16 operators a layer (assumption; the
published fine-tuning runs of one short sequence agree). spread: assumption, which fits the loss of 1-2 % from one node
to a hundred."""
FUSED_DISPATCH = 8e-6
"""Seconds to launch one fused kernel (assumption)."""
FETCH = 2.5e-4
"""Seconds of the host to gather and release one tensor in DeepSpeed's hooks (from full fine-tuning of Qwen on one and
two cards, whose steps of short sequences take as long as ones of 2048 tokens)."""


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
    alone = cluster.size == 1 and device.architecture == "hopper"
    hot = TRAINING._replace(sustained=sustained_share(device, alone))
    if fused:  # ours were measured on one Hopper GPU, where they take as long in a step as by themselves
        return hot._replace(pointwise=1.0 if alone else TRAINING.fused, dispatch=FUSED_DISPATCH)
    return hot


def sustained_share(device: Device, alone: bool = False) -> float:
    """The share of a device's peak that matrix products sustain for minutes at its power limit.

    A short measurement runs at the boost clock, a training run does not. This limits the kernels that come closest to
    the peak, not those that wait for memory or for launches. 0.6 on an H100 gives the published 41 to 43 % of the peak
    of Llama 3 405B at 8192 tokens (arXiv:2407.21783, table 4) and Nemotron-4 340B (arXiv:2406.11704, table 2), in which
    it stands for what else thousands of GPUs lose. ``alone``: 0.72, of products in steps of Llama 3.2 1B on one H100
    at 690 W for ten seconds (``benchmarks/results/gpu_h100/earlier_calls.json``). A card of less power loses by its
    square root: dynamic power grows with the square of the clock or faster, as voltage does. The time of fused
    attention by itself has that already.
    """
    peak = device.peak_flops.get("bf16", 0.0)
    usual = _FLOPS_PER_JOULE.get(device.architecture)
    if not device.watts or not peak or usual is None:
        return 1.0
    share: float = (_HOT_ALONE if alone else _HOT) * math.sqrt(usual * device.watts / peak)
    return min(1.0, share)
