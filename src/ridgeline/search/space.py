"""The space of plans: meshes × what shapes a block's operators × how the model is split × where its states live.

Techniques fall into the four groups by their phase, never by name. A *mesh* technique divides operators over ranks, a
*shape* technique changes what one block computes and keeps, a *split* cuts the model into stages, a *placement* decides
where parameters, gradients and states live. Splits and placements never shorten computation, so the computation of a
mesh and shape bounds all their plans from below.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from ridgeline.predict.settle import ask
from ridgeline.search.question import Question
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Generate, Training
from ridgeline.techniques.registry import (
    check_apart,
    check_places,
    check_techniques,
    check_workload,
    in_order,
    mesh_axes,
    resolve,
    techniques_of,
)
from ridgeline.techniques.technique import Technique

GROUPS = ("mesh", "shape", "split", "placement")
_GROUP = {"tensor": "mesh", "sequence": "mesh", "adapt": "shape", "recompute": "shape", "compile": "shape",
          "split": "split"}  # fmt: skip

Set = tuple[Technique, ...]


@dataclass(frozen=True)
class Slots:
    """Every technique's choices (``None`` is off) by group, and the techniques that are on wherever they can be."""

    choices: dict[str, list[tuple[Technique | None, ...]]]
    placements: tuple[Set, ...]
    """Combinations of placement techniques that ``check`` accepts together; those that offload come last."""
    settled: Set = ()

    def combinations(self, group: str) -> Iterator[Set]:
        """Every combination of one group's choices."""
        for chosen in product(*self.choices[group]):
            yield tuple(t for t in chosen if t is not None)

    def count(self, group: str) -> int:
        """How many combinations a group has."""
        return math.prod(len(slot) for slot in self.choices[group])

    @property
    def below(self) -> int:
        """How many splits and placements one mesh and shape has."""
        return self.count("split") * len(self.placements)


def slots(
    q: Question, base: Experiment, known: list[type[Technique]], settled: Set = (),
    required: frozenset[str] = frozenset(),
) -> Slots:  # fmt: skip
    """The choices of every technique on this experiment, with goal memory also those for the least of it; of those
    named in ``required`` one is always on."""
    choices: dict[str, list[tuple[Technique | None, ...]]] = {g: [] for g in GROUPS}
    always = {t.card.name for t in settled}
    for cls in known:
        options = q.choices(cls, base) + (cls.smallest(base) if q.goal == "memory" else [])
        if options and cls.card.name not in always:
            off = () if cls.card.name in required else (None,)
            choices[_GROUP.get(cls.phase, "placement")].append((*off, *options))
    apart = {
        frozenset((x, y))
        for a, b in combinations(choices["placement"], 2)
        for x, y in product(a, b)
        if x is not None and y is not None and refusal(candidate(base, (x, y)))
    }
    together = [
        tuple(t for t in chosen if t is not None)
        for chosen in product(*choices["placement"])
        if not any(frozenset(pair) in apart for pair in combinations(chosen, 2))
    ]
    return Slots(choices, tuple(sorted(together, key=lambda p: (offloads(p), len(p)))), settled)


def refusal(point: tuple[Experiment, list[Technique]], whole: bool = False) -> str:
    """Why ``check`` refuses an experiment with these techniques; empty: it does not. ``whole``: no technique will be
    added."""
    try:
        if whole:
            check_places(point[0])
        check_techniques(*point)
    except Incompatible as why:
        return str(why)
    return ""


def workload_refusal(e: Experiment) -> str:
    """Why the workload does not divide over the ranks, whatever else the plan has; empty: it does."""
    try:
        check_workload(e)
    except Incompatible as why:
        return str(why)
    return ""


@lru_cache(maxsize=16384)
def apart(one: Technique, other: Technique) -> str:
    """Why the two exclude each other in every plan; empty: they do not."""
    try:
        check_apart([one, other])
    except Incompatible as why:
        return str(why)
    return ""


def beside(chosen: Set, placements: Iterable[Set]) -> tuple[list[Set], Counter[str]]:
    """The placements of which no technique excludes one of ``chosen``, and why the others do, with their numbers."""
    why: dict[Technique, str] = {}
    kept, refused = [], Counter[str]()
    for placement in placements:
        for t in placement:
            if t not in why:
                why[t] = next(filter(None, (apart(c, t) for c in chosen)), "")
        reason = next(filter(None, (why[t] for t in placement)), "")
        if reason:
            refused[reason] += 1
        else:
            kept.append(placement)
    return kept, refused


def with_open_options(e: Experiment, techniques: list[Technique]) -> tuple[Experiment, list[Technique], str]:
    """The experiment and its techniques with what they leave to the predictor, and why that fails, if it does."""
    try:
        return (*resolve(e, ask), "")
    except Incompatible as why:
        return e, techniques, str(why)


def offloads(placement: Set) -> int:
    """How many of its techniques move something out of the device's memory."""
    return sum(t.phase == "offload" for t in placement)


def moves_activations(placement: Set) -> bool:
    """Whether saved activations go somewhere else than the device's memory."""
    return any("activations" in t.parts for t in placement)


def with_settled(base: Experiment, chosen: Set, settled: Set) -> Set:
    """``chosen`` and those of ``settled`` that ``check`` accepts beside it."""
    for t in settled:
        if not refusal(candidate(base, (*chosen, t))):
            chosen = (*chosen, t)
    return chosen


def splits_batch(placement: Set) -> bool:
    """Whether it makes data-parallel ranks work together."""
    return any("batch_split" in t.parts for t in placement)


def candidate(base: Experiment, chosen: Set, micro_batch: int | None = None) -> tuple[Experiment, list[Technique]]:
    """The experiment of one point of the space, and its techniques (those of ``base`` too) in canonical order. Not
    checked yet."""
    techniques = in_order([*techniques_of(base.plan), *chosen])
    plan = Plan.model_construct(calls=tuple(map(_call, techniques)))
    update: dict[str, object] = {"plan": plan, "parallel": mesh_axes(base.task, techniques)}
    if micro_batch is not None:
        update["workload"] = base.workload.model_copy(update={"micro_batch_size": micro_batch})
    return base.model_copy(update=update), techniques


@lru_cache(maxsize=4096)
def _call(t: Technique) -> Call:
    return Call.model_construct(name=t.card.name, options=t.model_dump(mode="json", exclude_none=True))


MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of micro-batches that are tried, as far as they divide the batch."""


def micro_batches(e: Experiment, degree: int, free: bool) -> list[int | None]:
    """Sizes to try on a mesh of ``degree`` ranks: powers of two up to what one pipeline over all ranks would take."""
    if not isinstance(e.workload, Training) or not free:
        return [None]
    return [m for m in MICRO_BATCHES if m <= e.batch_size and e.batch_size % m == 0]


def batches(e: Experiment, free: bool) -> list[int]:
    """Batch sizes to try for a generation workload whose batch is free."""
    if not free or not isinstance(e.workload, Generate):
        return [0]
    return [2**i for i in range(11)]


def sub_clusters(cluster: Cluster, free: bool) -> list[Cluster]:
    """The cluster, and when cost counts its halves down to one device."""
    out = [cluster]
    while free and not cluster.parts and out[-1].size > 1:
        last = out[-1]
        if last.nodes > 1:
            out.append(last.model_copy(update={"nodes": last.nodes // 2}))
        else:
            out.append(last.model_copy(update={"devices_per_node": last.devices_per_node // 2}))
    return out
