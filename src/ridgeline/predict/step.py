"""Step time: operators on streams with dependencies, so that overlap is a result, not a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.predict.collective import collective_time
from ridgeline.predict.kernel import op_time, roof_seconds
from ridgeline.spec.device import Cluster
from ridgeline.spec.result import Row


@dataclass(slots=True)
class Event:
    """One interval on one stream, in seconds from the start of the step."""

    name: str
    stream: str
    start: float
    seconds: float
    phase: str


@dataclass(slots=True)
class Step:
    """A timed step."""

    seconds: float
    events: list[Event]
    exposed: float
    """Seconds in which communication keeps compute waiting."""


@dataclass(slots=True)
class Streams:
    """Two streams with a clock each. Without overlap (a CPU's ranks share their cores) they are one."""

    overlap: bool
    events: list[Event] = field(default_factory=list)
    compute: float = 0.0
    link: float = 0.0
    exposed: float = 0.0

    def run(self, name: str, phase: str, seconds: float, after: float = 0.0) -> float:
        """Run on the compute stream once ``after`` (a communication's end) has passed; returns the end."""
        start = max(self.compute, after)
        self.exposed += start - self.compute
        if seconds:
            self.events.append(Event(name, "compute", start, seconds, phase))
        self.compute = start + seconds
        return self.compute

    def send(self, name: str, seconds: float, after: float) -> float:
        """Issue a collective that may begin at ``after``; returns its end."""
        start = max(self.link, after)
        if not self.overlap:
            start = max(start, self.compute)
        if seconds:
            self.events.append(Event(name, "communication", start, seconds, "communication"))
        self.link = start + seconds
        if not self.overlap:
            self.exposed += self.link - self.compute
            self.compute = self.link
        return self.link


@dataclass(slots=True)
class _Times:
    forward: float
    backward: float
    gather_forward: float
    gather_backward: float
    reduce: float


def _block_times(b: Block, cluster: Cluster) -> _Times:
    device = cluster.device
    return _Times(
        sum(op_time(o, device).seconds for o in b.forward),
        sum(op_time(o, device).seconds for o in b.backward),
        sum(collective_time(o, cluster).seconds for o in b.gather_forward),
        sum(collective_time(o, cluster).seconds for o in b.gather_backward),
        sum(collective_time(o, cluster).seconds for o in b.reduce),
    )


def simulate(g: Graph, cluster: Cluster, update: list[Op]) -> Step:
    """Time one step: forward, backward (per micro-batch), then the update.

    Parameter gathers are prefetched one block ahead; reductions run behind the rest of backward; the update waits.
    """
    times = [(b, _block_times(b, cluster)) for b in g.blocks]
    s = Streams(overlap=cluster.device.kind == "gpu")
    for micro in range(g.accumulation):
        last = micro == g.accumulation - 1
        before = s.compute  # when the previous block started: the earliest a prefetch may be issued
        for b, t in times:
            for i in range(b.repeat):
                ready = s.send(f"gather {b.name}", t.gather_forward, before) if t.gather_forward else 0.0
                before = max(s.compute, ready)
                s.run(_label(b, i), "forward", t.forward, ready)
        before = s.compute
        for b, t in reversed(times):
            for i in reversed(range(b.repeat)):
                ready = s.send(f"gather {b.name}", t.gather_backward, before) if t.gather_backward else 0.0
                before = max(s.compute, ready)
                end = s.run(_label(b, i), "backward", t.backward, ready)
                if t.reduce and (last or g.reduce_every_micro_batch):
                    s.send(f"reduce {b.name}", t.reduce, end)
    for op in update:
        s.run(op.name, "optimizer", op_time(op, cluster.device).seconds, s.link)
    return Step(max(s.compute, s.link), s.events, s.exposed)


def _label(b: Block, i: int) -> str:
    return f"{b.name}.{i}" if b.repeat > 1 else b.name


def breakdown(g: Graph, cluster: Cluster, update: list[Op], times: int = 1) -> list[Row]:
    """One row per (phase, module, operator, kind), summed over blocks and micro-batches; slowest first."""
    device = cluster.device
    rows: dict[tuple[str, str, str, str], Row] = {}
    roofs: dict[tuple[str, str, str, str], float] = {}
    for op, count in _all_ops(g, update):
        key = (op.phase, op.module, op.name, op.kind)
        one = collective_time(op, cluster) if op.axis else op_time(op, device)
        n = count * times
        row = rows.setdefault(key, Row(phase=key[0], module=key[1], operator=key[2], kind=key[3], seconds=0.0, count=0))
        row.seconds += one.seconds * n
        row.bound = one.bound
        row.count += n
        row.flops += op.flops * n
        row.bytes += op.bytes * n
        row.link_bytes += op.link_bytes * n
        roofs[key] = roofs.get(key, 0.0) + (0.0 if op.axis else roof_seconds(op, device) * n)
    for key, row in rows.items():
        if roofs[key] and row.seconds:
            row.roof = min(1.0, roofs[key] / row.seconds)
    return sorted(rows.values(), key=lambda r: -r.seconds)


def _all_ops(g: Graph, update: list[Op]) -> Iterator[tuple[Op, float]]:
    for b in g.blocks:
        n = b.repeat * g.accumulation
        reduces = n if g.reduce_every_micro_batch else b.repeat
        for group in (b.gather_forward, b.forward, b.gather_backward, b.backward):
            for op in group:
                yield op, n
        for op in b.reduce:
            yield op, reduces
    for op in update:
        yield op, 1
