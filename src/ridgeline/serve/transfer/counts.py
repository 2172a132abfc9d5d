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

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"ridgeline_transfer_{name}", what, buckets=_SECONDS, registry=registry)

        self.exposed = histogram("exposed_seconds", "From the end of a prompt's computation here until the last of its"
                                 " keys and values was sent.")  # fmt: skip
        self.wait = histogram("wait_seconds", "From the arrival of a prompt's first token here to that of the last of"
                              " its keys and values.")  # fmt: skip
