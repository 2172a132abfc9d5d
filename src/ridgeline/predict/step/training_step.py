"""Prediction of a training step: time, exposed communication, utilization, memory."""

from __future__ import annotations

from ridgeline.graph import Graph, Op, optimizer_ops, training_graph
from ridgeline.graph.graph import changed
from ridgeline.graph.traffic import traffic
from ridgeline.predict.common import (
    assemble,
    beyond_host,
    metric,
    peak_note,
    rank_cluster,
    rewritten,
    source_of,
    trained,
)
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.predict.step.in_step import training_factors
from ridgeline.predict.step.peak_memory import Peak, training_peak
from ridgeline.predict.step.streams import StreamEvent, TimedStep, breakdown, simulate
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result, Row, Traffic
from ridgeline.techniques.technique import Technique

COMMUNICATOR_BYTES = 0.25e9
"""Device memory of one communicator's channels (assumption)."""
FRAGMENTATION = 0.03
"""Fraction of the step's changing tensors that the allocator's block sizes (512 bytes, 2 MiB, …) waste (assumption)."""


def update_ops(g: Graph, e: Experiment) -> list[Op]:
    """Build the optimizer's operators, keep them in the graph and return them."""
    ops = optimizer_ops(g, e.training.optimizer, e.training.grad_clip > 0)
    if g.host_states:
        ops = [changed(op, kind="host_update", axis="host") for op in ops]
    g.update = [*g.before_update, *ops]
    return g.update


def timed(g: Graph, update: list[Op], cluster: Cluster, record: bool = False) -> tuple[TimedStep, float]:
    """The step of one rank, and the seconds that it waits for the slowest."""
    factors = training_factors(cluster, g.fused)
    step = simulate(g, cluster, update, factors, record)
    delay = (step.seconds - step.exposed) * factors.straggling(cluster.size)
    if record and delay:
        step.events.append(StreamEvent("waiting for the slowest rank", "compute", step.seconds, delay, "other"))
    return step, delay


def predict_training(e: Experiment, techniques: list[Technique]) -> Result:
    """The Result of a training experiment, already normalized and checked."""
    cluster = rank_cluster(e)
    g = rewritten(training_graph(e), e, techniques)
    update = update_ops(g, e)
    step, delay = timed(g, update, cluster)
    seconds = step.seconds + delay
    tight, peak = tightest(g, e, cluster)
    tokens = e.batch_size * e.training.seq_len
    each = g.accumulation / g.stages / seconds
    parts = cluster.parts or (cluster,)
    dtype_peak = sum(part.size * peak_flops(part.device, g.dtype) for part in parts) / cluster.size
    source = source_of(cluster)
    metrics = {
        "tokens_per_s": metric(tokens / seconds, "tokens/s", "higher", source),
        "tokens_per_s_per_device": metric(tokens / seconds / e.world, "tokens/s", "higher", source),
        "step_time_s": metric(seconds, "s", "lower", source),
        "tokens_per_step": metric(tokens, "tokens", "", "workload"),
        "mfu": metric(g.model_flops * each / dtype_peak, "", "higher", peak_note(dtype_peak, g.dtype)),
        "hfu": metric(g.flops * g.passes * each / dtype_peak, "", "higher", peak_note(dtype_peak, g.dtype)),
        "exposed_communication_s": metric(step.exposed_communication, "s", "lower", source),
        "hidden_communication_s": metric(step.hidden, "s", "", source),
        "bubble_s": metric(step.bubble, "s", "lower", source),
        "bubble_share": metric(step.bubble / seconds, "", "lower", source),
        "trained_parameters": metric(trained(g), "", "", "graph"),
    }
    if g.host_bytes:
        metrics["host_bytes"] = metric(g.host_bytes, "bytes", "lower", "graph")
    result = assemble(e, metrics, peak, tight)
    if short := beyond_host(g, cluster):
        result.status, result.reason = "infeasible", "; ".join(filter(None, (result.reason, short)))
    result.breakdown = breakdown(g, cluster, factors=training_factors(cluster, g.fused))
    _expose(result.breakdown, g, step)
    result.breakdown += _waits(step, delay)
    sent = sorted(traffic(g).items())
    result.traffic = [Traffic(kind=k, ranks=n, calls=calls, bytes=size) for (k, n), (calls, size) in sent]
    return result


def tightest(g: Graph, e: Experiment, cluster: Cluster) -> tuple[Cluster, Peak]:
    """The part of the cluster whose memory is filled most, and the peak of the rank there that needs most."""
    if not cluster.parts:
        return cluster, with_overheads(training_peak(g), e)
    assert g.pipeline is not None
    places = cluster.places(g.pipeline.degree)
    found = []
    for part in {id(p): p for p in places}.values():
        peak = with_overheads(training_peak(g, [r for r, p in enumerate(places) if p is part]), e)
        found.append(((peak.total + part.device.reserved_bytes) / part.device.memory_bytes, part, peak))
    _, part, peak = max(found, key=lambda one: one[0])
    return part, peak


def with_overheads(peak: Peak, e: Experiment) -> Peak:
    """Add a GPU's allocator and communicator overhead."""
    if e.cluster.device.kind != "gpu":
        return peak
    at = dict(peak.categories)
    at["buffers"] = at.get("buffers", 0.0) + communicators(e)
    at["fragmentation"] = FRAGMENTATION * (at.get("activations", 0.0) + at.get("temporaries", 0.0))
    return Peak({k: v for k, v in at.items() if v}, peak.instant)


def communicators(e: Experiment) -> float:
    """Bytes of a GPU rank's communicators, which no framework counts among its tensors."""
    return COMMUNICATOR_BYTES * sum(degree > 1 for degree in (e.data_parallel, *e.parallel.values()))


def _expose(rows: list[Row], g: Graph, step: TimedStep) -> None:
    """Exposed seconds of each collective, those inside blocks proportionally, the others from the remainder; and of the
    optimizer on the host."""
    inside = {o.name for b in g.blocks for o in (*b.forward, *b.backward) if o.axis}
    updates = [r for r in rows if r.kind == "host_update"]
    sends = [r for r in rows if r.phase == "communication" and r.kind != "host_update"]
    within, outside = ([r for r in sends if (r.operator in inside) == here] for here in (True, False))
    shares = ((within, step.inline), (outside, step.exposed_communication - step.inline), (updates, step.updating))
    for mine, exposed in shares:
        sent = sum(r.seconds for r in mine)
        for row in mine:
            row.exposed_seconds = row.seconds * exposed / sent if sent else 0.0


def _waits(step: TimedStep, delay: float) -> list[Row]:
    """Rows for the time in which no operator of this rank makes progress."""
    parts = {
        ("pipeline bubble", "bubble", "bubble"): step.bubble,
        ("slowed by collectives", "contention", "link"): step.slowed,
        ("waiting for the host", "dispatch", "host"): step.dispatch,
        ("waiting for the slowest rank", "straggler", "latency"): delay,
    }
    return [
        Row(phase="other", module="schedule", operator=name, kind=kind, seconds=s, bound=bound)
        for (name, kind, bound), s in parts.items()
        if s > 0
    ]
