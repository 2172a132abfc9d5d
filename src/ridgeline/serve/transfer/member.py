"""A server as a member of a fleet that divides prefill from decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ridgeline.serve.detokenize import ServeJob
from ridgeline.serve.transfer.secret import signed, verified
from ridgeline.serve.transfer.tls import Tls

if TYPE_CHECKING:
    from ridgeline.serve.engine_loop import EngineLoop


@dataclass(frozen=True)
class MemberOptions:
    """How an engine exchanges caches."""

    secret: bytes
    host: str
    port: int
    """On which other servers fetch caches; 0: any."""
    tls: Tls | None
    say: Callable[[str], None]
    """Gets a line for each peer that is refused or lost."""
    stall: float
    """Seconds that a step may take before others do not wait for it."""


class FleetMember:
    """What a router sees of it, whatever its ``role``: that is where the router prefers to use it."""

    def __init__(self, loop: EngineLoop, role: str, secret: bytes, port: int, fingerprint: str) -> None:
        """``port``: on which its engine listens; ``fingerprint``: what others must have in common with it."""
        self.role, self.port, self.fingerprint = role, port, fingerprint
        self._secret, self._loop = secret, loop

    def assign(self, jobs: Iterable[ServeJob], header: str | None) -> bool:
        """Have the prompts of ``jobs`` computed where a router's ``header`` says → whether it does; one without a
        valid signature says nothing."""
        address = verified(self._secret, header) if header else None
        if address:
            for job in jobs:
                job.request = replace(job.request, prefill_at=address)
        return bool(address)

    def signed_at(self, host: str) -> str:
        """What :meth:`assign` of other members takes, for this one at ``host``."""
        return signed(self._secret, f"{host}:{self.port}")

    def description(self) -> dict[str, Any]:
        """What a router needs to know."""
        stats, limits = self._loop.stats, self._loop.engine.limits
        return {
            "role": self.role, "port": self.port, "fingerprint": self.fingerprint,
            "queued_tokens": stats.pending_prompt_tokens, "most_tokens": limits.max_num_batched_tokens,
            "sequences": stats.waiting + stats.running, "most_sequences": limits.max_num_seqs,
        }  # fmt: skip
