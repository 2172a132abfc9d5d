"""Sheared LLaMA: learn which layers, heads and channels to keep to reach an exact target shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

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
    from ridgeline.runtime.compress_build import CompressBuild, ModelJob


class ShearedLLaMA(Technique):
    """Train masks over layers, heads, hidden and inner channels together with the weights, with Lagrange multipliers
    that drive them to a target shape; cut the model to exactly that shape. Continue with ``ridgeline train`` and
    dynamic_batch_loading."""

    card: ClassVar[Card] = Card(
        name="sheared_llama",
        title="Sheared LLaMA",
        paper="arXiv:2310.06694",
        taxonomy="training/compression/pruning",
        tasks=frozenset({"compress", "generate", "serve"}),
        lossless=False,
        claim="1.3B and 2.7B models from LLaMA2-7B with 3 % of the compute of training them from scratch",
        tolerance=0.09,
        quality="the shape asked for exactly; after the same training a lower loss than the same shape from scratch",
        runs_in=frozenset({"compress"}),
        example={"intermediate": 32},
        owns=frozenset({"model_shape"}),
    )
    phase: ClassVar[Phase] = "adapt"
    order: ClassVar[int] = PRUNE - 2
    """Before everything else, since it changes the model's sizes."""

    layers: int = Field(default=0, ge=0)
    """Number of layers to keep; 0: all."""
    hidden: int = Field(default=0, ge=0)
    """Number of hidden channels to keep; 0: all."""
    heads: int = Field(default=0, ge=0)
    """Number of query heads to keep in every layer, in whole groups that share a key/value head; 0: all."""
    intermediate: int = Field(default=0, ge=0)
    """Number of inner channels to keep in every layer; 0: all."""
    steps: int = Field(default=3200, ge=1)
    """Number of steps that train masks and weights."""
    batch: int = Field(default=32, ge=1)
    """Calibration windows per step."""
    warmup: float = Field(default=0.2, ge=0, le=1)
    """Fraction of the steps during which the target moves from the whole model to the final shape."""
    lr: float = Field(default=1e-4, ge=0)
    """Learning rate of the weights."""
    mask_lr: float = Field(default=1.0, gt=0)
    """Learning rate of the masks and of the multipliers."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: the loss in quality is not predicted, so a search would always choose it."""
        return []

    def check(self, e: Experiment) -> None:
        """The shape must be smaller, consist of whole groups, and be expressible in the configuration."""
        m = e.model
        self.needs(m.causal and not m.is_encoder_decoder, f"{m.name} is not a decoder", "use a decoder")
        shape = {
            "layers": (self.layers, m.num_layers), "hidden": (self.hidden, m.hidden_size),
            "heads": (self.heads, m.num_heads), "intermediate": (self.intermediate, m.intermediate_size),
        }  # fmt: skip
        for name, (left, whole) in shape.items():
            self.needs(left <= whole, f"{name}={left} exceeds the {whole} of {m.name}", f"use at most {whole}")
        self.needs(any(0 < left < whole for left, whole in shape.values()), f"that is the shape of {m.name} already",
                   "give a smaller one, such as intermediate=" + str(m.intermediate_size // 2))  # fmt: skip
        share = m.num_heads // m.num_kv_heads
        self.needs(self.heads % share == 0, f"heads={self.heads} is not made of whole groups of {share}",
                   f"use a multiple of {share}")  # fmt: skip
        self.needs(self.hidden in (0, m.hidden_size) or m.norm == "rmsnorm",
                   "a LayerNorm's mean changes without some hidden channels", "leave hidden out")  # fmt: skip
        self.needs(self.layers in (0, m.num_layers) or m.moe_every == 1,
                   "which layers are mixtures goes by their number", "leave layers out")  # fmt: skip
        new = self.resized(m)
        self.needs(m.family != "llama" or new.hidden_size % new.num_heads == 0,
                   f"transformers' Llama wants the hidden size ({new.hidden_size}) to be a multiple of the number of "
                   f"heads ({new.num_heads})", "choose them so")  # fmt: skip
        try:
            to_hf_config(new)
        except UserError as why:
            self.needs(False, why.what, "leave heads and hidden out")

    def resized(self, spec: ModelSpec) -> ModelSpec:
        """The requested shape."""
        hidden, heads = self.hidden or spec.hidden_size, self.heads or spec.num_heads
        return spec.changed(
            num_layers=self.layers or spec.num_layers, hidden_size=hidden, num_heads=heads,
            num_kv_heads=heads * spec.num_kv_heads // spec.num_heads,
            intermediate_size=self.intermediate or spec.intermediate_size,
            norm_eps=spec.norm_eps * spec.hidden_size / hidden, published_parameters=None,
        )  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The graph of the smaller model."""
        return resized(g, e.model, self.resized(e.model))

    def compress(self, run: CompressBuild) -> None:
        """Needs the whole model, its gradients and optimizer states in memory."""
        run.whole.append(lambda job: self._shear(run, job))

    def _shear(self, run: CompressBuild, job: ModelJob) -> None:
        from ridgeline.techniques.pruning.sheared_llama_torch import Shearing, shear

        seed = run.experiment.workload.seed
        how = Shearing(self.steps, self.batch, self.warmup, self.lr, self.mask_lr, seed)
        job.model = shear(job.model, job.windows, self.resized(job.model.spec), how, job.report)
