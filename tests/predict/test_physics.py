"""What no prediction may break: more hardware is never slower, more work never faster, and rooflines hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import catalog, experiments
from ridgeline.graph import Op, training_graph
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time, peak_flops
from ridgeline.predict.step.peak_memory import training_peak
from ridgeline.spec.device import DTYPE_BYTES, Cluster
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.registry import check, resolve

quick = settings(max_examples=40, deadline=None, derandomize=True)
few = settings(max_examples=12, deadline=None, derandomize=True)
GPUS = st.sampled_from(["a100-80g-sxm", "h100-sxm", "h20", "l40s", "t4", "v100-32g-sxm", "rtx4090", "b200", "mi300x"])
SIZES = st.sampled_from([1, 7, 16, 64, 100, 512, 1000, 4096, 5000, 16384])
ROUNDING = 1.0 + 1e-9
TILE = 4e-7  # s: among launch-bound products, one that just fills a larger tile may take this much less


def gemm(m, n, k, dtype="bf16"):
    width = 1 if dtype == "fp8" else 2
    moved = (m * k + n * k) * width + 2.0 * m * n
    return Op("x", "mlp", "gemm", flops=2.0 * m * n * k, bytes=moved, dtype=dtype, shape=(m, n, k))


def attention(batch, q, kv, causal):
    heads, kv_heads, dim = 32, 8, 128
    moved = 4.0 * batch * kv_heads * kv * dim + 4.0 * batch * heads * q * dim
    return Op("x", "attention", "attention", flops=4.0 * batch * heads * q * kv * dim, bytes=moved, dtype="bf16",
              shape=(batch, heads, kv_heads, q, kv, dim), causal=causal)  # fmt: skip


def faster(device, bandwidth=1.0, peak=1.0, link=1.0):
    """The device with some rates multiplied."""
    update = {
        "memory_bandwidth": device.memory_bandwidth * bandwidth,
        "peak_flops": {k: v * peak for k, v in device.peak_flops.items()},
    }
    if device.link is not None:
        update["link"] = device.link.model_copy(update={"bandwidth": device.link.bandwidth * link})
    return device.model_copy(update=update)


@quick
@given(GPUS, SIZES, SIZES, SIZES, st.sampled_from(["bf16", "fp16", "fp8", "int8"]))
def test_products_keep_above_the_roofline_and_grow(name, m, n, k, dtype):
    device = catalog.device(name)
    op = gemm(m, n, k, dtype)
    cold = n * k * DTYPE_BYTES[dtype] / device.memory_bandwidth  # activations may come out of a cache
    assert op_time(op, device).seconds >= max(cold, op.flops / peak_flops(device, dtype)) * 0.98
    for larger in (gemm(2 * m, n, k, dtype), gemm(m, 2 * n, k, dtype), gemm(m, n, 2 * k, dtype)):
        assert op_time(larger, device).seconds >= op_time(op, device).seconds * 0.97 - TILE


@quick
@given(GPUS, SIZES, SIZES, SIZES, st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 1.5]))
def test_faster_devices_are_never_slower(name, m, n, k, bandwidth, peak):
    device = catalog.device(name)
    for op in (gemm(m, n, k), attention(m, 1, n + 1, False), attention(1, n, n, True)):
        better = op_time(op, faster(device, bandwidth, peak)).seconds
        assert better <= op_time(op, device).seconds * ROUNDING


@quick
@given(GPUS, st.sampled_from([1, 4, 32, 200]), st.sampled_from([64, 1000, 4096, 20000]), st.booleans())
def test_attention_keeps_above_the_roofline_and_grows(name, batch, length, decode):
    device = catalog.device(name)
    q = 1 if decode else length
    op, longer = attention(batch, q, length, not decode), attention(batch, 2 * q if not decode else 1, 2 * length, True)
    visible = 1.0 if decode else 0.5 + 0.5 / length
    compute = visible * op.flops / device.peak_flops.get("bf16", device.peak_flops.get("fp16"))
    assert op_time(op, device).seconds >= 0.98 * max(compute, op.bytes / device.memory_bandwidth)
    assert op_time(longer, device).seconds >= op_time(op, device).seconds


@quick
@given(GPUS, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "p2p"]),
       st.sampled_from([1e3, 1e6, 1e9]), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 8]))  # fmt: skip
def test_collectives_grow_with_bytes_and_shrink_with_links(name, kind, size, ranks, nodes):
    device = catalog.device(name)

    def seconds(size, device):
        cluster = Cluster(device=device, devices_per_node=ranks, nodes=nodes)
        op = Op("x", "communication", kind, dtype="bf16", link_bytes=size, ranks=ranks * nodes, axis="dp")
        return collective_time(op, cluster).seconds

    base = seconds(size, device)
    assert seconds(2 * size, device) >= base > 0
    assert seconds(size, faster(device, link=2.0)) <= base * ROUNDING


def step(plan, batch=32, on="8xa100-80g-sxm", model="llama2-7b", **work):
    fields = {"kind": "pretrain", "seq_len": 1024, "batch_size": batch, **work}
    return experiments.make(model, on, fields, ["mixed_precision", "flash_attention", *plan])


PLANS = st.lists(
    st.sampled_from(["tensor_parallel:degree=2", "pipeline:degree=2", "recompute:policy=full", "sequence_parallel",
                     "zero:stage=1", "fused_layers"]),
    unique=True, max_size=4,
)  # fmt: skip


@few
@given(PLANS, st.sampled_from([1, 2]))
def test_steps_keep_above_the_peak_and_grow_with_the_batch(plan, micro):
    try:
        small, large = (predict(step(plan, n, micro_batch_size=micro)) for n in (32, 64))
    except Incompatible:
        return
    assert 0 < small.metrics["mfu"].value <= small.metrics["hfu"].value < 0.9
    assert large.metrics["step_time_s"].value > small.metrics["step_time_s"].value
    assert large.metrics["peak_bytes"].value >= small.metrics["peak_bytes"].value


@few
@given(PLANS)
def test_memory_grows_with_the_micro_batch_and_the_sequence(plan):
    try:
        peaks = [predict(step(plan, 64, micro_batch_size=m)).metrics["peak_bytes"].value for m in (1, 2, 4)]
        longer = predict(step(plan, 64, micro_batch_size=1, seq_len=2048)).metrics["peak_bytes"].value
    except Incompatible:
        return
    assert peaks == sorted(peaks)
    assert longer >= peaks[0]


@pytest.mark.parametrize(
    "plan",
    [[], ["tensor_parallel:degree=2"], ["tensor_parallel:degree=8"], ["zero:stage=3"], ["pipeline:degree=4"],
     ["tensor_parallel:degree=2", "pipeline:degree=2"]],
)  # fmt: skip
def test_no_layout_loses_or_invents_parameters(plan):
    e = step(plan)
    g = rewritten(training_graph(e), e, check(e))
    held = sum(p.numel * n for p, n in g.params) * e.parallel.get("tp", 1)
    norms = e.model.num_layers * 2 * e.model.hidden_size + e.model.hidden_size  # every rank of a group has them
    assert e.model.num_parameters <= held * ROUNDING
    assert held <= e.model.num_parameters + norms * e.parallel.get("tp", 1)
    assert sum(b.repeat for stage in g.cut(g.stages) for b in stage) == sum(b.repeat for b in g.blocks)


@pytest.mark.parametrize(("model", "plan"), [
    ("llama2-7b", ["pipeline:degree=4,layers=2+2+20+8"]), ("t5-11b", ["pipeline:degree=4"]),
    ("gpt-neox-20b", ["pipeline:degree=8,schedule=interleaved,chunks=4", "lora"]),
    ("llama2-7b", ["pipeline:degree=8,schedule=zero_bubble,layers=1+4+1+4+9+4+8+1"]),
    ("llama2-7b", ["pipeline:degree=8,schedule=gpipe,layers=1+4+1+4+9+4+8+1"]),
])  # fmt: skip
def test_the_peak_is_that_of_the_rank_that_needs_most(model, plan):
    """Stages need not be alike: decoders' layers are larger than encoders', and numbers of layers differ."""
    work = {"batch_size": 64, "micro_batch_size": 1, "seq_len": 512}
    e, techniques = resolve(experiments.make(model, "8xh100-sxm", work, ["mixed_precision", *plan]))
    g = rewritten(training_graph(e), e, techniques)
    peaks = [training_peak(g, [rank]).total for rank in range(g.pipeline.degree)]
    assert training_peak(g).total == max(peaks)
    assert max(peaks) not in (peaks[0], peaks[1], peaks[-1])


@few
@given(st.sampled_from(["a100-80g-sxm", "h100-sxm", "l40s", "b200"]), st.sampled_from([1, 16, 200]),
       st.sampled_from(["vllm", "trtllm", "vllm-2023"]))  # fmt: skip
def test_serving_keeps_below_the_roofline(name, clients, engine):
    work = {"kind": "serve", "concurrency": clients, "requests": 2 * clients, "prompt_len": 256, "output_len": 32,
            "engine": engine}  # fmt: skip
    e = experiments.make("llama3.1-8b", name, work, [])
    m = predict(e).metrics
    device, flops = e.cluster.device, 2.0 * (e.model.num_parameters - e.model.vocab_size * e.model.hidden_size)
    per_request = flops * (256 + 32)  # every token of prompt and answer passes every weight but the embedding
    assert m["requests_per_s"].value * per_request < device.peak_flops["bf16"]
    assert m["tpot_s"].value > flops / device.memory_bandwidth  # 2 bytes of each weight per token
    assert m["ttft_s"].value > flops * 255 / device.peak_flops["bf16"]
    quicker = experiments.make("llama3.1-8b", f"2x{name}", work, ["tensor_parallel:degree=2"])
    assert predict(quicker).metrics["requests_per_s"].value < 2 * device.peak_flops["bf16"] / per_request
