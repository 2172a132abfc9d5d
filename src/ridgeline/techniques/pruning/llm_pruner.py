"""LLM-Pruner: remove whole heads and channels by their importance for the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.build_graph import resized
from ridgeline.graph.graph import Graph
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.quantization.weight_only import PRUNE
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from torch import Tensor

    from ridgeline.runtime.compress_build import CompressBuild, ModelJob


class LLMPruner(Technique):
    """Remove the coupled slices of the least important heads and inner channels of every layer (or hidden channels of
    the whole model). All layers keep the same shape, so the result is a plain checkpoint with smaller sizes."""

    card: ClassVar[Card] = Card(
        name="llm_pruner",
        title="LLM-Pruner",
        paper="arXiv:2305.11627",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="94.97 % of the original performance is kept with 20 % fewer parameters",
        tolerance=0.09,
        quality="the smaller model computes exactly what the whole one does with the pruned units at zero",
        runs_in=frozenset({"compress"}),
        example={"multiple": 4},
        owns=frozenset({"model_shape"}),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = PRUNE - 2
    """Before everything else, since it changes the model's sizes."""

    ratio: float = Field(default=0.2, gt=0, lt=1)
    """Fraction of the blocks' parameters to remove, as closely as whole units allow."""
    mode: Literal["block", "channel"] = "block"
    """What is removed: heads and inner channels of each layer, or hidden channels of the whole model."""
    importance: Literal["param_first", "vectorize", "param_second", "param_mix", "l2", "random"] = "param_first"
    """Importance of a unit: first-order Taylor by weight or by slice, second-order, both; or baselines without data."""
    heads: bool = True
    """Whether heads are removed too; False: inner channels only."""
    multiple: int = Field(default=8, ge=1)
    """The number of remaining channels is a multiple of this."""
    samples: int = Field(default=10, ge=1)
    """Calibration windows on which gradients are computed."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: the loss in quality is not predicted, so a search would always choose it."""
        return []

    def check(self, e: Experiment) -> None:
        """The configuration must be able to express the model's smaller shape."""
        m = e.model
        self.needs(m.causal and not m.is_encoder_decoder, f"{m.name} is not a decoder", "use a decoder")
        self.needs(self.mode == "block" or m.norm == "rmsnorm",
                   "a LayerNorm's mean changes without some hidden channels", "use mode=block")  # fmt: skip
        new = self.resized(m)
        self.needs(new.num_parameters < m.num_parameters, f"nothing of {m.name} goes at ratio {self.ratio}",
                   "raise ratio or lower multiple")  # fmt: skip
        if new.num_heads != m.num_heads or self.mode == "channel":
            try:
                to_hf_config(new)
            except UserError as why:
                self.needs(False, why.what, "use heads=False")

    def resized(self, spec: ModelSpec) -> ModelSpec:
        """Sizes whose blocks come nearest to the fraction that remains. transformers' Llama requires the hidden size to
        be a multiple of the number of heads, whatever ``head_dim`` is, so numbers of heads that do not divide it are
        skipped."""
        left = 1 - self.ratio
        if self.mode == "channel":
            step = math.lcm(self.multiple, spec.num_heads if spec.family == "llama" else 1)
            hidden = _rounded(spec.hidden_size * left, spec.hidden_size, step)
            eps = spec.norm_eps * spec.hidden_size / hidden
            return spec.changed(hidden_size=hidden, norm_eps=eps, published_parameters=None)
        queries = spec.num_heads // spec.num_kv_heads
        counts = [
            n
            for n in range(1, spec.num_kv_heads + 1)
            if n == spec.num_kv_heads or spec.family != "llama" or spec.hidden_size % (n * queries) == 0
        ]
        kv = min(counts, key=lambda n: (abs(n - left * spec.num_kv_heads), -n)) if self.heads else spec.num_kv_heads
        update = {"num_kv_heads": kv, "num_heads": kv * queries,
                  "published_parameters": None}  # fmt: skip
        narrow = spec.changed(**update, intermediate_size=1)
        each = _in_blocks(narrow.changed(intermediate_size=2)) - _in_blocks(narrow)
        inner = 1 + (left * _in_blocks(spec) - _in_blocks(narrow)) / each
        return spec.changed(**update, intermediate_size=_rounded(inner, spec.intermediate_size, self.multiple))

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The graph of the smaller model."""
        return resized(g, e.model, self.resized(e.model))

    def compress(self, run: CompressBuild) -> None:
        """Needs the whole model and its gradients in memory."""
        run.whole.append(lambda job: self._prune(run, job))

    def _prune(self, run: CompressBuild, job: ModelJob) -> None:
        from ridgeline.runtime.structure import Place, cut
        from ridgeline.techniques.pruning.llm_pruner_torch import saliency

        old = job.model.spec
        new = self.resized(old)
        windows = job.windows[: self.samples]
        worth = saliency(job.model, windows, self.importance, run.experiment.workload.seed,
                         lambda i: job.report({"stage": f"gradients of window {i + 1} of {len(windows)}"}))  # fmt: skip
        stays = {"hidden": new.hidden_size, "heads": new.num_kv_heads, "inner": new.intermediate_size}
        keep: dict[Place, Tensor] = {}
        for place, scores in worth.items():
            if stays[place[0]] < len(scores):
                keep[place] = scores.topk(stays[place[0]]).indices.sort().values
        job.model = cut(job.model, keep)
        share = 1 - _in_blocks(new) / _in_blocks(old)
        job.report({"stage": f"pruned {share:.1%} of the blocks' parameters: {new.num_heads} heads, "
                             f"{new.intermediate_size} inner and {new.hidden_size} hidden channels"})  # fmt: skip


def _rounded(size: float, whole: int, step: int) -> int:
    return min(whole, max(1, round(size / step)) * step)


def _in_blocks(spec: ModelSpec) -> int:
    return sum(p.numel for p in spec.parameters() if p.block.startswith("layers."))
