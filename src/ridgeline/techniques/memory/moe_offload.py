"""Expert offloading: a mixture's experts are stored off the device; recently used ones are cached on it, and the next
ones are prefetched speculatively."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.memory.zero_inference import arriving, weights_change
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build

_EXPERTS = "mlp.experts."


class MoEOffload(Technique):
    """Keep a mixture's experts in host memory or on disk, and on the device only each layer's most recently used ones;
    while a layer computes, prefetch the experts that the next layer's router picks for this layer's input (Eliseev and
    Mazur). Experts may be quantized differently from the rest; they are transferred as stored."""

    card: ClassVar[Card] = Card(
        name="moe_offload",
        title="Expert offloading",
        paper="arXiv:2312.17238",
        taxonomy="inference/offload/experts",
        tasks=frozenset({"generate", "serve"}),
        lossless=True,
        claim="Mixtral-8x7B in mixed quantization at 2 to 3 tokens/s on desktop GPUs of 12 to 16 GB, 3 to 4 times the"
        " naive offloading of experts",
        owns=frozenset({"resting_weights"}),
        conflicts={"divided_experts": "{other} divides the experts over ranks, and each keeps its own on the device"},
        needs_model={"family": "mixtral", "num_experts": 4, "experts_per_token": 2},
    )
    phase: ClassVar[Phase] = "offload"
    captured: ClassVar[bool] = False

    parameters: Literal["cpu", "nvme"] = "cpu"
    """Where experts are stored: host memory or disk."""
    experts: int = Field(default=2, ge=1)
    """Number of experts per layer that are cached on the device."""
    policy: Literal["lru", "lfu"] = "lru"
    """Which cached expert is evicted: the least recently or the least frequently used."""
    staging: int = Field(default=4, ge=1)
    """Additional buffers into which experts are fetched."""
    guess: int = Field(default=2, ge=0)
    """Number of experts per token that are prefetched for the next layer; 0: no prefetching."""
    hit_rate: float | None = Field(default=None, ge=0, le=1)
    """Assumed cache hit rate for predictions; None: the cached fraction of all experts, as if routing had no
    locality."""
    recall: float = Field(default=0.8, ge=0, le=1)
    """Fraction of cache misses that are prefetched, for predictions (the paper: 0.8 to 0.9 one layer ahead)."""
    path: str | None = None
    """Directory for experts on disk that no checkpoint stores in the required form; None: Ridgeline's cache."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Both tiers, caching a quarter, half and three quarters of the experts."""
        if not e.model.num_experts:
            return []
        kept = sorted({max(1, e.model.num_experts * k // 4) for k in range(1, 4)})
        return [cls(parameters=tier, experts=n) for tier in ("cpu", "nvme") for n in kept]

    def check(self, e: Experiment) -> None:
        """Needs a mixture with more experts than each layer caches."""
        m = e.model
        self.needs(m.num_experts > 0, f"{m.name} has no experts", "offload whole layers instead")
        self.needs(self.experts <= m.num_experts, f"experts={self.experts} of {m.num_experts}",
                   f"use experts={m.num_experts} or less")  # fmt: skip
        self.needs(self.guess <= m.num_experts, f"guess={self.guess} of {m.num_experts} experts",
                   f"use guess={m.num_experts} or less")  # fmt: skip

    def reads_itself(self, e: Experiment) -> tuple[str, ...]:
        """All experts, unless another technique changes them when the model is built."""
        if weights_change(self, e):
            return ()
        return tuple(f"layers.{i}.{_EXPERTS}" for i in range(e.model.num_layers))

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Add copies of the experts that miss the cache, and the memory of the cached ones."""
        all_experts = e.model.num_experts
        hits = self.experts / all_experts if self.hit_rate is None else self.hit_rate
        buffer = 0.0

        def layer(b: Block) -> None:
            nonlocal buffer
            held = [p for p in b.params if p.name.startswith(_EXPERTS)]
            if not held:
                return
            each = sum(p.stored_bytes for p in held) / all_experts
            # None in a step of the decoder's, whose encoder has run before.
            needed = max((op.experts for op in b.forward if op.param.startswith(_EXPERTS)), default=0)
            missing = needed * (1 - hits)
            found = self.recall if self.guess else 0.0
            disk = self.parameters == "nvme"
            for name, count, how in (("guessed", missing * found, "layers"), ("missing", missing * (1 - found), "")):
                if count:
                    b.gather_forward += arriving(f"experts.{name}", count * each, disk, e, how, requests=count)
            for p in held:
                p.resident = self.experts / all_experts
                g.host_bytes += 0.0 if disk else p.stored_bytes * b.repeat
            buffer = max(buffer, each)

        g.each_block(layer, layers_only=True)
        g.weight_buffers += buffer * self.staging
        return g

    def apply(self, run: Build) -> None:
        """Move the experts to where they are stored, after checking that the disk is usable."""
        from pathlib import Path

        from ridgeline.paths import cache_dir
        from ridgeline.techniques.memory.moe_offload_torch import offload_experts

        folder = Path(self.path).expanduser() if self.path else cache_dir() / "offload"
        offload_experts(run, folder if self.parameters == "nvme" else None, self.experts, self.staging, self.policy,
                        self.guess)  # fmt: skip
