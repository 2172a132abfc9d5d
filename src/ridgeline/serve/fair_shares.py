"""Fair shares of one engine: the virtual token counter (VTC; Sheng et al., OSDI 2024, arXiv:2401.00588, algorithm 2).

Each client has a counter of the tokens that it was served, weighted by what they cost. Of the clients with waiting
requests the one with the lowest counter goes next. A client that was away does not save up its share: its counter is
raised to the lowest of those that wait. While two clients have requests waiting, what they were served differs by no
more than a constant that does not grow with time (theorem 4.4).
"""

from __future__ import annotations

from collections.abc import Collection

POLICIES = ("priority", "fair")
"""Names of policies: of equal priority, in the order of arrival, or fairly between clients."""


class FairShares:
    """The counters. ``prompt_weight``, ``output_weight``: what a token of a prompt and of an output count."""

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        """By default as the paper has them, after the prices of public APIs."""
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        self.served: dict[bytes, float] = {}
        """By client."""
        self._last: bytes | None = None
        """The client whose request left the queue last."""

    def arrive(self, client: bytes, waiting: Collection[bytes]) -> None:
        """A request of ``client`` joins the queue, in which the clients ``waiting`` have some."""
        if client in waiting:
            return
        level = min(map(self._of, waiting)) if waiting else self._of(self._last)
        self.served[client] = max(self._of(client), level)

    def first(self, clients: Collection[bytes]) -> bytes:
        """Whose request goes next."""
        return min(clients, key=self._of)

    def admit(self, client: bytes, prompt_tokens: int) -> None:
        """A request of ``client`` leaves the queue."""
        self._last = client
        self._add(client, self.prompt_weight * prompt_tokens)

    def generated(self, client: bytes) -> None:
        """A token of an output of ``client`` was generated."""
        self._add(client, self.output_weight)

    def _of(self, client: bytes | None) -> float:
        return 0.0 if client is None else self.served.get(client, 0.0)

    def _add(self, client: bytes, tokens: float) -> None:
        self.served[client] = self._of(client) + tokens
