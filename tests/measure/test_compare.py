"""Comparisons: verdicts with intervals, unlike environments refused, residuals labeled."""

import numpy as np
import pytest

from ridgeline.measure.compare import compare, environment_differences
from ridgeline.spec.comparison import Comparison
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Memory, Metric, Result, Row, Sample

ENV = {"cpu": "Xeon", "cores": 8, "torch": "2.13.0", "code": "aaa", "peak_flops": {"fp32": 1e12}, "load": 0.3}


def result(name: str, seconds: float = 1.0, source: str = "measured", samples: bool = True, **env: object) -> Result:
    rng = np.random.default_rng(len(name))
    steps = [Sample(step=i, seconds=seconds * (1 + 0.01 * rng.normal()), tokens=100, repeat=i // 10, warmup=i % 10 == 0)
             for i in range(30)]  # fmt: skip
    return Result(
        source=source,
        experiment_id="e",
        name=name,
        experiment={},
        environment={**ENV, **env},
        metrics={
            "tokens_per_s": Metric(value=100 / seconds, unit="tokens/s", better="higher"),
            "step_time_s": Metric(value=seconds, unit="s", better="lower"),
            "peak_bytes": Metric(value=4e6 * seconds, unit="bytes", better="lower", low=3.9e6 * seconds,
                                 high=4.1e6 * seconds),
        },
        breakdown=[
            Row(phase="forward", module="block", operator="qkv", kind="gemm", seconds=0.4 * seconds),
            Row(phase="forward", module="block", operator="norm", kind="norm", seconds=0.1),
        ],
        memory=[Memory(category="parameters", bytes=2e6), Memory(category="activations", bytes=1e6 * seconds)],
        samples=steps if samples else [],
    )  # fmt: skip


def by_name(c: Comparison) -> dict:
    return {m.name: m for m in c.metrics}


def test_measured_pair_gets_verdicts():
    c = compare(result("base", 1.0), result("quick", 0.5))
    assert c.kind == "measured vs measured"
    m = by_name(c)
    assert m["tokens_per_s"].verdict == m["step_time_s"].verdict == "faster"
    assert m["tokens_per_s"].ratio == pytest.approx(2, rel=0.02)
    assert m["step_time_s"].ratio == pytest.approx(0.5, rel=0.02)
    assert m["tokens_per_s"].low < m["tokens_per_s"].ratio < m["tokens_per_s"].high
    assert m["peak_bytes"].verdict == "better"
    assert Comparison.model_validate_json(c.model_dump_json()) == c


def test_same_thing_is_no_difference():
    c = compare(result("base"), result("same"))
    assert by_name(c)["tokens_per_s"].verdict == "no difference"


def test_without_spread_there_is_no_verdict():
    c = compare(result("base", samples=False), result("fast", 0.5, samples=False))
    assert by_name(c)["step_time_s"].verdict == "no interval"


def test_movers_and_memory():
    c = compare(result("base", 1.0), result("quick", 0.5))
    assert next((r.operator, r.a_seconds, r.b_seconds) for r in c.movers) == ("qkv", 0.4, 0.2)
    assert {m.category: (m.a_bytes, m.b_bytes) for m in c.memory}["activations"] == (1e6, 0.5e6)


def test_unlike_environments_are_refused_then_flagged():
    a, b = result("base"), result("other", cpu="EPYC", code="bbb")
    with pytest.raises(UserError, match=r"code: aaa \| bbb; cpu: Xeon \| EPYC"):
        compare(a, b)
    c = compare(a, b, force=True)
    assert c.flagged
    assert [d.key for d in c.differences] == ["code", "cpu"]
    assert any("unlike environments" in n for n in c.notes)


def test_what_counts_as_unlike():
    assert environment_differences(ENV, {**ENV, "load": 7.0}) == []
    assert environment_differences(ENV, {**ENV, "peak_flops": {"fp32": 1.03e12}}) == [], "probes scatter"
    assert [d.key for d in environment_differences(ENV, {**ENV, "peak_flops": {"fp32": 2e12}})] == ["peak_flops.fp32"]
    missing = {k: v for k, v in ENV.items() if k != "torch"}
    assert environment_differences(ENV, missing)[0].b == "not recorded"


def test_prediction_is_always_comparable_and_labeled():
    measured, predicted = result("base", 2.0), result("base", 1.0, source="predicted", cpu="none of it")
    for pair in ((measured, predicted), (predicted, measured)):
        c = compare(*pair)
        assert (c.kind, c.a, c.flagged) == ("prediction residual", "base (predicted)", False)
        m = by_name(c)["step_time_s"]
        assert (m.ratio, m.verdict) == (2.0, "residual")


def test_failures_are_told():
    bad = Result(source="measured", experiment_id="e", name="bad", experiment={}, environment=ENV, status="oom",
                 reason="8 GiB")  # fmt: skip
    c = compare(result("base"), bad)
    assert any("oom: 8 GiB" in n for n in c.notes)
    assert by_name(c)["tokens_per_s"].b is None
