"""Options that the predictor settles, and sizes as people write them."""

import pytest

from ridgeline import experiments
from ridgeline.predict.settle import ask, settle
from ridgeline.spec.errors import UserError
from ridgeline.spec.sizes import parse_size, say_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("200MB", 200_000_000), ("1.5 GiB", 3 * 2**29), ("4096", 4096), (7, 7), (2e9, 2_000_000_000), ("2gb", 2 * 10**9)],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "12 parsecs", "-3MB", None, True, [1]])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="200MB"):
        parse_size(text)


def test_sizes_in_messages():
    assert [say_size(n) for n in (12, 4096, 2e9, 123_456_789)] == ["12 B", "4.1 kB", "2 GB", "123 MB"]


def plan(*calls, on="a100", **workload):
    return experiments.make("llama-tiny", on, {"kind": "pretrain", "seq_len": 64, "batch_size": 4, **workload}, calls)


def test_settling_a_concrete_plan_changes_nothing():
    e = plan("recompute:every=2", "mixed_precision")
    assert settle(e) == e


def test_asking_gives_what_predicting_gives():
    from ridgeline.predict import predict

    e = plan("recompute")
    brief, whole = ask(e), predict(e)
    assert brief.metrics["peak_bytes"].value == whole.metrics["peak_bytes"].value
    assert brief.metrics["step_time_s"].value == whole.metrics["step_time_s"].value
    assert not brief.breakdown
    with pytest.raises(UserError):
        ask(plan("recompute:every=9"))
