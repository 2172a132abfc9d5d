"""What was transferred, as counters for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class TransferCounts:
    """Counters of one server, in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"ridgeline_transfer_{name}", what, labels, registry=registry)

        self.sent = counter("sent_bytes", "Bytes of keys and values sent to decode servers, without frames.")
        self.received = counter("received_bytes", "Bytes of keys and values received from prefill servers.")
        self.prompts = counter("prompts", "Prompts asked of prefill servers, by how that ended: complete, lost, failed,"
                               " cancelled.", "result")  # fmt: skip
        self.refused = counter("peers_refused", "Connections closed because of what the peer sent.")
        self.exposed = Histogram("ridgeline_transfer_exposed_seconds", "From a prompt's first token to the arrival of"
                                 " the last of its keys and values.", buckets=_SECONDS, registry=registry)  # fmt: skip
