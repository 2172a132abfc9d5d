"""predict(Experiment) → Result: what a plan will give on hardware that need not be there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from ridgeline.graph import Graph, Op, decode_graph, optimizer_ops, prefill_graph, training_graph
from ridgeline.predict.kernel import peak_flops
from ridgeline.predict.memory import Peak, inference_peak, training_peak
from ridgeline.predict.step import Event, breakdown, simulate
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Memory, Metric, Result
from ridgeline.techniques.base import Technique
from ridgeline.techniques.registry import check, normalise

GIB = 2**30


def predict(e: Experiment) -> Result:
    """The predicted Result of an experiment. Raises :class:`Incompatible` for a plan that cannot work."""
    e = normalise(e)
    made = check(e)
    if e.is_training:
        return _training(e, made)
    if e.task == "generate":
        return _generate(e, made)
    raise UserError(
        f"task {e.task!r} is not predicted yet", "use --task generate for a fixed batch, or pretrain/finetune"
    )


def predict_trace(e: Experiment) -> list[Event]:
    """The events of one predicted training step, for a Chrome trace beside the measured one."""
    e = normalise(e)
    g = rewritten(training_graph(e), e, check(e))
    return simulate(g, rank_cluster(e), _update(g, e)).events


def training_flops(e: Experiment) -> tuple[float, float, str]:
    """Matrix-multiply FLOPs of one step on one rank: (without recomputation, executed, compute dtype)."""
    e = normalise(e)
    g = rewritten(training_graph(e), e, check(e))
    return g.model_flops * g.accumulation, g.flops * g.accumulation, g.dtype


def rewritten(g: Graph, e: Experiment, made: list[Technique]) -> Graph:
    """The graph after every technique's pass, in canonical order."""
    for t in made:
        g = t.rewrite(g, e)
    return g.close()


def rank_cluster(e: Experiment) -> Cluster:
    """The cluster as one rank sees it: a CPU's ranks share its cores and memory."""
    shared = e.cluster.device.shared_by(e.cluster.devices_per_node)
    return e.cluster.model_copy(update={"device": shared})


def _update(g: Graph, e: Experiment) -> list[Op]:
    g.update = optimizer_ops(g, e.training.optimizer, e.training.grad_clip > 0)
    return g.update


def _training(e: Experiment, made: list[Technique]) -> Result:
    cluster = rank_cluster(e)
    g = rewritten(training_graph(e), e, made)
    update = _update(g, e)
    step = simulate(g, cluster, update)
    peak = training_peak(g)
    tokens = e.batch_size * e.training.seq_len
    per_device = g.accumulation / step.seconds
    dtype_peak = peak_flops(cluster.device, g.dtype)
    source = _source(cluster)
    metrics = {
        "tokens_per_s": _metric(tokens / step.seconds, "tokens/s", "higher", source),
        "tokens_per_s_per_device": _metric(tokens / step.seconds / e.world, "tokens/s", "higher", source),
        "step_time_s": _metric(step.seconds, "s", "lower", source),
        "tokens_per_step": _metric(tokens, "tokens", "", "workload"),
        "mfu": _metric(g.model_flops * per_device / dtype_peak, "", "higher", _peak_note(cluster, g.dtype)),
        "hfu": _metric(g.flops * per_device / dtype_peak, "", "higher", _peak_note(cluster, g.dtype)),
        "exposed_communication_s": _metric(step.exposed, "s", "lower", source),
        "trained_parameters": _metric(_trained(g), "", "", "graph"),
    }
    result = _result(e, metrics, peak, cluster)
    result.breakdown = breakdown(g, cluster, update)
    sent = sum(r.seconds for r in result.breakdown if r.phase == "communication")
    for row in result.breakdown:  # what hides behind compute is spread evenly over the collectives
        if row.phase == "communication":
            row.exposed_seconds = row.seconds * min(1.0, step.exposed / sent)
    return result


def _generate(e: Experiment, made: list[Technique]) -> Result:
    cluster = rank_cluster(e)
    prefill = rewritten(prefill_graph(e), e, made)
    decode = rewritten(decode_graph(e), e, made)
    first, each = simulate(prefill, cluster, []), simulate(decode, cluster, [])
    steps = decode.decode_steps
    total = first.seconds + steps * each.seconds
    produced = e.batch_size * (steps + 1)
    peak = inference_peak(prefill, decode)
    source = _source(cluster)
    metrics = {
        "ttft_s": _metric(first.seconds, "s", "lower", source),
        "tpot_s": _metric(each.seconds, "s", "lower", source),
        "e2e_s": _metric(total, "s", "lower", source),
        "tokens_per_s": _metric(produced / total, "tokens/s", "higher", source),
        "tokens_per_s_per_device": _metric(produced / total / e.world, "tokens/s", "higher", source),
        "mfu": _metric((prefill.flops + steps * decode.flops) / total / peak_flops(cluster.device, prefill.dtype),
                       "", "higher", _peak_note(cluster, prefill.dtype)),
    }  # fmt: skip
    result = _result(e, metrics, peak, cluster)
    rows = breakdown(prefill, cluster, [])
    later = breakdown(decode, cluster, [], times=steps)
    for row in rows:
        row.phase = "prefill" if row.phase == "forward" else row.phase
    for row in later:
        row.phase = "decode" if row.phase == "forward" else row.phase
    result.breakdown = rows + later
    return result


def _result(e: Experiment, metrics: dict[str, Metric], peak: Peak, cluster: Cluster) -> Result:
    categories = dict(peak.categories)
    if cluster.device.reserved_bytes:
        categories["framework"] = cluster.device.reserved_bytes
    total = sum(categories.values())
    largest = max(categories, key=lambda k: categories[k])
    metrics["peak_bytes"] = _metric(total, "bytes", "lower", "graph")
    device = cluster.device
    fits = total <= device.memory_bytes
    said = (
        f"needs {total / GIB:.1f} GiB per rank of {device.memory_bytes / GIB:.1f} GiB on {device.name};"
        f" largest category: {largest}, {categories[largest] / GIB:.1f} GiB; peak at {peak.instant}"
    )
    if device.price_per_hour and "tokens_per_s" in metrics:
        rate = metrics["tokens_per_s"].value
        cost = device.price_per_hour * e.world / 3600 / rate * 1e6
        metrics["dollars_per_million_tokens"] = _metric(cost, "$", "lower", "catalogue price")
    if device.watts and "tokens_per_s" in metrics:
        joules = device.watts * e.world / metrics["tokens_per_s"].value
        metrics["joules_per_token"] = _metric(joules, "J", "lower", "TDP, an upper bound")
    return Result(
        source="predicted",
        experiment_id=e.id,
        name=e.name,
        experiment=e.canonical(),
        status="ok" if fits else "infeasible",
        reason="" if fits else said,
        environment={
            "device": e.cluster.label,
            "peak_flops": dict(device.peak_flops),
            "memory_bandwidth": device.memory_bandwidth,
            "rates": "measured profile" if device.rates else "class defaults on the datasheet",
        },
        metrics=metrics,
        memory=[Memory(category=k, bytes=v) for k, v in sorted(categories.items(), key=lambda kv: -kv[1])],
        notes=[said] if fits else [],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _metric(value: float, unit: str, better: Literal["lower", "higher", ""], source: str) -> Metric:
    return Metric(value=value, unit=unit, better=better, source=source)


def _trained(g: Graph) -> float:
    return sum(p.numel * n for p, n in g.params if p.trainable)


def _source(cluster: Cluster) -> str:
    return "measured profile" if cluster.device.rates else "class default"


def _peak_note(cluster: Cluster, dtype: str) -> str:
    peak = peak_flops(cluster.device, dtype)
    return f"matrix-multiply FLOPs over the dense {dtype} peak of {peak / 1e12:.3g} TFLOP/s"
