"""What the first reference paper found (arXiv:2311.03687: Llama 2 on eight A800, RTX 4090 and RTX 3090, sequences of
350 tokens), as the predictor has it. Sizes are held to the errors that docs/accuracy.md states; what it misses fails
strictly, with both numbers, and stands in docs/accuracy.md."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict

ADA = "rtx4090-xeon-6230"
"""The RTX 4090 in the paper's server."""
LOW = "mixed_precision:weights=low"
TRAINING, FINETUNING, ATTENTION = 0.05, 0.15, 0.10
"""docs/accuracy.md: training runs 5 %, fine-tuning 15 % (the goal of its median error), attention kernels 10 %."""


def run(plan, on="8xa800-80g", model="llama2-7b", each=1, device=None):
    """``each``: sequences per device."""
    ranks = int(on.partition("x")[0]) if on[0].isdigit() else 1
    workload = {"kind": "pretrain", "seq_len": 350, "batch_size": each * ranks}
    e = experiments.make(model, on, workload, [LOW, *plan])
    if device is not None:
        e = e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": device})})
    return predict(e)


def rate(*args, **options):
    return run(*args, **options).metrics["tokens_per_s"].value


def size(*args, **options):
    return run(*args, **options).peak_bytes


def scaling(on, plan, each):
    """Throughput of eight devices over eight times that of one."""
    return rate([*plan, "data_parallel"], f"8x{on}", each=each) / 8 / rate(plan, on, each=each)


@pytest.mark.parametrize("each", [1, 8, 32])
def test_zero_2_saves_memory_at_no_cost_in_speed(each):
    assert size(["zero:stage=2"], each=each) < 0.6 * size(["data_parallel"], each=each)
    assert rate(["zero:stage=2"], each=each) > 0.97 * rate(["data_parallel"], each=each)


SHARDED = {stage: [f"zero:stage={stage}", "recompute", "flash_attention"] for stage in (2, 3)}
HIDDEN = pytest.mark.xfail(strict=True, reason="computation hides stage 3's gathers, not stage 2's after the update: it"
                           " is faster, for 7B as for 13B")  # fmt: skip


@pytest.mark.parametrize("each", [1, 2, *(pytest.param(n, marks=HIDDEN) for n in (4, 8, 32))])
def test_zero_3_is_slower_where_a_model_fits_without(each):
    assert rate(SHARDED[3], each=each) < rate(SHARDED[2], each=each)


def test_zero_3_pays_off_for_larger_models():
    plans = SHARDED
    saved = [size(plans[2], model=m) - size(plans[3], model=m) for m in ("llama2-7b", "llama2-13b", "llama2-70b")]
    assert saved == sorted(saved)
    lost = [rate(plans[3], model=m) / rate(plans[2], model=m) for m in ("llama2-7b", "llama2-13b")]
    assert lost[1] > 0.9 * lost[0]
    room = 80 * 2**30
    held = [size([*plans[s], "zero_offload"], model="llama2-70b") for s in (2, 3)]
    assert held[1] < room < held[0], "only stage 3 leaves room for a 70B model in the devices' memory"


@pytest.mark.xfail(strict=True, reason="Adam's states of 70B are 771 GiB, the paper's server has 512 GiB of memory: how"
                   " the paper trained it there is not known")  # fmt: skip
def test_zero_3_and_offload_train_70b_on_eight_a800():
    assert run([*SHARDED[3], "zero_offload"], model="llama2-70b").status == "ok"


def test_adams_states_of_70b_exceed_the_memory_of_the_papers_server():
    states = 12 * catalog.model("llama2-70b").num_parameters  # master weights and two moments in fp32
    assert states > catalog.device("a800-80g").host.memory_bytes
    found = run([*SHARDED[3], "zero_offload"], model="llama2-70b")
    assert "GiB of host memory per node, which has 512.0 GiB" in found.reason
    assert found.metrics["host_bytes"].value * 8 > states


OFFLOADED = [["zero:stage=2", "zero_offload"], ["zero:stage=3", "zero_infinity"]]


@pytest.mark.parametrize("moved", OFFLOADED, ids="+".join)
@pytest.mark.parametrize("on", ["8xa800-80g", f"8x{ADA}"])
def test_offload_trades_speed_for_memory(on, moved):
    assert rate(moved, on) < rate(["zero:stage=2"], on)
    assert size(moved, on) < size(["zero:stage=2"], on)


def one_thread_each(device):
    """Its server as DeepSpeed's and PyTorch's launchers leave it to eight ranks: OMP_NUM_THREADS=1."""
    return device.model_copy(update={"host": device.host.model_copy(update={"cores": 8})})


@pytest.mark.parametrize("moved", OFFLOADED, ids="+".join)
@pytest.mark.parametrize("on", [
    "8xa800-80g",
    pytest.param(f"8x{ADA}", marks=pytest.mark.xfail(strict=True, reason="over PCIe the same step without offload is"
                 " predicted many times as long as on A800: no more than 4 times slower")),
])  # fmt: skip
def test_offload_is_20_to_36_times_slower(on, moved):
    """Reported of a server that is not named."""
    slow = rate(moved, on, device=one_thread_each(catalog.device(on[2:])))
    assert 20 < rate(["zero:stage=2"], on) / slow < 36


def attention_seconds(plan, phase):
    rows = run([*plan, "zero:stage=2"]).breakdown
    return sum(r.seconds for r in rows if (r.phase, r.module) == (phase, "attention") and r.kind in CORE)


CORE = ("attention", "bmm", "softmax", "mask")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_flash_attention_makes_attention_faster(phase):
    assert attention_seconds(["flash_attention"], phase) < attention_seconds([], phase)


@pytest.mark.parametrize(
    ("phase", "reported"),
    [
        pytest.param("forward", 2 / 3, marks=pytest.mark.xfail(
            strict=True, reason="reported a third faster; predicted 48 % at batch 1")),
        pytest.param("backward", 3 / 4, marks=pytest.mark.xfail(
            strict=True, reason="reported a quarter faster; predicted 0 % at batch 1, 18 % at larger ones: the"
            " paper's batch is not known")),
    ],
)  # fmt: skip
def test_how_much_faster_flash_attention_is(phase, reported):
    """Reported: by about a third forward and a quarter backward."""
    ratio = attention_seconds(["flash_attention"], phase) / attention_seconds([], phase)
    assert ratio == pytest.approx(reported, rel=ATTENTION)


def test_recomputation_trades_a_third_more_compute_for_memory():
    """The forward pass again is a third of forward and backward; what is left of it depends on the rest of a step."""
    plain, again = (run([*p, "zero:stage=2"], each=32) for p in ([], ["recompute"]))
    slower = again.metrics["step_time_s"].value / plain.metrics["step_time_s"].value
    assert 1.2 < slower < 1.36
    kept = [next(m.bytes for m in r.memory if m.category == "activations") for r in (plain, again)]
    assert kept[1] < 0.15 * kept[0]


@pytest.mark.parametrize("on", ["8xa800-80g", f"8x{ADA}", "8xrtx3090"])
@pytest.mark.parametrize("model", ["llama2-7b", "llama2-13b"])
def test_lora_is_faster_than_qlora_which_is_smaller(on, model):
    plain, packed = ["lora:rank=64"], ["qlora:rank=64,targets=q_proj+v_proj"]
    assert rate(plain, on, model) > rate(packed, on, model)
    assert size(packed, on, model) < 0.6 * size(plain, on, model)
    assert rate(plain, on, model) > 2 * rate(["zero:stage=2"], on, model)


@pytest.mark.parametrize("on", ["8xa800-80g", f"8x{ADA}", "8xrtx3090"])
def test_a_quantized_base_trains_faster_than_all_weights(on):
    """Reported without a figure. What 4-bit weights save, which do not train, is their gradients' exchange and their
    update; unpacking them takes a part of it back."""
    packed, whole = rate(["qlora:rank=64,targets=all-linear", "zero:stage=2"], on), rate(["zero:stage=2"], on)
    assert packed > whole
    assert packed < rate(["lora:rank=64,targets=all-linear", "zero:stage=2"], on)


def test_flash_attention_and_recomputation_let_a_larger_batch_in():
    small, large = rate(["zero:stage=2"], each=4), rate(["zero:stage=2", "recompute"], each=32)
    assert large > 1.1 * small


SCALING = {ADA: 0.908, "rtx3090": 0.859}
"""Throughput of eight cards over eight times that of one, as reported."""


def test_nvlink_scales_better_than_pcie():
    """Reported: near-linear on A800."""
    nvlink = scaling("a800-80g", ["recompute"], 48)
    assert nvlink > max(scaling(on, ["recompute"], 48) for on in SCALING)
    assert nvlink == pytest.approx(1.0, rel=TRAINING)


@pytest.mark.parametrize("on", [
    ADA,
    pytest.param("rtx3090", marks=pytest.mark.xfail(strict=True, reason="reported 0.859, predicted 0.958")),
])  # fmt: skip
def test_scaling_over_pcie(on):
    assert scaling(on, ["recompute"], 48) == pytest.approx(SCALING[on], rel=TRAINING)


@pytest.mark.xfail(strict=True, reason="reported 0.908 > 0.859; predicted 0.901 < 0.958: the 3090 is slower, so that it"
                   " waits less for an equal link")  # fmt: skip
def test_the_4090_scales_better_than_the_3090():
    assert scaling(ADA, ["recompute"], 48) > scaling("rtx3090", ["recompute"], 48)


@pytest.mark.xfail(strict=True, reason="reported about 1.10, predicted 1.01: with 16 and 64 sequences a card the"
                   " sums are hidden; 1.40 with 8, and the paper's batch is not known")  # fmt: skip
def test_nvlink_bridges_help_the_rtx_3090():
    """Reported: about 10 %. A bridge joins two cards; the ring then crosses the host half as often."""
    device = catalog.device("rtx3090")
    bridge = {"name": "NVLink bridge", "bandwidth": 56.25e9, "p2p": True, "spans": [[2, 25e9]]}
    bridged = device.model_copy(update={"link": device.link.model_copy(update=bridge)})
    plan = ["zero:stage=3", "recompute"]
    gain = rate(plan, "8xrtx3090", each=64, device=bridged) / rate(plan, "8xrtx3090", each=64)
    assert gain == pytest.approx(1.10, rel=0.05)


def test_lora_with_zero_2_on_eight_a800():
    """All linear layers of rank 64, as the authors' scripts have it; what it waits for is the host."""
    plan = ["lora:rank=64,targets=all-linear", "zero:stage=2"]
    assert rate(plan) == pytest.approx(15_700, rel=FINETUNING)
    assert any(r.operator == "waiting for the host" for r in run(plan).breakdown)
