"""Planning again on a changed cluster: where states lie, what moves, whether it pays, and the run that goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.train.test_checkpoint import run
from tests.training import MODEL, experiment, write_corpus

from ridgeline import catalog
from ridgeline.predict.predict import resting_bytes
from ridgeline.search.auto.replan import move, pieces, replan
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import normalize

DEEP = MODEL.model_copy(update={"num_layers": 4})
EVERYWHERE = "tensor_parallel:degree=2,sharding=embed={0}+attention={0}+mlp={0}+head={0}"
PLANS = {
    "data": ("data_parallel",),
    "zero 3": ("zero:stage=3",),
    "tensor": ("tensor_parallel:degree=4",),
    "tensor, zero 3": ("tensor_parallel:degree=2", "zero:stage=3"),
    "stages": ("pipeline:degree=4",),
    "interleaved": ("pipeline:degree=2,schedule=interleaved,chunks=2", "data_parallel"),
    "uneven stages, batch": ("pipeline:degree=2,layers=3+1", EVERYWHERE.format("batch")),
    "scatter": (EVERYWHERE.format("scatter"), "data_parallel"),
}
BIG = DEEP.model_copy(update={"num_kv_heads": 4})


def at(*plan, ranks=4):
    return experiment("", *plan, ranks=ranks, model=BIG, batch_size=16, micro_batch_size=2)


def held(e, rank):
    return sum(p.size * (p.spans[rank][1] - p.spans[rank][0]) for p in pieces(e) if rank in p.spans)


@pytest.mark.parametrize("name", PLANS)
def test_pieces_are_complete_and_as_large_as_predicted(name):
    e = at(*PLANS[name])
    for piece in pieces(e):
        covered = 0.0
        for low, high in sorted(piece.spans.values()):
            assert low <= covered + 1e-9, piece.name
            covered = max(covered, high)
        assert covered == pytest.approx(1.0), piece.name
    predicted = resting_bytes(e)
    mean = sum(held(e, r) for r in range(e.world)) / e.world
    # Norms and row biases, which tensor-parallel ranks replicate, are counted as divided.
    assert mean == pytest.approx(predicted["parameters"] + predicted["optimizer"], rel=0.03)


@pytest.mark.parametrize("name", PLANS)
def test_nothing_moves_between_equal_plans(name):
    e = at(*PLANS[name])
    found = move(e, e, range(4))
    assert (found.total, found.read, found.seconds) == (0.0, 0.0, 0.0)


def test_what_moves_is_what_a_rank_lacks():
    data, tensor = at("data_parallel"), at("tensor_parallel:degree=4")
    whole = held(data, 0)
    assert move(data, tensor, range(4)).total == 0.0  # every rank has everything already
    back = move(tensor, data, range(4))
    assert back.received == pytest.approx(0.75 * whole)
    assert back.total == pytest.approx(3 * whole)
    assert back.read == 0.0
    assert back.seconds > 0


def test_what_only_lost_devices_had_is_read():
    tensor, two = at("tensor_parallel:degree=4"), at("tensor_parallel:degree=2", ranks=2)
    found = move(tensor, two, [0, 1])  # of quarters 0-3 the first two are left, where halves are needed
    whole = held(at("data_parallel"), 0)
    assert found.read == pytest.approx(0.5 * whole)
    assert found.total == pytest.approx(0.75 * whole)  # rank 0 lacks quarter 1, rank 1 has none of its half
    assert move(at("data_parallel"), two, [2, 3]).total == 0.0


def gpu_run(on, *plan, batch=16):
    workload = Pretrain(seq_len=1024, batch_size=batch, micro_batch_size=2)
    model, cluster = catalog.model("gpt2-medium"), catalog.cluster(on)
    return normalize(Experiment(model=model, cluster=cluster, workload=workload, plan=Plan.parse(plan)))


RUNNING = ("tensor_parallel:degree=2", "zero:stage=1", "flash_attention", "mixed_precision:weights=low", "fused_layers")


def test_a_lost_node_is_planned_around():
    running = gpu_run("2x4xa100-80g-sxm", *RUNNING)
    found = replan(running, catalog.cluster("4xa100-80g-sxm"), steps_left=100, workers=1)
    assert found.found.experiment.world == 4
    assert found.found.experiment.batch_size == running.batch_size
    assert {"mixed_precision", "fused_layers", "flash_attention"} <= {c.name for c in found.found.experiment.plan.calls}
    assert found.stays is not None  # its degrees still divide four devices
    assert found.found.step <= found.stays
    assert found.pays == (100 * (found.stays - found.found.step) > found.move.seconds)


def test_a_slow_link_pays_only_when_steps_are_left():
    running = gpu_run("2x4xa100-80g-sxm", "tensor_parallel:degree=8", *RUNNING[2:])
    slow = running.cluster.device.network.model_copy(update={"bandwidth": 1e8})
    device = running.cluster.device.model_copy(update={"network": slow})
    cluster = running.cluster.model_copy(update={"device": device})
    many = replan(running, cluster, steps_left=10_000, workers=1)
    one = replace(many, steps_left=1)
    assert many.stays > many.found.step
    assert many.pays
    assert one.pays == (many.pays_after <= 1)
    assert many.pays_after >= 1


def test_a_plan_whose_ranks_do_not_divide_cannot_stay():
    running = gpu_run("8xa100-80g-sxm", "tensor_parallel:degree=8", *RUNNING[2:])
    found = replan(running, catalog.cluster("4xa100-80g-sxm"), steps_left=1, workers=1)
    assert found.stays is None
    assert "8 model-parallel ranks" in found.why
    assert found.pays
    assert found.move.read > 0


def test_ranks_that_the_plan_does_not_have_are_refused():
    running = gpu_run("8xa100-80g-sxm", *RUNNING)
    with pytest.raises(UserError, match="not among the 8"):
        replan(running, catalog.cluster("4xa100-80g-sxm"), 10, lost=[9])


def test_a_run_goes_on_with_the_new_plan(tmp_path):
    """Four processes, a checkpoint, a node lost: two processes with the plan found for them give the losses of one
    process."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    settings = {"optimizer": "sgd", "lr": 1.0, "grad_clip": 0.05, "batch_size": 8, "steps": 6}
    plain, _ = run(experiment(corpus, model=DEEP, micro_batch_size=2, **settings), tmp_path / "plain", 6)
    mixed = "tensor_parallel:degree=2,sharding=embed=batch+attention.0-1=batch+mlp.0-1=scatter+head=scatter"
    before = experiment(
        corpus, "pipeline:degree=2,layers=3+1", mixed, ranks=4, model=DEEP, micro_batch_size=2, **settings
    )
    run(before, tmp_path / "made", 3)
    found = replan(before, Cluster(device=CPU, devices_per_node=2), steps_left=3, workers=1)
    assert found.found.experiment.world == 2
    made, _ = run(found.found.experiment, tmp_path / "made", 3)
    assert made == pytest.approx(plain, rel=1e-5)
