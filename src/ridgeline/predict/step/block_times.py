"""Seconds of operators, and of a block of them: what a step's streams are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.graph.graph import Block, Op, keep_time
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.host_work import COPIES, host_time
from ridgeline.predict.operators.kernel import Timed, op_time
from ridgeline.predict.step.in_step import ALONE, FETCH, InStepFactors
from ridgeline.spec.device import Cluster


@dataclass(slots=True)
class BlockTimes:
    """Seconds of one repeat of a block."""

    block: Block
    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    """Part of ``backward`` that computes gradients of weights."""
    forward_inline: float = 0.0
    backward_inline: float = 0.0
    gather_forward: list[tuple[str, float]] = field(default_factory=list)
    """(stream, seconds) of transfers required before forward."""
    gather_backward: list[tuple[str, float]] = field(default_factory=list)
    reduce: list[tuple[str, float]] = field(default_factory=list)
    store: list[tuple[str, float]] = field(default_factory=list)
    late_forward: float = 0.0
    """In a pipeline: what of the transfers before ``forward`` does not overlap with compute."""
    late_backward: float = 0.0
    dispatch: float = 0.0
    """Seconds of ``forward`` and ``backward`` in which the device waits for the host."""


def seconds_of(op: Op, cluster: Cluster, factors: InStepFactors = ALONE) -> float:
    """Seconds of any operator: compute, collective or copy."""
    timed = timed_of(op, cluster)
    if op.axis:
        return timed.seconds
    took: float
    _, _, known, took = op.timed
    if known is not factors and known != factors:
        took = factors.seconds(op, timed.seconds, cluster.device)
        keep_time(op, (cluster, timed, factors, took))  # the breakdown needs it again
    return took


def timed_of(op: Op, cluster: Cluster) -> Timed:
    """Seconds, bound and source of any operator in isolation."""
    if op.timed is not None and op.timed[0] is cluster:
        known: Timed = op.timed[1]
        return known
    if op.kind in COPIES:
        timed = host_time(op, cluster)
    elif op.axis:
        timed = collective_time(op, cluster)
    else:
        timed = op_time(op, cluster.device, op.calls)
    # Used by the step and its breakdown, and in a search by every plan that shares it.
    keep_time(op, (cluster, timed, None, 0.0))
    return timed


def block_times(
    b: Block, cluster: Cluster, factors: InStepFactors = ALONE, between: Cluster | None = None
) -> BlockTimes:
    """Time a block at the given factors. ``between``: what its exchanges with other stages pass, if not ``cluster``."""
    t = BlockTimes(b)
    t.forward, t.forward_inline, t.weight = in_direction(b.forward, cluster, factors)
    t.backward, t.backward_inline, t.weight = in_direction(b.backward, cluster, factors)
    if factors.dispatch:
        for name in ("forward", "backward"):
            gpu = getattr(t, name)
            called = [o for o in getattr(b, name) if o.kind != "accumulate"]  # which autograd does by itself
            fetched = sum(o.rails > 0 for o in b.gather_forward)  # one tensor each
            fetched *= 2 if name == "backward" and any(o.recompute for o in called) else 1
            host = len(called) * factors.dispatch + fetched * FETCH
            if host > gpu:
                setattr(t, name, host)
                t.dispatch += host - gpu
    for name in ("gather_forward", "gather_backward", "reduce", "store"):
        ops: list[Op] = getattr(b, name)
        setattr(t, name, [(COPIES.get(o.kind, "link"), seconds_of(o, place_of(o, cluster, between))) for o in ops])
    return t


def place_of(op: Op, cluster: Cluster, between: Cluster | None) -> Cluster:
    """The cluster that an operator runs on: ``between`` for exchanges with other pipeline stages, if given."""
    return between if between is not None and op.axis == "pp" else cluster


def in_direction(ops: list[Op], cluster: Cluster, factors: InStepFactors) -> tuple[float, float, float]:
    """(compute, exposed collectives, compute of weight gradients) of a block's operators in one direction."""
    compute = inline = weight = 0.0
    alongside: dict[str, float] = {}
    least: dict[str, float] = {}
    for o in ops:
        if o.axis:
            took = timed_of(o, cluster).seconds
            if o.behind:
                alongside[o.behind] = alongside.get(o.behind, 0.0) + took
                least[o.behind] = least.get(o.behind, 0.0) + (took / o.pieces if o.pieces > 1 else 0.0)
            else:
                inline += took
        else:
            took = seconds_of(o, cluster, factors)
            compute += took
            if o.role in ("weight_gradient", "bias_gradient"):
                weight += took
    if alongside:
        for o in ops:
            if o.name in alongside:
                inline += max(least[o.name], alongside.pop(o.name) - seconds_of(o, cluster, factors))
    return compute, inline, weight
