"""ZeRO-Infinity: parameters and optimizer states in host memory or on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import host_copy
from ridgeline.techniques.zero_offload import offload_states

if TYPE_CHECKING:
    from ridgeline.nn.store import Tier
    from ridgeline.train.build import TrainBuild

_TIER: dict[str, Tier] = {"cpu": "cpu", "nvme": "disk"}


class ZeroInfinity(Technique):
    """Stream parameters (under ZeRO-3 each rank's shard) in before every use, and update states where they rest.

    What is no transformer layer stays on the device through a micro-batch; of the layers, the one that runs and the
    next. With states on NVMe the gradients rest there too, and the step streams through memory part by part.
    """

    card: ClassVar[Card] = Card(
        name="zero_infinity",
        title="ZeRO-Infinity",
        paper="arXiv:2104.07857",
        taxonomy="training/offload/zero_infinity",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="over 25 PFLOP/s on 512 V100 (40 % of peak); a trillion parameters fine-tuned on one DGX-2",
    )
    phase: ClassVar[Phase] = "offload"

    parameters: Literal["device", "cpu", "nvme"] = "cpu"
    """Where parameters (or their shards) rest."""
    optimizer: Literal["cpu", "nvme"] = "cpu"
    """Where gradients and optimizer states rest, and master weights unless parameters do."""
    path: str | None = None
    """Folder of what rests on NVMe; None: Ridgeline's cache."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """From host memory to disk, one part at a time."""
        return [cls(parameters="cpu", optimizer="cpu"), cls(parameters="cpu", optimizer="nvme"),
                cls(parameters="nvme", optimizer="nvme")]  # fmt: skip

    def check(self, e: Experiment) -> None:
        """Under data parallelism parameters can only leave when they are sharded."""
        self.needs(
            self.parameters == "device" or not e.plan.has("pipeline"),
            "a pipeline's stages have no step-wide order of layers to stream parameters in",
            "use parameters=device, or drop pipeline",
        )
        self.needs(
            self.parameters == "device" or not e.plan.has("data_parallel"),
            "data_parallel keeps whole parameters on every device",
            "use zero:stage=3 instead of data_parallel, or parameters=device",
        )
        stage = e.plan.option("zero", "stage")
        self.needs(
            self.parameters == "device" or not e.plan.has("zero") or stage == 3,
            f"zero:stage={stage} keeps whole parameters on the device",
            "use zero:stage=3, or parameters=device",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Copies in front of every use of a block; on NVMe also the disk's reads and writes."""
        rest = self.parameters != "device"
        weights = self.parameters == "nvme" if rest else None
        offload_states(g, self.optimizer == "nvme", weights, rest)
        if rest:
            g.host_parameters = True
            for b in g.blocks:
                shard = sum(p.stored_bytes for p in b.params)
                if not shard:
                    continue
                ways = [host_copy("offload.shard", "h2d", shard, "forward")]
                if self.parameters == "nvme":
                    ways.insert(0, host_copy("offload.read", "disk_read", shard, "forward"))
                b.gather_forward = ways + b.gather_forward
                if b.name.startswith(("layers", "encoder")):
                    b.gather_backward = ways + b.gather_backward
        return g

    def build(self, run: TrainBuild) -> None:
        """Put everything where it rests, after making sure that the disk will do."""
        from pathlib import Path

        from ridgeline.nn.store import Store
        from ridgeline.paths import cache_dir
        from ridgeline.train.host import HostStates, disk_bytes, parts_of
        from ridgeline.train.resident import Residency

        states = _TIER[self.optimizer]
        rest = self.parameters != "device"
        weights = _TIER[self.parameters] if rest else states
        folder, need = None, 0
        if "disk" in (weights, states):
            folder = Path(self.path).expanduser() if self.path else cache_dir() / "offload"
            need = disk_bytes(parts_of(run.root), weights, states, run.experiment.training.optimizer)
        run.store = Store(run.device, folder, need)
        host = HostStates(run, run.store, states, weights, rest)
        if rest:
            Residency(run, run.store, host)
