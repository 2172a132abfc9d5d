"""Metrics of a whole swarm at any of its peers, from what all of them announce."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from ridgeline.spec.errors import UserError
from ridgeline.swarm.announcements import Announcement
from ridgeline.swarm.peer import Peer

PATIENCE = 5.0
"""Seconds in which a peer says what it knows."""
VALUES: dict[str, tuple[Callable[[Announcement], float], str]] = {
    "up": (lambda a: 1.0, "Peers whose announcements are valid."),
    "first_block": (lambda a: a.start, "First block that it holds."),
    "blocks": (lambda a: a.stop - a.start, "Blocks that it holds."),
    "throughput": (lambda a: a.throughput, "Tokens/s (a peer that trains: passes/s) through its blocks."),
    "running": (lambda a: a.running, "Sequences that it holds."),
    "room_tokens": (lambda a: a.room, "Tokens that its cache has room for."),
    "step": (lambda a: a.step, "Steps that its weights were trained; -1: fixed ones."),
    "refused": (lambda a: a.refused, "Peers that it refused."),
}
"""Names, what to read, and what it is."""


class SwarmMetrics:
    """``GET /metrics`` of a peer: every member of its swarm with the label ``member``."""

    def __init__(self, peer: Peer, loop: asyncio.AbstractEventLoop) -> None:
        """``loop``: the one that ``peer`` runs on."""
        self._peer, self._loop = peer, loop

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families, for prometheus_client; called on its thread."""

        async def known() -> list[Announcement]:
            return self._peer.table.live()

        members = asyncio.run_coroutine_threadsafe(known(), self._loop).result(PATIENCE)
        for name, (read, what) in VALUES.items():
            family = GaugeMetricFamily(f"ridgeline_swarm_{name}", what, labels=["member"])
            for a in members:
                family.add_metric([a.address], read(a))
            yield family

    def listen(self, host: str, port: int) -> Callable[[], None]:
        """Serve them → what ends that. Raises :class:`UserError` for a taken port."""
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, _ = start_http_server(port, host, registry)
        except OSError as e:
            raise UserError(f"nothing can listen at {host}:{port}: {e.strerror or e}",
                            "give another --metrics-port") from None  # fmt: skip
        return server.shutdown
