"""Times of single operators: bounds, orders, published figures, and what happens off the beaten track."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import catalog, experiments
from ridgeline.graph import Op
from ridgeline.predict import predict
from ridgeline.predict.machine import machine
from ridgeline.predict.operators.host_work import host_time
from ridgeline.predict.operators.kernel import op_time, peak_flops, roof_seconds
from ridgeline.spec.device import DTYPE_BYTES, Cluster, Device, Link

GPUS = [n for n in catalog.devices() if catalog.device(n).kind == "gpu" and n != "dfx-u280"]  # whose rows wait
A100, H100 = catalog.device("a100-80g-sxm"), catalog.device("h100-sxm")


def gemm(m, n, k, dtype="bf16", **options):
    w = DTYPE_BYTES[dtype]
    moved = (m * k + n * k) * w + m * n * max(2, w)
    return Op("x", "mlp", "gemm", flops=2.0 * m * n * k, bytes=moved, dtype=dtype, shape=(m, n, k), **options)


def attention(batch, heads, kv_heads, q, kv, dim=128, **options):
    moved = 4.0 * batch * dim * (heads * q + kv_heads * kv)
    flops = 4.0 * batch * heads * q * kv * dim
    options = {"causal": True, "dtype": "bf16", **options}
    return Op(
        "x", "attention", "attention", flops=flops, bytes=moved, shape=(batch, heads, kv_heads, q, kv, dim), **options
    )


def seconds(op, device=A100):
    return op_time(op, device).seconds


# ---- matrix multiplication ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_no_device_beats_its_datasheet(name):
    device = catalog.device(name)
    for m, n, k in itertools.product((1, 16, 300, 8192), (64, 4096, 28672), (128, 8192)):
        for dtype in ("bf16", "fp8", "fp32"):
            op = gemm(m, n, k, dtype)
            t = op_time(op, device)
            cold = n * k * DTYPE_BYTES[dtype] / device.memory_bandwidth  # activations may come out of a cache
            assert t.seconds >= max(cold, op.flops / peak_flops(device, dtype)), (name, dtype, m, n, k)
            assert t.seconds < 1e-4 + 40 * roof_seconds(op, device), (name, dtype, m, n, k)
            assert 0 < t.spread < 1
            assert t.bound in ("compute", "memory", "launch")


SIZE = st.integers(1, 20000)


@settings(max_examples=150, deadline=None)
@given(SIZE, SIZE, SIZE)
def test_twice_the_work_is_never_cheaper(m, n, k):
    """Doubling any side may fill waves better, but never makes the whole faster by more than rounding of tiles."""
    one = seconds(gemm(m, n, k))
    for larger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert seconds(gemm(*larger)) > 0.9 * one


def test_one_tile_too_many_costs_a_wave():
    """108 processors of 256 × 128 tiles: 8 × 13 tiles fit one wave, 8 × 14 do not."""
    fits, over = gemm(2048, 13 * 128, 4096), gemm(2048, 14 * 128, 4096)
    assert seconds(over) / seconds(fits) > 1.05 * 14 / 13


def test_large_products_reach_what_is_measured():
    """The open measurements of large bf16 products: 0.82-0.93 of an A100's peak, 0.72-0.84 of an H100's."""
    op = gemm(8192, 8192, 8192)
    assert 245e12 < op.flops / seconds(op, A100) < 295e12
    assert 640e12 < op.flops / seconds(op, H100) < 830e12


def test_few_rows_are_bound_by_the_weights():
    op = gemm(8, 28672, 8192)
    t = op_time(op, H100)
    assert t.bound == "memory"
    assert 0.7 < op.bytes / t.seconds / H100.memory_bandwidth < 1
    assert seconds(gemm(16, 28672, 8192), H100) < 1.1 * t.seconds


def test_less_power_means_lower_clocks():
    """The PCIe card has 75 % of the watts of the SXM module for the same peak, and some of its speed."""
    op = gemm(8192, 8192, 8192)
    slower = seconds(op, catalog.device("a100-80g-pcie")) / seconds(op, A100)
    assert 1.05 < slower < 1 / 0.75


def test_eight_bits_are_faster_and_fall_back_where_they_are_not():
    eight, sixteen = gemm(8192, 8192, 8192, "fp8"), gemm(8192, 8192, 8192)
    assert 1.4 < seconds(sixteen, H100) / seconds(eight, H100) < 2.1
    assert peak_flops(A100, "fp8") == A100.peak_flops["bf16"]
    v100 = catalog.device("v100-16g-sxm")
    assert peak_flops(v100, "bf16") == v100.peak_flops["fp16"]
    assert op_time(eight, A100).seconds > 0


def test_narrow_weights_move_fewer_bytes():
    m, n, k = 1, 28672, 8192
    wide = gemm(m, n, k)
    narrow = Op("x", "mlp", "gemm", flops=wide.flops, bytes=wide.bytes - 1.5 * n * k, dtype="bf16", shape=(m, n, k),
                weight_dtype="int4")  # fmt: skip
    assert 2 < seconds(wide) / seconds(narrow) < 4
    big = gemm(8192, 8192, 8192)
    expanded = Op(
        "x", "mlp", "gemm", flops=big.flops, bytes=big.bytes, dtype="bf16", shape=big.shape, weight_dtype="int4"
    )
    assert seconds(expanded) > seconds(big)


def test_weights_that_stay_in_the_cache_are_read_faster():
    """96 MB of cache on an L40S, 40 MB on an A100: five copies of 16 MB stay in the one only."""
    l40s = catalog.device("l40s")
    weights = 2.0 * 4096 * 2048
    cold, warm = gemm(8, 4096, 2048), gemm(8, 4096, 2048, reuse=5 * weights)
    assert seconds(warm, l40s) < 0.6 * seconds(cold, l40s)
    assert seconds(warm) == seconds(cold)
    times = [seconds(gemm(8, 4096, 2048, reuse=x * weights), l40s) for x in (1, 4, 5.5, 6, 8, 100)]
    assert times == sorted(times)
    assert times[-1] == seconds(cold, l40s)


def test_a_larger_cache_is_never_slower():
    l40s = catalog.device("l40s")
    for op in (gemm(8, 4096, 2048, reuse=4e7), gemm(4096, 4096, 64), attention(64, 32, 8, 1, 512, reuse=7e7)):
        sizes = [l40s.model_copy(update={"l2_bytes": x * 2**20}) for x in (0, 6, 24, 48, 96, 192)]
        times = [seconds(op, d) for d in sizes]
        assert times == sorted(times, reverse=True)


def test_twice_the_processors_are_never_slower():
    for name in ("a100-80g-sxm", "h100-sxm", "l40s", "b200"):
        one = catalog.device(name)
        peaks = {k: 2 * v for k, v in one.peak_flops.items()}
        two = one.model_copy(update={"sm_count": 2 * one.sm_count, "peak_flops": peaks, "watts": 2 * one.watts})
        for op in (gemm(1, 4096, 4096), gemm(300, 4096, 4096), gemm(8192, 8192, 8192), attention(1, 32, 8, 4096, 4096),
                   attention(8, 32, 8, 1, 4096), attention(512, 32, 32, 1, 64)):  # fmt: skip
            assert seconds(op, two) <= 1.001 * seconds(op, one), (name, op.shape)


def test_small_tiles_wait_for_their_operands():
    """A product of 64 columns loads 64 + 128 operands per 64 · 128 products: it cannot reach what a square one does."""
    narrow, square = gemm(65536, 64, 8192), gemm(8192, 8192, 8192)
    rate = [op.flops / seconds(op, H100) for op in (narrow, square)]
    assert rate[0] < 0.8 * rate[1]


def test_a_kernel_that_does_not_split_its_cache_is_slow_on_one_long_sequence():
    """TensorRT-LLM's 8-bit kernel on Ada gives a sequence to one block; on Hopper it splits."""
    l40s = catalog.device("l40s")
    for device, factor in ((l40s, 3.5), (H100, 1.0)):
        short, long = (attention(1, 8, 1, 1, kv, kv_dtype="fp8", kernel="trtllm") for kv in (16384, 65536))
        grows = seconds(long, device) / seconds(short, device)
        assert grows > factor if device is l40s else grows < 3


def test_experts_share_one_kernel():
    """Rows over 8 experts: more tiles part filled than in one product, far less than 8 kernels one after another."""
    one, each = gemm(4096, 14336, 4096), gemm(512, 14336, 4096)
    grouped = Op(
        "x", "mlp", "gemm", flops=one.flops, bytes=8 * each.bytes, dtype="bf16", shape=(4096, 14336, 4096), experts=8
    )
    assert seconds(one) < seconds(grouped) < 8 * seconds(each)
    few = Op(
        "x", "mlp", "gemm", flops=1.0, bytes=2.0 * 2 * 14336 * 4096, dtype="bf16", shape=(2, 14336, 4096), experts=2.0
    )
    assert seconds(few) > 1.5 * seconds(gemm(1, 14336, 4096))


# ---- attention ----------------------------------------------------------------------------------------------------


def test_flash_attention_stays_below_the_best_published():
    """FlashAttention-2 (arXiv:2307.08691, abstract): 50-73 % of an A100's peak; causal and short is the lower end."""
    op = attention(4, 16, 16, 4096, 4096)
    assert 0.45 * 312e12 < op.flops / 2 / seconds(op) < 0.73 * 312e12


def test_causal_kernels_skip_half_and_backward_costs_more():
    op, full = attention(1, 32, 32, 16384, 16384), attention(1, 32, 32, 16384, 16384, causal=False)
    assert 1.7 < seconds(full) / seconds(op) < 2.1
    back = attention(1, 32, 32, 16384, 16384, direction="backward")
    assert 2 < seconds(back) / seconds(op) < 4
    again = attention(1, 32, 32, 16384, 16384, direction="backward", recompute=True)
    assert seconds(again) == seconds(op)


@pytest.mark.parametrize("device", [A100, H100, catalog.device("l40s")], ids=lambda d: d.name)
def test_decode_reads_its_cache_and_no_faster_than_memory(device):
    for batch, kv_heads, kv in itertools.product((1, 16, 256), (1, 8, 32), (64, 4096, 65536)):
        for kv_dtype, kernel in itertools.product(("bf16", "fp8"), ("flash", "trtllm")):
            op = attention(batch, 32, kv_heads, 1, kv, kv_dtype=kv_dtype, kernel=kernel)
            cache = 2.0 * batch * kv_heads * kv * 128 * DTYPE_BYTES[kv_dtype]
            assert cache / seconds(op, device) < device.memory_bandwidth
    big = attention(256, 32, 8, 1, 4096)
    assert 2.0 * 256 * 8 * 4096 * 128 * 2 / seconds(big, device) > 0.6 * device.memory_bandwidth


def test_decode_gains_from_shared_heads_and_from_splits():
    assert seconds(attention(64, 32, 8, 1, 8192)) < 0.4 * seconds(attention(64, 32, 32, 1, 8192))
    # One long sequence keeps the processors busy only if it is split.
    cache = 2.0 * 8 * 131072 * 128 * 2
    assert seconds(attention(1, 32, 8, 1, 131072)) < 2 * cache / A100.memory_bandwidth
    # TensorRT-LLM shares keys among at most 32 query heads.
    shared, apart = attention(64, 32, 1, 1, 8192, kernel="trtllm"), attention(64, 64, 1, 1, 8192, kernel="trtllm")
    assert seconds(apart) > 4 * seconds(shared)


def test_a_tile_of_queries_costs_the_same_however_full_it_is():
    """An H20 has little peak for its memory: it waits for the products of whole tiles, of 128 rows, or of 64 where the
    values are the keys."""
    h20 = catalog.device("h20")

    def took(device, heads, q, **options):
        return seconds(attention(128, heads, 1, q, 4096, dim=512, **options), device)

    assert took(h20, 16, 1) == took(h20, 16, 8) == took(h20, 128, 1)
    assert took(h20, 16, 9) == pytest.approx(2 * took(h20, 16, 8), rel=0.05)
    assert took(h20, 16, 5, kernel="latent") == pytest.approx(2 * took(h20, 16, 4, kernel="latent"), rel=0.05)
    assert took(catalog.device("h100"), 16, 8) == pytest.approx(took(catalog.device("h100"), 16, 1), rel=0.05)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 64), st.sampled_from([1, 2, 8, 32]), st.integers(1, 16384))
def test_longer_contexts_never_help(batch, kv_heads, kv):
    assert seconds(attention(batch, 32, kv_heads, 1, 2 * kv + 2)) > 0.93 * seconds(
        attention(batch, 32, kv_heads, 1, kv + 1)
    )
    assert seconds(attention(1, 32, kv_heads, 2 * kv, 2 * kv)) > 0.93 * seconds(attention(1, 32, kv_heads, kv, kv))


def test_a_chunk_of_a_prompt_sees_what_came_before():
    whole = seconds(attention(1, 32, 8, 8192, 8192))
    chunks = sum(seconds(attention(1, 32, 8, 1024, 1024 * (i + 1))) for i in range(8))
    assert whole < chunks < 2 * whole


# ---- everything else ----------------------------------------------------------------------------------------------


def test_what_only_moves_bytes():
    def norm(size):
        return Op("x", "norm", "norm", bytes=size, dtype="bf16")

    assert op_time(norm(4e9), A100).seconds == pytest.approx(4e9 / 2039e9 / 0.88, rel=0.05)
    assert op_time(norm(1e3), A100).bound == "launch"
    # What stays in the cache between two kernels passes faster than memory.
    assert seconds(norm(10e6)) < 10e6 / A100.memory_bandwidth + 3e-6
    assert seconds(norm(30e6)) > seconds(norm(20e6))


def test_copies_cross_the_host_link():
    def alone(op, device=A100):
        return host_time(op, Cluster(device=device)).seconds

    copy = Op("x", "attention", "h2d", bytes=1e9, link_bytes=1e9)
    assert 1e9 / 31.5e9 < alone(copy) < 1.5e9 / 31.5e9
    disk = Device.model_validate(
        {**A100.model_dump(), "disk": Link(name="nvme", bandwidth=7e9, latency=1e-4).model_dump()}
    )
    read = Op("x", "attention", "disk_read", bytes=7e9, link_bytes=7e9)
    assert alone(read, disk) == pytest.approx(1.0, rel=0.01)
    host = A100.host.model_copy(update={"disks": None})
    assert alone(read, A100.model_copy(update={"host": host})) > 1.0
    assert alone(read) == pytest.approx(7e9 / (8 * 3e9)), "a DGX A100 has eight drives"
    assert alone(copy, catalog.device("xeon")) > 0


def test_a_device_of_no_known_architecture_works():
    new = Device(name="new", architecture="rubin", peak_flops={"bf16": 1e15, "fp32": 1e14}, memory_bytes=1e11,
                 memory_bandwidth=5e12, sm_count=100)  # fmt: skip
    op = gemm(8192, 8192, 8192)
    t = op_time(op, new)
    assert 0.5 < op.flops / t.seconds / 1e15 < 1
    assert t.source == "class default"
    assert t.spread > op_time(op, A100).spread
    bare = Device(name="bare", peak_flops={"fp32": 1e13}, memory_bytes=1e10, memory_bandwidth=1e11)
    assert math.isfinite(op_time(op, bare).seconds)
    assert math.isfinite(op_time(attention(1, 8, 8, 1, 100), bare).seconds)


@pytest.mark.parametrize("name", [n for n in GPUS if n != "flexflow-16x16"])
def test_a_device_whose_processors_are_not_known_has_those_that_its_peaks_amount_to(name):
    whole = catalog.device(name)
    some, least = (whole.model_copy(update=update) for update in ({"sm_count": 0}, {"sm_count": 0, "clock": 0}))
    assert whole.sm_count / 2 <= machine(some).units <= 2 * whole.sm_count
    for op in (gemm(4096, 4096, 4096), gemm(16, 4096, 4096), attention(1, 32, 32, 2048, 2048)):
        assert all(0.5 < seconds(op, device) / seconds(op, whole) < 2 for device in (some, least))
    result = predict(experiments.make("gpt2", Cluster(device=some), {"kind": "generate"}, []))
    assert any("sm_count" in note for note in result.notes)


def test_predictions_say_where_they_come_from():
    op = gemm(4096, 4096, 4096)
    assert op_time(op, A100).source == "open data"
    assert op_time(op, catalog.device("h200-sxm")).source == "class default"
    assert op_time(op, catalog.device("h200-sxm")).spread > op_time(op, H100).spread
