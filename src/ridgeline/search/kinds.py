"""Kinds of plans: how the model and its states are divided, moved and recomputed, in words."""

from __future__ import annotations

from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.parts import Part
from ridgeline.techniques.registry import techniques_of
from ridgeline.techniques.technique import Technique

_AXES = {"pp": "pipeline stages", "tp": "tensor parallelism", "cp": "context parallelism", "ep": "expert parallelism"}
_MOVED: dict[Part, str] = {
    "optimizer": "optimizer offload", "activations": "activation offload", "resting_weights": "weight offload",
}  # fmt: skip


def kind_of(e: Experiment) -> tuple[str, ...]:
    """What two plans differ in, if they differ in more than degrees, schedules and options.

    In serving the degree counts too: it trades latency for throughput.
    """
    return tuple(dict.fromkeys(phrase for t in techniques_of(e.plan) for phrase in _phrases(t, e)))


def _phrases(t: Technique, e: Experiment) -> list[str]:
    if not (t.card.lossless or t.card.standard):
        return [t.card.name]
    axes = t.axes() if e.is_training else t.serving_axes(e.parallel)
    if t.phase in ("split", "tensor", "sequence"):
        return [_AXES[a] if e.is_training else f"{_AXES[a]} over {n}" for a, n in axes.items() if n > 1 and a in _AXES]
    if t.phase == "recompute":
        return ["recomputation"]
    if t.phase == "shard":
        return ["sharding" if "shards" in t.parts else "replicas"]
    if t.phase == "offload":
        return [words for part, words in _MOVED.items() if part in t.parts and t.moves(e)]
    return [t.card.name] if t.phase == "optimizer" else []


def difference(kind: tuple[str, ...], other: tuple[str, ...]) -> str:
    """``kind`` as ``other`` reads it: ``sharding, no recomputation``; empty: the same."""
    has = {words.split(" over ")[0] for words in kind}
    gone = [name for words in other if (name := words.split(" over ")[0]) not in has]
    return ", ".join([w for w in kind if w not in other] + [f"no {name}" for name in gone])
