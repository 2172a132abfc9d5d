"""Techniques that a search need not branch on: those that won every trial, or changed nothing in any."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ridgeline.predict.quick import quick
from ridgeline.search.question import Question
from ridgeline.search.space import Set, candidate, refusal
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.technique import Technique

_EQUAL = 1.01
"""Times and peaks that differ by less count as equal: a technique may lose this much in a trial."""
STANDARD = 1.05
"""What is standard practice may be slower by this much in a trial, as long as it is faster in most."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Techniques that are on wherever ``check`` accepts them, and names of those of which one option is always on."""

    always: tuple[tuple[Technique, str], ...]
    """With the evidence."""
    required: tuple[tuple[str, str], ...]
    without_effect: frozenset[str]
    """Names of those that changed neither time nor memory in any trial: they are left out."""

    @property
    def techniques(self) -> Set:
        """Those that are always on."""
        return tuple(t for t, _ in self.always)

    @property
    def names(self) -> frozenset[str]:
        """Names of those of which one option is always on."""
        return frozenset(name for name, _ in self.required)

    @property
    def evidence(self) -> dict[str, str]:
        """Why, by technique."""
        return {t.card.name: why for t, why in self.always} | dict(self.required)


def settle(q: Question, base: Experiment) -> Settled:
    """Lossless techniques without options that are never slower nor larger in any trial; and what is standard practice,
    where it is faster (unless memory is the goal).

    Trials are made beside every other technique, and on top of the one that shortens computation most.
    """
    if base.cluster.parts:  # what pays off on one device is judged without stages, in the first part
        base = base.model_copy(update={"cluster": base.cluster.parts[0]})
    micro = 1 if q.training and q.free_micro_batch else None
    key = "step_time_s" if q.training else "e2e_s"
    memory: dict[Set, dict[str, float] | None] = {}

    def metrics(chosen: Set) -> dict[str, float] | None:
        if chosen not in memory:
            point = candidate(base, chosen, micro)
            memory[chosen] = None if refusal(point) else quick(*point, always=True).metrics
        return memory[chosen]

    known = q.techniques()
    singles = [t for c in known for t in c.choices(base)[:2]]
    tried = [(m[key], t) for t in singles if t.phase == "compile" and (m := metrics((t,))) and key in m]
    lead = min(tried, key=lambda x: x[0])[1] if tried else None

    def trials(t: Technique) -> list[tuple[float, float]]:
        """(seconds, bytes) with it over those without it, where it was accepted."""
        out = []
        for other in [(), *((o,) for o in singles if type(o) not in (type(t), type(lead)))]:
            start = (*other, lead) if lead is not None and type(lead) is not type(t) else other
            off, on = metrics(start), metrics((*start, t))
            if off and on and key in off and key in on:
                out.append((on[key] / off[key], on["peak_bytes"] / off["peak_bytes"]))
        return out

    always, required, without_effect = [], [], set()
    for cls in known:
        options = cls.choices(base)
        if cls.card.standard and q.goal != "memory" and q.training:
            seconds = [ratio for t in options for ratio, _ in trials(t)]
            if seconds and median(seconds) < 1 and max(seconds) <= STANDARD:
                required.append((cls.card.name, f"{1 / median(seconds):.2g}x as fast in {len(seconds)} trials"))
        elif cls.card.lossless and len(options) == 1 and not options[0].axes():
            ratios = trials(options[0])
            if ratios and all(pair == (1.0, 1.0) for pair in ratios):
                without_effect.add(cls.card.name)
            gains = any(min(pair) < 1 for pair in ratios)
            if gains and all(max(pair) <= _EQUAL for pair in ratios):
                always.append((options[0], f"never slower nor larger in {len(ratios)} trials"))
    return Settled(tuple(always), tuple(required), frozenset(without_effect))
