"""Prediction of serving: the scheduler's simulation on the engine's predicted iteration times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ridgeline.graph import tokens_graph
from ridgeline.graph.traffic import traffic
from ridgeline.predict.common import assemble, beyond_host, metric, rank_cluster, rewritten, source_of
from ridgeline.predict.serving.arrivals import Arrival, requests
from ridgeline.predict.serving.discrete_events import SimulationOutcome
from ridgeline.predict.serving.engine_costs import PLANNED, EngineCosts, find_engine
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.serving.kv_budget import LESS, Room, pool_room, room
from ridgeline.predict.serving.schedule import Simulation
from ridgeline.predict.step.streams import breakdown
from ridgeline.spec.decode_kernel import OTHER_PARTS, refusal
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.result import Metric, Result, Row, Traffic
from ridgeline.spec.scheduling import OWN, Scheduling, context
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import default_plan
from ridgeline.techniques.technique import Technique

QUANTILES = (0.5, 0.9, 0.99)
SHARES = tuple(i / 100 for i in range(101))
"""Of the requests, at which a latency's distribution is given."""


def predict_serving(e: Experiment, techniques: list[Technique]) -> Result:
    """The Result of a serving experiment, already normalized and checked.

    ``data_parallel`` replicas take turns with the requests; one of them is simulated with its share.
    """
    w = e.workload
    assert isinstance(w, Serve)
    check_decodes(e.model)
    arrivals = _share(requests(w), e.data_parallel, w)
    lengths = [r.prompt + r.output for r in arrivals]
    surface = surface_of(e, techniques, arrivals)
    cluster, engine = surface.cluster, surface.engine
    clients = _clients(w, e.data_parallel)
    sim, space = simulation_of(surface, techniques, w, arrivals, clients)
    outcome = sim.run()
    if outcome.rejected == len(arrivals):
        reason = f"{space.reason}, no request ({min(lengths)} tokens or more) fits"
        if engine.budget_of_context:
            reason += f" beside an iteration of {context(e.model, w)} tokens, its longest request (max_model_len)"
        return _infeasible(e, space, cluster, reason)
    latencies = latencies_of(outcome)
    metrics = serving_metrics(outcome, latencies, w, e.world, source_of(cluster), e.data_parallel)
    if w.shared_prefix:
        found = outcome.cached_tokens / sum(r.prompt for r in arrivals)
        metrics["cached_share"] = metric(found, "", "higher", "prompt tokens found in the cache")
    waiting = waiting_share(surface, sum(r.prompt for r in arrivals) / len(arrivals), metrics["ttft_s"].value)
    metrics["waiting_share"] = metric(
        waiting, "", "lower", "of the mean time to first token, waiting for other requests"
    )
    metrics["kv_cache_tokens"] = metric(space.tokens, "tokens", "higher", "graph")
    result = assemble(e, metrics, space.peak, cluster)
    result.distributions = {
        f"{name}_s": [percentile(values, q) for q in SHARES] for name, values in latencies.items() if values
    }
    if (g := surface.graph(1, 1, 1)).host_bytes:
        result.metrics["host_bytes"] = metric(g.host_bytes, "bytes", "lower", "graph")
    if short := beyond_host(g, cluster):
        result.status, result.reason = "infeasible", "; ".join(filter(None, (result.reason, short)))
    if outcome.rejected:
        result.notes.append(
            f"{outcome.rejected} of {len(arrivals)} requests are longer than the cache or the context and were rejected"
        )
    if w.open_load:
        result.notes.append("no load is given: one request per second arrives; set a rate, clients or a trace")
    result.notes += _of_schedule(engine, techniques)
    sent, stages = sorted(traffic(surface.graph(1, 1, 1)).items()), e.parallel.get("pp", 1)
    result.traffic = [Traffic(kind=k, ranks=n, calls=c / stages, bytes=size / stages) for (k, n), (c, size) in sent]
    mean = max(1, round(metrics["batch_mean"].value))
    result.breakdown = iteration_rows(surface, "decode", mean, 1, max(1, w.prompt_len + w.output_len // 2))
    return result


def check_decodes(m: ModelSpec) -> None:
    """Raise :class:`Incompatible` for a model whose serving is not predicted."""
    if not m.causal:
        raise Incompatible(f"{m.name} is an encoder: its serving can be run, not predicted", "use a decoder")


def waiting_share(surface: Iterations, prompt: float, ttft: float) -> float:
    """Share of a mean time to first token that a request of ``prompt`` tokens waits for others."""
    alone = surface.engine.request_s + surface.mixed([(max(1, round(prompt)), 0)], 0, 0)
    return max(0.0, 1.0 - alone / ttft) if ttft else 0.0


def prompt_rows(e: Experiment, techniques: list[Technique]) -> list[Row]:
    """What a mean iteration reads of prompts, beside the decode rows of :func:`predict_serving`: the rows of the mean
    iteration that reads any, times the share of these."""
    w = e.workload
    assert isinstance(w, Serve)
    arrivals = _share(requests(w), e.data_parallel, w)
    surface = surface_of(e, techniques, arrivals)
    outcome = simulation_of(surface, techniques, w, arrivals, _clients(w, e.data_parallel))[0].run()
    if not outcome.prompt_iterations:
        return []
    length = sum(r.prompt for r in arrivals) / len(arrivals)
    tokens = outcome.prompt_tokens / outcome.prompt_iterations
    prompts = max(1, round(tokens / length))
    each = max(1, round(tokens / prompts))
    seen = max(each, round((length + each) / 2))  # the mean piece of a longer prompt has half of the rest before it
    share = outcome.prompt_iterations / outcome.iterations
    scaled = ("seconds", "count", "flops", "bytes", "link_bytes")
    return [row.model_copy(update={name: share * getattr(row, name) for name in scaled})
            for row in iteration_rows(surface, "prefill", prompts, each, seen)]  # fmt: skip


_RECENT = 16
_own_view: list[tuple[Device, tuple[float, bool], Device]] = []


def _in_own_engine(device: Device, weights: float, one_kernel: bool) -> Device:
    """:meth:`Device.serving`, the same object for the same arguments, as operators' times are shared by it."""
    for whole, known, view in _own_view:
        if whole is device and known == (weights, one_kernel):
            return view
    _own_view.insert(0, (device, (weights, one_kernel), device.serving(weights, one_kernel)))
    del _own_view[_RECENT:]
    return _own_view[0][2]


def surface_of(e: Experiment, techniques: list[Technique], arrivals: Sequence[Arrival]) -> Iterations:
    """The cost surface of one replica that serves ``arrivals``."""
    w, cluster = e.workload, rank_cluster(e)
    assert isinstance(w, Serve)
    engine = find_engine(w.engine, cluster.device, e.world // e.data_parallel)
    if engine.name == OWN:
        weights = rewritten(tokens_graph(e.model, 1, 1, 1, e.dtype), e, techniques).resident_bytes
        parts = {part for t in techniques for part in t.parts}
        one_kernel = "fused_attention" in parts and not OTHER_PARTS & parts and not refusal(e.model)
        device = _in_own_engine(cluster.device, weights, one_kernel)
        cluster = cluster.model_copy(update={"device": device})
    contexts = min(r.prompt for r in arrivals), max(r.prompt + r.output for r in arrivals)
    return Iterations(e, techniques, cluster, engine, contexts)


def iteration_rows(surface: Iterations, phase: str, batch: int, q_len: int, kv_len: int) -> list[Row]:
    """The breakdown of an iteration over the last ``q_len`` of ``kv_len`` tokens of ``batch`` sequences."""
    device = surface.cluster.device
    inside = {"1": max(0.0, device.in_step(batch * q_len))} if device.step_latency else {}
    device = device.model_copy(update={"host_latency": {**device.host_latency, **inside}})
    rows = breakdown(surface.graph(batch, q_len, kv_len), surface.cluster.model_copy(update={"device": device}))
    for row in rows:
        row.phase = phase if row.phase == "forward" else row.phase
    return rows


def done_anyway(e: Experiment, techniques: Sequence[Technique]) -> list[str]:
    """Techniques of the usual schedule that the engine of a resolved experiment has whatever the plan says."""
    w = e.workload
    return _given(find_engine(w.engine, e.cluster.device), techniques) if isinstance(w, Serve) else []


def _given(engine: EngineCosts, techniques: Sequence[Technique]) -> list[str]:
    usual = [t for t in techniques if "serve" in t.card.default_in]
    return [t.card.name for t in usual
            if (engine.flash if t.card.in_engines else engine.scheduling([t]) == engine.scheduling([]))]  # fmt: skip


def _of_schedule(engine: EngineCosts, techniques: Sequence[Technique]) -> Iterator[str]:
    """What a reader must know of the techniques that the engine has, or the plan has not."""
    usual = [t for t in techniques if "serve" in t.card.default_in]
    if given := _given(engine, techniques):
        yield f"{engine.name} does this whatever the plan says: {', '.join(given)}"
    added = [t.card.name for t in usual if t.card.name not in given and not t.card.in_engines]
    if added and engine.name not in (OWN, PLANNED):
        yield (f"{engine.name} schedules requests in another way by default; it is predicted as the plan says, with"
               f" {', '.join(added)}")  # fmt: skip
    missing = sorted({*default_plan("serve")} - {t.card.name for t in usual})
    if engine.name == PLANNED and missing:
        yield (f"no engine is named, so requests are served as the plan says, without {', '.join(missing)}: name an"
               f" engine, or add {'it' if len(missing) == 1 else 'them'}")  # fmt: skip
    if engine.name == OWN and not usual:
        yield f"without {', '.join(missing)}, which `ridgeline serve` has by default: add them to predict that"
    elif not engine.flash and engine.name != PLANNED and not any("fused_attention" in t.parts for t in techniques):
        yield "attention computes a matrix of scores for each sequence: flash_attention is not in the plan"
    s = engine.scheduling(techniques)
    if s.cut and not s.limits.padded:
        yield "batches of this engine have no pads: dividing the queue by length saves none"
    elif s.cut and not s.limits.continuous:
        yield ("the queue is divided by what prompts cost, and each batch runs until its last sequence ends: smaller"
               " batches save pads, but fewer sequences decode at once")  # fmt: skip


def _infeasible(e: Experiment, space: Room, cluster: Cluster, reason: str) -> Result:
    """The Result of an engine that cannot hold one request."""
    result = assemble(e, {}, space.peak, cluster)
    result.status, result.notes = "infeasible", []
    result.reason = f"{reason}; {LESS}"
    return result


class EngineSetup(NamedTuple):
    """An engine as a plan sets it up."""

    scheduling: Scheduling
    blocks: int
    """Of the cache."""
    longest: int
    """Prompt and output together that it takes."""
    mixes: bool
    """Whether prompts and decoding share an iteration."""


def setup_of(
    surface: Iterations, techniques: Sequence[Technique], w: Serve, arrivals: Sequence[Arrival]
) -> tuple[EngineSetup, Room]:
    """The engine of ``surface`` as the plan sets it up for ``arrivals``, and the room that it has for the cache."""
    engine = surface.engine
    s = engine.scheduling(techniques)
    if engine.budget_of_context:
        s.limits.max_num_batched_tokens = max(2048, context(surface.e.model, w))
    s.take_workload(w)
    if engine.name == OWN:
        space, blocks, longest = pool_room(surface, s, w)
    else:
        space = _engine_room(surface, s, arrivals)
        blocks = space.tokens // s.block_size
        longest = min(context(surface.e.model, w), blocks * s.block_size)
    mixes = engine.mixes or s.limits.chunked > engine.chunked  # pieces that a plan asks for go beside decoding
    return EngineSetup(s, blocks, longest, mixes), space


def _engine_room(surface: Iterations, s: Scheduling, arrivals: Sequence[Arrival]) -> Room:
    """The cache beside the largest iteration; where the user gives batches, these are halved until they fit."""
    prompt, longest = max(r.prompt for r in arrivals), max(r.prompt + r.output for r in arrivals)
    while True:
        largest = min(s.limits.max_num_batched_tokens, prompt * s.limits.max_num_seqs)
        space = room(surface.e, surface, surface.engine, largest)
        fits = space.tokens >= longest * s.limits.max_num_seqs
        if not surface.engine.batch_of_user or fits or s.limits.max_num_seqs == 1:
            return space
        s.limits.max_num_seqs //= 2


def simulation_of(
    surface: Iterations,
    techniques: Sequence[Technique],
    w: Serve,
    arrivals: Sequence[Arrival],
    clients: int | None = None,
) -> tuple[Simulation, Room]:
    """An engine as the plan sets it up, about to serve ``arrivals``, and the room that it has for the cache."""
    engine = surface.engine
    made, space = setup_of(surface, techniques, w, arrivals)
    sim = Simulation(surface, made.scheduling, made.blocks, made.longest, arrivals, clients, engine.request_s,
                     engine.admission_s, made.mixes, prefix=w.shared_prefix)  # fmt: skip
    return sim, space


def _share(arrivals: list[Arrival], replicas: int, w: Serve) -> list[Arrival]:
    """What the first of several replicas gets, in turns."""
    return arrivals if w.concurrency is not None else arrivals[::replicas]


def _clients(w: Serve, replicas: int) -> int | None:
    return None if w.concurrency is None else max(1, w.concurrency // replicas)


def latencies_of(o: SimulationOutcome) -> dict[str, list[float]]:
    """Sorted TTFT, TPOT and end-to-end seconds of the requests that were served."""
    served = [i for i, t in enumerate(o.finish) if not math.isnan(t)]
    several = [i for i in served if o.output[i] > 1]
    return {
        "ttft": sorted(o.first[i] - o.arrival[i] for i in served),
        "tpot": sorted(_tpot(o, i) for i in several),
        "e2e": sorted(o.finish[i] - o.arrival[i] for i in served),
    }


def _tpot(o: SimulationOutcome, i: int) -> float:
    return (o.finish[i] - o.first[i]) / (o.output[i] - 1) if o.output[i] > 1 else 0.0


def serving_metrics(
    o: SimulationOutcome, latencies: dict[str, list[float]], w: Serve, devices: int, source: str, n: int = 1
) -> dict[str, Metric]:
    """Latencies (mean and percentiles), throughput and goodput of what was simulated, times ``n`` replicas like it on
    ``devices`` in all."""
    served = [i for i, t in enumerate(o.finish) if not math.isnan(t)]
    span = max(o.finish[i] for i in served) - min(o.arrival[i] for i in served)
    tokens = sum(o.output[i] for i in served)
    metrics: dict[str, Metric] = {}
    for name, values in latencies.items():
        if values:
            metrics[f"{name}_s"] = metric(math.fsum(values) / len(values), "s", "lower", source)
            for q in QUANTILES:
                metrics[f"{name}_p{q * 100:.0f}_s"] = metric(percentile(values, q), "s", "lower", source)
    if o.gaps:
        total = sum(count for _, count in o.gaps)
        metrics["itl_s"] = metric(math.fsum(v * count for v, count in o.gaps) / total, "s", "lower", source)
        for q, value in zip(QUANTILES, weighted_percentiles(o.gaps, QUANTILES), strict=True):
            metrics[f"itl_p{q * 100:.0f}_s"] = metric(value, "s", "lower", source)
    good = sum(
        (w.slo_ttft is None or o.first[i] - o.arrival[i] <= w.slo_ttft)
        and (w.slo_tpot is None or _tpot(o, i) <= w.slo_tpot)
        for i in served
    )
    metrics |= {
        "requests_per_s": metric(n * len(served) / span, "requests/s", "higher", source),
        "goodput_per_s": metric(n * good / span, "requests/s", "higher", "requests within slo_ttft and slo_tpot"),
        "slo_share": metric(good / max(1, len(served) + o.rejected), "", "higher", "requests within both limits"),
        "tokens_per_s": metric(n * tokens / span, "tokens/s", "higher", "generated tokens"),
        "tokens_per_s_per_device": metric(n * tokens / span / devices, "tokens/s", "higher", "generated tokens"),
        "busy_share": metric(o.busy_s / span, "", "", "time with an iteration under way"),
        "batch_mean": metric(tokens / max(1, o.iterations), "sequences", "", "tokens per iteration"),
        "preemptions": metric(o.preemptions, "", "lower", source),
    }
    if w.concurrency is None and (share := _answered_share(o, served)) is not None:
        metrics["answered_share"] = metric(share, "", "higher", "first tokens per arrival in the second half")
    return metrics


def _answered_share(o: SimulationOutcome, served: Sequence[int]) -> float | None:
    """First tokens while the second half of the requests arrives, per arrival: less than one while the queue grows,
    however long answers take. None: they all arrive at once."""
    sent = sorted(o.arrival[i] for i in served)
    half, last = sent[len(sent) // 2], sent[-1]
    arrived = sum(half < t for t in sent)
    return sum(half < o.first[i] <= last for i in served) / arrived if arrived else None


def percentile(values: Sequence[float], q: float) -> float:
    """The value at share ``q`` of a sorted sample, interpolated linearly."""
    at = q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def weighted_percentiles(pairs: Sequence[tuple[float, int]], shares: Sequence[float]) -> list[float]:
    """Percentiles of values that stand for several samples each."""
    total = sum(n for _, n in pairs)
    found: list[float] = []
    seen, wanted = 0.0, list(shares)
    for value, n in sorted(pairs):
        seen += n
        while wanted and seen >= wanted[0] * total:
            found.append(value)
            wanted.pop(0)
    return found + [max(v for v, _ in pairs)] * len(wanted)
