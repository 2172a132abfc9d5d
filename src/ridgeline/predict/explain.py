"""Explains a prediction: the time as a tree with the bottleneck of each node, and the changes that would speed it up.

The effect of each resource is found by predicting again on a modified device, so that overlap and bubbles count:
doubling the link of a step whose communication is hidden gains nothing, and the result shows that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.predict.machine import machine
from ridgeline.predict.operators.host_work import faster_host, faster_paths
from ridgeline.predict.predict import predict
from ridgeline.spec.device import Cluster, Device, Link, Rate
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.result import Result, Row
from ridgeline.techniques.registry import registry

Resource = Literal["compute", "memory", "link", "latency", "host", "server"]
RESOURCES: tuple[Resource, ...] = ("compute", "memory", "link", "latency", "host", "server")
RESOURCE_NAMES = {
    "compute": "matrix-multiply rate",
    "memory": "memory bandwidth",
    "link": "bandwidth between devices",
    "latency": "launch and message latency",
    "host": "bandwidth to host memory and disks",
    "server": "the host's own memory bandwidth and cores",
}
GAIN = 0.10
"""The speedup that the levers are solved for."""
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "p2p", "broadcast", "reduce")
_LARGEST = 64.0
"""A factor beyond which improving a resource is reported as insufficient."""


@dataclass(slots=True)
class TimePart:
    """A part of the time: its seconds, its fraction of the whole, and what bounds it, as fractions of its seconds."""

    name: str
    seconds: float
    share: float
    bounds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    children: list[TimePart] = field(default_factory=list)

    @property
    def bound(self) -> str:
        """The largest bound, or "mixed" when none accounts for half of the seconds."""
        if not self.bounds:
            return ""
        top = max(self.bounds, key=self.bounds.__getitem__)
        return top if self.bounds[top] >= 0.5 else "mixed"


@dataclass(slots=True)
class Lever:
    """How much better one resource would have to be for the requested speedup."""

    resource: str
    factor: float | None
    """Improvement factor; None if no factor is enough."""
    limit: float
    """Speedup if this resource were 64 times better."""


@dataclass(slots=True)
class Move:
    """A change of the plan or the batch, and the predicted speedup (0.2: 20 % faster)."""

    change: str
    gain: float
    fits: bool
    note: str = ""


@dataclass(slots=True)
class Explanation:
    """The prediction, its tree, and what would change it."""

    result: Result
    metric: str
    tree: TimePart
    levers: list[Lever]
    moves: list[Move]


def explain(e: Experiment, moves: bool = True) -> Explanation:
    """Explain the predicted time of an experiment. Raises :class:`Incompatible` as :func:`predict` does."""
    result = predict(e)
    name = headline(result)
    now = result.metrics[name].value
    levers = [_lever(e, name, now, r) for r in RESOURCES]
    tried = _moves(e, name, now) if moves else []
    return Explanation(result, name, tree(result, name), levers, tried)


def headline(r: Result) -> str:
    """The time that is explained: of a step, of a batch, or of one output token."""
    served = "batch_mean" in r.metrics  # the breakdown is of one iteration, which gives every sequence one token
    for name in ("step_time_s", "tpot_s") if served else ("step_time_s", "e2e_s"):
        if name in r.metrics:
            return name
    if r.status == "ok":
        raise UserError("requests of one token have no time per further token to explain", "use a longer output_len")
    why = f": {r.reason}" if r.reason else ""
    raise UserError(f"there is no time to explain{why}", "choose a plan that fits: `ridgeline plan` finds one")


def tree(r: Result, name: str) -> TimePart:
    """Whole → phase → module → operator. Time that no row accounts for is shown separately. Where operators one by one
    take longer than the whole (on a CPU one kernel computes the layers of a decode step), shares are of their sum."""
    total = r.metrics[name].value
    phases: dict[str, list[Row]] = defaultdict(list)
    for row in r.breakdown:
        phases[row.phase].append(row)
    root = TimePart(name, total, 1.0)
    known = sum(map(_own, r.breakdown))
    if known > 1.005 * total:
        root.note = f"one by one its operators take {1e3 * known:.3g} ms, of which the shares are"
    for phase, rows in phases.items():
        node = _phase(phase, rows, max(total, known))
        if node.seconds > 0 or node.note:
            root.children.append(node)
    left = total - sum(c.seconds for c in root.children)
    if left > 0.005 * total:
        bound, note = ("latency", "time no operator accounts for")
        if name == "tpot_s":  # the rows are of an iteration that reads no prompts
            bound, note = ("waiting", "for prompts of others, pads and the engine's own work")
        root.children.append(TimePart("waiting", left, left / total, {bound: 1.0}, note))
    root.children.sort(key=lambda c: -c.seconds)
    root.bounds = _merge(root.children)
    return root


def _own(row: Row) -> float:
    return row.seconds if row.exposed_seconds is None else row.exposed_seconds


def _phase(phase: str, rows: list[Row], total: float) -> TimePart:
    modules: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        modules[row.module].append(row)
    node = TimePart(phase, sum(map(_own, rows)), sum(map(_own, rows)) / total)
    hidden = sum(row.seconds - _own(row) for row in rows)
    if hidden > 0:
        node.note = f"another {hidden:.3g} s hides behind computation"
    for module, inside in modules.items():
        seconds = sum(map(_own, inside))
        leaves = [
            TimePart(row.operator, _own(row), _own(row) / total, {row.bound or "unknown": 1.0}, _leaf_note(row))
            for row in sorted(inside, key=lambda x: -_own(x))
        ]
        child = TimePart(module, seconds, seconds / total, _merge(leaves), children=leaves)
        if len(leaves) == 1 and module == phase:
            child = leaves[0]
        node.children.append(child)
    node.children.sort(key=lambda c: -c.seconds)
    node.bounds = _merge(node.children)
    return node


def _leaf_note(row: Row) -> str:
    facts = [f"{row.count:g} calls"]
    if row.roof is not None:
        facts.append(f"{row.roof:.0%} of roof")
    return ", ".join(facts)


def _merge(nodes: Iterable[TimePart]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    whole = 0.0
    for n in nodes:
        whole += n.seconds
        for bound, share in n.bounds.items():
            sums[bound] += share * n.seconds
    return {k: v / whole for k, v in sorted(sums.items(), key=lambda kv: -kv[1])} if whole else {}


# ---- levers ---------------------------------------------------------------------------------------------------------


def _lever(e: Experiment, name: str, now: float, resource: Resource) -> Lever:
    """Bisection on predictions: the smallest factor that shortens the time to ``now / (1 + GAIN)``."""

    def at(factor: float) -> float:
        changed = e.model_copy(update={"cluster": _improved(e.cluster, resource, factor)})
        return predict(changed).metrics[name].value

    goal = now / (1 + GAIN)
    best = at(_LARGEST)
    if best > goal:
        return Lever(RESOURCE_NAMES[resource], None, now / best - 1)
    low, high = 1.0, _LARGEST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle) <= goal else (middle, high)
    return Lever(RESOURCE_NAMES[resource], high, now / best - 1)


def _improved(c: Cluster, resource: Resource, factor: float) -> Cluster:
    parts = tuple(_improved(part, resource, factor) for part in c.parts)
    return c.model_copy(update={"device": improved(c.device, resource, factor), "parts": parts})


def improved(d: Device, resource: Resource, factor: float) -> Device:
    """The device with one resource ``factor`` times better, in both its datasheet and its measured rates."""

    def rate(kind: str, r: Rate) -> Rate:
        sends = kind.split(".")[0] in _COLLECTIVES
        if resource == "compute":
            return r.model_copy(update={"flop_rate": r.flop_rate * factor})
        if resource == "latency":
            return r.model_copy(update={"latency": r.latency / factor})
        if sends == (resource == "link"):
            return r.model_copy(update={"byte_rate": r.byte_rate * factor})
        return r

    def link(x: Link | None) -> Link | None:
        if x is None or resource not in ("link", "latency"):
            return x
        if resource == "latency":
            return x.model_copy(update={"latency": x.latency / factor})
        return faster(x)

    def faster(x: Link | None) -> Link | None:
        if x is None:
            return None
        spans = tuple((count, bandwidth * factor) for count, bandwidth in x.spans)
        return x.model_copy(update={"bandwidth": x.bandwidth * factor, "spans": spans})

    through_host = resource == "link" and (d.link is None or not d.link.p2p)

    update: dict[str, object] = {
        "rates": {k: rate(k, r) for k, r in d.rates.items()},
        "ranks": {n: {k: rate(k, r) for k, r in rates.items()} for n, rates in d.ranks.items()},
        "link": d.link if through_host else link(d.link),
        "network": link(d.network),
    }
    constants = machine(d).efficiency
    if through_host:  # the whole path, but not the host's memory itself, which an offloaded optimizer works in
        sends = constants.collective
        sends = sends.model_copy(update={"bandwidth_share": sends.bandwidth_share * factor})
        update["efficiency"] = constants.model_copy(update={"collective": sends})
    if resource == "compute":  # including the power that it needs
        update["peak_flops"] = {k: v * factor for k, v in d.peak_flops.items()}
        update["watts"] = d.watts * factor
    elif resource == "memory":
        update["memory_bandwidth"] = d.memory_bandwidth * factor
    elif resource == "host":  # of the links, not of the memory itself
        update |= {"host_link": faster(d.host_link), "disk": faster(d.disk), "host": faster_paths(d.host, factor)}
    elif resource == "server":
        update["host"] = faster_host(d.host, factor)
    elif resource == "latency":
        update["launch_latency"] = d.launch_latency / factor
        update["efficiency"] = constants.model_copy(update={"clock": constants.clock / factor})
        update["host_latency"] = {k: v / factor for k, v in d.host_latency.items()}
    return d.model_copy(update=update)


# ---- moves ----------------------------------------------------------------------------------------------------------


def _moves(e: Experiment, name: str, now: float) -> list[Move]:
    """Every registered technique that is not in the plan, and doubling the micro-batch: those that help, best first."""
    out: list[Move] = []

    def attempt(change: str, changed: Experiment) -> None:
        try:
            r = predict(changed)
        except UserError:
            return
        gain = now / r.metrics[name].value - 1
        if gain > 0.01:
            out.append(Move(change, gain, r.status == "ok", "" if r.status == "ok" else r.reason))

    for technique, cls in registry().items():
        if e.plan.has(technique) or (e.task == "pretrain" and cls.card.bound == "falls"):
            continue
        quality = "" if cls.card.lossless else " (may change quality)"
        example = {} if "model_shape" in cls.card.owns else dict(cls.card.example)  # a small model's sizes
        for options in [{}, example] if example else [{}]:
            calls = (*e.plan.calls, Call(name=technique, options=options))
            attempt(f"{calls[-1]}{quality}", e.model_copy(update={"plan": Plan(calls=calls), "parallel": {}}))
    if e.is_training:
        doubled = e.workload.model_copy(update={"micro_batch_size": 2 * e.micro_batch_size})
        attempt(f"micro_batch_size={2 * e.micro_batch_size}", e.model_copy(update={"workload": doubled}))
    unique: dict[str, Move] = {}
    for m in sorted(out, key=lambda m: -m.gain):
        unique.setdefault(m.change, m)
    return list(unique.values())
