"""Paged key/value cache: blocks, tables, sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, SchedulingTechnique, Technique

if TYPE_CHECKING:
    from ridgeline.spec.scheduling import Scheduling


class PagedKV(SchedulingTechnique):
    """Allocate cache blocks as a sequence grows, and let equal prefixes and forks share them (vLLM). Without it, every
    sequence reserves the memory of its longest possible output when it starts."""

    card: ClassVar[Card] = Card(
        name="paged_kv",
        title="PagedAttention",
        paper="arXiv:2309.06180",
        taxonomy="inference/memory/kv-cache",
        tasks=frozenset({"serve"}),
        lossless=True,
        validated=frozenset({"serve"}),
        claim="2-4x the throughput of FasterTransformer and Orca at the same latency",
        default_in=frozenset({"serve"}),
    )
    phase: ClassVar[Phase] = "loop"

    block_size: int = Field(default=16, ge=1, le=1024)
    """Number of tokens per block."""
    prefix_sharing: bool = True
    """Whether prompts with the same prefix share blocks."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """The default block size."""
        return [cls()]

    def scheduling(self, s: Scheduling) -> None:
        """Grow tables block by block."""
        s.block_size, s.share_prefixes, s.limits.reserve = self.block_size, self.prefix_sharing, False
