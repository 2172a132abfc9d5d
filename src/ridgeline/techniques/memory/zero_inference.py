"""ZeRO-Inference: weights are stored in host memory or on disk and fetched to the device layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Serve
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build

_CHANGES_WEIGHTS: frozenset[Part] = frozenset({
    "adapter_table", "divided_experts", "divided_linears", "divided_tensors", "experts", "fused_linears", "low_rank",
    "model_shape", "products", "weights", "zeros",
})  # fmt: skip
"""Parts that need the weights of a layer when the model is built."""


class ZeroInference(Technique):
    """Keep the weights of transformer layers in host memory or on disk and fetch each layer (or each projection) to the
    device when it computes, prefetching the next ones; the freed memory allows larger batches (DeepSpeed
    ZeRO-Inference).

    Layers on disk are read from the checkpoint's own files where these store them in the required form; otherwise they
    are written once to an unlinked file in ``path``.
    """

    card: ClassVar[Card] = Card(
        name="zero_inference",
        title="ZeRO-Inference",
        paper="arXiv:2207.00032",
        taxonomy="inference/offload/zero_inference",
        tasks=frozenset({"generate", "serve"}),
        lossless=True,
        example={"fetch": "modules", "prefetch": 0.5},
        claim="25x larger models than the device's memory holds, at up to 84 TFLOP/s on an A6000 (over 50 % of peak)",
        owns=frozenset({"resting_weights"}),
    )
    phase: ClassVar[Phase] = "offload"
    captured: ClassVar[bool] = False

    parameters: Literal["cpu", "nvme"] = "cpu"
    """Where the weights of layers are stored: host memory or disk."""
    fetch: Literal["layers", "modules"] = "layers"
    """What is fetched at a time: whole layers, or single projections (latent attention, and a mixture's experts with
    their router, as a whole), whose memory is free for the next ones as soon as each is computed."""
    prefetch: int | Annotated[float, Field(allow_inf_nan=False)] = Field(default=1, ge=0)
    """Number of layers to prefetch; 0: none, so that nothing overlaps. Of modules: the device's memory for all that is
    fetched, as a number of layers; 0.5 is half a layer. Where that is less than two of the largest modules, one of them
    is fetched only after the other has computed."""
    resident: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Number of layers that stay on the device, spread evenly over the model; auto: as many as are predicted to fit, or
    in task serve as many as give the highest predicted throughput."""
    path: str | None = None
    """Directory for layers on disk that no checkpoint stores in the required form; None: Ridgeline's cache."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Both tiers, by layers and by modules, with as many layers on the device as the predictor decides. On a CPU,
        copies from host memory use the cores that compute, so prefetching does not help."""
        ahead = {"cpu": int(e.cluster.device.kind == "gpu"), "nvme": 1}
        units = [(tier, unit, k) for tier, k in ahead.items() for unit in ("layers", "modules")]
        part = _least_overlapping(e.model)
        return [cls(parameters=tier, resident="auto", fetch=unit, prefetch=k and part if unit == "modules" else k)
                for tier, unit, k in units]  # fmt: skip

    @classmethod
    def smallest(cls, e: Experiment) -> list[Technique]:
        """No layer stays on the device, and none is there before its turn."""
        return [cls(parameters=tier, resident=0, prefetch=0, fetch="modules") for tier in ("cpu", "nvme")]

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """Resolve the number of resident layers where it was left to the predictor."""
        if self.resident != "auto":
            return self
        layers = e.model.num_layers
        if isinstance(e.workload, Serve):  # what weights leave goes into the cache: neither end need be the best
            e = e.model_copy(update={"workload": e.workload.sample()})
            rates = {n: self._with(n)._rate(e, ask) for n in eighths(layers)}
            return self._with(max(rates, key=lambda n: (rates[n], n)) if any(rates.values()) else 0)
        low, high = 0, layers + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._with(middle)._rate(e, ask) else (low, middle)
        return self._with(low)

    def _rate(self, e: Experiment, ask: Ask) -> float:
        """Predicted tokens/s; 0 where it does not fit."""
        try:
            found = ask(self.placed(e))
        except UserError:  # a cache without room
            return 0.0
        return found.metrics["tokens_per_s"].value if found.status == "ok" else 0.0

    def _with(self, resident: int) -> ZeroInference:
        return self.model_copy(update={"resident": resident})

    def moves(self, e: Experiment) -> bool:
        """Whether a layer does not stay on the device."""
        return self.stays < e.model.num_layers

    @property
    def stays(self) -> int:
        """Number of layers that stay on the device; none before the predictor has resolved it."""
        return 0 if self.resident == "auto" else self.resident

    def check(self, e: Experiment) -> None:
        """There cannot be more resident layers than layers."""
        self.needs(self.stays <= e.model.num_layers, f"{self.resident} resident layers of {e.model.num_layers}",
                   f"use resident={e.model.num_layers} or less")  # fmt: skip
        whole = self.prefetch == int(self.prefetch)
        self.needs(whole or self.fetch == "modules", f"prefetch={self.prefetch} of whole layers",
                   "use fetch=modules, or a whole number")  # fmt: skip

    def streamed(self, layers: int) -> frozenset[int]:
        """The layers, of this many, that do not stay on the device, spread evenly."""
        count = max(0, layers - self.stays)
        return frozenset(i for i in range(layers) if (i + 1) * count // layers > i * count // layers)

    def reads_itself(self, e: Experiment) -> tuple[str, ...]:
        """All streamed layers, unless another technique changes their weights when the model is built."""
        if weights_change(self, e):
            return ()
        return tuple(f"layers.{name}." for name in self.fetched(e.model))

    def fetched(self, model: ModelSpec) -> list[str]:
        """What is fetched at a time, in order: names of modules below the model's layers ("3", "3.mlp.up_proj")."""
        layers = sorted(self.streamed(model.num_layers))
        if self.fetch == "layers":
            return [str(i) for i in layers]
        return [f"{i}.{name}" for i in layers for name in large_modules(model, model.is_moe_layer(i))]

    def room(self, layers: Sequence[Sequence[float]]) -> float:
        """Bytes of the device for what is fetched, of those of what is fetched at a time in each layer."""
        largest = max(map(max, layers))
        if self.fetch == "layers":
            return largest * min(self.prefetch + 1, len(layers))
        return min(max(largest, self.prefetch * max(map(sum, layers))), sum(map(sum, layers)))

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Add copies before the streamed layers, and the memory of those being fetched."""
        stay, blocks, moved = self.stays, list[Block](), list[tuple[Block, dict[str, float]]]()
        for b in g.blocks:
            here = min(stay, b.repeat) if b.is_layer else b.repeat
            if b.is_layer:
                stay -= here
            if here:
                blocks.append(b if here == b.repeat else replace(b.copy(), repeat=here))
            if here < b.repeat:
                b.repeat -= here
                moved.append((b, self._move(b, e.model)))
                blocks.append(b)
        g.blocks = blocks
        layers = [list(sizes.values()) for b, sizes in moved for _ in range(b.repeat)]
        if not layers:
            return g
        disk = self.parameters == "nvme"
        for b, sizes in moved:
            for part, size in sizes.items():
                b.gather_forward += arriving("weights", size, disk, e, "weights" if self.prefetch else "", part)
        if not disk:
            g.host_bytes += sum(map(sum, layers))
        g.weight_buffers += self.room(layers)
        return g

    def _move(self, b: Block, model: ModelSpec) -> dict[str, float]:
        """Take what is fetched from the device → bytes of each fetch for one layer of the block, by the beginning of
        its parameters' names."""
        moe = any(p.name.startswith("mlp.experts.") for p in b.params)
        names = [""] if self.fetch == "layers" else [f"{name}." for name in large_modules(model, moe)]
        sizes = {}
        for name in names:
            params = [p for p in b.params if p.name.startswith(name)]
            sizes[name] = sum(p.stored_bytes for p in params)
            for p in params:
                p.resident = 0.0
        return sizes

    def apply(self, run: Build) -> None:
        """Move the layers to where they are stored, after checking that the disk is usable."""
        from pathlib import Path

        from ridgeline.paths import cache_dir
        from ridgeline.techniques.memory.zero_inference_torch import stream_modules

        folder = Path(self.path).expanduser() if self.path else cache_dir() / "offload"
        names = self.fetched(run.experiment.model)
        stream_modules(run, names, folder if self.parameters == "nvme" else None, self.prefetch > 0, self.room)


def large_modules(model: ModelSpec, moe: bool) -> list[str]:
    """The modules of a layer, in order, that hold all but its norms and other vectors; each is called as a whole.
    ``moe``: of a mixture's layer."""
    attention = ["attention"] if model.is_latent else [f"attention.{name}_proj" for name in "qkvo"]
    cross = ["cross_attention"] if model.is_encoder_decoder else []
    mlp = ["mlp"] if moe else [f"mlp.{name}_proj" for name in (*(["gate"] if model.gated else []), "up", "down")]
    return [*attention, *cross, *mlp]


def _least_overlapping(model: ModelSpec) -> float:
    """Half or three quarters of a layer, whichever first has room for two of its largest modules; of a mixture, whose
    experts are one module, half."""
    index = model.num_layers - 1
    names, sizes = large_modules(model, model.is_moe_layer(index)), dict[str, float]()
    for p in model.block_parameters(index):
        for name in names:
            if f".{name}." in p.name:
                sizes[name] = sizes.get(name, 0.0) + p.numel
    total, largest = sum(sizes.values()), max(sizes.values())
    return next((k for k in (0.5, 0.75) if k * total >= 2 * largest), 0.5)


def eighths(layers: int) -> list[int]:
    """Numbers of layers from none to all, in steps of about an eighth."""
    return sorted({layers * k // 8 for k in range(9)})


def weights_change(technique: Technique, e: Experiment) -> bool:
    """Whether another technique of the plan needs the layers' weights when the model is built."""
    others = (t for t in techniques_of(e.plan) if t.card.name != technique.card.name)
    return any(t.parts & _CHANGES_WEIGHTS for t in others)


def arriving(
    name: str, size: float, disk: bool, e: Experiment, behind: str, part: str = "", requests: float = 1
) -> list[Op]:
    """The copies that transfer ``size`` bytes to the device, from host memory or from disk, in ``requests``.
    ``behind``: as :attr:`Op.behind`; ``part``: beginning of the names of the parameters that they belong to.

    A CPU reads from disk directly into the destination.
    """
    kinds = ["disk_read"] * disk + ["h2d"] * (not disk or e.cluster.device.kind == "gpu")
    return [changed(host_copy(f"{name}.{kind}", kind, size, "forward"), behind=behind, param=part, requests=requests)
            for kind in kinds]  # fmt: skip
