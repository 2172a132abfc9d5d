"""Identities of the parallel techniques: what all ranks hold and do together is what one rank would."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import training_graph
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.registry import check, require_runnable

BASE = ["mixed_precision:weights=low"]
FLASH = [*BASE, "flash_attention"]


def make(*plan, on="8xa100", model="llama2-7b", **workload):
    fields = {"kind": "pretrain", "seq_len": 2048, "batch_size": 16, "micro_batch_size": 1, **workload}
    return experiments.make(model, on, fields, list(plan))


def graph(*plan, **options):
    e = make(*plan, **options)
    return rewritten(training_graph(e), e, check(e))


def numel(g):
    return sum(p.numel * n for p, n in g.params)


def memory(e):
    return {m.category: m.bytes for m in predict(e).memory}


@pytest.mark.parametrize("model", ["llama2-7b", "gpt3-13b", "mixtral-8x7b", "qwen3-8b"])
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("attention", [BASE, FLASH], ids=["naive", "flash"])
def test_tensor_parallel_ranks_share_the_work(model, degree, attention):
    one, part = graph(*attention, model=model), graph(*attention, f"tensor_parallel:degree={degree}", model=model)
    router = sum(o.flops * b.repeat for b in one.blocks for o in (*b.forward, *b.backward) if "router" in o.name)
    assert (part.flops - router) * degree == pytest.approx(one.flops - router)
    # Norms, positions, routers and the biases of row-parallel layers are held by every rank.
    everywhere = ("norm.weight", "norm.bias", "router.weight", "positions.weight", "o_proj.bias", "down_proj.bias")
    held = sum(p.numel * n for p, n in one.params if p.name.endswith(everywhere))
    assert (numel(part) - held) * degree == pytest.approx(numel(one) - held)


def test_key_value_heads_repeat_when_there_are_fewer_than_ranks():
    one, part = graph(*FLASH, model="llama2-70b"), graph(*FLASH, "tensor_parallel:degree=16", model="llama2-70b",
                                                         on="2x8xa100")  # fmt: skip

    def kv(g):
        return sum(p.numel * n for p, n in g.params if "k_proj" in p.name)

    assert kv(part) == kv(one) / 8


def test_tensor_parallel_communication():
    """Two all-reduces of the residual stream per layer and direction (arXiv:1909.08053, section 3)."""
    g = graph(*FLASH, "tensor_parallel:degree=8")
    stream = 2048 * 4096 * 2
    layer = next(b for b in g.blocks if b.name == "layers")
    for ops in (layer.forward, layer.backward):
        assert [o.link_bytes for o in ops if o.axis == "tp"] == [stream, stream]
    parted = next(
        b for b in graph(*FLASH, "tensor_parallel:degree=8", "sequence_parallel").blocks if b.name == "layers"
    )
    kinds = [o.kind for o in parted.forward if o.axis == "tp"]
    assert kinds == ["all_gather", "reduce_scatter"] * 2


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_sequence_parallel_memory(policy):
    """Activations of a layer: sbh(10 + 24/t + 5as/ht) without, sbh(34 + 5as/h)/t with (arXiv:2205.05198, eq. 2, 4).

    Megatron's softmax is fused: the plain one also keeps its fp32 result, 4as more.
    """
    spec = catalog.model("megatron-22b").model_copy(update={"dropout": 0.1}).model_dump()
    plan = [*BASE, "fused_layers:chunked=false", "tensor_parallel:degree=8"] + (
        [] if policy == "none" else [f"recompute:policy={policy}"]
    )
    s, h, a, t = 2048, 6144, 64, 8
    scores = 5 * a * s / h if policy == "none" else 0

    def layer(*extra):
        g = graph(*plan, *extra, model=spec, batch_size=1, micro_batch_size=1)
        return next(b for b in g.blocks if b.name == "layers").saved_bytes / (s * h)

    if policy == "full":
        assert layer() == pytest.approx(2)
        return
    assert layer() == pytest.approx(10 + (24 + scores) / t, rel=1e-3)
    assert layer("sequence_parallel") == pytest.approx((34 + scores) / t, rel=1e-3)


def test_states_of_megatron():
    """18 bytes per parameter: 2 of weight, 4 of gradient, 12 of optimizer (arXiv:2205.05198, figure 1)."""
    got = memory(make(*FLASH, "tensor_parallel:degree=8", "recompute", model="megatron-22b", batch_size=1))
    n = catalog.model("megatron-22b").num_parameters
    states = got["parameters"] + got["gradients"] + got["optimizer"]
    assert states == pytest.approx(18 * n / 8, rel=0.01)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ring_attention_divides_the_tokens(degree):
    one, part = graph(*FLASH), graph(*FLASH, f"ring_attention:degree={degree}")
    assert part.flops * degree == pytest.approx(one.flops)
    assert numel(part) == numel(one)
    kept = [sum(b.saved_bytes * b.repeat for b in g.blocks) for g in (one, part)]
    assert kept[1] * degree == pytest.approx(kept[0], rel=1e-3)
    assert part.tokens * degree == one.tokens


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_expert_parallel_divides_the_experts(degree):
    one, part = graph(*FLASH, model="mixtral-8x7b"), graph(*FLASH, f"expert_parallel:degree={degree}",
                                                           model="mixtral-8x7b")  # fmt: skip
    assert part.flops == pytest.approx(one.flops)
    experts = sum(p.numel * n for p, n in one.params if ".experts." in p.name)
    assert numel(part) == pytest.approx(numel(one) - experts * (1 - 1 / degree))
    layer = next(b for b in part.blocks if b.name == "layers")
    for ops in (layer.forward, layer.backward):  # to the experts and back, two experts a token
        sent = [o.link_bytes for o in ops if o.axis == "ep" and not o.name.endswith("counts")]
        assert sent == pytest.approx([2 * 2048 * 4096 * 2] * 2)
    assert [o.link_bytes for o in layer.forward if o.name.endswith("counts")] == [8 * 8]


@pytest.mark.parametrize(
    "how",
    ["degree=4", "degree=8,schedule=gpipe", "degree=4,schedule=interleaved,chunks=2", "degree=2,schedule=zero_bubble"],
)
@pytest.mark.parametrize("others", [[], ["recompute"], ["tensor_parallel:degree=2"], ["zero:stage=1"]], ids="+".join)
def test_pipeline_balances(how, others):
    e = make(*FLASH, f"pipeline:{how}", *others, on="2x8xa100", batch_size=64)
    r = predict(e)
    step = r.metrics["step_time_s"].value
    parts = sum(row.seconds if row.exposed_seconds is None else row.exposed_seconds for row in r.breakdown)
    assert parts == pytest.approx(step, rel=1e-9)
    assert 0 < r.metrics["bubble_share"].value < 0.6
    assert r.metrics["tokens_per_s"].value * step == pytest.approx(64 * 2048)


def test_pipeline_memory_per_schedule():
    def peak(how, batch=64):
        return memory(make(*FLASH, f"pipeline:degree=8,{how}", batch_size=batch))["activations"]

    assert peak("schedule=1f1b") == pytest.approx(peak("schedule=1f1b", 128))
    assert peak("schedule=gpipe") > 4 * peak("schedule=1f1b")
    assert peak("schedule=interleaved,chunks=2") > peak("schedule=1f1b")
    assert peak("schedule=zero_bubble") >= peak("schedule=1f1b")


def test_zero_divides_by_its_data_parallel_ranks_only():
    e = make(*FLASH, "zero:stage=1", "tensor_parallel:degree=2", "pipeline:degree=2", on="2x8xa100", batch_size=32)
    assert e.data_parallel == 4
    assert (e.stride("tp"), e.stride("cp"), e.stride("dp"), e.stride("pp")) == (1, 2, 2, 8)
    alone = make(*FLASH, "tensor_parallel:degree=2", "pipeline:degree=2", on="4xa100", batch_size=8)
    assert memory(e)["optimizer"] == pytest.approx(memory(alone)["optimizer"] / 4)


def test_hybrid_sharding_stores_more_and_sends_less_across_nodes():
    plan = [*FLASH, "recompute"]
    all_, inside = (make(*plan, z, on="4x8xa100", batch_size=32) for z in ("zero:stage=3", "zero:stage=3,degree=8"))
    assert memory(inside)["optimizer"] == pytest.approx(4 * memory(all_)["optimizer"])

    def sent(e):
        slow = e.cluster.device.network.model_copy(update={"bandwidth": 1e9})
        device = e.cluster.device.model_copy(update={"network": slow})
        e = e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": device})})
        return sum(r.seconds for r in predict(e).breakdown if r.phase == "communication")

    assert sent(inside) < 0.9 * sent(all_)  # only the gradients cross, summed in fp32


def test_offload_moves_states_off_the_device():
    plain, moved = make(*FLASH, "zero"), make(*FLASH, "zero", "zero_offload")
    assert "optimizer" not in memory(moved)
    assert predict(moved).peak_bytes < predict(plain).peak_bytes
    late = make(*FLASH, "zero", "zero_offload:delayed=true")
    times = [predict(e).metrics["step_time_s"].value for e in (plain, late, moved)]
    assert times == sorted(times)
    disk = predict(make(*FLASH, "zero:stage=3", "zero_infinity:parameters=nvme,optimizer=nvme"))
    assert disk.peak_bytes < predict(moved).peak_bytes
    assert disk.metrics["step_time_s"].value > times[-1]
    for r in (predict(moved), predict(late), disk):
        parts = sum(row.seconds if row.exposed_seconds is None else row.exposed_seconds for row in r.breakdown)
        assert parts == pytest.approx(r.metrics["step_time_s"].value)


def test_fused_layers_change_no_arithmetic():
    plain, fused = graph(*FLASH), graph(*FLASH, "fused_layers")
    assert fused.flops == pytest.approx(plain.flops)
    assert predict(make(*FLASH, "fused_layers")).metrics["step_time_s"].value < predict(
        make(*FLASH)).metrics["step_time_s"].value  # fmt: skip


REFUSED = [
    (["tensor_parallel:degree=3"], {"on": "3xa100"}, "do not divide over 3 ranks"),
    (["sequence_parallel"], {}, "tensor_parallel leaves whole"),
    (["pipeline:degree=8,schedule=interleaved"], {}, "with one chunk is 1f1b"),
    (["pipeline:degree=8,chunks=2"], {}, "not 2 chunks"),
    (["pipeline:degree=8,schedule=interleaved,chunks=8"], {}, "do not fill 64 stages"),
    (["pipeline:degree=8,schedule=interleaved,chunks=2"], {"batch_size": 12}, "in groups of its 8 stages"),
    (["tensor_parallel:degree=4"], {"on": "6xa100", "batch_size": 6}, "do not split into groups of 4"),
    (["ring_attention:degree=8", "flash_attention"], {"seq_len": 2040}, "zigzag"),
    (["expert_parallel:degree=2"], {}, "has no experts"),
    (["expert_parallel:degree=8"], {"model": "mixtral-8x7b", "on": "4xa100"}, "do not form groups of 8"),
    (["zero:stage=3,degree=3"], {}, "do not form groups of 3"),
    (["zero:stage=2", "zero_infinity"], {}, "keeps whole parameters"),
    (["zero", "zero_offload", "zero_infinity:parameters=device"], {}, "also decides how the optimizer's states"),
    (["mixed_precision", "fp8"], {}, "no fp8 arithmetic"),
    (["qlora", "lora"], {}, "also decides which parameters train"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "options", "says"), REFUSED, ids=[r[2] for r in REFUSED])
def test_refusals(plan, options, says):
    with pytest.raises(Incompatible, match=says) as caught:
        make(*plan, **options)
    assert caught.value.fix


def test_what_cannot_be_run_yet_says_so():
    workload, plan = {"kind": "generate", "batch_size": 2}, ["tensor_parallel:degree=2"]
    divided = experiments.make("llama2-7b", "2xa100", workload, plan)
    with pytest.raises(UserError, match=r"tensor_parallel can be predicted in task 'generate', not yet run"):
        require_runnable(divided)
    require_runnable(make("zero", "mixed_precision", "recompute"))
