"""Closed forms of dataflows: systolic arrays, FlexFlow's and DFX's unrolling."""

import itertools
import math
import random

import numpy as np
import pytest

from ridgeline import catalog
from ridgeline.catalog import chips
from ridgeline.hardware.device import chip_device
from ridgeline.predict.machine import Machine
from ridgeline.predict.operators import systolic, unrolled
from ridgeline.predict.operators.attention_time import attention_time
from ridgeline.predict.operators.gemm import gemm_time
from ridgeline.predict.operators.unrolled import Layer
from ridgeline.validate import hardware_figures as published
from ridgeline.validate.hardware_claims import flexflow_utilization, sentence


def stepped(m, n, k, rows, columns, dataflow):
    """Cycles by walking over folds and, in each, over the skewed wavefront: the last operand enters the last
    multiplier after rows - 1 and columns - 1 steps; what stays in place is first shifted in, row by row."""
    total = 0
    if dataflow == "output":
        for _ in itertools.product(range(0, m, rows), range(0, n, columns)):
            total += max(i + j + t for i in (0, rows - 1) for j in (0, columns - 1) for t in range(k)) + 1
        return total - 1
    across, moving = (n, m) if dataflow == "weight" else (m, n)
    for _ in itertools.product(range(0, k, rows), range(0, across, columns)):
        total += rows + max(i + j + t for i in (0, rows - 1) for j in (0, columns - 1) for t in range(moving)) + 1
    return total - 1


@pytest.mark.parametrize("flow", ["output", "weight", "input"])
def test_the_closed_form_counts_every_step(flow):
    draw = random.Random(7)
    for _ in range(60):
        m, n, k = (draw.randint(1, 70) for _ in range(3))
        rows, columns = (draw.choice((4, 8, 16)) for _ in range(2))
        assert systolic.cycles(m, n, k, rows, columns, flow) == stepped(m, n, k, rows, columns, flow)


@pytest.mark.parametrize(("product", "count"), [((32, 16, 256), 571), ((16, 16, 512), 541), ((32, 32, 128), 631)])
def test_rows_of_llmcompass(product, count):  # look_up_table_16_16.csv of its repository
    assert systolic.cycles(*product, 16, 16) == count


def test_a_full_array_on_a_long_product():
    assert systolic.utilization(128, 128, 100_000, 128, 128) == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("name", ["2D mapping", "tiling"])
@pytest.mark.parametrize("net", published.FLEXFLOW_LAYERS)
def test_fixed_dataflows_within_five_points_of_figure_15(name, net):
    assert 100 * flexflow_utilization(name, net) == pytest.approx(published.FLEXFLOW_UTILIZATION[name][net], abs=5)


@pytest.mark.parametrize("net", ["FR", "LeNet-5", "HG", "AlexNet", "VGG"])  # PV's layers are from memory
def test_flexflow_within_five_points_of_figure_15(net):
    assert 100 * flexflow_utilization("FlexFlow", net) == pytest.approx(
        published.FLEXFLOW_UTILIZATION["FlexFlow"][net], abs=5
    )


def test_found_factors_are_the_best_and_coupled():
    layers = [Layer(1, 3, (6, 6), 2), Layer(3, 4, (4, 4), 3)]
    found = unrolled.factors(layers, (4, 4))
    (across, _), (_, within) = found
    assert within == across, "results lie where the next layer reads them"

    def three(most):
        ranges = (range(1, min(x, 4) + 1) for x in most)
        return [f for f in itertools.product(*ranges) if f[0] * f[1] * f[2] <= 4]

    every = (
        unrolled.flexible_cycles(layers, [(across, first), (last, across)])
        for first in three((1, 2, 2)) for across in three((3, 3, 3)) for last in three((4, 4, 4))
    )  # fmt: skip
    assert unrolled.flexible_cycles(layers, found) == min(every)


def test_published_factors_are_no_better():
    lenet = published.FLEXFLOW_LAYERS["LeNet-5"]
    theirs = [((3, 1, 5), (1, 3, 5)), ((16, 1, 1), (3, 1, 5))]  # table 4
    found = unrolled.factors(lenet, (16, 16))
    assert unrolled.flexible_cycles(lenet, found) <= unrolled.flexible_cycles(lenet, theirs)


def with_constants(**constants):
    known = catalog.architecture("dfx")
    gemm = {"bf16": known.gemm["bf16"].model_copy(update=constants)}
    return catalog.device("dfx-u280").model_copy(update={"efficiency": known.model_copy(update={"gemm": gemm})})


def test_dfx_fitted_on_one_model_predicts_another():
    """Seconds are linear in row_latency and in 1 / share: the catalog's are those of least squared relative error."""
    rows = []
    for n, rate in published.DFX_345M:
        seen = 64 / rate
        plain, slower, later = (
            64 / sentence("gpt2-medium", with_constants(share=share, row_latency=latency), n)
            for share, latency in ((0.5, 1e-5), (0.25, 1e-5), (0.5, 2e-5))
        )
        slope, more = (slower - plain) / 2, (later - plain) / 1e-5
        rows.append([slope / seen, more / seen, 1 - (plain - 2 * slope - 1e-5 * more) / seen])
    table = np.array(rows)
    (slow, latency), *_ = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)
    fitted = catalog.architecture("dfx").gemm["bf16"]
    assert (fitted.share, fitted.row_latency) == pytest.approx((1 / slow, latency), rel=2e-3)
    for n, rate in published.DFX_345M:
        assert sentence("gpt2-medium", catalog.device("dfx-u280"), n) == pytest.approx(rate, rel=0.01)
    assert sentence("gpt2-1.5b", catalog.device("dfx-u280"), 4) == pytest.approx(published.DFX_XL, rel=0.08)


def test_rows_of_dfx_pass_one_by_one():
    m = Machine(catalog.device("dfx-u280"))
    c = m.efficiency.gemm["bf16"]
    one, many = (gemm_time(m, "fp16", rows, 1000, 1030, 1.0, 0.0) for rows in (1, 48))
    assert many.seconds == pytest.approx(48 * one.seconds)
    cycles = math.ceil(1030 / 64) * math.ceil(1000 / 16)  # inputs that 64 multipliers take, outputs 16 at a time
    assert one.seconds == pytest.approx(cycles / 200e6 / c.share + c.row_latency)
    slow = Machine(with_constants(share=1.0).model_copy(update={"memory_bandwidth": 46e9}))
    assert gemm_time(slow, "fp16", 48, 1024, 1024, 1.0, 0.0).seconds > 48 * 1024 * 1024 * 2 / 46e9, (
        "each reads all weights"
    )


def test_attention_on_an_array_is_two_products_of_every_head():
    m = Machine(catalog.device("dfx-u280"))
    one = attention_time(m, "flash", (1, 16, 16, 1, 640, 64), True, "fp16", "", False).seconds
    scores, values = (
        gemm_time(m, "fp16", 16, 640, 64, 16, 0.0).seconds,
        gemm_time(m, "fp16", 16, 64, 640, 16, 0.0).seconds,
    )
    assert one == pytest.approx(scores + values)


def test_flexflow_as_a_device_fills_its_array_where_a_fixed_dataflow_cannot():
    m = Machine(catalog.device("flexflow-16x16").model_copy(update={"memory_bandwidth": 1e15}))
    full = gemm_time(m, "fp16", 64, 160, 320, 1.0, 0.0).seconds
    assert full == pytest.approx(2 * 64 * 160 * 320 / 512e9)
    narrow = gemm_time(m, "fp16", 64, 4, 320, 1.0, 0.0).seconds  # four outputs of four rows at a time
    assert narrow == pytest.approx(2 * 64 * 4 * 320 / 512e9)
    assert unrolled.product_cycles("tiling", (16, 16), 64, 4, 320) == 4 * 64 * 4 * 320 / 256
    assert unrolled.product_cycles("two_dimensional", (16, 16), 64, 4, 320) == 16 * 64 * 4 * 320 / 256


def test_a_design_unrolls_over_its_own_array():
    c = chips.chip("ga100").model_copy(update={"architecture": "flexflow"})
    assert chip_device(c).efficiency.gemm["bf16"].array == (16, 16)
    wide = c.core.array.model_copy(update={"rows": 32, "columns": 8})
    c = c.model_copy(update={"core": c.core.model_copy(update={"array": wide})})
    assert chip_device(c).efficiency.gemm["bf16"].array == (32, 8)


def test_a_systolic_chip_is_bounded_by_its_arrays_its_buffer_and_its_memory():
    c = chips.chip("ga100").model_copy(update={"architecture": "systolic"})
    m = Machine(chip_device(c))
    full = gemm_time(m, "fp16", 8192, 8192, 8192, 1.0, 0.0)
    ideal = 2 * 8192.0**3 / c.peak_flops["fp16"]
    assert ideal < full.seconds < 1.1 * ideal
    thin = gemm_time(m, "fp16", 16, 8192, 8192, 1.0, 0.0)
    assert thin.bound == "memory"
    assert thin.seconds > 8192 * 8192 * 2 / c.memory.bandwidth
    starved = c.model_copy(update={"cache_bytes_per_clock": 64.0, "name": "starved"})
    assert gemm_time(Machine(chip_device(starved)), "fp16", 8192, 8192, 8192, 1.0, 0.0).seconds > 3 * full.seconds


def test_larger_arrays_waste_more_on_small_products():
    base = chips.chip("ga100").model_copy(update={"architecture": "systolic"})
    large = base.core.array.model_copy(update={"rows": 128, "columns": 128})
    few = base.model_copy(update={"cores": 2, "core": base.core.model_copy(update={"array": large}), "name": "large"})
    assert few.peak_flops["fp16"] == base.peak_flops["fp16"]
    small, big = (systolic.array_seconds(c, "fp16", 64, 1, 256, 4096) for c in (base, few))
    assert big > 1.5 * small


def test_8_bit_runs_at_the_rate_of_its_array():
    c = chips.chip("ga100")
    assert (
        systolic.array_seconds(c, "int8", 512, 1, 512, 512) == systolic.array_seconds(c, "fp16", 512, 1, 512, 512) / 2
    )
