"""Cache blocks that the pool drops go to host memory and to disk, and come back when they are wanted again."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sizes import Size
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild

GIB = 1 << 30


class KVOffload(Technique):
    """Keep the key/value blocks that the pool has no room for, in host memory and from there on disk. A prompt that
    begins like an earlier one, or a request that was preempted, takes them up again instead of computing them.

    Blocks are known by their contents where prefixes are shared, as the default plan of ``serve`` has it.
    """

    card: ClassVar[Card] = Card(
        name="kv_offload",
        title="KV cache offloading",
        paper="arXiv:2303.06865",
        taxonomy="inference/offload/kv-cache",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="the cache of a block of batches rests in host memory and on disk (FlexGen)",
        unpredicted={"serve": "blocks that a simulated pool drops are computed again"},
        owns=frozenset({"dropped_blocks"}),
        conflicts={"adapter_table": "blocks computed with an adapter of {other} are known by a version that ends with"
                   " the process"},
        example={"host": "8MB"},
    )  # fmt: skip
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = 5

    host: Size = GIB
    """Host memory for blocks."""
    disk: Size | None = None
    """Disk space for blocks that host memory has no room for; None: none."""
    path: str | None = None
    """Folder for them; None: Ridgeline's cache."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what it saves is not predicted."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs a cache, in one process."""
        check_blocks(self, e)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Operators stay as they are."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Give the pool a store for what it drops; its files end with the process."""
        from pathlib import Path

        from ridgeline.paths import cache_dir
        from ridgeline.techniques.serving.kv_offload_torch import give_store

        folder = (Path(self.path).expanduser() if self.path else cache_dir()) / "kv-blocks"
        give_store(run, int(self.host), int(self.disk or 0), folder, persistent=False)


def check_blocks(t: Technique, e: Experiment) -> None:
    """Refuse encoders, and pools that lie in several processes."""
    t.needs(e.model.causal, f"{e.model.name} is an encoder, which keeps no cache", f"drop {t.card.name}")
    t.needs(e.world == 1, "the pool of a divided model lies in several processes",
            f"use one process, or drop {t.card.name}")  # fmt: skip
