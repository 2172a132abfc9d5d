"""Every system of the literature, shrunk to four ranks, trains for real as one process does: the triples' test."""

import pytest
from tests.techniques.test_parity import assert_parity, comparison
from tests.training import MODEL, experiment, train

from ridgeline import catalog, experiments
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import check, require_runnable, techniques

TRAINING = [n for n in catalog.systems() if catalog.system(n).reported.workload.get("kind", "pretrain") != "serve"]
DEEP = MODEL.model_copy(update={"num_layers": 4})
"""A layer for every stage."""


def shrunk(name: str, corpus) -> Experiment:
    """The system's small plan on a small model: plain SGD, clipped below every gradient norm."""
    small = catalog.system(name).shrunk
    plan = experiments.plan_of([f"{name}:ranks={small.ranks}"])
    streams = plan.has("pipeline")
    e = experiment(
        corpus, *plan.strings(), ranks=small.ranks, model=DEEP, batch_size=8, micro_batch_size=1 if streams else None,
        steps=5, optimizer="sgd", lr=10.0, grad_clip=0.05, warmup_steps=0,
    )  # fmt: skip
    check(e)
    require_runnable(e)
    return e


_REFERENCES = {}


def reference_of(e: Experiment):
    if e.id not in _REFERENCES:
        _REFERENCES[e.id] = train(e)
    return _REFERENCES[e.id]


@pytest.mark.parametrize("name", TRAINING)
def test_four_ranks_train_as_one(name, corpus):
    c = comparison(shrunk(name, corpus))
    assert c.subject.world == 4
    assert c.reference is not None
    assert c.reference.world == 1
    # Micro-batches of one process change nothing but the order of sums, so one reference serves most.
    whole = c.reference.workload.model_copy(update={"micro_batch_size": None})
    c.reference = c.reference.model_copy(update={"workload": whole})
    limit = c.subject.training.grad_clip
    subject, reference = train(c.subject), reference_of(c.reference)
    assert min(subject.norms) > limit
    assert len(subject.losses) == 5
    assert_parity(c, subject, reference)


def test_systems_cover_triples(corpus):
    """What makes this more than the pairs' test: three techniques and more, over two axes."""
    plans = {n: {t.card.name for t in techniques(shrunk(n, corpus).plan)} for n in TRAINING}
    assert sum(len(names) >= 3 for names in plans.values()) >= 7
    assert sum(len(shrunk(n, corpus).parallel) >= 2 for n in plans) >= 2
