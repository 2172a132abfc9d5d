"""A planner's answer: the best plans, the front, why not the others, and runnable files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.experiments import save, to_toml
from ridgeline.predict.common import unknown_host
from ridgeline.predict.serving.arrivals import REQUESTS
from ridgeline.report.table import Column, Table
from ridgeline.report.units import NONE, metric, percent, size
from ridgeline.search.expand import SLACK
from ridgeline.search.found import ALIKE, Answer, Tried
from ridgeline.search.kinds import difference
from ridgeline.search.question import HIGHER
from ridgeline.search.why import Relaxation, WhyNot
from ridgeline.spec.workload import Generate, Serve, Training, Workload
from ridgeline.techniques.registry import brief, registry

TIGHT = 0.95
"""Share of the memory above which a plan is called tight."""
SHOWN = {
    "tokens_per_s": ("Throughput", "tokens/s"), "step_time_s": ("Step", "s"), "ttft_s": ("TTFT", "s"),
    "tpot_s": ("TPOT", "s"), "e2e_s": ("E2E", "s"), "dollars_per_million_tokens": ("$ per 1M tokens", ""),
    "joules_per_token": ("J per token", ""),
}  # fmt: skip


def answer_tables(a: Answer) -> list[Table]:
    """The best plan and the best ones of other kinds, then the front."""
    q = a.question
    tables = [_table(f"Best plans for {q.model.name} on {q.cluster.label}, goal {q.goal}", a.best, q.metric)]
    tables[0].notes += [
        *load(q.workload),
        _counts(a),
        *(f"{name}: {_where(name, a)}, {why}" for name, why in a.settled.items()),
    ]
    lossy = {c.name for t in a.best for c in t.experiment.plan.calls if not registry()[c.name].card.lossless}
    native = {q.published: f"the format in which {q.model.name} is published"}
    tables[0].notes += [
        f"{name}: {native[name]}" if name in native else f"{name} may change quality: {registry()[name].card.quality}"
        for name in sorted(lossy)
    ]
    if left := q.left_to_the_user():
        tables[0].notes.append(f"not considered, as they change quality: {', '.join(left)} (--allow NAME, --with NAME)")
    if unlike := sorted({name for t in a.best for name in t.unvalidated}):
        tables[0].notes.append(f"not compared with published measurements, and so ranked lower: {', '.join(unlike)}")
    waiting = {c.name for t in a.best for c in t.experiment.plan.calls if not registry()[c.name].card.runs}
    if waiting:
        tables[0].notes.append(f"predicted only, not run by this version: {', '.join(sorted(waiting))}")
    for plan, t in enumerate(a.best, 1):
        needed = unknown_host(t.metrics.get("host_bytes", 0.0), t.experiment.cluster)
        tables[0].notes += [f"plan {plan}: {note}" for note in needed]
        if isinstance(q.workload, Serve) and not q.keeps_up(t.metrics):
            rates = f"{metric(t.metrics['requests_per_s'], '')} of {q.offered:g} requests/s"
            tables[0].notes.append(f"plan {plan} does not keep up with the arrivals: it answers {rates}")
    if a.best and a.best[0].over > TIGHT:
        tables[0].notes.append(
            f"the first plan takes {percent(a.best[0].over)} of the memory: little is left for error"
        )
    front = shown_front(a.found.front)
    if len(front) > 1:
        tables.append(_table(f"Pareto front: {q.metric} against memory", front))
    return tables


def shown_front(front: list[Tried]) -> list[Tried]:
    """The front, smallest first, without plans that leave less than :data:`ALIKE` more of the memory than the next
    better one."""
    kept: list[Tried] = []
    for t in sorted(front, key=lambda t: t.rank):
        if not kept or kept[-1].over - t.over >= ALIKE:
            kept.append(t)
    return kept[::-1]


def _table(title: str, plans: list[Tried], goal: str = "") -> Table:
    """Plans with their metrics; with a ``goal`` also what each trades against the first."""
    training = any(t.experiment.is_training for t in plans)
    keys = [k for k in SHOWN if any(k in t.metrics for t in plans)]
    batch = "Micro-batch" if training else "Batch"
    served = all(t.experiment.task == "serve" for t in plans)
    columns = [Column("#", align="left"), Column("Plan", align="left"), Column("Devices"),
               *([] if served else [Column(batch)]), *(Column(SHOWN[k][0], k) for k in keys),
               Column("Memory", "peak_bytes"), Column("Of it")]  # fmt: skip
    if goal:
        columns.append(Column("Against the first", align="left"))
    rows = [
        [str(i), " ".join(brief(t.experiment.plan)) or "(no technique)", t.experiment.cluster.label,
         *([] if served else [str(t.experiment.micro_batch_size)]),
         *(metric(t.metrics[k], SHOWN[k][1]) if k in t.metrics else NONE for k in keys),
         size(t.metrics["peak_bytes"]), percent(t.over), *([trade(t, plans[0], goal)] if goal else [])]
        for i, t in enumerate(plans, 1)
    ]  # fmt: skip
    return Table(title, columns, rows)


_WORDS = {"speed": ("faster", "slower"), "price": ("cheaper", "more expensive"), "": ("better", "worse")}
_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT"}


def trade(t: Tried, first: Tried, goal: str) -> str:
    """How a plan differs from the first in kind, and what that costs: ``sharding, no recomputation: 8 % slower, 5.0 GiB
    spare``."""
    if t is first:
        return NONE
    level = goal != "peak_bytes" and t.is_level_with(first)
    if goal == "peak_bytes" and "tokens_per_s" in t.metrics:
        goal = "tokens_per_s"  # memory is said in any case
    ratio = t.metrics[goal] / first.metrics[goal]
    better = ratio > 1 if goal in HIGHER else ratio < 1
    costs = []
    if abs(ratio - 1) >= 0.005 and not level:
        good, bad = _WORDS["speed" if goal.endswith("_s") else "price" if "dollars" in goal else ""]
        costs.append(f"{percent(abs(ratio - 1))} {good if better else bad}")
    serving = t.experiment.task == "serve"
    if serving:
        for key, name in _LATENCIES.items():
            if key != goal and key in t.metrics and first.metrics.get(key):
                change = t.metrics[key] / first.metrics[key] - 1
                if abs(change) >= ALIKE:
                    costs.append(f"{name} {percent(abs(change))} {'longer' if change > 0 else 'shorter'}")
    elif "dollars" in goal:
        speed = t.metrics["tokens_per_s"] / first.metrics["tokens_per_s"]
        if abs(speed - 1) >= ALIKE:
            costs.append(f"{speed:.2g}x as fast")
    if not serving and abs(t.over - first.over) >= ALIKE:
        costs.append(f"{size(max(0.0, t.quick.limit - t.metrics['peak_bytes']))} spare")
    return f"{difference(t.kind, first.kind) or 'other devices'}: {', '.join(costs) or 'equal'}"


def load(w: Workload) -> list[str]:
    """What plans were judged by: ``load: 4 requests/s, of 512 + 128 tokens``, ``load: 32 sequences of 4096 tokens in a
    step``."""
    if isinstance(w, Training):
        return [f"load: {w.batch_size} sequences of {w.seq_len} tokens in a step (--batch-size, --seq-len)"]
    if isinstance(w, Generate):
        return [f"load: sequences of {w.prompt_len} + {w.output_len} tokens (--prompt-len, --output-len)"]
    if w.trace:
        return [f"load: {w.trace}" + (f", at {w.rate:g} requests/s" if w.rate else "")]
    lengths = f"of {w.prompt_len} + {w.output_len} tokens" + (" on average" if w.length_cv or w.output_cv else "")
    if w.offered:
        return [f"load: {w.offered:g} requests/s, {lengths}" + (" (--rate, --concurrency)" if w.open_load else "")]
    equal = [] if w.length_cv or w.output_cv else [
        "all requests have the same lengths, so that those of a batch end together: --length-cv says how much they vary"
    ]  # fmt: skip
    if w.concurrency == (w.requests or REQUESTS):
        return [f"load: {w.concurrency} requests at once, {lengths} (--rate, --concurrency)", *equal]
    return [f"load: {w.concurrency} clients, each with its next request when the last is answered, {lengths}", *equal]


def _where(name: str, a: Answer) -> str:
    """Of a settled technique: some plans cannot have it, and in some it does nothing."""
    return "always on" if all(name in t.names for t in a.best) else "on where it can be and changes something"


def _counts(a: Answer) -> str:
    c = a.found.counts
    return (
        f"{c['considered']} candidate plans in {a.seconds:.1f} s: {c['refused']} refused by check, {c['bounded']}"
        f" at least {SLACK:g}x slower than the best, {c['dominated']} offload where it is not needed,"
        f" {c['oversize']} too large, {c['missed']} past a limit, {c['feasible']} feasible"
    )


def write_plans(a: Answer, folder: Path) -> list[Path]:
    """One runnable experiment file per answer, best first."""
    named = [t.experiment.model_copy(update={"name": f"plan-{i}"}) for i, t in enumerate(a.best, 1)]
    return [save(e, folder / f"{e.name}.toml") for e in named]


def as_dict(a: Answer, reasons: list[WhyNot], ways: list[Relaxation], miss: tuple[Tried, str] | None) -> dict[str, Any]:
    """The ``--json`` document."""
    q = a.question
    return {
        "model": q.model.name,
        "on": q.cluster.label,
        "goal": q.goal,
        "metric": q.metric,
        "slo": dict(q.slo),
        "load": "; ".join(load(q.workload)),
        "best": [{**_plan(t), "against_first": trade(t, a.best[0], q.metric)} for t in a.best],
        "front": [_plan(t) for t in sorted(a.found.front, key=lambda t: t.metrics["peak_bytes"])],
        "settled": a.settled,
        "why_not": [{"what": w.what, "because": w.because, "therefore": w.therefore} for w in reasons],
        "closest_miss": {**_plan(miss[0]), "misses": miss[1]} if miss else None,
        "relaxations": [{"change": r.change, "plan": r.plan} for r in ways],
        "counts": dict(a.found.counts),
        "refusals": dict(a.found.refusals.most_common(40)),
        "seconds": a.seconds,
    }


def _plan(t: Tried) -> dict[str, Any]:
    return {
        "plan": t.experiment.plan.strings(),
        "brief": brief(t.experiment.plan),
        "on": t.experiment.cluster.label,
        "batch_size": t.experiment.batch_size,
        "micro_batch_size": t.experiment.micro_batch_size,
        "metrics": t.metrics,
        "memory": t.quick.peak,
        "toml": to_toml(t.experiment),
    }
