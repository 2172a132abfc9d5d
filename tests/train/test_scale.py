"""Plans for clusters that are not here: fake process groups and meta tensors build every technique's real side, and
each rank's real parameter shapes are those that were predicted."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from tests.crossings import crossing
from tests.world import forks

from ridgeline import catalog, experiments
from ridgeline.predict.predict import resting_bytes
from ridgeline.predict.settle import settled
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.matrix import pair_experiment
from ridgeline.techniques.registry import registry

ONE = {"kind": "pretrain", "seq_len": 2048, "batch_size": 64, "micro_batch_size": 1}
LLAMA = ("llama2-70b", "8x8xa100")
PLANS = {  # model, cluster, workload, plan, groups of ranks whose mean is predicted
    "llama2-70b tp8 pp2 zero-3": (
        *LLAMA, ONE, ["tensor_parallel:degree=8", "pipeline:degree=2", "zero:stage=3", "recompute"],
        [(0,), (31,), (32,), (63,)],
    ),
    "llama2-70b tp8 zero-3": (*LLAMA, ONE, ["tensor_parallel:degree=8", "zero:stage=3"], [(0,), (37,)]),
    "llama2-70b zero-3": (*LLAMA, ONE, ["zero:stage=3", "recompute"], [(0,), (63,)]),
    "llama2-70b hybrid": (*LLAMA, ONE, ["zero:stage=3,degree=8"], [(0,), (63,)]),
    # 6 ranks do not divide every parameter evenly: what is exact is their sum.
    "gpt3-1t tp8 pp64 zero-1": (
        "gpt3-1t", "384x8xa100", {**ONE, "batch_size": 3072},
        ["mixed_precision", "tensor_parallel:degree=8", "pipeline:degree=64,schedule=interleaved,chunks=2",
         "zero:stage=1", "recompute"],
        [tuple(range(48 * stage + 3, 48 * (stage + 1), 8)) for stage in (0, 31, 63)],
    ),
    "gpt3-1t megatron_ptdp": (
        "gpt3-1t", "384x8xa100", {**ONE, "batch_size": 3072}, ["megatron_ptdp", "mixed_precision:weights=fp32"],
        [(0,), (1500,), (3071,)],
    ),
    "gpt3-1t zero-infinity": (
        "gpt3-1t", "64x8xa100", {**ONE, "batch_size": 512},
        ["zero:stage=3", "zero_infinity:parameters=nvme,optimizer=nvme"],
        [(0,), (511,)],
    ),
}  # fmt: skip
RUNNABLE = [n for n, t in registry().items() if t.card.runs and t.card.tasks & {"pretrain", "finetune"}]


@pytest.fixture(scope="module")
def elsewhere():
    """Another process, since a fake world takes the place of this one's process groups."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda f, *args: pool.submit(f, *args).result(timeout=300)


def build_ranks(e: Experiment, ranks: tuple[int, ...]) -> list[tuple[int, int, dict]]:
    """Place in the pipeline, parameter bytes, and local shapes of some ranks."""
    from ridgeline.train.scale import assemble_rank, fake_world, local_shapes, parameter_bytes

    found = []
    for rank in ranks:
        with fake_world(e.world, rank):
            run = assemble_rank(e, rank)
            shapes = {n: tuple(shape) for n, (shape, _) in local_shapes(run).items()}
            found.append((run.mesh.at("pp") if run.mesh else 0, parameter_bytes(run), shapes))
            assert all(p.device.type == "meta" for p in run.root.parameters())
    return found


def refuse_nested() -> str:
    from ridgeline.train.scale import fake_world

    with fake_world(8, 3):
        assert torch.distributed.get_rank() == 3
        try:
            with fake_world(2):
                return ""
        except UserError as error:
            return str(error)


@pytest.mark.parametrize("name", [pytest.param(name, marks=crossing(name, 2)) for name in PLANS])
def test_real_shapes_are_those_predicted(name, elsewhere):
    model, on, workload, plan, groups = PLANS[name]
    spec = catalog.model(model)
    if "pp64" not in name and "ptdp" not in name:  # further layers are like these
        spec = spec.changed(num_layers=16)
    e = experiments.make(spec.model_dump(), on, workload, plan)
    for ranks in groups:
        built = elsewhere(build_ranks, e, ranks)
        (place,) = {place for place, _, _ in built}
        real, predicted = sum(size for _, size, _ in built), resting_bytes(e, place)["parameters"] * len(ranks)
        print(f"ranks {ranks}, stage {place}: {real} bytes, predicted {predicted:.1f}")
        assert real == round(predicted)
        assert abs(real - predicted) < 1e-3 * len(ranks)
        if len(ranks) > 1:  # rows are handed out whole
            assert max(size for _, size, _ in built) <= 1.001 * predicted / len(ranks)


def test_shapes_by_hand(elsewhere):
    """Llama-2-70B, 8-way tensor parallel, two stages, shards over the 4 ranks that are left."""
    model, on, workload, plan, _ = PLANS["llama2-70b tp8 pp2 zero-3"]
    e = experiments.make(model, on, workload, plan)
    ((_, _, first), (_, _, last)) = elsewhere(build_ranks, e, (5, 63))
    assert first["model.embed.tokens.weight"] == (32000 // 8 // 4, 8192)
    assert first["model.layers.0.attention.q_proj.weight"] == (8192 // 8 // 4, 8192)
    assert first["model.layers.0.attention.k_proj.weight"] == (1024 // 8 // 4, 8192)
    assert first["model.layers.39.mlp.down_proj.weight"] == (8192 // 4, 28672 // 8)
    assert first["model.layers.39.attention_norm.weight"] == (8192 // 4,)
    assert {n.split(".")[2] for n in first if "layers" in n} == {str(i) for i in range(40)}
    assert {n.split(".")[2] for n in last if "layers" in n} == {str(i) for i in range(40, 80)}
    assert last["model.head.out.weight"] == (32000 // 8 // 4, 8192)
    assert "model.head.out.weight" not in first
    assert "model.embed.tokens.weight" not in last


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_technique_builds_without_memory(name, elsewhere):
    e = settled(pair_experiment(name))
    ((place, real, _),) = elsewhere(build_ranks, e, (e.world - 1,))
    assert real == resting_bytes(e, place)["parameters"]


def test_one_world_per_process(elsewhere):
    assert "already belongs to a process group" in elsewhere(refuse_nested)


def test_stages_differ_so_that_a_mix_up_would_show():
    model, on, workload, plan, _ = PLANS["gpt3-1t megatron_ptdp"]
    e = experiments.make(model, on, workload, plan)
    first, middle, last = (resting_bytes(e, place)["parameters"] for place in (0, 31, 63))
    assert first > last > middle
    total = sum(resting_bytes(e, place)["parameters"] for place in range(64)) * 8
    width, table = 25600 * 4, catalog.model("gpt3-1t").vocab_size * 25600 * 4
    whole = catalog.model("gpt3-1t").num_parameters * 4 + table  # and the last stage's copy of a tied table
    # Positions, norms, and biases of row-parallel layers are held by all 8 tensor-parallel ranks.
    assert total == whole + 7 * (2048 + 6 * 128 + 2) * width
    assert resting_bytes(e)["parameters"] * 64 * 8 == pytest.approx(total)
