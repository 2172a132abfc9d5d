"""A forward pass whose weights come through a ring of device memory: the schedule of the run, in seconds.

Fetches are made in order, each when the ring has room in one piece behind the last one; what has computed gives its
memory back in the same order (:class:`~ridgeline.spec.ring.RingSpace`, which the run uses too). Two transfers that are
under way on one disk share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from ridgeline.graph import Graph, Op
from ridgeline.graph.graph import Block, alternate
from ridgeline.predict.step.block_times import block_times, seconds_of
from ridgeline.spec.device import Cluster
from ridgeline.spec.ring import RING_BYTES, RingSpace

_FETCHES = 64
"""Fetches that are followed at least, in whole passes; and segments ahead of these, from the pass before."""
STREAMS = {"disk_read": "disk", "disk_write": "disk", "h2d": "h2d", "d2h": "d2h"}


@dataclass(slots=True)
class _Segment:
    """What computes with one fetch of weights, or between two."""

    part: str
    """Beginning of the names of its parameters in the layer."""
    before: float = 0.0
    """Seconds of computation before it, without its weights."""
    waits: float = 0.0
    """Seconds with its weights' memory in which computation waits or copies."""
    compute: float = 0.0
    size: float = 0.0
    """Bytes of weights that it waits for; 0: none."""
    fetch: dict[str, float] = field(default_factory=dict)
    """Seconds of their transfer by stream, one after the other."""
    beside: dict[str, float] = field(default_factory=dict)
    """Seconds of other transfers by stream that are made while it computes, and end with it at the earliest."""


def streamed_seconds(g: Graph, cluster: Cluster) -> float:
    """Seconds of a forward pass in the steady state of one after the other, with what it waits for, the weights that
    arrive, and what is moved beside parts of layers (``behind`` empty, weights and module). ``g``: a pass's operators,
    with the bytes of the ring as its ``weight_buffers``."""
    known = [_segments(b, cluster, g.accumulation * g.passes, g.weight_buffers) for b in g.blocks]
    order = [s for i, n in alternate(g.blocks) for _ in range(n) for s in known[i]]
    return _Pass(order, g.weight_buffers).seconds()


def waits(op: Op, cluster: Cluster) -> bool:
    """Whether the cores that compute wait for a copy, or make it, as a CPU's do from host memory."""
    return not op.behind or (op.kind == "h2d" and cluster.device.kind == "cpu")


def _copied(op: Op, cluster: Cluster, room: float) -> float:
    """Seconds in which cores copy weights from host memory into a ring of ``room`` bytes, which may stay in a cache."""
    if op.name != "weights.h2d" or cluster.device.kind != "cpu":
        return seconds_of(op, cluster)
    sizes = [size for size in RING_BYTES if size >= room] or RING_BYTES[-1:]
    rate = cluster.device.rates.get(f"copy_ring{sizes[0] >> 20}")
    return seconds_of(op, cluster) if rate is None else op.link_bytes / rate.byte_rate


def _segments(b: Block, cluster: Cluster, times: int, room: float) -> list[_Segment]:
    """The parts of a block in order, each computed ``times`` times; ``room``: bytes of the ring."""
    moved = [o for o in b.gather_forward if o.axis == "host" and (o.behind != "layers" or waits(o, cluster))]
    parts = [o.param for o in moved if o.param or o.behind] or [""]
    found = {part: _Segment(part) for part in parts}
    for o in moved:
        s = found.get(o.param) or next(iter(found.values()))
        if o.behind == "weights":
            s.size = o.link_bytes
        if waits(o, cluster):
            s.waits += _copied(o, cluster, room)
        else:
            to = s.fetch if o.behind == "weights" else s.beside
            to[STREAMS[o.kind]] = to.get(STREAMS[o.kind], 0.0) + seconds_of(o, cluster)
    t = block_times(replace(b, gather_forward=[]), cluster)
    alone = sum(seconds_of(o, cluster) for o in b.forward)
    scale = times * (t.forward + t.forward_inline) / alone if alone else 0.0
    between, ahead = 0.0, list(found.values())
    for o in b.forward:
        mine = next((s for s in found.values() if o.param.startswith(s.part) or s.part == f"{o.module}."), None)
        if mine is None:
            between += scale * seconds_of(o, cluster)
            continue
        if mine in ahead:
            mine.before, between = between, 0.0
            ahead = ahead[ahead.index(mine) + 1 :]
        mine.compute += scale * seconds_of(o, cluster)
    return [*found.values(), _Segment("-", compute=between)] if between else [*found.values()]


class _Pass:
    """Passes through the ``order`` of segments, with ``room`` bytes for weights on their way."""

    def __init__(self, order: list[_Segment], room: float) -> None:
        self.order = order
        self.fetched = [s for s in order if s.size]
        largest = max((s.size for s in self.fetched), default=0.0)
        self.ring = RingSpace(max(room, largest) * (1 + 1e-9))
        self.clocks = {"disk": 0.0, "h2d": 0.0, "d2h": 0.0}
        """When each stream has nothing more to do."""
        self.pending: deque[float] = deque()
        """When what is on its way is there."""
        self.next = 0

    def seconds(self) -> float:
        """Of one pass, behind enough of the one before to fill an empty ring."""
        if not self.fetched:
            return sum(max(s.waits + s.compute, *s.beside.values(), 0.0) + s.before for s in self.order)
        ahead, passes = self.order, -(-_FETCHES // len(self.fetched))
        if passes == 1:
            ahead = ahead[-_FETCHES:]
            self.next = len(self.fetched) - sum(s.size > 0 for s in ahead)
        now, start = 0.0, 0.0
        self._fetch(now)
        for s in ahead:
            start = now = self._run(s, now)
        for s in self.order * passes:
            now = self._run(s, now)
        return (now - start) / passes

    def _run(self, s: _Segment, now: float) -> float:
        """The end of a segment that begins at ``now`` at the earliest."""
        start = now + s.before
        if s.size:
            start = max(start, self.pending.popleft())
        end = start + s.waits + s.compute
        for stream, seconds in s.beside.items():
            others = max(0.0, self.clocks[stream] - start)  # of weights that are under way on the same stream
            later = min(seconds, others)
            end = max(end, start + seconds + later)
            if later:
                self.pending = deque(t + later if t > start else t for t in self.pending)
            self.clocks[stream] = start + others + seconds
        if s.size:
            self.ring.give()
            self._fetch(end)
        return end

    def _fetch(self, now: float) -> None:
        while len(self.pending) < len(self.fetched):
            s = self.fetched[self.next % len(self.fetched)]
            if self.ring.take(s.size) is None:
                return
            self.next += 1
            at = now
            for stream, seconds in s.fetch.items():
                at = self.clocks[stream] = max(at, self.clocks[stream]) + seconds
            self.pending.append(at)
