"""Splitwise: prompts are computed on some servers, and their outputs generated on others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ridgeline.graph.graph import Graph
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.serve_build import ServeBuild


class Splitwise(Technique):
    """Compute a prompt and its first token on one server, and the other tokens on another, which gets the keys and
    values over the network: long prompts layer by layer while the next layer computes, short ones at once (section
    4.3). Prompts then do not delay the next tokens of running requests, and each pool can have the hardware that suits
    it. The servers are joined by ``ridgeline router`` or ``ridgeline fleet``."""

    card: ClassVar[Card] = Card(
        name="splitwise",
        title="Splitwise",
        paper="arXiv:2311.18677",
        taxonomy="inference/scheduling/phase-splitting",
        tasks=frozenset({"serve"}),
        lossless=True,
        claim="1.4x the throughput at 20 % lower cost, or 2.35x at equal cost and power",
        owns=frozenset({"phase_pools"}),
        conflicts={"pass_memory": "{other} uses the memory of a pass again, where copies of the cache wait to be sent"},
        example={"whole_below": 8},
    )
    phase: ClassVar[Phase] = "loop"
    captured: ClassVar[bool] = False

    role: Literal["prefill", "decode", "mixed"] = "mixed"
    """What the router prefers to use this server for."""
    whole_below: int = Field(default=512, ge=1)
    """Prompts with fewer tokens are sent after their pass at once (the paper's bound on an H100)."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: a plan is searched for one server."""
        return []

    def check(self, e: Experiment) -> None:
        """Needs a cache, in one process."""
        self.needs(e.model.causal, f"{e.model.name} is an encoder, which generates nothing", "drop splitwise")
        self.needs(e.world == 1, "the pool of a divided model lies in several processes",
                   "use one process per server, or drop splitwise")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Operators stay as they are; the transfer is predicted by :mod:`ridgeline.predict.serving.kv_transfer`."""
        return g

    def serve(self, run: ServeBuild) -> None:
        """Let the engine send and receive the caches of prompts."""
        run.role, run.whole_below = self.role, self.whole_below
