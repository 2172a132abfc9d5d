"""Options that the predictor settles, and sizes as people write them."""

from itertools import product

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.predict.settle import ask, settled
from ridgeline.spec.errors import UserError
from ridgeline.spec.sizes import parse_size, say_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200MB", 200_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("4096", 4096),
        (7, 7),
        (2**60 + 1, 2**60 + 1),
        (2e9, 2_000_000_000),
        ("2gb", 2 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "12 parsecs", "-3MB", "1e400GB", float("inf"), float("nan"), 10**400, None, True, [1]]
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="200MB"):
        parse_size(text)


def test_sizes_in_messages():
    assert [say_size(n) for n in (12, 4096, 2e9, 123_456_789)] == ["12 B", "4.1 kB", "2 GB", "123 MB"]


def plan(*calls, on="a100", **workload):
    return experiments.make("llama-tiny", on, {"kind": "pretrain", "seq_len": 64, "batch_size": 4, **workload}, calls)


def test_settling_a_concrete_plan_changes_nothing():
    e = plan("recompute:every=2", "mixed_precision")
    assert settled(e) == e


def test_asking_gives_what_predicting_gives():
    from ridgeline.predict import predict

    e = plan("recompute")
    brief, whole = ask(e), predict(e)
    assert brief.metrics["peak_bytes"].value == whole.metrics["peak_bytes"].value
    assert brief.metrics["step_time_s"].value == whole.metrics["step_time_s"].value
    assert not brief.breakdown
    with pytest.raises(UserError):
        ask(plan("recompute:every=9"))


@pytest.mark.parametrize(
    ("vocab", "layers", "degree", "schedule"),
    [(2048, 8, 4, "1f1b"), (128000, 8, 4, "1f1b"), (128000, 8, 2, "1f1b"), (32000, 7, 3, "gpipe")],
)
def test_balanced_stages_are_the_best_cut_there_is(vocab, layers, degree, schedule):
    """Against every way to cut the layers."""
    spec = {"base": "llama2-7b", "num_layers": layers, "vocab_size": vocab, "hidden_size": 1024, "num_heads": 16,
            "num_kv_heads": 16, "intermediate_size": 2816}  # fmt: skip
    workload = {"kind": "pretrain", "seq_len": 1024, "batch_size": 16, "micro_batch_size": 1}
    base = ["flash_attention", "mixed_precision"]

    def made(extra):
        return experiments.make(
            spec, f"{degree}xa100", workload, [*base, f"pipeline:degree={degree},schedule={schedule},{extra}"]
        )

    def seconds(e):
        return predict(e).metrics["step_time_s"].value

    cuts = [c for c in product(range(1, layers + 1), repeat=degree) if sum(c) == layers]
    best = min(seconds(made("layers=" + "+".join(str(n) for n in c))) for c in cuts)
    auto = made("balance=auto")
    chosen = auto.plan.option("pipeline", "layers")
    assert sum(chosen) == layers
    assert seconds(auto) == pytest.approx(best, rel=1e-6)
    assert settled(auto) == auto
    if vocab > 100_000:
        assert seconds(auto) < 0.95 * seconds(made("balance=even")), "the head's stage takes fewer layers"
