"""Several processes of one plan → one Result; its effect against the baseline; the equivalence of its loss."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ridgeline.measure.stats import bootstrap_ci, outliers, perplexity_ratio, ratio_ci, verdict, warmup_steps
from ridgeline.spec.ablation import Outcome
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Metric, Result, Sample
from ridgeline.techniques.registry import techniques_of


def steady(samples: list[Sample]) -> list[list[Sample]]:
    """Samples by repeat with the detected warm-up of each marked and left out."""
    blocks: list[list[Sample]] = []
    for repeat in sorted({s.repeat for s in samples}):
        run = [s for s in samples if s.repeat == repeat]
        skip = warmup_steps([s.seconds for s in run])
        for s in run[:skip]:
            s.warmup = True
        blocks.append(run[skip:])
    return [b for b in blocks if b]


def merge(parts: list[Result]) -> Result:
    """One Result of a plan's processes: all samples, the median step with its interval, throughput that balances.

    A plan with no successful process keeps its first failure.
    """
    good = [p for p in parts if p.status == "ok"]
    if not good:
        return parts[0]
    first = next((p for p in good if p.memory), good[0])
    out = first.model_copy(deep=True)
    if "wall_s" not in first.metrics:
        return _merge_batches(out, good)
    out.samples = [s for p in good for s in p.samples]
    blocks = steady(out.samples)
    flat = [s for b in blocks for s in b]
    step = statistics.median(s.seconds for s in flat)
    # On a log scale, as for ratios: a wide interval of seconds must not reach below zero.
    middle, low, high = bootstrap_ci([[math.log(s.seconds) for s in b] for b in blocks])
    low, high = step * math.exp(low - middle), step * math.exp(high - middle)
    tokens = flat[0].tokens
    wall = sum(p.metrics["wall_s"].value for p in good)
    total = sum(s.seconds for s in out.samples)
    ranks = int(out.environment.get("ranks", 1))
    n = len(flat)
    out.metrics["step_time_s"] = Metric(
        value=step, unit="s", low=low, high=high, n=n, better="lower", source="measured"
    )
    rate = {"unit": "tokens/s", "n": n, "better": "higher", "source": "tokens per step / median step time"}
    out.metrics["tokens_per_s"] = Metric(value=tokens / step, low=tokens / high, high=tokens / low, **rate)
    per = {"value": tokens / step / ranks, "low": tokens / high / ranks, "high": tokens / low / ranks}
    out.metrics["tokens_per_s_per_device"] = Metric(**per, **rate)
    out.metrics["tokens_per_step"] = Metric(value=tokens, unit="tokens", source="valid labels of the global batch")
    firsts = [p.samples[0].seconds for p in good]
    out.metrics["first_step_s"] = Metric(value=statistics.median(firsts), unit="s", n=len(firsts), better="lower")
    last = [p.samples[-1].loss for p in good if p.samples[-1].loss is not None]
    out.metrics["final_loss"] = Metric(value=statistics.median(last), unit="nats/token", n=len(last), better="lower")
    out.metrics["first_loss"] = Metric(value=good[0].samples[0].loss or 0.0, unit="nats/token")
    out.checks += [_balance(out.experiment, tokens / step, step, flat, wall, total), _same_runs(good)]
    warm = sum(s.warmup for s in out.samples)
    out.notes.append(f"{warm} of {len(out.samples)} steps were warm-up (detected, first step always) and are left out")
    found = outliers([s.seconds for s in flat])
    if found.note:
        out.notes.append(found.note)
    failed = [p for p in parts if p.status != "ok"]
    if failed:
        out.notes.append(f"{len(failed)} of {len(parts)} processes failed: {failed[0].status}: {failed[0].reason}")
    return out


def _merge_batches(out: Result, good: list[Result]) -> Result:
    """Processes that generated the same batch (and maybe compressed the model before): the median of each metric."""
    out.samples = [s for p in good for s in p.samples]
    for name, metric in out.metrics.items():
        values = [p.metrics[name].value for p in good if name in p.metrics]
        out.metrics[name] = metric.model_copy(update={"value": statistics.median(values)})
    return out


def _balance(e: dict[str, Any], rate: float, step: float, steps: list[Sample], wall: float, total: float) -> Check:
    """Check that tokens, steps, time and rate agree.

    The rate times the step time must give the tokens that the experiment's own batch holds (not what the engine
    counted), in every step; and the steps' times must fill the wall time of the loop.
    """
    w = e["workload"]
    held = (w["batch_size"] or steps[0].tokens // w["seq_len"]) * w["seq_len"]
    counted = {s.tokens for s in steps}
    exact = counted == {held} or bool(e["model"]["causal"] is False)
    passed = exact and abs(rate * step - steps[0].tokens) < 1e-6 * held and abs(total - wall) < 0.02 * wall
    return Check(
        name="rate × step time = tokens per step = batch × length, and step times fill the wall time",
        passed=passed,
        expected=held,
        got=rate * step,
        tolerance=1e-6,
    )


def _same_runs(good: list[Result]) -> Check:
    """The plan's processes trained the same thing: equal seeds give equal losses."""
    losses = [p.samples[-1].loss for p in good]
    values = [x for x in losses if x is not None]
    spread = (max(values) - min(values)) / abs(values[0]) if values else 0.0
    return Check(name="repeats reach the same loss", passed=spread < 1e-4, expected=0.0, got=spread, tolerance=1e-4)


def effect(outcome: Outcome, base: Result, is_baseline: bool, margin: float) -> None:
    """Fill in speed-up with its interval, memory ratio and verdict."""
    own = outcome.measured
    assert own is not None
    if own.status != "ok" or base.status != "ok":
        outcome.verdict = "failed"
        return
    blocks = [[[s.seconds / s.tokens for s in b] for b in steady(r.samples)] for r in (base, own)]
    ratio, low, high = ratio_ci(blocks[0], blocks[1])
    outcome.speedup = Metric(value=ratio, low=low, high=high, n=len(own.samples), better="higher",
                             source="ratio of median seconds per token, block bootstrap")  # fmt: skip
    if own.peak_bytes and base.peak_bytes:
        outcome.memory_ratio = own.peak_bytes / base.peak_bytes
    if own.losses and len(own.losses) == len(base.losses) and not is_baseline:
        worse = perplexity_ratio(own.losses, base.losses)
        outcome.perplexity_ratio = Metric(value=worse.value, low=worse.low, high=worse.high, n=len(own.losses),
                                          better="lower", source="paired bootstrap over windows")  # fmt: skip
    outcome.verdict = "baseline" if is_baseline else verdict(low, high, margin)


def sameness(e: Experiment, own: Result, base: Result) -> list[Check]:
    """Whether the plan still computes the same result. The bound comes from the cards of its techniques."""
    loss, reference = own.metric("final_loss"), base.metric("final_loss")
    if own.status != "ok" or loss is None or reference is None:
        return []
    techniques = techniques_of(e.plan)
    if any(t.card.bound == "falls" for t in techniques):
        start, loss = own.metric("eval_loss_start"), own.metric("eval_loss")
        if start is None or loss is None:
            return []
        names = ", ".join(t.card.name for t in techniques if t.card.bound == "falls")
        what = f"held-out loss falls ({names} trains other parameters)"
        return [Check(name=what, passed=loss < start, expected=start, got=loss)]
    tolerance = max((t.card.tolerance for t in techniques), default=1e-5)
    # Rounding differs between kernels and grows with the steps; the card's bound is per comparison of whole runs.
    tolerance = max(tolerance, 1e-4)
    return [
        Check(name="same loss as baseline", passed=abs(loss - reference) <= tolerance * abs(reference),
              expected=reference, got=loss, tolerance=tolerance)
    ]  # fmt: skip
