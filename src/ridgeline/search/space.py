"""The space of plans: parallel layouts × what shapes a block's operators × what places its states.

Techniques fall into the three groups by their phase, never by name. A *layout* fixes the mesh; *shape* techniques
change what one block computes and keeps; *placement* techniques decide where parameters, gradients and states live.
Placement never shortens computation, so the computation of one placement bounds all others of that layout and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Generate, Training
from ridgeline.techniques.base import PHASES, Technique

LAYOUT = frozenset({"split", "tensor", "sequence"})
SHAPE = frozenset({"adapt", "recompute", "compile"})

Set = tuple[Technique, ...]


@dataclass(frozen=True)
class Slots:
    """Every technique's choices (``None`` is off), by group."""

    layout: tuple[tuple[Technique | None, ...], ...]
    shape: tuple[tuple[Technique | None, ...], ...]
    placement: tuple[tuple[Technique | None, ...], ...]

    def layouts(self) -> Iterator[Set]:
        """Combinations that fix the mesh."""
        return _combinations(self.layout)

    def shapes(self) -> Iterator[Set]:
        """Combinations that fix a block's operators."""
        return _combinations(self.shape)

    def placements(self) -> Iterator[Set]:
        """Combinations that fix where states live."""
        return _combinations(self.placement)

    @property
    def size(self) -> int:
        """Number of combinations, batch sizes not counted."""
        n = 1
        for slot in (*self.layout, *self.shape, *self.placement):
            n *= len(slot)
        return n


def slots(base: Experiment, known: list[type[Technique]], settled: frozenset[str] = frozenset()) -> Slots:
    """The choices of every technique on this experiment; those in ``settled`` are always on."""
    groups: dict[str, list[tuple[Technique | None, ...]]] = {"layout": [], "shape": [], "placement": []}
    for cls in known:
        options = cls.choices(base)
        if not options:
            continue
        group = "layout" if cls.phase in LAYOUT else "shape" if cls.phase in SHAPE else "placement"
        off: tuple[Technique | None, ...] = () if cls.card.name in settled else (None,)
        groups[group].append((*off, *options))
    return Slots(*(tuple(groups[g]) for g in ("layout", "shape", "placement")))


def _combinations(slot: tuple[tuple[Technique | None, ...], ...]) -> Iterator[Set]:
    for chosen in product(*slot):
        yield tuple(t for t in chosen if t is not None)


def candidate(base: Experiment, chosen: Set, micro_batch: int | None = None) -> tuple[Experiment, list[Technique]]:
    """The experiment of one point of the space, and its techniques in canonical order. Not checked yet."""
    made = sorted(chosen, key=lambda t: (PHASES.index(t.phase), t.order, t.card.name))
    axes: dict[str, int] = {}
    for t in made:
        axes.update(t.axes())
    update: dict[str, object] = {"plan": Plan.model_construct(calls=tuple(map(_call, made))), "parallel": axes}
    if micro_batch is not None:
        update["workload"] = base.workload.model_copy(update={"micro_batch_size": micro_batch})
    return base.model_copy(update=update), made


@lru_cache(maxsize=4096)
def _call(t: Technique) -> Call:
    return Call.model_construct(name=t.card.name, options=t.model_dump(mode="json", exclude_none=True))


def micro_batches(e: Experiment, free: bool) -> list[int | None]:
    """Sizes to try for this layout: powers of two that divide a rank's share of the batch."""
    if not isinstance(e.workload, Training) or not free:
        return [None]
    share = e.batch_size // e.data_parallel
    if not share or e.batch_size % e.data_parallel:
        return []
    return [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= share and share % m == 0]


def batches(e: Experiment, free: bool) -> list[int]:
    """Batch sizes to try for a generation workload whose batch is free."""
    if not free or not isinstance(e.workload, Generate):
        return [0]
    return [2**i for i in range(11)]


def sub_clusters(cluster: Cluster, free: bool) -> list[Cluster]:
    """The cluster, and when cost counts its halves down to one device."""
    out = [cluster]
    while free and out[-1].size > 1:
        last = out[-1]
        if last.nodes > 1:
            out.append(last.model_copy(update={"nodes": last.nodes // 2}))
        else:
            out.append(last.model_copy(update={"devices_per_node": last.devices_per_node // 2}))
    return out
