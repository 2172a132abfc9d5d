"""Intervals cover what they claim, warm-up is found, outliers are named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.measure.stats import (
    bootstrap_ci,
    outliers,
    percentile,
    ratio_ci,
    step_blocks,
    summary,
    verdict,
    warmup_steps,
)
from ridgeline.spec.result import Sample

times = st.floats(min_value=1e-3, max_value=1e3, allow_nan=False)
blocks = st.lists(st.lists(times, min_size=1, max_size=8), min_size=1, max_size=4)


def runs(seed: int, count: int, steps: int, between: float, within: float, mean: float = 1.0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(mean * (1 + between * rng.normal() + within * rng.normal(size=steps))) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "between", "within"), [(1, 0.0, 0.03), (2, 0.01, 0.01), (3, 0.03, 0.01), (5, 0.02, 0.02)]
)
def test_interval_covers_the_truth_about_as_often_as_it_says(count, between, within):
    hits = 0
    trials = 200
    for seed in range(trials):
        ci = bootstrap_ci(runs(seed, count, 20, between, within), n=400)
        hits += ci.low <= 1 <= ci.high
    # Binomial noise of 200 trials is ±3 %; two runs are the hardest case.
    assert (0.8 if count == 2 else 0.9) <= hits / trials <= 1.0


def test_interval_is_not_uselessly_wide():
    ci = bootstrap_ci([list(np.random.default_rng(0).normal(1, 0.03, 100))])
    standard_error = 1.2533 * 0.03 / 10  # of a median
    assert 2 * standard_error < ci.high - ci.low < 6 * standard_error


def test_pooling_correlated_steps_would_be_overconfident():
    """The reason for blocks: with runs that differ, a flat bootstrap misses the truth most of the time."""
    data = [runs(seed, 4, 30, 0.05, 0.005) for seed in range(100)]
    flat = [bootstrap_ci([[x for run in d for x in run]], n=300) for d in data]
    block = [bootstrap_ci(d, n=300) for d in data]
    assert np.mean([c.low <= 1 <= c.high for c in flat]) < 0.75
    assert np.mean([c.low <= 1 <= c.high for c in block]) > 0.88


def test_known_answers():
    assert bootstrap_ci([[2.0, 2.0], [2.0]]) == (2.0, 2.0, 2.0)
    ci = ratio_ci([[2.0, 2.0]], [[1.0, 1.0]])
    assert ci == pytest.approx((2.0, 2.0, 2.0))
    assert bootstrap_ci([[1.0, 2.0, 9.0]], statistic=np.mean).value == 4.0


def test_pairing_cancels_a_drift_of_the_machine():
    drift = [1.0, 1.3, 0.8, 1.15]
    rng = np.random.default_rng(1)
    a = [list(d * 1.10 * (1 + 0.005 * rng.normal(size=15))) for d in drift]
    b = [list(d * 1.00 * (1 + 0.005 * rng.normal(size=15))) for d in drift]
    paired, free = ratio_ci(a, b, paired=True), ratio_ci(a, b)
    assert verdict(paired.low, paired.high) == "faster"
    assert verdict(free.low, free.high) == "no difference"
    with pytest.raises(ValueError, match="paired"):
        ratio_ci(a, b[:2], paired=True)


@settings(max_examples=40, deadline=None)
@given(blocks)
def test_interval_is_ordered_finite_and_repeatable(data):
    ci = bootstrap_ci(data, n=50)
    assert np.isfinite(ci).all()
    assert ci.low <= ci.high
    assert ci == bootstrap_ci(data, n=50)


@settings(max_examples=40, deadline=None)
@given(blocks, st.floats(min_value=0.1, max_value=10))
def test_interval_scales_with_the_unit(data, factor):
    scaled = [[x * factor for x in b] for b in data]
    assert bootstrap_ci(scaled, n=50) == pytest.approx([factor * v for v in bootstrap_ci(data, n=50)], rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(blocks)
def test_a_ratio_with_itself_is_one(data):
    ci = ratio_ci(data, data, n=50, paired=True)
    assert ci.value == pytest.approx(1)
    assert ci.low > 0


def test_intervals_of_times_stay_above_zero_however_noisy():
    for data in ([[0.5] * 5, [3.3] * 5], [[0.1, 5.0, 0.2], [9.0, 8.0]]):
        ci = bootstrap_ci(data)
        assert 0 < ci.low <= ci.value <= ci.high < 1e3
        assert verdict(*ratio_ci(data, data)[1:]) == "no difference"


def test_equal_plans_rarely_get_a_verdict():
    wrong = 0
    for seed in range(150):
        a, b = runs(seed, 2, 12, 0.02, 0.02), runs(seed + 1000, 2, 12, 0.02, 0.02)
        ci = ratio_ci(a, b, n=300)
        wrong += verdict(ci.low, ci.high) != "no difference"
    assert wrong / 150 < 0.05


def test_bad_input_is_refused():
    for bad in ([], [[]], [[float("nan")]]):
        with pytest.raises(ValueError, match="value"):
            bootstrap_ci(bad)
    with pytest.raises(ValueError, match="positive"):
        ratio_ci([[0.0]], [[1.0]])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.05, 1.2, "faster"), (0.7, 0.9, "slower"), (0.99, 1.3, "no difference"), (1.005, 1.015, "no difference")],
)
def test_verdict(low, high, said):
    assert verdict(low, high) == said


def test_verdict_margin_can_be_moved():
    assert verdict(1.005, 1.015, margin=0.001) == "faster"


def test_warmup_is_the_slow_prefix():
    rng = np.random.default_rng(0)
    steady = list(1 + 0.01 * rng.normal(size=20))
    assert warmup_steps([9.0, 4.0, 2.0, *steady]) == 3
    assert warmup_steps([0.6, 0.7, *steady]) == 2, "a step that is too fast is no steady state either"
    assert warmup_steps(steady) == 1, "the first step always counts"


def test_warmup_ignores_a_late_spike_and_never_drops_more_than_half():
    steady = [1.0, 1.01, 0.99, 1.0, 1.005, 0.995] * 3
    assert warmup_steps([5.0, *steady[:6], 7.0, *steady[6:]]) == 1
    assert warmup_steps([float(20 - i) for i in range(20)]) <= 10
    assert [warmup_steps([1.0] * n) for n in range(5)] == [0, 0, 1, 1, 1]


@given(st.lists(times, max_size=40))
def test_warmup_bounds(seconds):
    skip = warmup_steps(seconds)
    assert min(1, len(seconds) // 2) <= skip <= len(seconds) // 2


def test_outliers_are_named():
    found = outliers([1.0, 1.01, 0.99, 1.02, 5.0, 1.0, 0.98])
    assert found.indices == [4]
    assert "1 of 7 step is an outlier (index 4), the worst 5× the median" in found.note
    assert outliers([1.0, 1.01, 0.99, 1.02]) == ([], "")
    assert outliers([1.0] * 9 + [2.0]).indices == [9], "zero MAD falls back to the mean deviation"
    assert outliers([1.0, 1.0, 1.0]) == ([], "")


def test_percentiles_that_n_cannot_support_are_withheld():
    values = [float(i) for i in range(1, 100)]
    assert percentile(values, 99) is None
    assert percentile([*values, 100.0], 99) == pytest.approx(99.01)
    assert percentile(values[:19], 95) is None
    assert percentile(values[:1], 50) == 1.0
    assert percentile([], 50) is None


def test_summary_and_step_blocks():
    samples = [Sample(step=i, seconds=s, tokens=4, warmup=i == 0, repeat=r)
               for r in (1, 0) for i, s in enumerate((9.0, 1.0 + r, 1.0 + r))]  # fmt: skip
    assert step_blocks(samples) == [[1.0, 1.0], [2.0, 2.0]]
    assert step_blocks(samples, per_token=True)[1] == [0.5, 0.5]
    metric = summary(step_blocks(samples))
    assert (metric.value, metric.n, metric.unit) == (1.5, 4, "s")
    assert metric.low is not None
    assert metric.low < 1.5
