"""Every system of the literature, shrunk to four ranks, trains for real as one process does: the triples' test."""

import pytest
from tests.crossings import crossing
from tests.techniques.test_parity import assert_parity, comparison
from tests.training import MODEL, experiment, train, train_once

from ridgeline import catalog, experiments
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import check, registry, require_runnable, techniques_of


def trains(name: str) -> bool:
    """Whether ``ridgeline train`` runs the system: not where another command does, with tests of its own."""
    system = catalog.system(name)
    calls = Plan.parse(system.shrunk.plan, name).calls
    return system.reported.workload.get("kind", "pretrain") == "pretrain" and not any(
        registry()[call.name].card.runs_by for call in calls
    )


TRAINING = [n for n in catalog.systems() if trains(n)]
DEEP = MODEL.model_copy(update={"num_layers": 4})
"""A layer for every stage."""


EPS = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-10}
"""Relative tolerance of the loss: one rounding of every activation, which is where a reordered sum may differ."""
OTHER_AXES = {"colossal_ai": ["pipeline:degree=2", "tensor_parallel:degree=2"]}
"""Where four ranks hold two of a system's three axes: the third in the place of what comes first."""


def shrunk(name: str, corpus, other: bool = False) -> Experiment:
    """The system's small plan on a small model: plain SGD, clipped below every gradient norm."""
    system = catalog.system(name)
    plan = experiments.plan_of([f"{name}:ranks={system.shrunk.ranks}"])
    if other:
        gone, come = OTHER_AXES[name]
        plan = Plan.parse([come if call == gone else call for call in system.shrunk.plan])
    streams = plan.has("pipeline")
    # A plan that forgoes the norm takes the steps that others take after clipping, by their own gradients' length.
    lr, clip = (0.2, 0.0) if plan.option("lomo", "norm") == "none" else (10.0, 0.05)
    e = experiment(
        corpus, *plan.strings(), ranks=system.shrunk.ranks, model=DEEP, batch_size=8,
        micro_batch_size=1 if streams else None, steps=3, optimizer="sgd", lr=lr, grad_clip=clip, warmup_steps=0,
        dtype=system.reported.workload.get("dtype", "fp32"),
    )  # fmt: skip
    check(e)
    require_runnable(e)
    return e


def split(call: str) -> tuple[str, dict[str, str]]:
    """("zero:stage=3,degree=2") → ("zero", {"stage": "3"}): without degrees, which are the cluster's."""
    name, _, options = call.partition(":")
    given = dict(option.split("=") for option in options.split(",") if option)
    return name, {k: v for k, v in given.items() if k != "degree"}


@pytest.mark.parametrize("name", catalog.systems())
def test_the_small_plan_is_the_paper_s(name):
    """What runs is what the file states: every technique with every option but degrees. Axes that four ranks have no
    room for may go, and what another command runs without; what shards over several devices may join a plan that is
    one device's."""
    system = catalog.system(name)
    whole, small = dict(map(split, system.plan)), dict(map(split, system.shrunk.plan))
    degrees = [c for c in system.shrunk.plan if "degree=" in c]
    fits = 2 ** len(degrees) < system.shrunk.ranks
    own = any(registry()[technique].card.runs_by for technique in small)
    for technique, options in whole.items():
        if technique not in small:
            assert technique in system.shrunk.note
            assert own or not fits, technique
            assert own or any(c.startswith(f"{technique}:degree=") for c in system.plan), technique
        else:
            assert small[technique] == options
    on = catalog.cluster(system.reported.on)
    alone = on.nodes * on.devices_per_node == 1
    assert set(small) - set(whole) <= ({"zero", "data_parallel"} if alone else set())


@pytest.mark.parametrize(("name", "other"), [
    pytest.param(name, other, marks=crossing(f"{name} {other}", 2))
    for name, other in [(n, False) for n in TRAINING] + [(n, True) for n in OTHER_AXES]
])  # fmt: skip
def test_four_ranks_train_as_one(name, other, corpus):
    c = comparison(shrunk(name, corpus, other))
    assert c.subject.world == 4
    assert c.reference is not None
    assert c.reference.world == 1
    # Micro-batches of one process change nothing but the order of sums, so one reference serves most.
    whole = c.reference.workload.model_copy(update={"micro_batch_size": None})
    c.reference = c.reference.model_copy(update={"workload": whole})
    c.tolerance = EPS[c.subject.plan.option("mixed_precision", "dtype") or c.subject.dtype]
    limit = c.subject.training.grad_clip
    subject, reference = train(c.subject), train_once(c.reference)
    assert min(subject.norms) > limit
    assert len(subject.losses) == 3
    assert_parity(c, subject, reference)


def test_systems_cover_triples(corpus):
    """What makes this more than the pairs' test: three techniques and more, over two axes."""
    plans = {n: {t.card.name for t in techniques_of(shrunk(n, corpus).plan)} for n in TRAINING}
    assert sum(len(names) >= 3 for names in plans.values()) >= 7
    assert sum(len(shrunk(n, corpus).parallel) >= 2 for n in plans) >= 2
