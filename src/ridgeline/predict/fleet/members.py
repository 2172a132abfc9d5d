"""The replicas of a fleet and which of them gets a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ridgeline.predict.fleet.replica import Replica
from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.predict.serving.discrete_events import Costs
from ridgeline.predict.serving.simulate import EngineSetup
from ridgeline.spec.fleet import FleetSpec, Flip, Policy, Pool


class PoolModel(NamedTuple):
    """A pool, ready to be simulated. Figures are those of one replica."""

    pool: Pool
    costs: Costs
    made: EngineSetup
    request_s: float = 0.0
    admission_s: float = 0.0
    devices: int = 1
    layers: int = 1
    kv_bytes: float = 0.0
    """Of one token's keys and values, on all its devices."""
    bandwidth: float = float("inf")
    """Bytes/s of all its network cards."""
    latency: float = 0.0
    price_per_hour: float = 0.0
    watts: float = 0.0


@dataclass(eq=False)
class Member:
    """One replica in the fleet."""

    model: PoolModel
    replica: Replica
    number: int
    born: float = 0.0
    died: float | None = None
    """When it was given back; None: at the end."""
    state: Literal["starting", "up", "draining", "gone"] = "up"
    mixed: bool = False
    """Whether a replica of one phase takes requests of both for now."""
    requests: int = 0
    sent: int = 0
    promised: int = 0
    """Tokens in the cache when its requests are as long as they will be."""
    foreign: int = 0
    """Requests in the phase that is not its pool's."""
    sends_until: float = 0.0
    receives_until: float = 0.0

    @property
    def role(self) -> str:
        """Of its pool."""
        return self.model.pool.role


Key = Callable[[Member], tuple[float, ...]]


@dataclass
class Routing:
    """Chooses replicas: one for a prompt and one for the tokens after the first, at once."""

    spec: FleetSpec
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.spec.fleet.seed)
        self.changed()

    def changed(self) -> None:
        """Replicas came, went or took another role."""
        up = [m for m in self.members if m.state == "up"]
        self.mixed = [m for m in up if m.role == "mixed" or m.mixed]
        self.prefill = [m for m in up if m.role == "prefill" and not m.mixed]
        self.decode = [m for m in up if m.role == "decode" and not m.mixed]
        self.shortest = min((m.replica.longest for m in up), default=0)

    def place(self, r: Arrival) -> tuple[Member, Member] | None:
        """The replicas for the prompt and for the tokens of a request; None: there is none now."""
        if not self.spec.split:
            one = self._best(self.mixed, r, "prompt")
            return None if one is None else (one, one)
        if self.spec.flip is not None:
            return self._flipping(r, self.spec.flip)
        prompt = self._best([*self.prefill, *self.mixed], r, "prompt")
        token = self._best([*self.decode, *self.mixed], r, "token")
        return None if prompt is None or token is None else (prompt, token)

    def _flipping(self, r: Arrival, flip: Flip) -> tuple[Member, Member] | None:
        """The shortest queue in a phase's own pool, then among mixed replicas; if both are too long, the least loaded
        replica of the other phase becomes a mixed one. Without any, the least loaded of all does the whole request."""

        def short(m: Member) -> bool:
            waits = m.replica.pending
            return not waits or waits + r.prompt <= flip.prompt_tokens

        def spacious(m: Member) -> bool:
            return m.promised + r.prompt + r.output <= flip.memory_share * m.replica.capacity

        prompt = self._first([self.prefill, self.mixed], r, "prompt", short)
        token = self._first([self.decode, self.mixed], r, "token", spacious)
        if prompt is None and (prompt := self._best(self.decode, r, "prompt")) is not None:
            self._flip(prompt)
        if token is None and (token := self._best(self.prefill, r, "token")) is not None:
            self._flip(token)
        if prompt is not None and token is not None:
            return prompt, token
        one = self._best([*self.prefill, *self.mixed, *self.decode], r, "prompt")
        return None if one is None else (one, one)

    def _flip(self, m: Member) -> None:
        m.mixed = True
        self.changed()

    def settle(self, m: Member) -> None:
        """A replica without requests of the other phase goes back to its own."""
        if m.mixed and not m.foreign:
            m.mixed = False
            self.changed()

    def _first(
        self, pools: Sequence[list[Member]], r: Arrival, phase: str, fits: Callable[[Member], bool]
    ) -> Member | None:
        best = (self._best(members, r, phase) for members in pools)
        return next((m for m in best if m is not None and fits(m)), None)

    def _best(self, members: Sequence[Member], r: Arrival, phase: str) -> Member | None:
        if r.prompt + r.output > self.shortest:
            members = [m for m in members if m.replica.longest >= r.prompt + r.output]
        if not members:
            return None
        if self.spec.fleet.policy == "random":
            return self.random.choice(members)
        return min(members, key=KEYS[self.spec.fleet.policy, phase])


def _fewest(m: Member) -> tuple[float, ...]:
    return m.requests, m.sent


def _in_turn(m: Member) -> tuple[float, ...]:
    return m.sent, m.number


KEYS: dict[tuple[Policy, str], Key] = {
    ("prefix", "prompt"): _fewest, ("prefix", "token"): _fewest,
    ("least-loaded", "prompt"): _fewest, ("least-loaded", "token"): _fewest,
    ("round-robin", "prompt"): _in_turn, ("round-robin", "token"): _in_turn,
    ("shortest-queue", "prompt"): lambda m: (m.replica.pending, m.requests, m.number),
    ("shortest-queue", "token"): lambda m: (m.promised, m.number),
}  # fmt: skip
"""What the chosen replica has least of, by policy and phase."""
