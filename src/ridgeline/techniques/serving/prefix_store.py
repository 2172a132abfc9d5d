"""Prefixes on disk: cache blocks that survive a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.sizes import Size
from ridgeline.techniques.serving.kv_offload import GIB, check_blocks
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild


class PrefixStore(Technique):
    """Keep key/value blocks in files by the hash of their tokens, so that a server that starts again knows the prompts
    of before. A block is only taken up by the same weights, dtype, cache format and plan."""

    card: ClassVar[Card] = Card(
        name="prefix_store",
        title="Prefix store",
        paper="arXiv:2309.06180",
        taxonomy="inference/offload/kv-cache",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="a shared prefix is computed once (vLLM: 1.67 to 3.58 times Orca's throughput)",
        unpredicted={"serve": "a simulated pool starts empty, and what it drops is computed again"},
        owns=frozenset({"dropped_blocks"}),
        conflicts={"adapter_table": "blocks computed with an adapter of {other} are known by a version that ends with"
                   " the process"},
        example={"host": "1MB", "disk": "8MB"},
    )  # fmt: skip
    phase: ClassVar[Phase] = "loop"
    order: ClassVar[int] = 5

    disk: Size = 10 * GIB
    """Disk space for blocks; those used longest ago go first."""
    host: Size = GIB
    """Host memory for blocks, in front of the disk."""
    path: str | None = None
    """Folder of the store; None: Ridgeline's cache."""

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
        """Give the pool a store that stays."""
        from pathlib import Path

        from ridgeline.paths import cache_dir
        from ridgeline.techniques.serving.kv_offload_torch import give_store

        folder = Path(self.path).expanduser() if self.path else cache_dir() / "prefixes"
        give_store(run, int(self.host), int(self.disk), folder, persistent=True)
