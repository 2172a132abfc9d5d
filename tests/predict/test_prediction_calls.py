"""What a prediction costs, as a number of calls of our own functions: times would depend on the machine."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import ridgeline
from ridgeline import experiments
from ridgeline.predict import predict

SOURCES = str(Path(ridgeline.__file__).parent)
MEGATRON = ["mixed_precision", "flash_attention", "tensor_parallel:degree=8", "sequence_parallel", "zero:stage=1"]


def calls_of(e) -> int:
    """Calls of Ridgeline's functions in a prediction, without comprehensions, which are calls up to Python 3.11."""
    found = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        code = frame.f_code
        found += event == "call" and code.co_filename.startswith(SOURCES) and not code.co_name.startswith("<")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        predict(e)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("model", "on", "work", "plan", "most"),
    [
        ("llama2-70b", "16x8xa100-80g-sxm", {"seq_len": 4096},
         [*MEGATRON, "pipeline:degree=8,schedule=interleaved,chunks=2", "recompute:policy=full"], 3_200),
        ("llama3.1-70b", "16x8xh100-sxm", {"seq_len": 8192},
         [*MEGATRON, "pipeline:degree=4", "fp8", "ring_attention:degree=2"], 4_500),
    ],
    ids=["3-D", "4-D in fp8"],
)  # fmt: skip
def test_a_training_step_is_predicted_in_few_calls(model, on, work, plan, most):
    e = experiments.make(model, on, {"kind": "pretrain", "batch_size": 128, "micro_batch_size": 1, **work}, plan)
    predict(e)  # tables of devices and techniques are read once
    assert calls_of(e) <= most
