"""FlexGen: weights, cache and activations over device, host memory and disk, several batches through every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.result import Result
from ridgeline.techniques.memory.flexgen_policy import KINDS, PassCosts, PolicyCosts, place
from ridgeline.techniques.memory.zero_inference import arriving, weights_change
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Ask, Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build

_SHARES = tuple(f"{kind}_{tier}" for kind in KINDS for tier in ("device", "host"))
_RESERVE = 0.05
"""Share of a memory that the placement leaves free."""
_STAGED = 3
"""Buffers in host memory for what is on its way to and from disk, each of one part of the batch."""


class FlexGen(Technique):
    """Divide the batch into ``batches``, take all of them through a layer's attention, and then through its
    feed-forward part, before the next weights come (the zig-zag schedule), and spread weights, key/value cache and the
    hidden states between these over device, host memory and disk. Attention to a cache outside the device is computed
    on the host. What is left open is found by a linear program over the shares, for each number of batches
    (FlexGen)."""

    card: ClassVar[Card] = Card(
        name="flexgen",
        title="FlexGen",
        paper="arXiv:2303.06865",
        taxonomy="inference/offload/flexgen",
        tasks=frozenset({"generate"}),
        lossless=True,
        claim="OPT-175B on one T4 at 1 token/s; OPT-30B at 7.32 tokens/s, 12 times the best baseline's 0.60",
        owns=frozenset({"resting_weights"}),
        example={"batches": 1, "weights_device": 50, "weights_host": 50, "cache_device": 50, "cache_host": 50},
    )
    phase: ClassVar[Phase] = "offload"

    batches: int | None = Field(default=None, ge=1)
    """Parts of the batch that pass through a layer one after the other; None: the best of the powers of two."""
    weights_device: int | None = Field(default=None, ge=0, le=100)
    """Percent of the layers that stay on the device; None (as all that follow): what the linear program finds."""
    weights_host: int | None = Field(default=None, ge=0, le=100)
    """Percent of the layers in host memory; the rest are on disk."""
    cache_device: int | None = Field(default=None, ge=0, le=100)
    """Percent of the key/value cache on the device."""
    cache_host: int | None = Field(default=None, ge=0, le=100)
    """Percent of it in host memory; the rest is on disk."""
    activations_device: int | None = Field(default=None, ge=0, le=100)
    """Percent of the batches whose hidden states are on the device between two modules; None beside given shares of
    weights and cache: all."""
    activations_host: int | None = Field(default=None, ge=0, le=100)
    """Percent of them in host memory; the rest is on disk."""
    overlap: bool = True
    """Whether transfers run beside computation; false: one after the other, for comparison."""
    path: str | None = None
    """Folder of what is on disk, beside a checkpoint's own files; None: Ridgeline's cache."""

    @property
    def open(self) -> bool:
        """Whether something is left to the predictor."""
        return self.batches is None or self.weights_device is None

    def share(self, name: str) -> float:
        """A share in 0 to 1; before it is settled, everything is on the device."""
        value = getattr(self, name)
        return (1.0 if name.endswith("device") else 0.0) if value is None else value / 100

    def micro_batches(self, e: Experiment) -> int:
        """Parts of the batch."""
        return self.batches or 1

    def moves(self, e: Experiment) -> bool:
        """Whether less than all of the weights, the cache and the hidden states is on the device."""
        return any(self.share(f"{kind}_device") < 1 for kind in KINDS)

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """All left to the predictor."""
        return [cls()] if e.task in cls.card.tasks else []

    def settled(self, e: Experiment, ask: Ask) -> Technique:
        """The number of batches and the shares with the highest predicted throughput."""
        if not self.open or e.task not in self.card.tasks:
            return self
        batch, given = e.micro_batch_size, [n for n in _SHARES if getattr(self, n) is not None]
        if (self.batches and batch % self.batches) or (self.weights_device is None and given):
            return self  # which check refuses
        counts = [self.batches] if self.batches else [2**i for i in range(int(math.log2(batch)) + 1)]
        best: tuple[bool, float, FlexGen] | None = None
        for n in counts:
            if batch % n:
                continue
            found = self._placed(e, n, ask)
            if found is not None:
                r = ask(found.placed(e))
                one = (r.status == "ok", r.metrics["tokens_per_s"].value, found)
                best = one if best is None or one[:2] > best[:2] else best
        if best is None:
            raise Incompatible(
                f"flexgen: no placement of {e.model.name} is within the memories at a batch of {batch}",
                "use a smaller batch_size, or more host memory",
            )
        return best[2]

    def _placed(self, e: Experiment, n: int, ask: Ask) -> FlexGen | None:
        """The shares for ``n`` batches, in whole percent; None where nothing fits."""
        if self.weights_device is not None:
            return self.model_copy(update={"batches": n})
        found = place(self._costs(e, n, ask))
        if found is None:
            return None
        # Whole percent, so that what was found can be written down; what is cut off goes one tier out.
        percent = {name: math.floor(100 * share + 1e-6) for name, share in found.items()}
        for kind in KINDS:
            if found[f"{kind}_disk"] < 1e-6:
                percent[f"{kind}_host"] = 100 - percent[f"{kind}_device"]
        return self.model_copy(update={"batches": n, **{name: percent[name] for name in _SHARES}})

    def _costs(self, e: Experiment, n: int, ask: Ask) -> PolicyCosts:
        """What each share costs: differences of predictions in which nothing overlaps."""

        def asked(overlap: bool = False, **tiers: str) -> Result:
            shares = {f"{kind}_{tier}": 100 * int(tiers.get(kind, "device") == tier)
                      for kind in KINDS for tier in ("device", "host")}  # fmt: skip
            return ask(self.model_copy(update={"batches": n, "overlap": overlap, **shares}).placed(e))

        on_disk = not _coded(e)
        device, host, disk = asked(), asked(weights="host"), asked(weights="disk")
        outside = asked(cache="host")
        far = asked(cache="disk") if on_disk else outside
        hidden, away = asked(activations="host"), asked(activations="disk")
        serial = e.cluster.device.kind == "cpu"
        passes: list[PassCosts] = []
        results = (device, host, disk, outside, far, hidden, away)
        for base, copied, read, hosted, moved, left, spilled in zip(*map(_seconds, results), strict=True):
            copies = copied - base
            passes.append(PassCosts(base, copies, read - base - (0.0 if serial else copies), hosted - base,
                                    moved - hosted, left - base, spilled - left))  # fmt: skip
        memory = {m.category: m.bytes for m in device.memory}
        weights, cache = host.metrics["host_bytes"].value, memory["kv_cache"]
        least = sum(m.bytes for m in asked(self.overlap, weights="host", cache="host", activations="host").memory)
        d = e.cluster.device
        room = math.inf if d.host is None else (1 - _RESERVE) * d.host.memory_bytes / e.cluster.devices_per_node
        steps = e.workload.output_len - 1  # type: ignore[union-attr]
        space = max(0.0, (1 - _RESERVE) * d.memory_bytes - least)
        return PolicyCosts(passes[0], passes[1], steps, weights, cache, hidden.metrics["host_bytes"].value, space, room,
                           on_disk, serial)  # fmt: skip

    def check(self, e: Experiment) -> None:
        """Needs whole shares, a batch that divides, and a cache that it can place."""
        given = [name for name in _SHARES if getattr(self, name) is not None]
        several = [name for name in given if not name.startswith("activations")]
        self.needs(len(several) in (0, 4) and len(given) in (0, 4, 6), f"{', '.join(given)} without the other shares",
                   "give those of weights and cache, and of activations both or none; or none at all")  # fmt: skip
        for kind in KINDS:
            total = self.share(f"{kind}_device") + self.share(f"{kind}_host")
            self.needs(total <= 1 + 1e-9, f"{kind}_device and {kind}_host are {100 * total:.0f} percent",
                       "give shares that sum to 100 or less")  # fmt: skip
        self.needs(e.micro_batch_size % (self.batches or 1) == 0,
                   f"a batch of {e.micro_batch_size} is no multiple of batches={self.batches}",
                   "use a divisor of the batch size")  # fmt: skip
        self.needs(not getattr(e.workload, "engine", ""), "serving engines place the cache themselves",
                   "leave the workload's engine empty")  # fmt: skip
        self.needs(not e.model.is_latent, f"the cache of {e.model.name} holds latents, which flexgen does not place",
                   "use zero_inference")  # fmt: skip
        disk = 1 - self.share("cache_device") - self.share("cache_host")
        self.needs(
            not _coded(e) or disk < 1e-9, "a quantized cache has no form on disk", "use cache_device and cache_host"
        )

    def reads_itself(self, e: Experiment) -> tuple[str, ...]:
        """All layers that do not stay, unless another technique changes their weights when the model is built."""
        if weights_change(self, e):
            return ()
        return tuple(f"layers.{name}." for name in self.fetched(e.model))

    def fetched(self, model: ModelSpec) -> dict[str, str]:
        """What is fetched at a time, in order: names of modules below the model's layers ("3.mlp"), and their tiers."""
        tiers = enumerate(self.layer_tiers(model.num_layers))
        return {f"{i}.{part}" if part else str(i): tier for i, tier in tiers if tier != "device"
                for part in parts_of(model)}  # fmt: skip

    def layer_tiers(self, layers: int) -> list[str]:
        """The tier of every layer, each tier's spread evenly."""
        return spread(layers, self.share("weights_device"), self.share("weights_host"))

    def cache_tiers(self, layers: int) -> list[list[str]]:
        """The tier of the cache of every layer and part of the batch."""
        n = self.batches or 1
        flat = spread(layers * n, self.share("cache_device"), self.share("cache_host"))
        return [flat[i * n : (i + 1) * n] for i in range(layers)]

    def activation_tiers(self) -> list[str]:
        """The tier of the hidden states of each part of the batch."""
        return spread(self.batches or 1, self.share("activations_device"), self.share("activations_host"))

    def room(self, sizes: Sequence[float]) -> float:
        """Bytes of the device for what is fetched, of those of each fetch in order: of two that follow one another, or
        without ``overlap`` of the largest."""
        if not self.overlap or len(sizes) == 1:
            return max(sizes)
        return max(a + b for a, b in zip(sizes, (*sizes[1:], sizes[0]), strict=True))

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Weights come once for all batches; the cache's part outside the device is read where it is."""
        n = self.micro_batches(e)
        g.accumulation, g.layer_gathers = n, 1.0
        caches = n * e.model.num_layers
        counts = tier_counts(caches, self.share("cache_device"), self.share("cache_host"))
        share = {tier: count / caches for tier, count in counts.items()}
        cache = n * g.kv_cache
        g.kv_cache = cache * share["device"]
        g.host_bytes += cache * share["host"] + cache / caches * min(counts["disk"], _STAGED)
        residual = max((o.bytes / 3 for b in g.blocks for o in b.forward if o.kind == "residual"), default=0.0)
        hidden = tier_counts(n, self.share("activations_device"), self.share("activations_host"))
        if n > 1 or not hidden["device"]:
            g.buffers += hidden["device"] * residual
            g.host_bytes += (hidden["host"] + min(hidden["disk"], _STAGED)) * residual
        self._weights(g, e)
        self._cache(g, e, cache, share)
        self._hidden(g, e, residual, hidden)
        return g

    def _weights(self, g: Graph, e: Experiment) -> None:
        tiers = self.layer_tiers(sum(b.repeat for b in g.blocks if b.is_layer))
        blocks: list[Block] = []
        arrive, at, behind = list[float](), 0, "weights" if self.overlap else ""
        for b in g.blocks:
            if not b.is_layer:
                blocks.append(b)
                continue
            mine, at = tiers[at : at + b.repeat], at + b.repeat
            names = _prefixes(e.model)
            parts = [[i for i, p in enumerate(b.params) if p.name.startswith(name)] for name in names]
            sizes = [sum(b.params[i].stored_bytes for i in part) for part in parts]
            size = sum(sizes)
            for tier in ("device", "host", "disk"):
                if count := mine.count(tier):
                    piece = replace(b.copy(), repeat=count)
                    if tier != "device":
                        for name, part in zip(names, sizes, strict=True):
                            piece.gather_forward += arriving("weights", part, tier == "disk", e, behind, name)
                        for i in chain.from_iterable(parts):
                            piece.params[i].resident = 0.0
                        arrive += sizes * count
                        g.host_bytes += size * count * (tier == "host")
                    blocks.append(piece)
        g.blocks = blocks
        g.weight_buffers += self.room(arrive) if arrive else 0.0

    def _cache(self, g: Graph, e: Experiment, cache: float, share: dict[str, float]) -> None:
        """Copies of each layer's cache, for all batches at once."""
        assert g.sizes is not None
        layers, n = sum(b.repeat for b in g.blocks if b.is_layer), self.micro_batches(e)
        w = e.workload
        total = w.prompt_len + w.output_len  # type: ignore[union-attr]
        per_token = cache / layers / total
        gpu = e.cluster.device.kind == "gpu"
        new, decoding = per_token * g.sizes.q_len, g.sizes.q_len < g.sizes.kv_len
        behind, part = "module" if self.overlap else "", _prefixes(e.model)[0]
        ops: list[Op] = []
        outside = share["host"] + share["disk"]

        def copy(name: str, kind: str, size: float, parts: float) -> Op:
            """Of every part by itself."""
            return changed(host_copy(name, kind, size, "forward"), behind=behind, param=part, requests=n * parts)

        if gpu and outside:
            ops.append(copy("cache.out", "d2h", new * outside, outside))
            if decoding:
                attended = host_copy("cache.attention", "host_read", per_token * g.sizes.kv_len * outside, "forward")
                ops.append(changed(attended, param=part))
        if share["disk"]:
            ops.append(copy("cache.write", "disk_write", new * share["disk"], share["disk"]))
            if decoding:
                read = copy("cache.read", "disk_read", per_token * (g.sizes.kv_len - 1) * share["disk"], share["disk"])
                # The first part's is read ahead, while the feed-forward part before computes.
                for name, times in ((part, (n - 1) / n), (_prefixes(e.model)[-1], 1 / n)):
                    sizes = {"bytes": read.bytes * times, "link_bytes": read.link_bytes * times}
                    ops.append(changed(read, param=name, requests=read.requests * times, **sizes))
        for b in g.blocks:
            if b.is_layer:
                b.gather_forward += ops

    def _hidden(self, g: Graph, e: Experiment, size: float, tiers: dict[str, int]) -> None:
        """Copies of the batches' hidden states, each of ``size`` bytes, in and out of every layer, or of its parts."""
        behind = "module" if self.overlap else ""
        moves: list[tuple[str, int]] = []
        if e.cluster.device.kind == "gpu":
            moves += [(kind, tiers["host"] + tiers["disk"]) for kind in ("h2d", "d2h")]
        moves += [(kind, tiers["disk"]) for kind in ("disk_read", "disk_write")]
        ops = [changed(host_copy(f"hidden.{kind}", kind, size * n, "forward"), behind=behind, param=part, requests=n)
               for part in _prefixes(e.model) for kind, n in moves if n]  # fmt: skip
        for b in g.blocks:
            if b.is_layer:
                b.gather_forward += ops

    def apply(self, run: Build) -> None:
        """Put weights and cache where they rest, after making sure that the disk will do."""
        from pathlib import Path

        from ridgeline.paths import cache_dir
        from ridgeline.techniques.memory.flexgen_torch import spread_over_tiers

        model = run.experiment.model
        folder = Path(self.path).expanduser() if self.path else cache_dir() / "offload"
        spread_over_tiers(run, self.fetched(model), self.cache_tiers(model.num_layers), self.activation_tiers(), folder,
                          int(self.overlap), self.room)  # fmt: skip


def parts_of(model: ModelSpec) -> tuple[str, ...]:
    """The modules of a layer that all batches pass through one after the other; "": the layer, where these read more
    than one another's results."""
    return ("",) if model.parallel_residual or model.is_encoder_decoder else ("attention", "mlp")


def _prefixes(model: ModelSpec) -> list[str]:
    """Of the names of these modules' parameters."""
    return [f"{part}." if part else "" for part in parts_of(model)]


def tier_counts(count: int, device: float, host: float) -> dict[str, int]:
    """How many of ``count`` items each tier has by these shares; what is rounded goes outwards."""
    on_device = math.floor(count * device + 1e-9)
    outside = count - on_device
    in_host = outside if device + host > 1 - 1e-9 else min(outside, math.floor(count * host + 1e-9))
    return {"device": on_device, "host": in_host, "disk": outside - in_host}


def spread(count: int, device: float, host: float) -> list[str]:
    """A tier for each of ``count`` items by their shares, every tier's spread evenly."""
    counts = tier_counts(count, device, host)
    outside, in_host = count - counts["device"], counts["host"]
    tiers, used = [], 0
    for i in range(count):
        if (i + 1) * outside // count > i * outside // count:
            here = (used + 1) * in_host // max(1, outside) > used * in_host // max(1, outside)
            tiers.append("host" if here else "disk")
            used += 1
        else:
            tiers.append("device")
    return tiers


def _coded(e: Experiment) -> bool:
    """Whether another technique quantizes the cache."""
    return any(t.cache_dtype for t in techniques_of(e.plan))


def _seconds(r: Result) -> tuple[float, float]:
    """Of the prefill and of a decode step."""
    return r.metrics["ttft_s"].value, r.metrics["tpot_s"].value
