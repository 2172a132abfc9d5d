"""Keys and values on their way from the replica that computed a prompt to the one that generates its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.predict.fleet.members import Member
from ridgeline.predict.fleet.replica import FleetRequest
from ridgeline.spec.fleet import Transfer


@dataclass
class Sent:
    """Sums over all transfers."""

    count: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    """Of the links."""
    exposed_s: float = 0.0
    """From the first token to the arrival of the whole cache."""


class Transfers:
    """Times of transfers. A replica's cards send one cache after the other, and receive so.

    Layer by layer (Splitwise, arXiv:2311.18677, section IV-C), the cache of layer i leaves while layer i + 1 computes:
    of L layers at least the last is sent after the prompt's end. On an idle link this is
    :func:`~ridgeline.predict.serving.kv_transfer.kv_transfer` (a test).
    """

    def __init__(self, spec: Transfer) -> None:
        self.spec, self.sent = spec, Sent()

    def send(self, job: FleetRequest, source: Member, target: Member, now: float) -> float:
        """When the cache of a prompt whose first token is generated ``now`` has arrived."""
        if source is target:
            return now
        model, size = source.model, (job.tokens - 1) * source.model.kv_bytes
        by_layer = job.tokens > self.spec.layerwise_from  # the prompt and its first token
        messages = model.layers if by_layer else 1
        latency = max(model.latency, target.model.latency)
        seconds = size / min(model.bandwidth, target.model.bandwidth) + messages * latency
        begun = job.since + (now - job.since) / messages if by_layer else now
        begun = max(begun, source.sends_until, target.receives_until)
        over = begun + seconds
        source.sends_until = target.receives_until = over
        end = max(now + seconds / messages, over)
        self.sent.count += 1
        self.sent.bytes += size
        self.sent.seconds += seconds
        self.sent.exposed_s += end - now
        return end
