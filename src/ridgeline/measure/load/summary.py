"""Records of requests → the metrics that a prediction of the same workload has, and client-side ones."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from ridgeline.measure.load.drive import Drive
from ridgeline.measure.load.intervals import block_length, spreads
from ridgeline.measure.load.record import Record
from ridgeline.measure.stats import percentile
from ridgeline.spec.result import Check, Metric, Result
from ridgeline.spec.workload import Serve

QUANTILES = (0.5, 0.9, 0.99)
POINTS = 201
"""Of a stored distribution."""
CHANCE = 4
"""First tokens in which prompts may agree by chance; some caches count single tokens."""
ON_TIME = 0.02
"""Share of the median time to first token that the median lateness of sending may make up."""


def summarize(d: Drive, w: Serve, result: Result) -> Result:
    """Fill a Result with the run's metrics, distributions, checks, notes, status."""
    served = [r for r in d.records if r.ok]
    failed = [r for r in d.records if r.error and r.error != "interrupted"]
    _errors(result, d.records, failed)
    if d.interrupted:
        result.status, result.reason = "interrupted", f"stopped after {len(served)} answered requests"
    elif not served:
        result.status, result.reason = "error", "no request was answered"
    if not served:
        return result
    ends = [r.end for r in served if r.end is not None]
    span = max(ends) - min(r.intended for r in d.records)
    in_flight = sum(r.end - r.sent for r in served if r.end is not None and r.sent is not None) / span
    block = block_length(len(served), in_flight)
    values: dict[str, list[list[float]]] = {
        "ttft": [[r.ttft] for r in served],
        "tpot": [[r.tpot] if r.tpot is not None else [] for r in served],
        "e2e": [[r.e2e] for r in served],
        "itl": [gaps(r) for r in served],
    }
    for name, per_request in values.items():
        _latency(result, name, per_request, block)
    good = np.array([float(r.ok and within(r, w)) for r in d.records if r.error != "interrupted"])
    share = _metric(float(good.mean()), "", "higher", "requests within both limits; failures are not", len(good))
    if interval := spreads(good, np.arange(len(good)), len(good), block, ()).mean:
        share.low, share.high = interval
    tokens = sum(r.tokens for r in served)
    result.metrics |= {
        "requests_per_s": _metric(len(served) / span, "requests/s", "higher", n=len(served)),
        "goodput_per_s": _metric(
            float(good.sum()) / span, "requests/s", "higher", "requests within slo_ttft and slo_tpot"
        ),
        "slo_share": share,
        "tokens_per_s": _metric(tokens / span, "tokens/s", "higher", "generated tokens"),
        "window_s": _metric(span, "s", "", "first intended sending to last end"),
        "concurrency_mean": _metric(in_flight, "requests", "", "seconds under way over wall time"),
        "output_tokens_mean": _metric(tokens / len(served), "tokens", ""),
        "output_tokens_total": _metric(tokens, "tokens", ""),
    }
    _prompts(result, d, served, span, w.shared_prefix)
    if w.concurrency is None:
        _sending(result, d, served)
    _trust(result, d, w, served)
    return result


def _prompts(result: Result, d: Drive, served: list[Record], span: float, shared: int) -> None:
    prompt_tokens = [r.prompt_tokens for r in served if r.prompt_tokens is not None]
    if prompt_tokens:
        result.metrics["prompt_tokens_mean"] = _metric(
            statistics.fmean(prompt_tokens), "tokens", "", "as the server counts"
        )
        result.metrics["prompt_tokens_per_s"] = _metric(
            sum(prompt_tokens) / span, "tokens/s", "higher", "of answered requests"
        )
    cached = [r.cached_tokens for r in served if r.cached_tokens is not None]
    if cached and prompt_tokens:
        result.metrics["cached_share"] = _metric(
            sum(cached) / sum(prompt_tokens), "", "higher", "prompt tokens found in a cache"
        )
        _cache(result, d, served, shared)


def _sending(result: Result, d: Drive, served: list[Record]) -> None:
    """How closely requests were sent at their intended times."""
    lags = sorted(r.lag for r in served)
    result.metrics["offered_per_s"] = _metric(_offered(d.records), "requests/s", "", "as intended")
    result.metrics["schedule_lag_s"] = _metric(statistics.fmean(lags), "s", "lower", "sent after the intended time")
    if (late := percentile(lags, 99)) is not None:
        result.metrics["schedule_lag_p99_s"] = _metric(late, "s", "lower", n=len(lags))


def within(r: Record, w: Serve) -> bool:
    """Whether an answered request keeps both limits."""
    slow = r.tpot
    return (w.slo_ttft is None or r.ttft <= w.slo_ttft) and (w.slo_tpot is None or slow is None or slow <= w.slo_tpot)


def gaps(r: Record) -> list[float]:
    """Seconds between neighboring chunks with text."""
    return [b - a for a, b in pairwise(r.chunks)]


def _latency(result: Result, name: str, per_request: Sequence[Sequence[float]], block: int) -> None:
    """Mean, percentiles, intervals and distribution of one latency. Percentiles that n cannot carry are left out."""
    flat = [v for row in per_request for v in row]
    if not flat:
        return
    values = np.array(flat)
    owner = np.repeat(np.arange(len(per_request)), [len(row) for row in per_request])
    known = [(q, v) for q in QUANTILES if (v := percentile(flat, 100 * q)) is not None]
    found = spreads(values, owner, len(per_request), block, [q for q, _ in known])
    ends = [found.mean, *found.quantiles]
    names = [f"{name}_s", *(f"{name}_p{q * 100:.0f}_s" for q, _ in known)]
    for key, value, interval in zip(names, [float(values.mean()), *(v for _, v in known)], ends, strict=True):
        m = _metric(value, "s", "lower", n=len(values))
        if interval:
            m.low, m.high = min(interval[0], value), max(interval[1], value)
        result.metrics[key] = m
    points = np.percentile(values, np.linspace(0, 100, POINTS))
    result.distributions[f"{name}_s"] = [round(float(p), 7) for p in points]


def _errors(result: Result, records: Sequence[Record], failed: Sequence[Record]) -> None:
    kinds = Counter(r.error for r in failed)
    sent = len(records)
    result.metrics["requests"] = _metric(sent, "requests", "", "sent")
    result.metrics["errors"] = _metric(len(failed), "requests", "lower", "sent, not answered to the end")
    for kind, count in kinds.most_common():
        detail = next((r.detail for r in failed if r.error == kind and r.detail), "")
        result.notes.append(f"{count} of {sent} requests failed: {kind}" + (f" ({detail})" if detail else ""))
    dropped = sum(r.error == "interrupted" for r in records)
    if dropped:
        result.notes.append(f"{dropped} requests were under way when the run was interrupted; they count nowhere")


def _trust(result: Result, d: Drive, w: Serve, served: Sequence[Record]) -> None:
    """Checks of the plausibility of the numbers."""
    dropped = sum(r.error == "interrupted" for r in d.records)
    errors = sum(bool(r.error) for r in d.records) - dropped
    result.checks.append(
        Check(name="every request sent is accounted for", passed=len(served) + errors + dropped == len(d.records),
              expected=len(d.records), got=len(served) + errors + dropped)
    )  # fmt: skip
    if w.concurrency is None:
        median = statistics.median(r.ttft for r in served)
        late = statistics.median(r.lag for r in served)
        on_time = Check(name="requests were sent on time", passed=late <= max(ON_TIME * median, 1e-3), expected=0.0,
                        got=late / median if median else 0.0, tolerance=ON_TIME,
                        note="median lateness over median TTFT")  # fmt: skip
        result.checks.append(on_time)
        if not on_time.passed:
            result.notes.append("this client could not keep the schedule: its lateness is in every latency; send from"
                                " a machine with an idle core, or at a lower rate")  # fmt: skip
    got = sum(r.tokens for r in served) / sum(r.output_len for r in served)
    lengths = Check(name="outputs as long as asked", passed=abs(got - 1) < 0.01, expected=1.0, got=got, tolerance=0.01)
    result.checks.append(lengths)
    if not lengths.passed:
        result.notes.append(
            f"outputs have {got:.2f} of the tokens asked for: compare only with runs of the same length"
        )
    chunks = sum(len(r.chunks) for r in served)
    tokens = sum(r.tokens for r in served)
    if chunks and all(r.output_tokens is None for r in served):
        result.notes.append("the server reports no usage: tokens are counted as chunks with text")
    elif chunks:
        result.metrics["tokens_per_chunk"] = _metric(tokens / chunks, "tokens", "")
        if tokens / chunks > 1.05:
            result.notes.append(f"a chunk holds {tokens / chunks:.2f} tokens on average: ITL is the gap between chunks,"
                                " TPOT is per token")  # fmt: skip
    if w.concurrency is None and len(served) >= 40:
        ordered = [r.ttft for r in sorted(served, key=lambda r: r.intended)]
        quarter = len(ordered) // 4
        early, last = statistics.median(ordered[:quarter]), statistics.median(ordered[-quarter:])
        if last > 2 * early and last - early > 0.05:
            result.notes.append("TTFT grew all through the run: the server is asked for more than it gives, and the"
                                " latencies depend on how long the run lasted")  # fmt: skip


def _cache(result: Result, d: Drive, served: Sequence[Record], shared: int) -> None:
    """Whether the workload itself explains the server's prefix-cache hits."""
    explained = 0.0
    counted = [(r.prompt_tokens, r.prompt_len) for r in served if r.prompt_tokens is not None]
    for prompt, length in counted:
        denser = max(1.0, (prompt - d.template) / length)  # text is cut by an estimate: the server may count more
        explained += min(prompt, d.template + shared * denser + CHANCE)
    share, got = explained / sum(prompt for prompt, _ in counted), result.metrics["cached_share"].value
    check = Check(name="the workload explains the cached prompts", passed=got <= share, expected=share, got=got,
                  note="expected: the most that its prompts share")  # fmt: skip
    result.checks.append(check)
    if not check.passed:
        result.notes.append(f"{got:.0%} of the prompt tokens came out of the server's prefix cache, where the prompts"
                            f" share {share:.0%} at most: the server has seen them before, and the latencies are not"
                            " those of new prompts")  # fmt: skip


def _offered(records: Sequence[Record]) -> float:
    times = [r.intended for r in records]
    span = max(times) - min(times)
    return (len(times) - 1) / span if span else 0.0


def _metric(
    value: float, unit: str, better: Literal["lower", "higher", ""], source: str = "measured", n: int | None = None
) -> Metric:
    return Metric(value=value, unit=unit, better=better, source=source, n=n)
