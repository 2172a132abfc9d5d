"""A server as a member of a fleet that divides prefill from decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ridgeline.serve.detokenize import ServeJob
from ridgeline.serve.engine_loop import EngineLoop
from ridgeline.serve.transfer.client import PrefillClient
from ridgeline.serve.transfer.counts import TransferCounts
from ridgeline.serve.transfer.secret import verified
from ridgeline.serve.transfer.server import PrefillServer
from ridgeline.serve.transfer.tls import Tls


class FleetMember:
    """Computes prompts for other servers, and has others compute prompts for it, whatever its ``role``: that is where
    the router prefers to use it."""

    def __init__(
        self, loop: EngineLoop, role: str, secret: bytes, host: str, port: int, say: Callable[[str], None],
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """Listens at once. Raises :class:`UserError` for a taken ``port`` (0: any)."""
        engine = loop.engine
        assert engine.exports is not None
        assert engine.imports is not None
        self.role, self._secret, self._loop = role, secret, loop
        self.fingerprint = engine.fingerprint()
        counts = TransferCounts(loop.metrics.registry)
        own, other = (tls.listening(mutual=True), tls.connecting(named=False)) if tls else (None, None)
        self.server = PrefillServer(engine, engine.exports, loop.post, secret, self.fingerprint, counts, say, own)
        self.server.draining = lambda: loop.draining
        self.server.alive = lambda: loop.failure is None and loop.step_age <= loop.limits.stall
        self.port = self.server.listen(host, port)
        self.client = PrefillClient(engine.imports, loop.post, secret, self.fingerprint, counts, say, other)

    def assign(self, jobs: Iterable[ServeJob], header: str | None) -> None:
        """Have the prompts of ``jobs`` computed where a router's ``header`` says; one without a valid signature says
        nothing."""
        address = verified(self._secret, header) if header else None
        if address:
            for job in jobs:
                job.request = replace(job.request, prefill_at=address)

    def description(self) -> dict[str, Any]:
        """What a router needs to know."""
        stats, limits = self._loop.stats, self._loop.engine.limits
        return {
            "role": self.role, "port": self.port, "fingerprint": self.fingerprint,
            "queued_tokens": stats.pending_prompt_tokens, "most_tokens": limits.max_num_batched_tokens,
            "sequences": stats.waiting + stats.running, "most_sequences": limits.max_num_seqs,
        }  # fmt: skip

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        self.server.close()
