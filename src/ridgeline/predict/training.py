"""Prediction of a training step: time, exposed communication, utilisation, memory."""

from __future__ import annotations

import math
from dataclasses import replace

from ridgeline.graph import Graph, Op, optimizer_ops, training_graph
from ridgeline.predict.common import assemble, metric, peak_note, rank_cluster, rewritten, source_of, trained
from ridgeline.predict.kernel import peak_flops
from ridgeline.predict.memory import training_peak
from ridgeline.predict.step import Event, Step, breakdown, simulate
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result, Row
from ridgeline.techniques.base import Technique

DISPATCH = 8e-6
"""Seconds that an eager framework's host spends to launch one operator of a training step on a GPU (assumption)."""
RANK_SPREAD = 0.004
"""Relative standard deviation of one rank's step time: a step ends with the slowest of its ranks."""


def update_ops(g: Graph, e: Experiment) -> list[Op]:
    """Build the optimizer's operators, keep them in the graph and return them."""
    g.update = optimizer_ops(g, e.training.optimizer, e.training.grad_clip > 0)
    if g.host_states:
        g.update = [replace(op, kind="host_update", axis="host") for op in g.update]
    return g.update


def straggling(ranks: int, cluster: Cluster) -> float:
    """Relative delay of the slowest of ``ranks`` ranks: the mean maximum of n normal draws is about √(2 ln n) σ."""
    if cluster.device.kind != "gpu" or ranks < 2:
        return 0.0
    return RANK_SPREAD * math.sqrt(2 * math.log(ranks))


def timed(g: Graph, update: list[Op], cluster: Cluster, record: bool = False) -> tuple[Step, float]:
    """The step of one rank, and the seconds that it then waits for the slowest."""
    step = simulate(g, cluster, update, DISPATCH if cluster.device.kind == "gpu" else 0.0, record)
    delay = (step.seconds - step.exposed) * straggling(cluster.size, cluster)
    if record and delay:
        step.events.append(Event("waiting for the slowest rank", "compute", step.seconds, delay, "other"))
    return step, delay


def predict_training(e: Experiment, made: list[Technique]) -> Result:
    """The Result of a training experiment, already normalised and checked."""
    cluster = rank_cluster(e)
    g = rewritten(training_graph(e), e, made)
    update = update_ops(g, e)
    step, delay = timed(g, update, cluster)
    seconds = step.seconds + delay
    peak = training_peak(g)
    tokens = e.batch_size * e.training.seq_len
    each = g.accumulation / g.stages / seconds
    dtype_peak = peak_flops(cluster.device, g.dtype)
    source = source_of(cluster)
    metrics = {
        "tokens_per_s": metric(tokens / seconds, "tokens/s", "higher", source),
        "tokens_per_s_per_device": metric(tokens / seconds / e.world, "tokens/s", "higher", source),
        "step_time_s": metric(seconds, "s", "lower", source),
        "tokens_per_step": metric(tokens, "tokens", "", "workload"),
        "mfu": metric(g.model_flops * each / dtype_peak, "", "higher", peak_note(cluster, g.dtype)),
        "hfu": metric(g.flops * each / dtype_peak, "", "higher", peak_note(cluster, g.dtype)),
        "exposed_communication_s": metric(step.exposed, "s", "lower", source),
        "hidden_communication_s": metric(step.hidden, "s", "", source),
        "bubble_s": metric(step.bubble, "s", "lower", source),
        "bubble_share": metric(step.bubble / seconds, "", "lower", source),
        "trained_parameters": metric(trained(g), "", "", "graph"),
    }
    result = assemble(e, metrics, peak, cluster)
    result.breakdown = breakdown(g, cluster, update)
    _expose(result.breakdown, g, step)
    result.breakdown += _waits(step, delay)
    return result


def _expose(rows: list[Row], g: Graph, step: Step) -> None:
    """Exposed seconds of each collective: those inside blocks in proportion, the others by what is left."""
    inside = {o.name for b in g.blocks for o in (*b.forward, *b.backward) if o.axis}
    for within, exposed in ((True, step.inline), (False, step.exposed - step.inline)):
        moved = [r for r in rows if r.phase == "communication" or r.kind == "host_update"]
        mine = [r for r in moved if (r.operator in inside) == within]
        sent = sum(r.seconds for r in mine)
        for row in mine:
            row.exposed_seconds = row.seconds * exposed / sent if sent else 0.0


def _waits(step: Step, delay: float) -> list[Row]:
    """Rows for the seconds in which no operator of this rank makes progress."""
    parts = {
        ("pipeline bubble", "bubble"): step.bubble,
        ("slowed by collectives", "contention"): step.slowed,
        ("waiting for the host", "dispatch"): step.dispatch,
        ("waiting for the slowest rank", "straggler"): delay,
    }
    return [
        Row(phase="other", module="schedule", operator=name, kind=kind, seconds=s)
        for (name, kind), s in parts.items()
        if s > 0
    ]
