"""Techniques that a search need not branch on: those that won every trial, or changed nothing in any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod
from statistics import median

from ridgeline.predict.quick import quick
from ridgeline.search.question import Question
from ridgeline.search.space import Set, candidate, offloads, refusal, with_open_options
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import Serve
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


class _Trials:
    """Plans with and without one technique, each predicted once."""

    def __init__(self, q: Question, base: Experiment) -> None:
        w = base.workload
        self.base = base.model_copy(update={"workload": w.sample()}) if isinstance(w, Serve) else base
        self.micro = 1 if q.training and q.free_micro_batch else None
        self.key = "step_time_s" if q.training else "e2e_s"
        self.found: dict[frozenset[Technique], dict[str, float] | None] = {}
        known = q.techniques()
        self.ground = self._ground([t for c in known for t in q.choices(c, base)])
        """The least division of the model with which it fits, or else what offloads it: without one, a model that is
        too large has no times to compare."""
        self.singles = [t for c in known for t in q.choices(c, base)[:2] if c not in map(type, self.ground)
                        and not (base.task == "serve" and t.phase == "offload")]  # fmt: skip
        compiled = [t for t in self.singles if t.phase == "compile" and self._times((*self.ground, t))]
        self.lead = min(compiled, key=lambda t: self._times((*self.ground, t)), default=None)

    def ratios(self, t: Technique, kept: Set = ()) -> Iterator[tuple[float, float]]:
        """(seconds, bytes) with it over those without it, beside every other technique and those of ``kept`` that are
        accepted with and without it, where the plan was accepted."""
        lead = (self.lead,) if self.lead is not None and type(self.lead) is not type(t) else ()
        for other in [(), *((o,) for o in self.singles if type(o) not in (type(t), type(self.lead)))]:
            start = (*self.ground, *other, *lead)
            apart = {type(t), *map(type, start)}
            for k in kept:
                if type(k) not in apart and self._accepts((*start, k), t):
                    start = (*start, k)
            off, on = self._metrics(start), self._metrics((*start, t))
            if off and on and self.key in off and self.key in on:
                yield on[self.key] / off[self.key], on["peak_bytes"] / off["peak_bytes"]

    def _ground(self, choices: list[Technique]) -> Set:
        divisions = [t for t in choices if t.axes()]
        pairs = [pair for pair in combinations(divisions, 2) if len({*map(type, pair)}) > 1]
        divided: list[Set] = [(), *((t,) for t in divisions), *pairs]
        divided.sort(key=lambda chosen: prod(n for t in chosen for n in t.axes().values()))
        away = [t for t in choices if t.phase == "offload"]
        sets = divided + [(*some, t) for t in away for some in reversed(divided)]
        found = next((chosen for chosen in sets if self._times(chosen)), ())
        if self.base.is_training or not offloads(found):
            return found
        # How much is placed where is left to the predictor, which asks for many predictions: once for all trials.
        settled = with_open_options(*candidate(self.base, found))[1]
        return tuple(t for t in settled if type(t) in map(type, found))

    def goes_with(self, t: Technique, others: Iterable[Technique]) -> bool:
        """Whether ``check`` accepts a technique beside each of ``others``."""
        return not any(o is not t and refusal(candidate(self.base, (*self.ground, t, o))) for o in others)

    def _accepts(self, chosen: Set, t: Technique) -> bool:
        """Whether ``check`` accepts the plan, with ``t`` and without it."""
        return not any(refusal(candidate(self.base, some)) for some in (chosen, (*chosen, t)))

    def _times(self, chosen: Set) -> float:
        """Seconds of a plan; 0 where it is refused or does not fit."""
        return (self._metrics(chosen) or {}).get(self.key, 0.0)

    def _metrics(self, chosen: Set) -> dict[str, float] | None:
        key = frozenset(chosen)
        if key not in self.found:
            point = candidate(self.base, chosen, self.micro)
            self.found[key] = None if refusal(point) else quick(*point, always=True).metrics
        return self.found[key]


def settle(q: Question, base: Experiment) -> Settled:
    """Lossless techniques without options that are never slower nor larger in any trial; and what is standard practice,
    where it is faster (unless memory is the goal).

    Trials are made beside every other technique, on top of the one that shortens computation most; where the model is
    too large for one device, on top of the least division with which it fits. What does nothing there is tried again
    beside what is always on: blocks of a cache, for example, need batches that fill it; beside all others that do
    nothing, as continuous batching of padded batches, or packed batches that all end at once, gain nothing alone; and
    beside all that only lose alone, as continuous batching and chunks of long prompts do in padded batches.
    """
    if base.cluster.parts:  # what pays off on one device is judged without stages, in the first part
        base = base.model_copy(update={"cluster": base.cluster.parts[0]})
    trials = _Trials(q, base)
    always, required, idle, plain = [], [], [], []
    for cls in q.techniques():
        options = q.choices(cls, base)
        if cls.card.standard and q.goal != "memory" and q.training:
            seconds = [ratio for t in options for ratio, _ in trials.ratios(t)]
            if seconds and median(seconds) < 1 and max(seconds) <= STANDARD:
                required.append((cls.card.name, f"{1 / median(seconds):.2g}x as fast in {len(seconds)} trials"))
        elif cls.card.lossless and len(options) == 1 and not options[0].axes():
            plain.append(options[0])
            ratios = list(trials.ratios(options[0]))
            if ratios and _alike(ratios):
                idle.append(options[0])
            gains = any(min(pair) < 1 for pair in ratios)
            if gains and all(max(pair) <= _EQUAL for pair in ratios):
                always.append((options[0], f"never slower nor larger in {len(ratios)} trials"))
    always = [(t, why) for t, why in always if trials.goes_with(t, [other for other, _ in always])]
    kept = tuple(t for t, _ in always)
    without_effect = {
        t.card.name
        for t in idle
        if all(_alike(trials.ratios(t, beside)) for beside in (kept, (*kept, *idle), (*kept, *idle, *plain)))
    }
    return Settled(tuple(always), tuple(required), frozenset(without_effect))


def _alike(ratios: Iterable[tuple[float, float]]) -> bool:
    """Whether no trial changed seconds or bytes."""
    return all(pair == (1.0, 1.0) for pair in ratios)
