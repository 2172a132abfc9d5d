"""Results and ablations as files."""

import json
import math

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Check, Memory, Metric, Result, Row, Sample


@pytest.fixture
def result():
    return Result(
        source="measured", experiment_id="abc", name="zero2", experiment={"model": {"name": "x"}}, command="y",
        environment={"cpu": "y", "threads": 2}, metrics={"step_time_s": Metric(value=0.5, unit="s", low=0.4, n=3)},
        breakdown=[Row(phase="forward", module="mlp", operator="up", kind="gemm", seconds=0.1, flops=1e9, roof=0.5)],
        memory=[Memory(category="parameters", bytes=3.0), Memory(category="gradients", bytes=4.0)],
        samples=[Sample(step=0, seconds=0.5, tokens=64, loss=2.5, warmup=True)],
        checks=[Check(name="tokens = rate x time", passed=True, expected=1.0, got=1.0)], notes=["ü"],
    )  # fmt: skip


def test_round_trip(tmp_path, result):
    file = tmp_path / "r.json"
    file.write_text(result.to_json(), encoding="utf-8")
    assert Result.load(file) == result == Result.from_json(result.to_json(indent=None))
    assert json.loads(result.to_json())["schema"] == "ridgeline.result/1"
    assert result.peak_bytes == 7.0
    assert result.metric("step_time_s") == 0.5
    assert result.metric("mfu") is None


def test_predicted_result_round_trip():
    e = experiments.make("llama-tiny", "2xa100", {"kind": "pretrain", "seq_len": 64}, ["zero"], "zero2")
    r = predict(e)
    assert Result.from_json(r.to_json()) == r
    assert r.experiment_id == e.id
    assert json.loads(r.to_json())["experiment"] == json.loads(json.dumps(e.canonical()))


def test_a_diverged_loss_survives_the_file(result):
    diverged = result.model_copy(update={"samples": [Sample(step=1, seconds=0.5, tokens=64, loss=math.nan)]})
    text = diverged.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    loss = Result.from_json(text).samples[0].loss
    assert loss is not None
    assert math.isnan(loss)
    kept = Ablation(id="i", name="n", baseline="b", outcomes=[Outcome(name="b", plan=[], measured=diverged)])
    assert "NaN" in kept.to_json()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema": "ridgeline.result/2"}, "schema"), ({"schema": None}, "schema"), ({"source": "guessed"}, "source"),
     ({"extra": 1}, "extra"), ({"metrics": {"x": {"value": "fast"}}}, r"metrics\.x\.value")],
)  # fmt: skip
def test_another_version_or_field_is_refused(result, change, says):
    document = {**json.loads(result.to_json()), **change}
    with pytest.raises(UserError, match=rf"mine is not a ridgeline\.result/1 document: {says}"):
        Result.from_json(json.dumps(document), "mine")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]"])
def test_corrupt_files(tmp_path, text):
    file = tmp_path / "r.json"
    file.write_bytes(text)
    for kind in (Result, Ablation):
        with pytest.raises(UserError, match=r"r\.json"):
            kind.load(file)
        with pytest.raises(UserError, match=r"none\.json"):
            kind.load(tmp_path / "none.json")


def test_ablation_round_trip(tmp_path, result):
    outcome = Outcome(name="zero2", plan=["zero:stage=2"], measured=result, speedup=Metric(value=1.1, low=1.0),
                      predicted_speedup=1.2, verdict="faster", checks=result.checks)  # fmt: skip
    ablation = Ablation(id="i", name="n", baseline="base", outcomes=[Outcome(name="base", plan=[]), outcome])
    file = tmp_path / "a.json"
    file.write_text(ablation.to_json(), encoding="utf-8")
    assert Ablation.load(file) == ablation
    document = {**json.loads(ablation.to_json()), "schema": "ridgeline.ablation/2"}
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"a\.json is not a ridgeline\.ablation/1 document"):
        Ablation.load(file)
