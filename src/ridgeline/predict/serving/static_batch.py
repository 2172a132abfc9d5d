"""Prediction of a fixed batch: one prefill, then decode steps over a growing context."""

from __future__ import annotations

import math
from typing import NamedTuple

from ridgeline.graph import Graph, decode_graph, prefill_graph
from ridgeline.predict.common import assemble, beyond_host, metric, peak_note, rank_cluster, rewritten, source_of
from ridgeline.predict.operators.kernel import peak_flops
from ridgeline.predict.serving.engine_costs import EngineCosts, engine_of
from ridgeline.predict.serving.engine_fusions import fuse
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.serving.kv_budget import BLOCK, LESS, Room, room
from ridgeline.predict.serving.weight_transfers import pass_seconds
from ridgeline.predict.step.peak_memory import Peak, inference_peak
from ridgeline.predict.step.streams import breakdown
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import as_in_engines
from ridgeline.techniques.technique import Technique


def predict_generation(e: Experiment, techniques: list[Technique], stages: int = 1) -> Result:
    """The Result of a generation experiment, already normalized and checked. ``stages``: as of :func:`engine_times`."""
    w = e.workload
    assert isinstance(w, Generate)
    cluster = rank_cluster(e)
    engine = engine_of(e)
    if engine is not None and engine.flash:  # it computes attention in one kernel whatever the plan says
        techniques = as_in_engines(techniques)
    part = _micro_batch(e, techniques)
    prefill = rewritten(prefill_graph(part), part, techniques)
    decode = rewritten(decode_graph(part), part, techniques)
    steps = decode.decode_steps
    cluster = cluster.model_copy(update={"device": cluster.device.generating(_layer_bytes(decode))})
    if engine is not None:
        prefill, decode = fuse(prefill, engine, e.model), fuse(decode, engine, e.model)
    flops = prefill.accumulation * (prefill.flops + steps * decode.flops)
    peak, short = inference_peak(prefill, decode), ""
    if engine is None:
        first, each = _plain(prefill, decode, part, techniques, cluster)
        total, waves = first + steps * each, 1
    else:
        first, each, total, batch, space = engine_times(e, techniques, cluster, engine, w, stages)
        waves = -(-e.micro_batch_size // batch)
        if stages == 1 and not prefill.host_bytes:
            peak, short = _in_engine(space, batch, w)
        if waves > 1:
            part = part.model_copy(update={"workload": w.model_copy(update={"batch_size": -(-e.batch_size // waves)})})
            prefill = fuse(rewritten(prefill_graph(part), part, techniques), engine, e.model)
            decode = fuse(rewritten(decode_graph(part), part, techniques), engine, e.model)
    produced = e.batch_size * (steps + 1)
    source = source_of(cluster)
    metrics = {
        "ttft_s": metric(first, "s", "lower", source),
        "tpot_s": metric(each, "s", "lower", source),
        "e2e_s": metric(total, "s", "lower", source),
        "tokens_per_s": metric(produced / total, "tokens/s", "higher", source),
        "tokens_per_s_per_device": metric(produced / total / e.world, "tokens/s", "higher", source),
        "mfu": metric(flops / total / peak_flops(cluster.device, prefill.dtype), "", "higher",
                       peak_note(peak_flops(cluster.device, prefill.dtype), prefill.dtype)),
    }  # fmt: skip
    if prefill.host_bytes:
        metrics["host_bytes"] = metric(prefill.host_bytes, "bytes", "lower", "graph")
    result = assemble(e, metrics, peak, cluster)
    if short := short or beyond_host(prefill, cluster):
        result.status, result.reason = "infeasible", "; ".join(filter(None, (result.reason, short)))
    rows = breakdown(prefill, cluster, times=waves)
    later = breakdown(decode, cluster, times=steps * waves)
    for row in rows:
        row.phase = "prefill" if row.phase == "forward" else row.phase
    for row in later:
        row.phase = "decode" if row.phase == "forward" else row.phase
    result.breakdown = rows + later
    device = e.cluster.device
    if engine is None and device.kind == "cpu" and device.rates and not device.decode_latency:
        result.notes.append("the profile is of an earlier version, which did not time decode steps: `ridgeline probe`")
    return result


def _in_engine(space: Room, batch: int, w: Generate) -> tuple[Peak, str]:
    """The peak of an engine with ``batch`` sequences at a time, and why it cannot hold even one, if it cannot."""
    last = w.prompt_len + w.output_len
    if space.tokens < last:
        return space.peak, f"{space.reason}, no sequence of {last} tokens fits; {LESS}"
    parts = space.peak.categories
    cache = min(batch * last * space.bytes_per_token, parts["kv_cache"])
    return Peak({**parts, "kv_cache": cache}, space.peak.instant), ""


def _layer_bytes(g: Graph) -> float:
    """Bytes that the products of a layer read and write, almost all of them weights."""
    return max(sum(o.bytes for o in b.forward if o.kind == "gemm") for b in g.blocks if not b.is_head)


def _micro_batch(e: Experiment, techniques: list[Technique]) -> Experiment:
    """The experiment with the part of the batch that passes through a layer at once."""
    n = math.prod(t.micro_batches(e) for t in techniques)
    if n == 1:
        return e
    return e.model_copy(update={"workload": e.workload.model_copy(update={"batch_size": e.batch_size // n})})


def _plain(
    prefill: Graph, decode: Graph, e: Experiment, techniques: list[Technique], cluster: Cluster
) -> tuple[float, float]:
    """(first token, mean further token) of generation with the torch model; Simpson's rule over the growing context."""
    w = e.workload
    assert isinstance(w, Generate)
    first, middle = (pass_seconds(g, cluster) for g in (prefill, decode))
    if w.output_len < 32:  # the context hardly grows
        return first, middle
    ends = [
        pass_seconds(rewritten(decode_graph(e, n), e, techniques), cluster)
        for n in (w.prompt_len + 1, w.prompt_len + w.output_len)
    ]
    return first, (ends[0] + 4 * middle + ends[1]) / 6


class EngineTimes(NamedTuple):
    """Seconds of a fixed batch in an engine."""

    first: float
    """Mean time to the first token."""
    each: float
    """Mean time per further token: what a sequence waits for the prompts of others behind its own is part of it."""
    total: float
    """Of the whole batch."""
    batch: int
    """Sequences that the cache holds at a time: of one wave."""
    space: Room
    """For the cache."""


def engine_times(
    e: Experiment, techniques: list[Technique], cluster: Cluster, engine: EngineCosts, w: Generate, stages: int = 1
) -> EngineTimes:
    """The times of a batch that starts together.

    Prompts fill iterations up to the engine's token budget; decoding starts when all are processed. Decode iterations
    are linear in the cached tokens, so their mean is the one at the mean context. Where the cache is too small for all,
    the batch runs in waves, and the times are those of the first; the total is that of all. ``stages``: the layers are
    distributed over this many ``cluster``s in sequence; a token passes through one after another, the chunks of a
    prompt are pipelined.
    """
    longest = w.prompt_len + w.output_len
    if engine.half_sums and cluster.device.half_sums > 1:
        device = cluster.device
        rates = {k: v * device.half_sums for k, v in device.peak_flops.items() if k in ("fp16", "bf16")}
        faster = device.model_copy(update={"peak_flops": device.peak_flops | rates})
        cluster = cluster.model_copy(update={"device": faster})
    surface = Iterations(e, techniques, cluster, engine, (w.prompt_len, longest))
    space = room(e, surface, engine, e.micro_batch_size * w.prompt_len)
    batch = max(1, min(e.micro_batch_size, space.tokens // (w.prompt_len + BLOCK)))
    rest = e.micro_batch_size % batch or batch
    wave = _wave(surface, w, batch, stages)
    last = wave if rest == batch else _wave(surface, w, rest, stages)
    steps, full = w.output_len - 1, -(-e.micro_batch_size // batch) - 1
    total = full * (wave.prompts + steps * wave.step) + last.prompts + steps * last.step
    waits = (wave.prompts - wave.first) / steps if steps else 0.0
    return EngineTimes(wave.first, wave.step + waits, total, batch, space)


class _Wave(NamedTuple):
    """Seconds of sequences that start together."""

    first: float
    """Mean time to the first token."""
    prompts: float
    """Until all prompts are processed."""
    step: float
    """Mean time of a decode iteration."""


def _wave(surface: Iterations, w: Generate, batch: int, stages: int) -> _Wave:
    """The times of ``batch`` sequences that start together."""
    engine = surface.engine
    per = max(1, engine.max_num_batched_tokens // w.prompt_len)
    now, firsts, hops = engine.request_s, 0.0, (stages - 1) * engine.hop_s
    piece = engine.max_num_batched_tokens
    if engine.chunked and batch == 1 and w.prompt_len > piece:
        pieces = [(min(piece, w.prompt_len - at), at) for at in range(0, w.prompt_len, piece)]
        parts = [surface.mixed([p], 0, 0) for p in pieces]
        group = max(1, engine.drained_tokens // piece) if stages > 1 and engine.drained_tokens else len(parts)
        first = now
        for at in range(0, len(parts), group):  # the last waits for those before it at one stage
            some = parts[at : at + group]
            first += sum(some[:-1]) / stages + some[-1] + hops
        return _Wave(first, first, surface.mixed([], 1, round(w.prompt_len + w.output_len / 2)) + hops)
    for start in range(0, batch, per):
        n = min(per, batch - start)
        now += surface.mixed([(w.prompt_len, 0)] * n, 0, 0) + hops
        firsts += n * now
    each = surface.mixed([], batch, round(batch * (w.prompt_len + w.output_len / 2))) + hops
    return _Wave(firsts / batch, now, each)
