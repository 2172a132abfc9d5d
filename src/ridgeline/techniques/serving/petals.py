"""Petals: the layers of a model on machines of a wide-area network, which a client asks one after another."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ridgeline.graph.graph import Graph, Op
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.wire import Wire, wire_bytes
from ridgeline.techniques.technique import Card, Phase, Technique, degrees


class Petals(Technique):
    """Divide the layers over servers of a network, which the client asks in turn: a token takes the layers of all and a
    round trip to each, with activations in 8 bits. Servers may differ, come and go; the client sends a replacement what
    it sent before. Run by ``ridgeline swarm serve`` and ``swarm generate``; the client is one of the machines."""

    card: ClassVar[Card] = Card(
        name="petals",
        title="Petals",
        paper="arXiv:2209.01188",
        taxonomy="inference/distributed/petals",
        tasks=frozenset({"generate"}),
        lossless=False,
        claim="BLOOM-176B at about 1 step/s on consumer GPUs; up to 10x faster than offloading (arXiv:2312.08361)",
        tolerance=0.05,
        quality="tokens of plain activations are those of one machine; 8 bits round each server's input and output",
        runs=False,
        runs_by="ridgeline swarm",
        example={"servers": 2},
        conflicts={"resting_weights": "{other} streams a whole model through one machine"},
    )
    phase: ClassVar[Phase] = "split"

    servers: int = Field(default=3, ge=2)
    """Number of servers on a token's way, each with its part of the layers."""
    rtt: float = Field(default=0.05, ge=0)
    """Seconds from the client to a server and back."""
    rate: float = Field(default=12.5e6, gt=0)
    """Bytes/s between the client and a server (12.5e6: 100 Mbit/s)."""
    wire: Wire = "blockwise8"
    """Activations on the network: 8 bits with a scale for each block, or plain."""

    def axes(self) -> dict[str, int]:
        """The outermost mesh axis."""
        return {"pp": self.servers}

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """Powers of two, over the network of the defaults: a search does not know another."""
        return [cls(servers=n) for n in degrees(e, e.model.num_layers)]

    def check(self, e: Experiment) -> None:
        """There must be a layer for each server."""
        layers = e.model.num_layers
        self.needs(e.model.causal, f"{e.model.name} is an encoder, which generates nothing", "drop petals")
        self.needs(layers >= self.servers, f"{layers} layers do not fill {self.servers} servers",
                   f"use at most {layers} servers")  # fmt: skip

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """A token passes through all layers and to every server and back; each holds its part of layers and cache."""
        g.kv_cache /= self.servers
        for b in g.blocks:
            if b.name == "layers":
                for p in b.params:
                    p.numel /= self.servers
        size = 2 * wire_bytes(g.tokens, e.model.hidden_size, self.wire, DTYPE_BYTES[g.dtype])
        asks = [Op(f"ask{i}", "communication", "ask", bytes=size, link_bytes=size, ranks=2, axis="pp",
                   wan=(self.rtt, self.rate)) for i in range(self.servers)]  # fmt: skip
        head = next(b for b in g.blocks if b.is_head)
        head.forward[:0] = asks
        return g
