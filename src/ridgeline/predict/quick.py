"""The numbers that a search compares: the same model as :func:`predict`, without a Result's breakdown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.graph import Graph, training_graph
from ridgeline.predict.common import COSTS, beyond_host, cost_of, rank_cluster
from ridgeline.predict.predict import predict
from ridgeline.predict.segments import segments
from ridgeline.predict.step.block_times import block_times
from ridgeline.predict.step.in_step import training_factors
from ridgeline.predict.step.peak_memory import accumulates, least_activations, resident
from ridgeline.predict.step.training_step import tightest, timed, update_ops
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import PHASES, Technique


@dataclass(slots=True)
class Quick:
    """A prediction without the breakdown."""

    metrics: dict[str, float]
    """As in a Result; for a plan that does not fit, only ``peak_bytes``."""
    peak: dict[str, float]
    """Bytes per category at the time of the peak."""
    limit: float
    """Memory bytes available to one rank."""
    blocked: str = ""
    """Why it cannot run although its tensors fit (no room for one request's cache, or in host memory)."""
    complete: bool = True
    """Whether the peak is the step's actual peak; False: already a lower bound of it exceeds the device's memory."""
    states: float = 0.0
    """Bytes of parameters, optimizer states and what the framework holds: the same for all micro-batches."""
    gradients: float = 0.0
    """Bytes of gradients at the update: the same for all micro-batches."""
    after: float = 0.0
    """Seconds of a step after its computation, no less with more micro-batches: collectives and copies of the update,
    and the update itself where it runs on the host."""
    reducing: float = 0.0
    """Seconds of reductions and copies of gradients, of which the last micro-batch hides as much as it takes."""

    @property
    def fits(self) -> bool:
        """Whether it can run: the peak is within the device's memory, and nothing else blocks it."""
        return self.metrics["peak_bytes"] <= self.limit and not self.blocked


def prepare(e: Experiment, techniques: list[Technique]) -> Graph:
    """The training graph after the techniques of all phases before ``shard``: shared by all placements."""
    g = training_graph(e)
    for t in techniques:
        if not _places(t):
            g = t.rewrite(g, e)
    return g


def split(core: Graph, e: Experiment, techniques: list[Technique]) -> Graph:
    """:func:`prepare` for an experiment that differs from ``core``'s only by techniques of phase ``split``.

    They do not affect operators, so they may be applied last, except for a tied head, which gets a copy of the
    embedding.
    """
    if e.model.tie_embeddings and any(t.phase == "split" for t in techniques):
        return prepare(e, techniques)
    g = core.copy()
    g.accumulation = e.accumulation
    for t in techniques:
        if t.phase == "split":
            g = t.rewrite(g, e)
    return g


def _places(t: Technique) -> bool:
    return PHASES.index(t.phase) >= PHASES.index("shard")


def quick(
    e: Experiment,
    techniques: list[Technique],
    always: bool = False,
    prepared: Graph | None = None,
    activations: float = 0.0,
    room: float = math.inf,
) -> Quick:
    """Predict a normalized, checked experiment. Times are omitted when it does not fit, or takes more than ``room``
    bytes of memory in training, unless ``always``.

    ``prepared`` is the graph that :func:`prepare` created for it; it is not changed. ``activations``: bytes of
    activations and temporaries that are known to exist at one time.
    """
    if not e.is_training:
        r = predict(e)
        values = {k: m.value for k, m in r.metrics.items()}
        blocked = r.reason if r.status != "ok" else ""
        return Quick(values, {m.category: m.bytes for m in r.memory}, e.cluster.device.memory_bytes, blocked)
    parts = segments(e, techniques)
    if len(parts) > 1:
        return _mean([(share, _quick(part, techniques, always, None, 0.0, room)) for share, part in parts])
    return _quick(e, techniques, always, prepared, activations, room)


def _mean(found: list[tuple[float, Quick]]) -> Quick:
    """Aggregate over the segments of a run, as :func:`over_segments`."""
    out = max((one for _, one in found), key=lambda one: one.metrics["peak_bytes"])
    if any("step_time_s" not in one.metrics for _, one in found):
        return out
    metrics = {}
    times = [share * one.metrics["step_time_s"] for share, one in found]
    tokens = [seconds * one.metrics["tokens_per_s"] for seconds, (_, one) in zip(times, found, strict=True)]
    for name in found[-1][1].metrics:
        values = [one.metrics.get(name, 0.0) for _, one in found]
        if name.endswith("_bytes"):
            metrics[name] = max(values)
            continue
        by_steps = name.endswith("_s") and "per_s" not in name
        weights = [share for share, _ in found] if by_steps else tokens if name in COSTS else times
        metrics[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    after, reducing = (sum(share * getattr(one, name) for share, one in found) for name in ("after", "reducing"))
    return Quick(metrics, out.peak, out.limit, out.blocked, after=after, reducing=reducing)


def _quick(
    e: Experiment, techniques: list[Technique], always: bool, prepared: Graph | None, activations: float, room: float
) -> Quick:
    cluster = rank_cluster(e)
    g = prepared.copy() if prepared else prepare(e, techniques)
    for t in techniques:
        if _places(t):
            g = t.rewrite(g, e)
    g.close()
    device = max((part.device for part in cluster.parts or (cluster,)), key=lambda d: d.memory_bytes)
    least = {**resident(g), "framework": device.reserved_bytes}
    gradients = least["gradients"]
    states = sum(least.values()) - gradients
    blocked = beyond_host(g, cluster)
    if not always:
        room = min(device.memory_bytes, room)
        if sum(least.values()) <= room and activations:
            there = g.gradients_resident or accumulates(g)
            least |= {"gradients": gradients if there else 0.0, "activations": activations}
        if sum(least.values()) > room or blocked:
            at_least = {"peak_bytes": sum(least.values())}
            return Quick(at_least, least, device.memory_bytes, blocked, False, states, gradients)
    update = update_ops(g, e)
    tight, peak = tightest(g, e, cluster)
    device = tight.device
    categories = {**peak.categories, "framework": device.reserved_bytes}
    peak_bytes = sum(categories.values())
    out = Quick({"peak_bytes": peak_bytes}, categories, device.memory_bytes, blocked, True, states, gradients)
    if not (out.fits and peak_bytes <= room) and not always:
        return out
    step, delay = timed(g, update, cluster)
    seconds = step.seconds + delay
    rate = e.batch_size * e.training.seq_len / seconds
    out.metrics |= {
        "step_time_s": seconds,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / e.world,
        "exposed_communication_s": step.exposed_communication,
        "bubble_s": step.bubble,
    }
    if g.host_bytes:
        out.metrics["host_bytes"] = g.host_bytes
    out.metrics |= cost_of(e.cluster, rate)
    out.after, out.reducing = step.after, step.reducing
    return out


def least_bytes(prepared: Graph, e: Experiment) -> float:
    """Lower bound of a rank's memory peak in training, whatever is placed where: what ``prepared``, the graph of
    :func:`prepare` or :func:`split`, needs for activations, and the framework."""
    cluster = rank_cluster(e)
    reserved = min(part.device.reserved_bytes for part in cluster.parts or (cluster,))
    return sum(least_activations(prepared).values()) + reserved


def computation(e: Experiment, techniques: list[Technique]) -> float:
    """Lower bound in seconds of a training step: its computation alone, spread over all ranks without bubbles, but for
    what some placement saves.

    ``techniques`` may leave out what splits and places; the experiment need not be feasible.
    """
    return sum(share * _spread(part, techniques) for share, part in segments(e, techniques))


def _spread(e: Experiment, techniques: list[Technique]) -> float:
    """:func:`computation` of one segment of a run."""
    cluster = rank_cluster(e)
    g = training_graph(e)
    for t in techniques:
        g = t.rewrite(g, e)
    if e.gradient_ranks > 1:  # shards are gathered in the dtype that is computed in
        for b in g.blocks:
            b.forward = [o for o in b.forward if o.kind != "cast" or not o.param or "dequantize" in o.name]
    g.close()
    for b in g.blocks:  # where gradients leave the device, they are not added up there
        b.backward = [o for o in b.backward if o.kind != "accumulate"]
    once = min(_computation(g, part) for part in cluster.parts or (cluster,))
    return once * e.batch_size / (e.data_parallel * e.micro_batch_size)


def _computation(g: Graph, cluster: Cluster) -> float:
    """Seconds of a micro-batch's computation."""
    factors = training_factors(cluster, g.fused)._replace(dispatch=0.0)
    times = [(b.repeat, block_times(b, cluster, factors)) for b in g.blocks]
    return sum(n * (t.forward + t.backward) for n, t in times)
