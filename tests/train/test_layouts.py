"""Every schedule, stage and option of the parallel rows, several of them at once, and every family of models, against
one process: plain SGD, clipping active, rows with unequal numbers of labels.
"""

from __future__ import annotations

import pytest
import torch
from tests.crossings import crossing, named
from tests.nn.conftest import CONFIGS
from tests.training import MODEL, experiment, train, train_once

from ridgeline.spec.model import ModelSpec

TP, SP = "tensor_parallel:degree=2", "sequence_parallel"
RING = ("ring_attention:degree=2", "flash_attention")
DEEP = MODEL.model_copy(update={"num_layers": 4})
EXPERTS = MODEL.model_copy(update={"num_experts": 4, "experts_per_token": 2})
LOSSY = ("lora", "rtn")

PLANS = {
    "gpipe": (2, ("pipeline:degree=2,schedule=gpipe",), DEEP),
    "zero_bubble": (2, ("pipeline:degree=2,schedule=zero_bubble",), DEEP),
    "zero_bubble, fused": (2, ("pipeline:degree=2,schedule=zero_bubble", "fused_layers"), DEEP),
    "zero_bubble, fused experts": (
        2,
        ("pipeline:degree=2,schedule=zero_bubble", "fused_layers"),
        EXPERTS.model_copy(update={"num_layers": 4}),
    ),
    "interleaved": (2, ("pipeline:degree=2,schedule=interleaved,chunks=2",), DEEP),
    "four stages": (4, ("pipeline:degree=4",), DEEP),
    "uneven stages": (2, ("pipeline:degree=2,layers=3+1",), DEEP),
    "zero 1": (2, ("zero:stage=1",), MODEL),
    "zero 3": (2, ("zero:stage=3",), MODEL),
    "zero 3 ahead": (2, ("zero:stage=3,prefetch=2",), MODEL),
    "hybrid 2": (4, ("zero:stage=2,degree=2",), MODEL),
    "hybrid 3": (4, ("zero:stage=3,degree=2",), MODEL),
    "late": (2, ("data_parallel:overlap=false",), MODEL),
    "buckets": (2, ("data_parallel:bucket_mb=0.02",), MODEL),
    "tensor 4": (4, ("tensor_parallel:degree=4", SP), MODEL.model_copy(update={"num_kv_heads": 4})),
    "ring 4": (4, ("ring_attention:degree=4", "flash_attention"), MODEL),
    "roomy experts": (2, ("expert_parallel:degree=2,capacity=4.0",), EXPERTS),
    "tensor x pipeline x recompute": (4, (TP, SP, "pipeline:degree=2", "recompute"), DEEP),
    "zero_bubble x zero 2": (4, ("pipeline:degree=2,schedule=zero_bubble", "zero:stage=2"), DEEP),
    "pipeline x zero 3, resharded": (4, ("pipeline:degree=2", "zero:stage=3,reshard=true", "recompute"), DEEP),
    "interleaved x tensor": (4, ("pipeline:degree=2,schedule=interleaved,chunks=2", TP, SP), DEEP),
    "ring x tensor x flash": (4, (*RING, TP, SP), MODEL),
    "ring x pipeline": (4, (*RING, "pipeline:degree=2"), DEEP),
    "experts x zero 3 x recompute": (4, ("expert_parallel:degree=2", "zero:stage=3", "recompute"), EXPERTS),
    "experts x pipeline": (4, ("expert_parallel:degree=2", "pipeline:degree=2"), EXPERTS),
    "adapters x tensor x zero 3": (4, (TP, SP, "zero:stage=3", *LOSSY), MODEL),
    "adapters x pipeline x zero 3 x recompute": (4, ("pipeline:degree=2", "zero:stage=3", "recompute", *LOSSY), DEEP),
}


def compare(ranks, plan, model, corpus):
    settings = {"optimizer": "sgd", "lr": 5.0, "grad_clip": 0.05, "batch_size": 8, "micro_batch_size": 2, "steps": 3,
                "model": model}  # fmt: skip
    kept = [call for call in plan if call in LOSSY]
    plain = train_once(experiment(corpus, *kept, **settings))
    e = experiment(corpus, *plan, ranks=ranks, **settings)
    if e.accumulation > 2 and "pp" not in e.parallel:  # two micro-batches accumulate as four do
        e = experiment(corpus, *plan, ranks=ranks, **{**settings, "micro_batch_size": 4})
    made = train(e)
    residual = max(abs(a - b) for a, b in zip(made.losses, plain.losses, strict=True))
    print(f"signal {plain.signal:.3g}, residual {residual:.3g}")
    assert min(plain.norms) > settings["grad_clip"]
    assert plain.signal > 1000 * residual
    assert made.losses == pytest.approx(plain.losses, rel=1e-5)
    assert made.norms == pytest.approx(plain.norms, rel=1e-4)
    assert made.trained == plain.trained
    for name in plain.trained:
        assert float((made.after[name] - plain.after[name]).abs().max()) < 1e-4 * plain.moved, name
    for name in set(plain.after) - plain.trained:
        assert torch.equal(made.after[name], plain.after[name]), name


@pytest.mark.parametrize("name", named(PLANS))
def test_the_same_training(name, corpus):
    compare(*PLANS[name], corpus)


FAMILIES = {
    name: ModelSpec.from_config({**config, "vocab_size": 301}, name=f"{name}-test") for name, config in CONFIGS.items()
}
"""An odd vocabulary: the ranks' parts differ."""


def some_families(layout):
    """Those that `make test` divides so: all of them train in one process in tests/train/test_families.py."""
    return [pytest.param(family, marks=crossing(f"{layout} {family}", 8)) for family in FAMILIES]


@pytest.mark.parametrize("family", some_families("tensor"))
def test_every_family_divided_by_tensor_and_sequence(family, corpus):
    model = FAMILIES[family]
    degree = 2 if model.num_kv_heads % 2 == 0 else 0
    if not degree:
        pytest.skip("an odd number of key/value heads")
    compare(2, (TP, SP), model, corpus)


@pytest.mark.parametrize("family", some_families("stages"))
def test_every_family_in_stages(family, corpus):
    compare(4, ("pipeline:degree=2", "zero:stage=2"), FAMILIES[family], corpus)
