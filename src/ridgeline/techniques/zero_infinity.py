"""ZeRO-Infinity: parameters and optimizer states in host memory or on NVMe."""

from __future__ import annotations

from typing import ClassVar, Literal

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique
from ridgeline.techniques.mesh import host_copy
from ridgeline.techniques.zero_offload import offload_states


class ZeroInfinity(Technique):
    """Stream each rank's parameter shard in before every use, and update states where they rest (ZeRO-3 only)."""

    card: ClassVar[Card] = Card(
        name="zero_infinity",
        title="ZeRO-Infinity",
        paper="arXiv:2104.07857",
        taxonomy="training/offload/zero_infinity",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="over 25 PFLOP/s on 512 V100 (40 % of peak); a trillion parameters fine-tuned on one DGX-2",
        min_ranks=2,
        example={"parameters": "device"},
        requires=("zero",),
        runs=False,
    )
    phase: ClassVar[Phase] = "offload"

    parameters: Literal["device", "cpu", "nvme"] = "cpu"
    """Where parameter shards rest."""
    optimizer: Literal["cpu", "nvme"] = "cpu"
    """Where master weights and optimizer states rest."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """From host memory to disk, one part at a time."""
        return [cls(parameters="cpu", optimizer="cpu"), cls(parameters="cpu", optimizer="nvme"),
                cls(parameters="nvme", optimizer="nvme")]  # fmt: skip

    def check(self, e: Experiment) -> None:
        """Parameters can only leave when they are sharded."""
        self.needs(e.plan.has("zero"), "it streams the shards that zero makes", "add zero:stage=3")
        self.needs(
            self.parameters == "device" or e.plan.option("zero", "stage") == 3,
            f"zero:stage={e.plan.option('zero', 'stage')} keeps whole parameters on the device",
            "use zero:stage=3, or parameters=device",
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Copies in front of every gather; on NVMe also the disk's reads and writes."""
        offload_states(g)
        if self.parameters != "device":
            g.host_parameters = True
            for b in g.blocks:
                shard = sum(p.stored_bytes for p in b.params)
                ways = [host_copy("offload.shard", "h2d", shard, "forward")]
                if self.parameters == "nvme":
                    ways.insert(0, host_copy("offload.read", "disk_read", shard, "forward"))
                b.gather_forward = ways + b.gather_forward
                if b.gather_backward:
                    b.gather_backward = ways + b.gather_backward
        if self.optimizer == "nvme":
            held = sum(p.numel / p.state_shards * n for p, n in g.params if p.trainable) / g.stages
            size = held * (g.optimizer_bytes + 4.0)
            g.after_update += [host_copy("offload.states_in", "disk_read", size, "update"),
                               host_copy("offload.states_out", "disk_write", size, "update")]  # fmt: skip
        return g
