"""Hot neurons (PowerInfer): often active neurons on the device, the others in host memory and computed when predicted
to be active."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ridgeline.data.text import paths_of
from ridgeline.graph.graph import Block, Graph, Op, Param, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.memory.zero_inference import arriving, weights_change
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build

_SKEW = math.log(0.80) / math.log(0.26)
"""Exponent of the share of activations that a share of the neurons covers: 26 % of OPT-30B's neurons are 80 % of its
activations (arXiv:2312.12456, section 3)."""
_UP, _DOWN = "mlp.up_proj", "mlp.down_proj"


class HotNeurons(Technique):
    """Keep the neurons of feed-forward layers that are active most often on the device, chosen by an integer linear
    program from a profile; the others stay in host memory, where the processor computes those that a small network
    predicts to be active (PowerInfer). For models with ReLU, whose other neurons contribute nothing.

    The profile and the predictors are made when the model is loaded, and kept in Ridgeline's cache.
    """

    card: ClassVar[Card] = Card(
        name="hot_neurons",
        title="Hot neurons",
        paper="arXiv:2312.12456",
        taxonomy="inference/offload/neurons",
        tasks=frozenset({"generate"}),
        lossless=False,
        quality="perplexity of a ReLU model within 1 % at the default threshold; exact at threshold 0",
        claim="13.2 tokens/s on average, at most 29.1, on an RTX 4090; up to 11.69x llama.cpp",
        owns=frozenset({"resting_weights"}),
        conflicts={
            "weights": "{other} stores the projections in codes, whose neurons do not come singly",
            "products": "{other} computes the projections' products itself",
            "divided_linears": "{other} divides the neurons over ranks",
            "low_rank": "{other} adds to the projections' results",
        },
        tolerance=0.02,
        example={"hot": 0.25, "tokens": 256, "rows": 64, "threshold": 0.2},
        needs_model={"activation": "relu", "gated": False},
    )
    phase: ClassVar[Phase] = "offload"

    hot: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Fraction of the feed-forward weights on the device; auto: the one with the highest predicted throughput."""
    threshold: float = Field(default=0.1, ge=0, lt=1)
    """Predicted probability above which a neuron outside the device is computed; 0: all are."""
    rank: int | None = Field(default=None, ge=1)
    """Width of the predictors; None: a sixteenth of the hidden size, at least 16."""
    profile: str | None = None
    """Text that the model is profiled on, as ``data`` of training; None: text that the model generates itself."""
    tokens: int = Field(default=4096, ge=16)
    """Tokens of the profile."""
    rows: int = Field(default=8, ge=1)
    """Largest number of tokens for which neurons are predicted: more of them need nearly all."""
    active: float = Field(default=0.1, gt=0, le=1)
    """Fraction of neurons that a token activates, for predictions (the paper: less than a tenth in OPT-30B)."""

    def reads(self) -> tuple[Path, ...]:
        """The profile's text."""
        return () if self.profile is None else tuple(paths_of(self.profile))

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what it saves depends on the model's activations, which a plan does not know."""
        return []

    def check(self, e: Experiment) -> None:
        """Neurons must be inactive exactly, as after a ReLU."""
        m = e.model
        self.needs(m.activation == "relu" and not m.gated and not m.num_experts,
                   f"{m.name}'s feed-forward layers have no plain ReLU: no neuron is exactly inactive",
                   "offload whole layers (zero_inference), or use a ReLU model such as OPT")  # fmt: skip

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """The share with the highest predicted throughput of those that fit, in whole percent, where it was left to the
        predictor: the device computes all its neurons, so that many rarely active ones may cost more than they save."""
        if self.hot != "auto" or e.model.activation != "relu":
            return self
        low, high = 0, 101
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._rate(middle, e, ask) else (low, middle)
        rates = {percent: self._rate(percent, e, ask) for percent in {low * k // 8 for k in range(9)}}
        return self._with(max(rates, key=lambda percent: (rates[percent], percent)))

    def _rate(self, percent: int, e: Experiment, ask: Ask) -> float:
        """Predicted tokens/s; 0 where it does not fit."""
        try:
            found = ask(self._with(percent).placed(e))
        except UserError:
            return 0.0
        return found.metrics["tokens_per_s"].value if found.status == "ok" else 0.0

    def _with(self, percent: int) -> HotNeurons:
        return self.model_copy(update={"hot": percent / 100})

    @property
    def share(self) -> float:
        """Fraction on the device; none before the predictor has resolved it."""
        return 0.0 if self.hot == "auto" else self.hot

    def width(self, hidden: int) -> int:
        """Inner width of the predictors."""
        return self.rank or max(16, hidden // 16)

    def computed(self, tokens: int) -> float:
        """Expected fraction of the neurons outside the device that ``tokens`` tokens need."""
        if self.threshold == 0 or tokens > self.rows:
            return 1.0
        if self.share == 1:
            return 0.0
        each = self.active * (1 - self.share**_SKEW) / (1 - self.share)
        return 1.0 - float((1 - min(1.0, each)) ** tokens)

    def reads_itself(self, e: Experiment) -> tuple[str, ...]:
        """All feed-forward layers, unless another technique changes their weights when the model is built."""
        return () if weights_change(self, e) else tuple(f"layers.{i}.mlp." for i in range(e.model.num_layers))

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The device computes its neurons and the predictors; beside it the host computes what they predict."""
        if self.share == 1:
            return g
        piece = 0.0

        def layer(b: Block) -> None:
            nonlocal piece
            weights = [p for p in b.params if p.name in (f"{_UP}.weight", f"{_DOWN}.weight")]
            cold = sum(p.stored_bytes for p in weights) * (1 - self.share)
            for p in weights:
                p.resident = self.share
            g.host_bytes += cold * b.repeat
            piece = max(piece, cold / PIECES)
            self._layer(b, g, e, cold)

        g.each_block(layer, layers_only=True)
        if e.cluster.device.kind == "gpu":  # through which a long prompt's weights pass
            g.weight_buffers += piece
        return g

    def _layer(self, b: Block, g: Graph, e: Experiment, cold: float) -> None:
        m, t, width = e.model, g.tokens, DTYPE_BYTES[e.dtype]
        gpu = e.cluster.device.kind == "gpu"
        predicts = self.threshold > 0
        outside = m.intermediate_size * (1 - self.share)
        if predicts:
            rank = self.width(m.hidden_size)
            sizes = {"mlp.predictor.inner": (rank, m.hidden_size), "mlp.predictor.outer": (round(outside), rank)}
            b.params += [
                Param(f"{name}.weight", n * k, e.dtype, False, width, (n, k)) for name, (n, k) in sizes.items()
            ]
        many = t > self.rows or not predicts
        if many and t > self.rows:
            b.gather_forward += arriving("neurons", cold, False, e, "") if gpu else []
            return
        need = self.computed(t)
        on_device = self.share + (0.0 if gpu else (1 - self.share) * need)
        b.forward = [_fewer(o, on_device) for o in b.forward]
        if predicts:
            at = next(i for i, o in enumerate(b.forward) if o.name == _UP)
            b.forward[at:at] = [
                Op(name, "mlp", "gemm", flops=2.0 * t * n * k, bytes=(t * n + t * k + n * k) * width, dtype=e.dtype,
                   shape=(t, n, k), param=f"{name}.weight")
                for name, (n, k) in sizes.items()
            ]  # fmt: skip
        if gpu:
            states = t * m.hidden_size * width
            b.gather_forward += [
                host_copy("neurons.in", "d2h", states, "forward"),
                changed(host_copy("neurons", "host_product", cold * need, "forward"), behind="layers"),
                host_copy("neurons.out", "h2d", states, "forward"),
            ]

    def apply(self, run: Build) -> None:
        """Profile the model, place its neurons, and train the predictors of those outside the device."""
        from ridgeline.techniques.memory.hot_neurons_torch import divide_neurons

        divide_neurons(run, self)


PIECES = 8
"""Parts in which the weights outside the device pass through it for a long prompt."""


def _fewer(op: Op, share: float) -> Op:
    """The operator for this share of the neurons."""
    if op.name == "mlp.act":
        return changed(op, bytes=op.bytes * share)
    if op.name not in (_UP, _DOWN):
        return op
    m, n, k = op.shape
    n, k = (max(1, round(n * share)), k) if op.name == _UP else (n, max(1, round(k * share)))
    rows, out, inner = op.shape
    width = op.bytes / (rows * out + rows * inner + out * inner)
    return changed(op, flops=2.0 * m * n * k, bytes=(m * n + m * k + n * k) * width, shape=(m, n, k))
