"""The support matrix: every pair of techniques either runs (and has a parity test), can only be predicted, or is
refused."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Literal

from pydantic import BaseModel

from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.workload import Generate, Pretrain, Serve
from ridgeline.techniques.registry import check, make, mesh_axes, normalize, partners, registry, techniques_of
from ridgeline.techniques.technique import Technique

TINY = ModelSpec(
    name="matrix-tiny",
    family="llama",
    vocab_size=512,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_positions=64,
)
CPU = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)


class Pair(BaseModel):
    """One entry of the matrix."""

    a: str
    b: str
    status: Literal["works", "predicted", "refused"]
    """``works``: it runs, and a parity test checks it. ``predicted``: one of the two does not run in this task (its
    card lists the tasks in which it does)."""
    reason: str = ""
    task: str = ""
    plan: list[str] = []
    ranks: int = 1

    @property
    def mark(self) -> str:
        """The symbol shown in tables."""
        return {"works": "✓", "predicted": "○", "refused": "✗"}[self.status]


def pair_experiment(*names: str) -> Experiment:
    """The small experiment in which the techniques ``names`` are combined (not yet checked)."""
    chosen = [registry()[n] for n in names]
    tasks = set.intersection(*(set(t.card.tasks) for t in chosen))
    task = next((t for t in ("pretrain", "finetune", "generate", "serve") if t in tasks), "pretrain")
    training = task in ("pretrain", "finetune")
    wanted = dict.fromkeys(names)
    if training:
        for n in names:
            wanted.update(dict.fromkeys(partners(make(Call(name=n, options=dict(registry()[n].card.example))))))
    beside = {other: options for n in wanted for other, options in registry()[n].card.beside.items()}
    calls = tuple(Call(name=n, options={**registry()[n].card.example, **beside.get(n, {})}) for n in wanted)
    techniques = [make(call) for call in calls]
    degree = math.prod(mesh_axes(task, techniques).values())
    ranks = degree * max((t.card.min_ranks for t in techniques if not mesh_axes(task, [t])), default=1)
    model = TINY
    for t in chosen:
        model = model.model_copy(update=dict(t.card.needs_model))
    workload: Pretrain | Generate | Serve
    if training:  # plain SGD: AdamW hides gradient-scale bugs
        stream = any("pp" in t.axes() for t in techniques)  # a pipeline needs micro-batches
        workload = Pretrain(
            seq_len=16, batch_size=4, micro_batch_size=1 if stream else None, steps=5, optimizer="sgd", lr=0.5,
            warmup_steps=0,
        )  # fmt: skip
    elif task == "serve":
        workload = Serve(prompt_len=8, output_len=4, requests=4, rate=100)
    else:
        workload = Generate(prompt_len=8, output_len=4, batch_size=2)
    return Experiment(
        model=model, cluster=Cluster(device=CPU, devices_per_node=ranks), workload=workload, plan=Plan(calls=calls)
    )


def judge(*names: str) -> Pair:
    """Whether the techniques work together, according to their own ``check``."""
    first, last = names[0], names[-1]
    try:
        e = normalize(pair_experiment(*names))
        check(e)
    except Incompatible as refusal:
        return Pair(a=first, b=last, status="refused", reason=f"{refusal.what}; {refusal.fix}")
    runs = all(t.runs and (t.card.runs_in is None or e.task in t.card.runs_in) for t in techniques_of(e.plan))
    status: Literal["works", "predicted"] = "works" if runs else "predicted"
    return Pair(a=first, b=last, status=status, task=e.task, plan=e.plan.strings(), ranks=e.world)


def support_matrix(known: dict[str, type[Technique]] | None = None) -> list[Pair]:
    """Every unordered pair of registered techniques."""
    return [judge(a, b) for a, b in combinations(known or registry(), 2)]
