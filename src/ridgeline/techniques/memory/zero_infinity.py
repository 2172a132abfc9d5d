"""ZeRO-Infinity: parameters and optimizer states in host memory or on NVMe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.memory.zero_offload import moved_together, offload_states
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import refuse
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.nn.memory.tiered_store import Tier
    from ridgeline.runtime.train_build import TrainBuild

_WHOLE_LINEARS: dict[Part, str] = {
    "divided_tensors": "gathers or divides whole linears",
    "low_rank": "wraps whole linears",
    "weights": "packs or scales whole linears",
    "fused_linears": "fuses whole linears",
    "recomputation": "would fetch every tile once more",
    "compute_dtype": "keeps a low-precision copy of every tile until backward",
}
"""Parts that cannot be combined with tiled linears, with the reason."""
_TIER: dict[str, Tier] = {"cpu": "cpu", "nvme": "disk"}


class ZeroInfinity(Technique):
    """Stream parameters (under ZeRO-3 each rank's shard) in before every use, and update states where they are stored.

    Parts other than transformer layers stay on the device through a micro-batch; of the layers, only the current one
    and the next. With states on NVMe the gradients are stored there too, and the optimizer step streams through memory
    part by part.
    """

    card: ClassVar[Card] = Card(
        name="zero_infinity",
        title="ZeRO-Infinity",
        paper="arXiv:2104.07857",
        taxonomy="training/offload/zero_infinity",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="over 25 PFLOP/s on 512 V100 (40 % of peak); a trillion parameters fine-tuned on one DGX-2",
        owns=frozenset({"optimizer"}),
        changes=frozenset({"masters"}),
    )
    phase: ClassVar[Phase] = "offload"

    parameters: Literal["device", "cpu", "nvme"] = "cpu"
    """Where parameters (or their shards) are stored."""
    optimizer: Literal["cpu", "nvme"] = "cpu"
    """Where gradients and optimizer states are stored, and master weights unless parameters serve as such."""
    tile: int = Field(default=1, ge=1)
    """Tiles into which each linear of the feed-forward layers is cut; one at a time is on the device."""
    path: str | None = None
    """Directory of the files on NVMe; None: Ridgeline's cache."""

    def stored(self) -> dict[str, Any]:
        """Tiles are stored as separate parameters."""
        return {"tile": self.tile} if self.tile > 1 else {}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Offload from host memory to disk, one part at a time."""
        return [cls(parameters="cpu", optimizer="cpu"), cls(parameters="cpu", optimizer="nvme"),
                cls(parameters="nvme", optimizer="nvme")]  # fmt: skip

    def conflicts(self) -> Mapping[Part, str]:
        """A pipeline's stages, unless parameters stay on the device."""
        if self.parameters == "device":
            return super().conflicts()
        why = (
            "stages of {other} have no step-wide order of layers to stream parameters in (parameters=device needs none)"
        )
        return {**super().conflicts(), "stages": why}

    def check(self, e: Experiment) -> None:
        """Under data parallelism parameters can be offloaded only when they are sharded."""
        if self.parameters != "device":
            refuse(self, e, "replicas", "{other} keeps whole parameters on every device",
                   "use zero:stage=3, or parameters=device")  # fmt: skip
        if self.tile > 1:
            self._check_tiles(e)

    def _check_tiles(self, e: Experiment) -> None:
        m = e.model
        self.needs(self.parameters != "device", "tile cuts weights that come and go, but parameters=device keeps them",
                   "use parameters=cpu or nvme, or drop tile")  # fmt: skip
        self.needs(not m.num_experts, f"tile cuts dense layers, {m.name} has experts", "drop tile")
        width = math.gcd(m.hidden_size, m.intermediate_size)
        self.needs(width % self.tile == 0, f"tile={self.tile} does not divide the rows of every linear ({m.hidden_size}"
                   f" and {m.intermediate_size})", f"use a divisor of {width}")  # fmt: skip
        for part, why in _WHOLE_LINEARS.items():
            refuse(self, e, part, f"tile={self.tile} cannot be used with {{other}}, which {why}",
                   "drop tile, or {other}")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Add copies before every use of a block, and on NVMe the disk's reads and writes."""
        rest = self.parameters != "device"
        weights = self.parameters == "nvme" if rest else None
        if self.tile > 1:
            for p, _ in g.params:
                p.tiles = self.tile if p.name.startswith("mlp.") and len(p.shape) == 2 else 1
        offload_states(g, self.optimizer == "nvme", weights, rest)
        if rest:
            g.host_parameters = True
            for b in g.blocks:
                ways: list[Op] = []
                for params, tiles in moved_together(b):
                    shard = sum(p.stored_bytes for p in params) / tiles
                    each = [host_copy("offload.shard", "h2d", shard, "forward")]
                    if self.parameters == "nvme":
                        each.insert(0, host_copy("offload.read", "disk_read", shard, "forward"))
                    ways += each * tiles if shard else []
                b.gather_forward = ways + b.gather_forward
                if b.is_layer:
                    b.gather_backward = ways + b.gather_backward
        return g

    def build(self, run: TrainBuild) -> None:
        """Move everything to where it is stored, after checking that the disk is usable."""
        from pathlib import Path

        from ridgeline.nn.memory.tiered_store import TieredStore
        from ridgeline.nn.memory.tiled import tile_linears
        from ridgeline.paths import cache_dir
        from ridgeline.runtime.host_optimizer import HostStates, disk_bytes, parts_of
        from ridgeline.techniques.memory.zero_infinity_torch import Residency

        states = _TIER[self.optimizer]
        rest = self.parameters != "device"
        weights = _TIER[self.parameters] if rest else states
        if self.tile > 1:
            for block in run.model.layers.values():
                tile_linears(block.mlp, self.tile)  # type: ignore[arg-type]
        folder, need = None, 0
        if "disk" in (weights, states):
            folder = Path(self.path).expanduser() if self.path else cache_dir() / "offload"
            optimizer = run.experiment.training.optimizer
            need = disk_bytes(parts_of(run.root), weights, states, optimizer, bool(run.update.masters))
        run.store = TieredStore(run.device, folder, need)
        host = HostStates(run, run.store, states, weights, rest)
        if rest:
            Residency(run, run.store, host)
