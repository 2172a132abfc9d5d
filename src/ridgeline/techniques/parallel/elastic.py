"""Elastic training: the state is copied to memory, and a run goes on from there when ranks are lost or added."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Metric, Result
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.train_build import TrainBuild


class Elastic(Technique):
    """Copy weights and optimizer states to the host's memory after steps, and to that of the next machine. When a rank
    is lost, all start again and load the copy: at most ``every`` steps are computed again, and the losses are those of
    an undisturbed run. Under ``torchrun --nnodes MIN:MAX`` machines may be lost for good or added, too: the batch is
    divided anew over the data-parallel ranks that there are.
    """

    card: ClassVar[Card] = Card(
        name="elastic",
        title="Elastic training",
        paper="doi:10.1145/3600006.3613145",
        taxonomy="training/distributed/elastic",
        tasks=frozenset({"pretrain", "finetune"}),
        lossless=True,
        claim="checkpoints to CPU memory after every iteration without overhead; recovery 13 times as fast (Gemini)",
        encoder_decoders=True,
    )
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = 1

    every: int = Field(default=1, ge=1)
    """Steps between copies."""
    mtbf: float | None = Field(default=None, gt=0)
    """Mean seconds between two failures of the whole cluster; only for predictions."""
    restart: float = Field(default=30.0, ge=0)
    """Seconds from a failure to the first step after it; only for predictions."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: it costs time, and what it saves depends on how often machines fail."""
        return []

    def copies_every(self) -> int:
        """As given."""
        return self.every

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """After every ``every``-th step, copy this rank's share of weights and states out, and send it to the next
        machine; both are counted as an equal part of each step. The step waits for them."""

        def close(graph: Graph) -> None:
            written, loaded = copied_bytes(graph, e)
            size = written / self.every
            graph.after_update.append(host_copy("elastic.copy", "d2h", size, "update"))
            copy = written * min(2, e.cluster.nodes)
            # A copy, and the one before or the one from which the run goes on.
            graph.host_bytes += copy + min(written * e.cluster.nodes, loaded + copy - written)
            if e.cluster.nodes > 1:
                graph.after_update.append(Op("elastic.send", "communication", "p2p", "update", bytes=size,
                                             link_bytes=size, ranks=2, axis="all",
                                             stride=e.cluster.devices_per_node))  # fmt: skip

        g.closing.append(close)
        return g

    def note(self, e: Experiment, result: Result) -> None:
        """Seconds that a failure costs, and their share of the time: the start again, and on average half of the steps
        between copies."""
        lost = self.restart + (self.every + 1) / 2 * result.metrics["step_time_s"].value
        source = f"a restart of {self.restart:g} s, and steps computed again"
        result.metrics["lost_per_failure_s"] = Metric(value=lost, unit="s", source=source)
        if self.mtbf is not None:
            source = f"one failure in {self.mtbf:g} s"
            result.metrics["lost_share"] = Metric(value=lost / (lost + self.mtbf), unit="", source=source)

    def build(self, run: TrainBuild) -> None:
        """Nothing: the loop copies, as :meth:`copies_every` says."""


def copied_bytes(g: Graph, e: Experiment) -> tuple[float, float]:
    """Bytes of a copy that one rank writes, and its share of those that its machine reads at most: what several ranks
    hold alike, one of them writes, and each machine reads."""
    written = loaded = 0.0
    for b in g.blocks:
        for p in b.params:
            states = p.numel * (g.optimizer_bytes if p.state_bytes is None else p.state_bytes) * p.trainable
            alike = max(1, e.gradient_ranks // p.spread)
            own = (p.numel * p.bytes_per_element + states) / alike * b.repeat / g.stages
            written += own
            loaded += own * min(alike, e.cluster.nodes)
    return written, loaded
