"""The error table's arithmetic, against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from ridgeline.validate.case import Case
from ridgeline.validate.score import baseline, choices, regret_summary, score, spearman


def case(predicted: float, measured: float, **more) -> Case:
    return Case(group="g", quantity="seconds", measured=measured, predicted=predicted, label=f"{predicted}", **more)


def test_a_line_of_the_table():
    (s,) = score("f.csv", [case(1.08, 1.0), case(0.7, 1.0), case(1.05, 1.0), case(1.0, 1.0)])
    assert (s.n, s.group, s.quantity) == (4, "g", "seconds")
    assert s.median_ape == pytest.approx(0.065)
    assert s.mean_ape == pytest.approx(0.1075)
    assert s.bias == pytest.approx(-0.0425)
    assert s.within_10 == 0.75
    assert s.within_20 == 0.75
    assert s.p90_ape == pytest.approx(0.08 + 0.7 * 0.22)


def test_groups_and_quantities_are_kept_apart():
    rows = [case(1, 1), Case("h", "seconds", 1, 2, ""), Case("h", "bytes", 1, 3, "")]
    assert [(s.group, s.quantity, s.n) for s in score("f", rows)] == [
        ("g", "seconds", 1),
        ("h", "seconds", 1),
        ("h", "bytes", 1),
    ]


def test_baseline_finds_the_constants_of_a_roofline():
    rows = [
        case(1, 3e-6 + 2 * f + 1.5 * b, terms=(f, b, 1.0))
        for f, b in ((1e-6, 0), (5e-6, 2e-6), (0, 9e-6), (2e-6, 1e-6))
    ]
    error, name = baseline(rows)
    assert error == pytest.approx(0, abs=1e-9)
    assert name == "3-constant roofline"


def test_baseline_of_rates_is_additive_in_time():
    rows = [case(1, 0.5 / t, terms=(t,), inverse=True) for t in (1.0, 2.0, 7.0)]
    assert baseline(rows)[0] == pytest.approx(0, abs=1e-9)


def test_regret_of_the_favorite():
    slow = [case(1.0, 3.0, alternatives="a"), case(2.0, 2.0, alternatives="a"), case(9.0, 9.0, alternatives="a")]
    (c,) = choices("f", slow)
    assert (c.size, c.picked, c.best) == (3, "1.0", "2.0")
    assert c.regret == pytest.approx(0.5)
    fast = [case(1.0, 3.0, alternatives="a", better="higher"), case(2.0, 2.0, alternatives="a", better="higher")]
    (c,) = choices("f", fast)
    assert c.regret == pytest.approx(0.5)
    assert regret_summary([c])["best_picked"] == 0
    assert choices("f", [case(1, 1), case(2, 2)]) == []
    assert choices("f", [case(1, 1, alternatives="a"), case(1, 5, alternatives="a")]) == [], "one plan, measured twice"
    assert regret_summary([]) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=20))
def test_rank_correlation_is_scipys(pairs):
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    mine = spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert mine is None
    else:
        assert mine == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
