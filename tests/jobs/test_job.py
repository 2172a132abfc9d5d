"""What travels to the ranks of a job, and who does it there."""

from inspect import signature
from pkgutil import resolve_name

import pytest

from ridgeline import experiments
from ridgeline.jobs.job import (
    MODES,
    CompressOptions,
    EvaluateOptions,
    LaunchJob,
    SweepOptions,
    TrainOptions,
    train_job,
)

REQUIRED = {CompressOptions: {"out": "x"}, EvaluateOptions: {"checkpoint": "x", "text": "y"},
            SweepOptions: {"sizes": [1024]}}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_job_is_the_same_after_its_journey(mode):
    options = MODES[mode][0]
    e = experiments.make("llama-tiny", "a100", {"kind": "pretrain", "seq_len": 8, "batch_size": 1}, [])
    job = LaunchJob(mode, e, options(**REQUIRED.get(options, {}), timeout=3.0), ranks=2)
    assert LaunchJob.from_json(job.to_json()) == job


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_names_a_function(mode):
    parameters = list(signature(resolve_name(MODES[mode][1])).parameters)
    assert parameters == ["e", "options", "here"]


def test_another_backend_is_another_mode():
    e = experiments.make("llama-tiny", "2xa100", {"kind": "pretrain", "seq_len": 8, "batch_size": 2}, ["data_parallel"])
    assert train_job(e, TrainOptions()).mode == "train"
    assert train_job(e, TrainOptions(backend="hf")).mode == "train_backend"
    assert train_job(e, TrainOptions()).ranks == 2
