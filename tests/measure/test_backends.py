"""Other engines: what they refuse and why, and that they train the same curve as ours."""

import importlib.util
import json
import sys

import pytest
from tests.training import MODEL, experiment, train

from ridgeline.jobs.job import CellOptions, RankContext, TrainOptions, train_job
from ridgeline.measure import backends
from ridgeline.measure.ablate import require_local
from ridgeline.measure.backends import BACKENDS, require
from ridgeline.measure.cells.training_cell import training_cell
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.result import Result
from ridgeline.techniques.registry import registry

REFUSED = [
    ("hff", (), 1, {}, ["unknown backend 'hff'", "'hf'"]),
    ("hf", ("zero",), 2, {}, ["hf has no zero", "--backend native", "data_parallel"]),
    ("hf", ("rtn", "lora"), 1, {}, ["hf has no rtn", "drop it"]),
    ("hf", ("lora", "data_parallel"), 2, {}, ["peft is driven in one process", "drop data_parallel"]),
    ("hf", ("recompute:policy=selective",), 1, {}, ["hf: recompute: ", "checkpoints every block whole", "policy=full"]),
    ("hf", ("recompute:every=2",), 1, {}, ["every=1"]),
    ("hf", ("mixed_precision:dtype=fp16",), 1, {}, ["fp16 needs a GPU", "dtype=bf16"]),
    ("hf", ("mixed_precision:weights=low",), 1, {}, ["keeps fp32 weights", "--backend deepspeed"]),
    ("deepspeed", ("mixed_precision",), 1, {}, ["beside fp32 masters", "weights=low"]),
    ("deepspeed", ("zero:stage=3,degree=2",), 4, {}, ["over all data-parallel ranks", "use only stage"]),
    ("deepspeed", ("zero_offload:delayed=true",), 1, {}, ["drop delayed"]),
    ("deepspeed", ("tensor_parallel:degree=2",), 2, {}, ["drop the model-parallel techniques"]),
    ("deepspeed", ("ring_attention:degree=2",), 2, {}, ["drop the model-parallel techniques"]),
    ("megatron-core", (), 1, {}, ["need CUDA", "--backend deepspeed"]),
    ("torchtitan", (), 1, {}, ["imports Triton", "--backend native"]),
    ("hf", (), 1, {"save_every": 5}, ["keeps no checkpoints", "drop --save-every"]),
    ("hf", (), 1, {"device_memory": 10**9}, ["no device memory budget", "drop --device-memory"]),
]


@pytest.mark.parametrize(
    ("name", "plan", "ranks", "options", "says"), REFUSED, ids=[f"{r[0]} {r[4][0]}" for r in REFUSED]
)
def test_what_a_backend_lacks_is_refused_with_the_reason(name, plan, ranks, options, says, corpus, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda package: object())
    with pytest.raises(UserError) as error:
        require(name, experiment(corpus, *plan, ranks=ranks), TrainOptions(**options))
    assert error.value.fix
    for text in says:
        assert text in str(error.value)


@pytest.mark.parametrize("name", ["hf", "deepspeed"])
def test_a_missing_package_names_the_extra(name, corpus, monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="not installed") as error:
        require(name, experiment(corpus))
    assert error.value.fix == f"pip install 'ridgeline[{name}]'"
    assert not isinstance(error.value, Incompatible)


def test_what_backends_declare_are_techniques():
    for b in BACKENDS.values():
        assert set(b.expresses) <= set(registry().values())
        assert bool(b.engine) != bool(b.refused)
        assert not b.refused or "; " in b.refused, "a reason and what works"


def test_the_registry_needs_no_torch():
    import subprocess

    code = "import sys, ridgeline.measure.backends; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_several_machines_need_a_launcher(corpus):
    e = experiment(corpus, ranks=2)
    two = e.model_copy(update={"cluster": e.cluster.model_copy(update={"nodes": 2})})
    with pytest.raises(Incompatible, match="2xlocal is 2 machines") as error:
        require_local(two)
    assert "torchrun --nnodes 2 --nproc-per-node 2" in error.value.fix
    assert 'on = "4xlocal"' in error.value.fix
    require_local(two, launched=True)


# ---- the same curve -------------------------------------------------------------------------------------------------


def losses_of(name, e):
    """Train one process with a backend, through the code of ``bench``."""
    import torch

    result = Result.model_validate(
        training_cell(e, CellOptions(backend=name, memory=False), RankContext(torch.device("cpu")))
    )
    assert result.environment["backend"] == name
    assert all(c.passed or c.name == "step times add up to wall time" for c in result.checks)
    assert result.metrics["eval_loss"].value < result.metrics["eval_loss_start"].value
    return [s.loss for s in result.samples]


CURVES = [
    ((), {"micro_batch_size": 2}),
    (("flash_attention", "recompute"), {"optimizer": "sgd", "lr": 0.05}),
]


@pytest.mark.parametrize(("plan", "workload"), CURVES, ids=["adamw, accumulated", "sgd, recomputed"])
def test_hugging_face_trains_the_same_curve(plan, workload, corpus):
    pytest.importorskip("accelerate")
    e = experiment(corpus, *plan, grad_clip=0.2, weight_decay=0.1, **{"lr": 1e-2, **workload})
    ours = train(e, uneven=False)
    theirs = losses_of("hf", e)
    assert theirs == pytest.approx(ours.losses, rel=1e-5)
    unclipped = train(e.model_copy(update={"workload": e.training.model_copy(update={"grad_clip": 0.0})}), uneven=False)
    assert abs(unclipped.losses[-1] - ours.losses[-1]) / ours.losses[-1] > 1e-4, "clipping was seen"
    assert ours.signal > 0.01


def test_peft_trains_the_same_curve(corpus):
    pytest.importorskip("peft")
    e = experiment(corpus, "lora:rank=4,alpha=32,targets=all-linear", grad_clip=0.2, lr=3e-2)
    ours = train(e, uneven=False)
    assert losses_of("hf", e) == pytest.approx(ours.losses, rel=1e-5)
    assert ours.signal > 0.01


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("plan", [("zero:stage=2",), ("zero:stage=3",)], ids=" ".join)
def test_deepspeed_trains_the_same_curve(plan, corpus):
    from ridgeline.jobs.launch import run_job

    e = experiment(corpus, *plan, ranks=2, grad_clip=0.2, micro_batch_size=1, lr=1e-2)
    ours = train(e, uneven=False)
    theirs = run_job(train_job(e, TrainOptions(backend="deepspeed")))
    assert theirs["losses"] == pytest.approx(ours.losses, rel=1e-5)
    assert theirs["backend"] == "deepspeed"
    assert json.dumps(theirs)
    assert MODEL.num_layers == 2
