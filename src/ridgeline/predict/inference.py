"""Prediction of a fixed batch: one prefill, then decode steps."""

from __future__ import annotations

from ridgeline.graph import decode_graph, prefill_graph
from ridgeline.predict.common import assemble, metric, peak_note, rank_cluster, rewritten, source_of
from ridgeline.predict.kernel import peak_flops
from ridgeline.predict.memory import inference_peak
from ridgeline.predict.step import breakdown, simulate
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.techniques.base import Technique


def predict_generation(e: Experiment, made: list[Technique]) -> Result:
    """The Result of a generation experiment, already normalised and checked."""
    cluster = rank_cluster(e)
    prefill = rewritten(prefill_graph(e), e, made)
    decode = rewritten(decode_graph(e), e, made)
    first, each = simulate(prefill, cluster, []), simulate(decode, cluster, [])
    steps = decode.decode_steps
    total = first.seconds + steps * each.seconds
    produced = e.batch_size * (steps + 1)
    peak = inference_peak(prefill, decode)
    source = source_of(cluster)
    metrics = {
        "ttft_s": metric(first.seconds, "s", "lower", source),
        "tpot_s": metric(each.seconds, "s", "lower", source),
        "e2e_s": metric(total, "s", "lower", source),
        "tokens_per_s": metric(produced / total, "tokens/s", "higher", source),
        "tokens_per_s_per_device": metric(produced / total / e.world, "tokens/s", "higher", source),
        "mfu": metric((prefill.flops + steps * decode.flops) / total / peak_flops(cluster.device, prefill.dtype),
                       "", "higher", peak_note(cluster, prefill.dtype)),
    }  # fmt: skip
    result = assemble(e, metrics, peak, cluster)
    rows = breakdown(prefill, cluster, [])
    later = breakdown(decode, cluster, [], times=steps)
    for row in rows:
        row.phase = "prefill" if row.phase == "forward" else row.phase
    for row in later:
        row.phase = "decode" if row.phase == "forward" else row.phase
    result.breakdown = rows + later
    return result
