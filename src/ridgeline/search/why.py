"""Why not: for what the planner did not choose, a chain of because and therefore; for an empty answer, a way out."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline import catalog
from ridgeline.predict.predict import predict
from ridgeline.predict.quick import quick
from ridgeline.predict.serving.arrivals import requests
from ridgeline.report.units import percent, size
from ridgeline.search.expand import SLACK
from ridgeline.search.found import ALIKE, WORTH, Answer, Tried
from ridgeline.search.question import Question
from ridgeline.search.search import search
from ridgeline.search.space import candidate
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Generate, Serve, Training
from ridgeline.techniques.registry import brief, check, registry, resolve
from ridgeline.techniques.technique import Technique

GIB = 2.0**30
_MORE_DEVICES = (2, 4, 8, 16, 32, 64)
_NODE = 8
"""Devices of a usual node."""
_NOTHING = 0.001
"""Share of the whole below which a difference is not named."""
_TOTAL = {"pretrain": "step_time_s", "finetune": "step_time_s", "generate": "e2e_s"}
"""What phases of a task add up to."""
_LATENCIES = frozenset({"ttft_s", "tpot_s", "e2e_s"})
"""Of serving: means over the requests."""


@dataclass(slots=True)
class WhyNot:
    """One thing that was not chosen: what stands against it, and what follows."""

    what: str
    because: str
    therefore: str

    def __str__(self) -> str:
        return f"{self.what}: because {self.because}, therefore {self.therefore}"


@dataclass(slots=True)
class Relaxation:
    """A change of the question that has a feasible plan."""

    change: str
    plan: list[str]


def why_not(answer: Answer) -> list[WhyNot]:
    """The plain plan first, then every technique that the best plan leaves out."""
    q = answer.question
    best = answer.best[0] if answer.best else None
    out = [w for w in [_plain(answer)] if w]
    reference = predict(best.experiment) if best else None
    for cls in q.techniques():
        name = cls.card.name
        if (best and name in best.names) or name in answer.settled:
            continue
        other = answer.found.with_technique.get(name)
        if other and best and reference:
            whole = q.goal == "memory" or not answer.found.counts["bounded"]
            out.append(_unproven(q, name, best, other) or _slower(q, name, best, reference, other, whole))
            continue
        if name in answer.without_effect:
            out.append(WhyNot(name, "it changes neither time nor memory here", "it was left out"))
            continue
        alone = _alone(q, cls) or (_beside(q, best, cls) if best else "")
        if alone:
            out.append(WhyNot(name, alone, "no plan has it"))
            continue
        if not cls.choices(q.base(q.cluster)):
            if cls.card.min_ranks > q.cluster.size:
                out.append(WhyNot(name, f"it needs {cls.card.min_ranks} devices or more", "no plan has it"))
            elif cls().axes():
                out.append(WhyNot(name, "no degree of it divides these devices and this model", "no plan has it"))
            else:
                out.append(WhyNot(name, "its options are the user's to choose", f"add --with {name} to have it"))
            continue
        if best and q.workload.kind == "serve" and cls.phase == "offload" and q.goal != "memory":
            out.append(WhyNot(name, "the model fits without it", "it was left out"))
            continue
        near = next((t for t in answer.found.nearest if name in t.names), None)
        if near:
            out.append(WhyNot(name, _misses(near), "no plan with it was feasible"))
        else:
            out.append(WhyNot(name, "no plan with it fits or comes near the best", "it was left out"))
    return out


def _plain(answer: Answer) -> WhyNot | None:
    """The plan without techniques, when it does not fit."""
    q = answer.question
    e, _ = candidate(q.base(q.cluster), (), 1 if q.training and q.free_micro_batch else None)
    try:
        e, techniques = resolve(e)
        t = Tried(e, quick(e, techniques), 0.0)
    except UserError as refusal:
        return WhyNot("plain plan", str(refusal).splitlines()[0], "it cannot run")
    if t.quick.fits:
        return None
    fix = answer.found.simplest
    therefore = "it does not fit"
    if fix:
        batch = f", micro_batch_size={fix.experiment.micro_batch_size}" if q.training else ""
        therefore += f"; nearest fix: {' + '.join(brief(fix.experiment.plan))}{batch}"
    return WhyNot("plain plan", size_of(t), therefore)


def size_of(t: Tried) -> str:
    """``optimizer 552 GB + parameters 276 GB + … exceed 64 x 80 GB``: what of its peak exceeds the device."""
    if t.quick.blocked:
        return t.quick.blocked
    parts = sorted(t.quick.peak.items(), key=lambda kv: -kv[1])
    big = " + ".join(f"{name} {value / GIB:.0f} GiB" for name, value in parts[:3] if value >= GIB / 2)
    cluster = t.experiment.cluster
    return (
        f"{big} on each rank exceed the {t.quick.limit / GIB:.0f} GiB of {cluster.device.name} ({cluster.size} in all)"
    )


def _misses(t: Tried) -> str:
    return size_of(t) if not t.quick.fits else "; ".join(t.missed)


def _slower(q: Question, name: str, best: Tried, reference: Result, other: Tried, whole: bool) -> WhyNot:
    """Compare the best plan that has it with the best of all: which phases grew, or where it is far behind because it
    cannot be in the best plan: why not. ``whole``: no plan was left out for its time; otherwise plans that are further
    behind than :data:`SLACK` are mostly not timed, and the best of those that were may not be the best there is."""
    more, fewer = other.experiment.cluster.size, best.experiment.cluster.size
    if q.goal == "cost" and more > fewer:
        causes = f"it takes {more} devices, not {fewer}"
    elif q.goal == "memory":
        causes = " and ".join(_larger(best, other)) or "nothing gets smaller"
    elif isinstance(q.workload, Serve):
        causes = " and ".join(_longer(best, other)) or "no time gets shorter"
    else:
        grown = {k: v - _phases(reference).get(k, 0.0) for k, v in _phases(predict(other.experiment)).items()}
        least = _NOTHING * reference.metrics[_TOTAL[q.workload.kind]].value
        worse = sorted(((v, k) for k, v in grown.items() if v >= least), reverse=True)[:2]
        causes = " and ".join(f"{k} +{v:.3g} s" for v, k in worse) or "nothing gets shorter"
    behind = 1 / _ahead(q, best, other)
    if behind > WORTH:
        causes = _beside(q, best, registry()[name]) or causes
    extra = " + ".join(s for s in brief(other.experiment.plan) if s.split(":")[0] == name)
    verdict = "its best plan is no better" if behind < 1.005 else f"its best plan is {behind:.2f}x behind the best plan"
    if q.goal == "cost" and q.keeps_up(best.metrics) and not q.keeps_up(other.metrics):
        verdict = "its best plan does not keep up with the arrivals"
    elif behind > SLACK and not whole:
        verdict = f"its plans are at least {SLACK:g}x behind the best plan, and {behind:.2f}x where one was timed"
    return WhyNot(extra or name, causes, verdict)


def _larger(best: Tried, other: Tried) -> list[str]:
    """The two categories at the peak that grew most in the other plan: ``activations +1.20 GiB``."""
    grown = {k: v - best.quick.peak.get(k, 0.0) for k, v in other.quick.peak.items()}
    worse = sorted(((v, k) for k, v in grown.items() if v >= 0.01 * sum(best.quick.peak.values())), reverse=True)[:2]
    return [f"{k} +{size(v)}" for v, k in worse]


def _longer(best: Tried, other: Tried) -> Iterator[str]:
    """Which of requests' times are longer in the other plan: batches and the queue decide, which no kernel's time
    shows."""
    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        ratio = other.metrics[key] / best.metrics[key] if best.metrics.get(key) else 0.0
        if ratio >= 1 + ALIKE:
            yield f"{name} is {ratio:.2f}x as long"


def _unproven(q: Question, name: str, best: Tried, other: Tried) -> WhyNot | None:
    """Of a technique, or its option, that nobody measured and whose best plan is predicted no slower: what it gains."""
    ahead = _ahead(q, best, other)
    unlike = next((what for what in other.unvalidated if what.partition(":")[0] == name), None)
    if unlike is None or ahead < 1:
        return None
    gain = percent(ahead - 1) if ahead - 1 >= _NOTHING else "nothing"
    return WhyNot(unlike, f"predictions with it were never compared with published measurements, and it gains {gain}",
                  "the plan without it comes first")  # fmt: skip


def _ahead(q: Question, best: Tried, other: Tried) -> float:
    """By what factor the other plan is predicted ahead of the best, below 1 where it is behind."""
    ratio = q.rank(best.metrics) / q.rank(other.metrics)
    return ratio if q.rank(best.metrics) > 0 else 1 / ratio


def _phases(r: Result) -> dict[str, float]:
    """Seconds on the critical path by phase; recomputation and each kind of wait apart."""
    out: dict[str, float] = defaultdict(float)
    for row in r.breakdown:
        phase = "recomputation" if row.operator.endswith(".again") else row.phase
        if phase == "other":  # waits are told apart: bubbles, stragglers, contention
            phase = row.operator
        out[f"exposed {phase}" if row.exposed_seconds is not None else phase] += (
            row.seconds if row.exposed_seconds is None else row.exposed_seconds
        )
    return out


def _alone(q: Question, cls: type[Technique]) -> str:
    """Why ``check`` refuses the technique whatever else is on: the reason that holds with those it asks for."""
    base = q.base(q.cluster)
    partners = [p for other in q.techniques() if other is not cls for p in other.choices(base)]
    reasons: Counter[str] = Counter()
    for t in cls.choices(base) or [cls()]:
        for beside in [(), *((p,) for p in partners)]:
            try:
                check(candidate(base, (*beside, t))[0])
                return ""
            except Incompatible as refusal:
                name, _, reason = refusal.what.partition(": ")
                if name == cls.card.name and not any(_named(p, reason) for p in beside):
                    reasons[reason] += 1
    # What one partner would lift is refused beside all others; the rarest reason is what stays even then.
    return min(reasons, key=reasons.__getitem__) if reasons else ""


def _named(t: Technique, reason: str) -> bool:
    """Whether a reason is about the technique: by its name or by its axis, ``the plan divides it (tp)``."""
    return t.card.name in reason or not set(re.findall(r"\w+", reason)).isdisjoint(t.axes())


def _beside(q: Question, best: Tried, cls: type[Technique]) -> str:
    """Why ``check`` refuses every choice of the technique beside the best plan: its own reason, if it has one."""
    reasons = []
    for t in q.choices(cls, best.experiment):
        try:
            check(candidate(best.experiment, (t,))[0])
            return ""
        except Incompatible as refusal:
            name, _, reason = refusal.what.partition(": ")
            reasons.append(reason if name == cls.card.name else "")
    return f"beside the best plan, {reasons[0]}" if reasons and all(reasons) else ""


# ---- no feasible plan -----------------------------------------------------------------------------------------------


def closest_miss(answer: Answer) -> tuple[Tried, str] | None:
    """The infeasible plan that misses by least, and by what."""
    if not answer.found.nearest:
        return None
    t = answer.found.nearest[0]
    return t, _misses(t)


def relaxations(answer: Answer) -> list[Relaxation]:
    """Single changes of the question after which a plan exists, the smallest of each kind."""
    q = answer.question
    out = [r for r in [_looser(answer)] if r] + _climb(q)
    if not out and (q.forbid or q.only):
        free = replace(q, forbid=frozenset(), only=frozenset())
        out = [Relaxation(f"allow every technique, and {r.change}", r.plan) for r in _climb(free)]
    return out


def _looser(answer: Answer) -> Relaxation | None:
    """The limits at which the closest miss would do."""
    near = next((t for t in answer.found.nearest if t.quick.fits), None)
    if near is None:
        return None
    broken = [m.split()[0] for m in near.missed]
    return Relaxation(" and ".join(f"{n}={near.metrics[n]:.3g}" for n in broken), brief(near.experiment.plan))


def _climb(q: Question) -> list[Relaxation]:
    out = []
    if q.longest < math.inf:  # faster plans keep limits on time where others do not
        q = replace(q, goal="throughput")
    for ladder in _ladders(q):
        for change, question in ladder:
            try:
                found = None if _out_of_reach(question) else search(question, first_feasible=True)
            except (Incompatible, UserError):
                continue
            if found and found.best:
                out.append(Relaxation(change, brief(found.best[0].experiment.plan)))
                break
    return out


def _out_of_reach(q: Question) -> bool:
    """Whether limits are broken by every plan: on rates, as the load or the devices' peaks give less; on latencies even
    for one request alone, as no load makes it faster."""
    if q.slo.get("tokens_per_s", 0.0) > _most_tokens(q):
        return True
    w, limits = q.workload, {name: limit for name, limit in q.slo.items() if name in _LATENCIES}
    if not isinstance(w, Serve) or w.trace or not limits:
        return False
    change = {"rate": None, "concurrency": 1, "requests": 1, "length_cv": 0.0, "output_cv": None,
              "prompt_len": max(1, w.prompt_len - w.shared_prefix), "shared_prefix": 0}  # fmt: skip
    divides = frozenset(cls.card.name for cls in q.techniques() if cls.phase != "loop")  # nothing to schedule
    alone = replace(q, workload=w.model_copy(update=change), slo=limits, only=divides)
    return not search(alone, first_feasible=True).best


def _most_tokens(q: Question) -> float:
    """Tokens per second that no plan exceeds: twice what requests ask for between the first arrival and the last (each
    replica has its own); and two FLOPs for each active parameter at the devices' highest peak, doubled for sparse
    products."""
    w, asked = q.workload, math.inf
    if isinstance(w, Serve) and (w.rate or w.trace):
        arrivals = requests(w)
        span = arrivals[-1].arrival - arrivals[0].arrival
        asked = 2 * sum(r.output for r in arrivals) / span if span else math.inf
    parts = q.cluster.parts or (q.cluster,)
    peaks = sum(part.size * max(part.device.peak_flops.values(), default=math.inf) for part in parts)
    return min(asked, peaks / q.model.num_active_parameters)


def _ladders(q: Question) -> Iterator[list[tuple[str, Question]]]:
    """Per kind of change, its steps from small to large; of techniques, those first that were proven in the task."""
    if q.forbid or q.only:
        freed = [(f"allow {name}", replace(q, forbid=q.forbid - {name})) for name in sorted(q.forbid)]
        yield [*freed, ("allow every technique", replace(q, forbid=frozenset(), only=frozenset()))]
    lossy = sorted(q.left_to_the_user(), key=lambda name: q.workload.kind not in registry()[name].card.validated)
    yield [(f"--allow {name}", replace(q, allow=q.allow | {name})) for name in lossy]
    w = q.workload
    if isinstance(w, Training):
        lengths = [n for n in (w.seq_len // 2, w.seq_len // 4, w.seq_len // 8) if n >= 128]
        yield [(f"seq_len={n}", replace(q, workload=w.model_copy(update={"seq_len": n}))) for n in lengths]
    elif isinstance(w, (Generate, Serve)):
        lengths = [n for n in (w.prompt_len // 2, w.prompt_len // 4) if n >= 16]
        yield [(f"prompt_len={n}", replace(q, workload=w.model_copy(update={"prompt_len": n}))) for n in lengths]
    c = q.cluster
    if c.parts:
        return
    larger = [
        (f"{c.size * k} devices", replace(q, cluster=c.model_copy(update={"nodes": c.nodes * k})))
        for k in _MORE_DEVICES
    ]
    if c.nodes == 1 and c.size < _NODE:  # fill the node first
        sizes = [(1, n) for n in (2, 4, _NODE) if n > c.size] + [(k, _NODE) for k in _MORE_DEVICES]
        larger = [
            (f"{k * n} devices", replace(q, cluster=c.model_copy(update={"nodes": k, "devices_per_node": n})))
            for k, n in sizes
        ]
    yield larger
    if q.training and q.slo.get("peak_bytes", math.inf) <= c.device.memory_bytes:
        return  # what a step takes is no less on a device that has more
    room = 1.05 * c.device.memory_bytes
    known = [d for d in map(catalog.device, catalog.devices()) if d.kind == c.device.kind and d.memory_bytes > room]
    known.sort(key=lambda d: (d.memory_bytes, d.name))
    yield [
        (
            f"{c.size} x {d.name} ({d.memory_bytes / GIB:.0f} GiB)",
            replace(q, cluster=c.model_copy(update={"device": d})),
        )
        for d in known
    ]
