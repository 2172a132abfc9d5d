"""Prediction of a training step: time, exposed communication, utilisation, memory."""

from __future__ import annotations

from ridgeline.graph import Graph, Op, optimizer_ops, training_graph
from ridgeline.predict.common import assemble, metric, peak_note, rank_cluster, rewritten, source_of, trained
from ridgeline.predict.kernel import peak_flops
from ridgeline.predict.memory import training_peak
from ridgeline.predict.step import breakdown, simulate
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.techniques.base import Technique


def update_ops(g: Graph, e: Experiment) -> list[Op]:
    """Build the optimizer's operators, keep them in the graph and return them."""
    g.update = optimizer_ops(g, e.training.optimizer, e.training.grad_clip > 0)
    return g.update


def predict_training(e: Experiment, made: list[Technique]) -> Result:
    """The Result of a training experiment, already normalised and checked."""
    cluster = rank_cluster(e)
    g = rewritten(training_graph(e), e, made)
    update = update_ops(g, e)
    step = simulate(g, cluster, update)
    peak = training_peak(g)
    tokens = e.batch_size * e.training.seq_len
    per_device = g.accumulation / step.seconds
    dtype_peak = peak_flops(cluster.device, g.dtype)
    source = source_of(cluster)
    metrics = {
        "tokens_per_s": metric(tokens / step.seconds, "tokens/s", "higher", source),
        "tokens_per_s_per_device": metric(tokens / step.seconds / e.world, "tokens/s", "higher", source),
        "step_time_s": metric(step.seconds, "s", "lower", source),
        "tokens_per_step": metric(tokens, "tokens", "", "workload"),
        "mfu": metric(g.model_flops * per_device / dtype_peak, "", "higher", peak_note(cluster, g.dtype)),
        "hfu": metric(g.flops * per_device / dtype_peak, "", "higher", peak_note(cluster, g.dtype)),
        "exposed_communication_s": metric(step.exposed, "s", "lower", source),
        "trained_parameters": metric(trained(g), "", "", "graph"),
    }
    result = assemble(e, metrics, peak, cluster)
    result.breakdown = breakdown(g, cluster, update)
    sent = sum(r.seconds for r in result.breakdown if r.phase == "communication")
    for row in result.breakdown:  # what hides behind compute is spread evenly over the collectives
        if row.phase == "communication":
            row.exposed_seconds = row.seconds * min(1.0, step.exposed / sent)
    return result
