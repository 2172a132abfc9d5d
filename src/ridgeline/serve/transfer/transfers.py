"""An engine's exchange of caches with other servers, in the process where the engine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ridgeline.serve.transfer.client import PrefillClient
from ridgeline.serve.transfer.counts import TransferCounts
from ridgeline.serve.transfer.member import MemberOptions
from ridgeline.serve.transfer.secret import require_secret
from ridgeline.serve.transfer.server import Post, PrefillServer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ridgeline.serve.engine import Engine


class Transfers:
    """Computes prompts for other servers, and has others compute prompts for this one, whatever its role."""

    def __init__(
        self, engine: Engine, options: MemberOptions, post: Post, registry: CollectorRegistry,
        draining: Callable[[], bool], alive: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Listens at once. ``post``: has the engine's thread call something between two steps; ``draining``: whether
        new prompts are refused; ``alive``: whether the engine works. Raises :class:`UserError` for a taken port, and
        without a secret."""
        assert engine.exports is not None
        assert engine.imports is not None
        o = options
        require_secret(engine.role, o.secret)
        self.fingerprint = engine.fingerprint()
        counts = TransferCounts(registry)
        own, other = (o.tls.listening(mutual=True), o.tls.connecting(named=False)) if o.tls else (None, None)
        self.server = PrefillServer(engine, engine.exports, post, o.secret, self.fingerprint, counts, o.say, own)
        self.server.draining, self.server.alive = draining, alive
        self.port = self.server.listen(o.host, o.port)
        self.client = PrefillClient(engine.imports, post, o.secret, self.fingerprint, counts, o.say, other)

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        self.server.close()
