"""Planning again when the cluster has changed: a node was lost, a link or a device became slow.

The running plan's states (parameters, optimizer states) lie on the devices that are left. A rank of the new plan needs
its own part of them; what its device already has stays, the rest is sent, and what only lost devices had is read from
the last checkpoint. A new plan is worth that if the steps that are left gain more than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ridgeline.graph import training_graph
from ridgeline.graph.graph import Block
from ridgeline.predict.common import rewritten
from ridgeline.predict.quick import quick
from ridgeline.predict.step.block_times import seconds_of
from ridgeline.search.auto.auto_parallel import AutoParallel, Progress, auto_parallel
from ridgeline.search.auto.points import point_of
from ridgeline.search.question import Question
from ridgeline.search.space import refusal
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.sharding import DIVIDED, Sharding
from ridgeline.techniques.parallel.divide_operators import host_copy
from ridgeline.techniques.registry import normalize, registry, techniques_of

REPLACED = frozenset({"split", "tensor", "sequence", "recompute", "shard", "offload"})
"""Phases of the techniques that a new plan chooses anew; all others of the running plan stay as they are."""

Span = tuple[float, float]
"""Part of a tensor's elements, from 0 to 1."""


@dataclass(frozen=True)
class Piece:
    """A part of the model with its states, and which rank has which span of it."""

    name: str
    size: float
    """Bytes of parameters and optimizer states of all of it."""
    spans: dict[int, Span]
    """By rank."""


def pieces(e: Experiment) -> list[Piece]:
    """Where the states of every layer (attention and MLP apart), the embedding and the head lie.

    Tensors that tensor-parallel ranks divide are cut among them first, then among the data-parallel ranks that share
    their optimizer states. Where weights are replicated, but not their states, the states' spans count.
    """
    techniques = techniques_of(e.plan)
    g = rewritten(training_graph(e), e, techniques)
    whole = training_graph(e.model_copy(update={"plan": Plan(), "parallel": {}}))
    plan = point_of(e).sharding
    if plan is None and e.parallel.get("tp", 1) > 1:
        plan = Sharding.uniform("reduce", e.model.num_layers)
    shards = {kind: min((p.state_shards for b in g.blocks if _kind(b) == kind for p in b.params), default=1)
              for kind in ("embed", "layers", "head")}  # fmt: skip
    each = g.optimizer_bytes + (2.0 if g.weights_16bit else 4.0)
    stage_of = _stages(e)
    found = []
    for name, kind, layer, elements in _tensors(whole.blocks, e):
        strategy = None if plan is None else _strategy(plan, name, layer)
        stage = 0 if kind == "embed" else max(stage_of.values()) if kind == "head" else stage_of[layer]
        spans = {r: _span(e, r, strategy is None or strategy in DIVIDED, shards[kind]) for r in _ranks(e, stage)}
        found.append(Piece(name, elements * each, spans))
    return found


def _kind(b: Block) -> str:
    return "layers" if b.is_layer else "head" if b.is_head else "embed"


def _tensors(blocks: list[Block], e: Experiment) -> Iterator[tuple[str, str, int, float]]:
    """(name, kind, layer, elements) of every piece."""
    layers = {moe: b for b in blocks if b.is_layer for moe in [any(".experts." in p.name for p in b.params)]}
    for b in blocks:
        if not b.is_layer:
            yield _kind(b), _kind(b), -1, sum(p.numel for p in b.params)
    for i in range(e.model.num_layers):
        for part in ("attention", "mlp"):
            params = layers[e.model.is_moe_layer(i)].params
            mine = sum(p.numel for p in params if p.name.startswith("mlp") == (part == "mlp"))
            yield f"{part}.{i}", "layers", i, mine


def _strategy(plan: Sharding, name: str, layer: int) -> str:
    part = name.partition(".")[0]
    if part in ("embed", "head"):
        return plan.embed if part == "embed" else plan.head
    return (plan.attention if part == "attention" else plan.mlp)[layer]


def _stages(e: Experiment) -> dict[int, int]:
    """The pipeline rank of every layer."""
    cut, ranks = point_of(e).cut(e), e.parallel.get("pp", 1)
    out: dict[int, int] = {}
    for k, n in enumerate(cut):
        out.update(dict.fromkeys(range(len(out), len(out) + n), k % ranks))
    return out


def _ranks(e: Experiment, stage: int) -> range:
    each = e.world // e.parallel.get("pp", 1)
    return range(stage * each, (stage + 1) * each)


def _span(e: Experiment, rank: int, divided: bool, shards: int) -> Span:
    t = e.parallel.get("tp", 1)
    low, width = (rank % t / t, 1 / t) if divided else (0.0, 1.0)
    place = rank // e.stride("dp") % e.data_parallel % shards
    return low + width * place / shards, low + width * (place + 1) / shards


@dataclass(frozen=True)
class Move:
    """What has to move from one layout to another."""

    received: float
    """Bytes that the rank that lacks most receives from others, or reads."""
    total: float
    """Bytes that all ranks receive or read."""
    read: float
    """Of these, bytes that no device has any more: they are read from a checkpoint."""
    seconds: float
    """Estimated time: every rank receives over its network card (inside one node: its link), and reads at its disk's
    rate."""


def move(old: Experiment, new: Experiment, survivors: Collection[int]) -> Move:
    """The states that change places between two plans of one model. ``survivors``: the old ranks of the devices that
    are the new plan's ranks 0, 1, …; those beyond start with nothing."""
    before, after = {p.name: p for p in pieces(old)}, pieces(new)
    device = dict(enumerate(survivors))
    received: dict[int, float] = {}
    lost: dict[int, float] = {}
    for piece in after:
        was = before[piece.name]
        there = [was.spans[r] for r in device.values() if r in was.spans]
        for rank, span in piece.spans.items():
            own = was.spans.get(device.get(rank, -1))
            lacks = _outside(span, [own] if own else [])
            gone = _outside(span, there)
            received[rank] = received.get(rank, 0.0) + lacks * piece.size
            lost[rank] = lost.get(rank, 0.0) + gone * piece.size
    on = new.cluster.between if new.cluster.parts else new.cluster
    wire = on.device.network if on.nodes > 1 else on.device.link
    rate = wire.bandwidth if wire else new.cluster.device.memory_bandwidth / 4
    disk = seconds_of(host_copy("states", "disk_read", 1e9, "update"), new.cluster) / 1e9
    times = [(received[r] - lost[r]) / rate + lost[r] * disk for r in received]
    return Move(max(received.values()), sum(received.values()), sum(lost.values()), max(times))


def _outside(span: Span, others: list[Span]) -> float:
    """Length of ``span`` that none of ``others`` covers."""
    low, high = span
    at, missing = low, 0.0
    for a, b in sorted(others):
        if b <= at or a >= high:
            continue
        missing += max(0.0, a - at)
        at = max(at, b)
    return missing + max(0.0, high - at)


@dataclass(frozen=True)
class Replan:
    """The best plan for the changed cluster, and whether to change over."""

    found: AutoParallel
    stays: float | None
    """Predicted seconds of a step of the running plan on the changed cluster; None: it cannot run there."""
    why: str
    """Why it cannot."""
    move: Move
    steps_left: int

    @property
    def pays(self) -> bool:
        """Whether the steps that are left gain more than the move takes, or nothing else runs."""
        return self.stays is None or self.steps_left * (self.stays - self.found.step) > self.move.seconds

    @property
    def pays_after(self) -> int | None:
        """Steps after which the move has paid; None: never."""
        if self.stays is None:
            return 0
        gain = self.stays - self.found.step
        return math.ceil(self.move.seconds / gain) if gain > 0 else None


def replan(
    running: Experiment, cluster: Cluster, steps_left: int, lost: Collection[int] = (), method: str = "alpa",
    workers: int = 2, progress: Progress | None = None,
) -> Replan | None:  # fmt: skip
    """The best plan for the rest of a run on a changed cluster; None: nothing fits.

    ``lost``: ranks of the running plan whose devices are gone; by default the last ones, as many as the cluster is
    smaller. Raises :class:`UserError` for ranks that the plan does not have.
    """
    gone = set(lost) or set(range(cluster.size, running.world))
    if gone - set(range(running.world)):
        raise UserError(f"ranks {sorted(gone - set(range(running.world)))} are not among the {running.world} of the"
                        " running plan", f"name ranks 0-{running.world - 1}")  # fmt: skip
    survivors = [r for r in range(running.world) if r not in gone][: cluster.size]
    fields = {"batch_size": running.batch_size, "micro_batch_size": None}  # the same steps, divided anew
    kept = Plan(calls=tuple(c for c in running.plan.calls if registry()[c.name].phase not in REPLACED))
    q = Question(running.model, cluster, running.workload.model_copy(update=fields), fixed=kept,
                 only=frozenset(n for n, cls in registry().items() if cls.phase in REPLACED))  # fmt: skip
    found = auto_parallel(q, method, workers, progress)
    if found is None:
        return None
    stays, why = _stay(running, cluster)
    return Replan(found, stays, why, move(running, found.experiment, survivors), steps_left)


def _stay(running: Experiment, cluster: Cluster) -> tuple[float | None, str]:
    """Seconds of a step of the running plan on the changed cluster, or why it cannot run."""
    there = normalize(running.model_copy(update={"cluster": cluster}))
    techniques = techniques_of(there.plan)
    if there.world % (ranks := math.prod(there.parallel.values())):
        return None, f"{there.world} devices do not split into groups of its {ranks} model-parallel ranks"
    if why := refusal((there, techniques), whole=True):
        return None, why.splitlines()[0]
    found = quick(there, techniques, always=True)
    if not found.fits:
        return None, "it does not fit"
    return found.metrics["step_time_s"], ""
