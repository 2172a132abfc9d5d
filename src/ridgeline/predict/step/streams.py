"""Step time: operators on streams with dependencies, so that overlap is a result, not a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from ridgeline.graph.graph import Block, Graph, Op
from ridgeline.graph.schedule import run as run_schedule
from ridgeline.graph.traffic import step_ops
from ridgeline.predict.machine import machine
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.host_work import COPIES
from ridgeline.predict.operators.kernel import least_bytes, roof_seconds
from ridgeline.predict.step.block_times import BlockTimes, block_times, place_of, seconds_of, timed_of
from ridgeline.predict.step.in_step import ALONE, InStepFactors, training_factors
from ridgeline.spec.device import Cluster
from ridgeline.spec.result import Row


@dataclass(slots=True)
class StreamEvent:
    """One interval on one stream, in seconds from the start of the step."""

    name: str
    stream: str
    start: float
    seconds: float
    phase: str


@dataclass(slots=True)
class TimedStep:
    """A timed step of the slowest rank."""

    seconds: float
    events: list[StreamEvent]
    exposed: float
    """Seconds in which compute waits for communication, or for the optimizer on the host."""
    inline: float = 0.0
    """The part of it caused by collectives inside blocks (tensor and context parallel)."""
    communication: float = 0.0
    """Seconds of communication, hidden and exposed."""
    bubble: float = 0.0
    """Seconds in which a rank waits for its pipeline neighbors (mean over the ranks)."""
    slowed: float = 0.0
    """Seconds that compute is slowed by concurrent collectives."""
    dispatch: float = 0.0
    """Seconds in which the device waits for the host to launch the next operator."""
    updating: float = 0.0
    """The part of ``exposed`` in which the optimizer runs on the host."""
    after: float = 0.0
    """Seconds of collectives, copies and the host's update that follow forward and backward one after another."""
    reducing: float = 0.0
    """Seconds of the reductions and copies of gradients that the last micro-batch starts, of the rank with least."""

    @property
    def exposed_communication(self) -> float:
        """Seconds in which compute waits for communication."""
        return max(0.0, self.exposed - self.updating)

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with compute."""
        return max(0.0, self.communication - self.exposed_communication)


@dataclass(slots=True)
class Streams:
    """Streams with a clock each. Without overlap (a CPU's ranks share their cores) there is only one."""

    overlap: bool
    share: float = 0.0
    """Fraction of compute's speed that a running collective takes."""
    record: bool = True
    events: list[StreamEvent] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "link": 0.0, "out": 0.0, "in": 0.0})
    exposed: float = 0.0
    communication: float = 0.0
    slowed: float = 0.0
    updates: list[tuple[float, float]] = field(default_factory=list)
    """When the optimizer runs on the host: start and end."""
    updating: float = 0.0
    """The part of ``exposed`` that these take."""

    @property
    def compute(self) -> float:
        """Time at which the compute stream is free."""
        return self.clocks["compute"]

    def waited(self, begin: float, end: float) -> None:
        """Compute has waited from ``begin`` to ``end``: counts what of it the optimizer on the host took."""
        for start, stop in self.updates:
            self.updating += max(0.0, min(end, stop) - max(begin, start))

    def run(self, name: str, phase: str, seconds: float, after: float = 0.0, inline: float = 0.0) -> float:
        """Run on the compute stream after the time ``after`` (the end of a communication); returns the end.

        ``inline`` seconds of collectives inside the block make it wait.
        """
        now = self.clocks["compute"]
        start = max(now, after)
        beside = max(0.0, min(self.clocks["link"] - start, seconds)) * self.share
        self.exposed += start - now + inline
        self.waited(now, start)
        self.communication += inline
        self.slowed += beside
        end = start + seconds + beside + inline
        if self.record and seconds:
            self.events.append(StreamEvent(name, "compute", start, seconds + beside, phase))
            if inline:
                self.events.append(StreamEvent(name, "tensor", end - inline, inline, "communication"))
        self.clocks["compute"] = end
        return end

    def send(self, name: str, seconds: float, after: float, stream: str = "link", update: bool = False) -> float:
        """Issue a collective, a copy or the host's ``update`` that may begin at ``after``; returns its end."""
        start = max(self.clocks[stream], after)
        if not self.overlap:
            start = max(start, self.clocks["compute"])
        if self.record and seconds:
            label = "communication" if stream == "link" else f"host {stream}"
            phase = "optimizer" if update else "communication"
            self.events.append(StreamEvent(name, label, start, seconds, phase))
        end = self.clocks[stream] = start + seconds
        if update:
            self.updates.append((start, end))
        else:
            self.communication += seconds
        if not self.overlap:
            self.exposed += end - self.clocks["compute"]
            self.waited(self.clocks["compute"], end)
            self.clocks["compute"] = end
        return end


def simulate(
    g: Graph, cluster: Cluster, update: list[Op], factors: InStepFactors = ALONE, record: bool = False
) -> TimedStep:
    """Time one step: forward, backward (per micro-batch), then the update.

    Parameter gathers are prefetched one block ahead; reductions overlap with the rest of backward; the update waits.
    With a pipeline, the schedule's action list decides. ``record`` keeps every event, and simulates every micro-batch.
    """
    if g.pipeline:
        return _pipelined(g, cluster, update, factors, record)
    times = [block_times(b, cluster, factors) for b in g.blocks]
    s = _streams(cluster, record)
    for _ in range(g.passes):
        _micro_batches(s, g, times)
    after = _finish(s, g, cluster, update, factors)
    runs = g.accumulation * g.passes
    inline = sum((t.forward_inline + t.backward_inline) * t.block.repeat for t in times) * runs
    waited = sum(t.dispatch * t.block.repeat for t in times) * runs
    end = max(s.clocks.values())
    s.exposed += end - s.compute
    s.waited(s.compute, end)
    return TimedStep(end, s.events, s.exposed, inline, s.communication, 0.0, s.slowed, waited, s.updating, after,
                     _longest(times))  # fmt: skip


def _streams(cluster: Cluster, record: bool) -> Streams:
    gpu = cluster.device.kind == "gpu"
    taken = machine(cluster.device).efficiency.comm_sm_share if gpu else 0.0
    return Streams(overlap=gpu, share=taken, record=record)


def _micro_batches(s: Streams, g: Graph, times: list[BlockTimes]) -> None:
    """Forward and backward of every micro-batch; a long accumulation repeats its second one."""
    if g.accumulation <= 3 or s.record:
        for i in range(g.accumulation):
            _micro_batch(s, g, times, last=i == g.accumulation - 1)
        return
    _micro_batch(s, g, times, last=False)
    before = dict(s.clocks), s.exposed, s.communication, s.slowed
    _micro_batch(s, g, times, last=False)
    more = g.accumulation - 3
    for name, was in before[0].items():
        s.clocks[name] += (s.clocks[name] - was) * more
    s.exposed += (s.exposed - before[1]) * more
    s.communication += (s.communication - before[2]) * more
    s.slowed += (s.slowed - before[3]) * more
    _micro_batch(s, g, times, last=True)


def _micro_batch(s: Streams, g: Graph, times: list[BlockTimes], last: bool) -> None:
    before = s.compute  # when the previous block started: the earliest a prefetch may be issued
    for t in times:
        b = t.block
        for i in range(b.repeat):
            ready = _fetch(s, t.gather_forward, b.name, before)
            before = max(s.compute, ready)
            end = s.run(_label(b, i), "forward", t.forward, ready, t.forward_inline)
            for stream, seconds in t.store:
                s.send(f"store {b.name}", seconds, end, stream)
    blocks = [(t, i) for t in reversed(times) for i in reversed(range(t.block.repeat))]
    ready = _fetch(s, blocks[0][0].gather_backward, blocks[0][0].block.name, s.compute)
    for (t, i), (after, _) in zip(blocks, [*blocks[1:], (None, 0)], strict=True):
        start = max(s.compute, ready)
        end = s.run(_label(t.block, i), "backward", t.backward, ready, t.backward_inline)
        if after and not g.gathers_after_reduction:
            ready = _fetch(s, after.gather_backward, after.block.name, start)
        if g.overlap_reduce and (last or g.reduce_every_micro_batch):
            _reduce(s, t, end)
        if after and g.gathers_after_reduction:
            ready = _fetch(s, after.gather_backward, after.block.name, start)
    if last and not g.overlap_reduce:
        for t in reversed(times):
            for _ in range(t.block.repeat):
                _reduce(s, t, s.compute)


def _reduce(s: Streams, t: BlockTimes, end: float) -> None:
    for stream, seconds in t.reduce:  # a copy waits for the reduction in front of it
        end = s.send(f"reduce {t.block.name}", seconds, end, stream)


def _fetch(s: Streams, parts: list[tuple[str, float]], name: str, after: float) -> float:
    ready = 0.0
    for stream, seconds in parts:
        if seconds:
            ready = s.send(f"gather {name}", seconds, max(after, ready), stream)
    return ready


def _finish(s: Streams, g: Graph, cluster: Cluster, update: list[Op], factors: InStepFactors) -> float:
    """The optimizer's operators, on the device or on the host, and what follows them → seconds of all but those on the
    device that come one after another."""
    start, others = s.compute, 0.0
    for op in update:
        took = seconds_of(op, cluster, factors)
        if op.axis and op.kind not in COPIES:
            others += took
            s.run(op.name, "optimizer", 0.0, s.send(op.name, took, s.compute))
        elif op.kind in COPIES:  # the device waits, unless the update is applied a step late
            after = max(s.clocks.values()) if not g.delayed_update else 0.0
            end = s.send(op.name, took, after, "out", update=op.kind == "host_update")
            others += 0.0 if g.delayed_update else took
            s.run(op.name, "optimizer", 0.0, 0.0 if g.delayed_update else end)
        else:
            s.run(op.name, "optimizer", took, max(s.clocks["link"], s.clocks["out"]))
    gathers = [(op, b.repeat / g.stages) for b in g.blocks for op in b.after_update]
    for op, times in [*((op, 1.0) for op in g.after_update), *gathers]:
        stream = COPIES.get(op.kind, "link")
        after = max(s.clocks.values()) if not g.delayed_update else start
        took = times * seconds_of(op, cluster)
        end = s.send(op.name, took, after, stream)
        others += 0.0 if g.delayed_update else took
        s.run(op.name, "optimizer", 0.0, 0.0 if g.delayed_update else end)
    return others


def _pipelined(g: Graph, cluster: Cluster, update: list[Op], factors: InStepFactors, record: bool) -> TimedStep:
    """Every virtual stage timed separately, then the schedule simulated; reductions follow the last backward."""
    pipe = g.pipeline
    assert pipe is not None
    ranks, chunks = pipe.degree, pipe.chunks
    places = cluster.places(ranks)
    factors_of = {id(part): training_factors(part, g.fused) if cluster.parts else factors for part in places}
    between = cluster.between if cluster.parts else None
    known = {(id(b.params), id(part)): block_times(b, part, factors_of[id(part)], between) for part in _apart(places)
             for b in g.blocks}  # fmt: skip
    stages = [[(known[id(b.params), id(places[i % ranks])], b.repeat) for b in stage]
              for i, stage in enumerate(g.cut(ranks * chunks))]  # fmt: skip
    forward, backward, weight = [], [], []
    exposed = communication = slowed = inline = waited = 0.0
    for t in known.values():
        t.late_forward, t.late_backward = _late(t.gather_forward, t.forward), _late(t.gather_backward, t.backward)
    keys = [tuple([(id(t), n) for t, n in stage]) for stage in stages]
    alike = dict(zip(keys, stages, strict=True))  # most are
    known_stages = {key: _of_stage(stage, pipe.schedule == "zero_bubble") for key, stage in alike.items()}
    for key in keys:
        f, b, w, sums = known_stages[key]
        forward.append(f)
        backward.append(b - w)
        weight.append(w)
        for held, late, sent_by, host in sums:
            inline += held
            exposed += late
            communication += sent_by
            waited += host
    each = g.accumulation / ranks
    hops = [*_apart(places), between] if between else [cluster]  # the slowest of all hops stands for each
    send = max(collective_time(pipe.send, hop).seconds for hop in hops) if pipe.send else 0.0
    if pipe.waits:  # a transfer is part of what every stage does
        cuts = len(forward) - 1
        forward = [f + (send if i < cuts else 0.0) for i, f in enumerate(forward)]
        backward = [b + (send if i else 0.0) for i, b in enumerate(backward)]
        exposed += 2 * cuts * send
        communication += 2 * cuts * send
        send = 0.0
    timeline = run_schedule(
        pipe.schedule, ranks, g.accumulation, tuple(forward), tuple(backward), tuple(weight), send, chunks, record
    )
    shrink = shared_cores(timeline.busy, max(timeline.ends), cluster.device.per_core)
    ends = [end * shrink for end in timeline.ends]
    s = _streams(cluster, record)
    tails, sent = [], 0.0
    reduced: dict[tuple[tuple[tuple[int, int], ...], ...], tuple[float, float]] = {}
    for r in range(ranks):
        mine = tuple(keys[r::ranks])
        if mine not in reduced:
            reduced[mine] = _reductions([pair for stage in stages[r::ranks] for pair in stage], g.overlap_reduce)
        total, tail = reduced[mine]
        tails.append(tail)
        sent += total / ranks
    slowest = max(range(ranks), key=lambda r: ends[r] + tails[r])
    end = ends[slowest] + tails[slowest]
    busy = sum(timeline.busy) / ranks
    if record:
        for r, plan in enumerate(timeline.starts):
            for action, start in plan:
                took = {"F": forward, "B": backward, "W": weight}[action.kind][action.stage]
                phase = "forward" if action.kind == "F" else "backward"
                name = f"{action.kind}{action.micro}"
                s.events.append(StreamEvent(name, f"stage {r}", start * shrink, took * shrink, phase))
    for name in s.clocks:
        s.clocks[name] = end
    last = max(_apart(places), key=lambda part: sum(seconds_of(op, part, factors_of[id(part)]) for op in update))
    after = _finish(s, g, last, update, factors_of[id(last)])
    finish = max(s.clocks.values())
    s.exposed += finish - s.compute
    s.waited(s.compute, finish)
    exposed = exposed * each + tails[slowest] + s.exposed
    communication = communication * each + sent + s.communication
    bubble = max(0.0, ends[slowest] - busy)
    return TimedStep(finish, s.events, exposed, inline * each, communication, bubble, slowed, waited * each, s.updating,
                     after, min(total for total, _ in reduced.values()))  # fmt: skip


def _of_stage(stage: list[tuple[BlockTimes, int]], apart: bool) -> tuple[float, float, float, list[tuple[float, ...]]]:
    """Seconds of a stage in forward, in backward and, if these run apart, for the gradients of weights; and of each of
    its blocks those of collectives inside, of exposed ones, of all, and of waiting for the host."""
    f = sum(n * (t.forward + t.forward_inline + t.late_forward) for t, n in stage)
    b = sum(n * (t.backward + t.backward_inline + t.late_backward) for t, n in stage)
    w = sum(n * t.weight for t, n in stage) if apart else 0.0
    sums: list[tuple[float, ...]] = []
    for t, n in stage:
        held = t.forward_inline + t.backward_inline
        late = t.late_forward + t.late_backward
        sent = held + sum(x for _, x in (*t.gather_forward, *t.gather_backward))
        sums.append((n * held, n * (held + late), n * sent, n * t.dispatch))
    return f, b, w, sums


def _longest(times: list[BlockTimes]) -> float:
    """Seconds of the reductions on the stream that has most."""
    sums: dict[str, float] = {}
    for t in times:
        for stream, seconds in t.reduce:
            sums[stream] = sums.get(stream, 0.0) + seconds * t.block.repeat
    return max(sums.values(), default=0.0)


def _reductions(own: list[tuple[BlockTimes, int]], overlap: bool) -> tuple[float, float]:
    """Seconds of the reductions of a rank's blocks, and of those that outlast its last backward pass."""
    total = sum([n * x for t, n in own for _, x in t.reduce])
    if not total or not overlap:
        return total, total
    window = sum([n * t.backward for t, n in own]) - max([t.backward for t, _ in own])
    return total, max(total - window, total / max(1, sum([n for _, n in own])))


def shared_cores(busy: Sequence[float], seconds: float, per_core: float) -> float:
    """Factor on a schedule's times where ``per_core`` ranks share a core, which works for the others while one waits:
    no core idles while there is work, and a rank alone is ``per_core`` times as fast."""
    return max(sum(busy) / len(busy) / seconds, 1.0 / per_core) if seconds and per_core > 1 else 1.0


def _apart(places: list[Cluster]) -> list[Cluster]:
    """The different ones, in order."""
    return list({id(part): part for part in places}.values())


def _late(parts: list[tuple[str, float]], compute: float) -> float:
    """The part of a prefetch one block ahead that is exposed."""
    return max(0.0, sum(x for _, x in parts) - compute) if parts else 0.0


def _label(b: Block, i: int) -> str:
    return f"{b.name}.{i}" if b.repeat > 1 else b.name


def _placed(g: Graph, cluster: Cluster) -> list[tuple[Op, float, Cluster]]:
    """Every operator of a step, how often it runs on the mean rank, and where."""
    if not cluster.parts:
        return [(op, n, cluster) for op, n in step_ops(g)]
    assert g.pipeline is not None
    ranks = g.pipeline.degree
    places = cluster.places(ranks)
    stages = g.cut(ranks * g.pipeline.chunks)
    between = cluster.between
    out: list[tuple[Op, float, Cluster]] = []
    for part in _apart(places):
        blocks = [b for i, stage in enumerate(stages) if places[i % ranks] is part for b in stage]
        alone = replace(g, blocks=blocks, update=[], after_update=[], pipeline=replace(g.pipeline, send=None))
        out += [(op, n, place_of(op, part, between)) for op, n in step_ops(alone)]
        share = sum(p is part for p in places) / ranks
        out += [(op, share, part) for op in (*g.update, *g.after_update)]
    return out + [(op, n, between) for op, n in step_ops(replace(g, blocks=[], update=[], after_update=[]))]


_ROWS = TypeAdapter(list[Row])


def breakdown(g: Graph, cluster: Cluster, times: int = 1, factors: InStepFactors = ALONE) -> list[Row]:
    """One row per (phase, module, operator, kind), summed over blocks and micro-batches; slowest first.

    With a pipeline the rows are the mean over its ranks.
    """
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for op, count, part in _placed(g, cluster):
        alone = timed_of(op, part)
        n, seconds, roof = count * times, alone.seconds, 0.0
        if not op.axis:
            here = training_factors(part, g.fused) if cluster.parts else factors
            seconds, roof = seconds_of(op, part, here), roof_seconds(op, part.device)
        moved = least_bytes(op) if op.kind == "attention" else op.bytes
        phase = op.phase
        key = (phase, op.module, op.name, op.kind)
        row = rows.get(key)
        if row is None:
            rows[key] = {"phase": phase, "module": op.module, "operator": op.name, "kind": op.kind,
                         "seconds": seconds * n, "count": n, "flops": op.flops * n, "bytes": moved * n,
                         "link_bytes": op.link_bytes * n, "roof": roof * n, "bound": alone.bound,
                         "spread": alone.spread}  # fmt: skip
        else:
            row["seconds"] += seconds * n
            row["count"] += n
            row["flops"] += op.flops * n
            row["bytes"] += moved * n
            row["link_bytes"] += op.link_bytes * n
            row["roof"] += roof * n
            row["bound"], row["spread"] = alone.bound, alone.spread
    for row in rows.values():
        row["roof"] = min(1.0, row["roof"] / row["seconds"]) if row["roof"] and row["seconds"] else None
    return _ROWS.validate_python(sorted(rows.values(), key=lambda row: -row["seconds"]))
