"""The 95 % interval of a prediction: what widens it, and that `validate` judges the one that `predict` states."""

import math

import pytest

from ridgeline import experiments
from ridgeline.predict import predict
from ridgeline.validate import serving_rows
from ridgeline.validate.csv_table import CsvRow

BATCH = {"kind": "generate", "batch_size": 4, "prompt_len": 512, "output_len": 64}
LOAD = {"kind": "serve", "engine": "vllm", "requests": 128, "prompt_len": 512, "output_len": 64}


def spread(result, name):
    m = result.metrics[name]
    assert m.low == pytest.approx(m.value**2 / m.high)
    return math.log(m.high / m.value) / 1.96


def batch(engine, on="a100-80g-sxm"):
    return predict(experiments.make("llama2-7b", on, {**BATCH, "engine": engine}, []))


def served(**load):
    return predict(experiments.make("llama3.1-8b", "h100-sxm", {**LOAD, **load}, []))


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "tokens_per_s"])
def test_an_engine_that_was_not_measured_widens_it(name):
    known, assumed = batch("vllm-2023"), batch("lightllm")
    assert spread(assumed, name) > 1.2 * spread(known, name)
    assert any("no measurement of this engine" in note for note in assumed.notes)
    assert not any("no measurement of this engine" in note for note in known.notes)
    assert any("no measurement of this engine" in note for note in batch("vllm-2023", "a10g").notes)


def test_the_first_token_is_less_certain_than_the_others():
    r = batch("vllm-2023")
    assert spread(r, "ttft_s") > spread(r, "tpot_s")


def test_an_unknown_load_widens_the_time_to_first_token_by_the_share_of_waiting():
    alone, open_, stated = (
        served(concurrency=1, requests=4),
        served(concurrency=64),
        served(concurrency=64, length_cv=0.1),
    )
    assert alone.metrics["waiting_share"].value < 0.05
    assert open_.metrics["waiting_share"].value > 0.5
    assert spread(open_, "ttft_s") > 1.1 * spread(stated, "ttft_s")
    assert spread(alone, "ttft_s") == pytest.approx(spread(stated, "ttft_s"), rel=0.02)
    assert spread(open_, "tpot_s") == pytest.approx(spread(stated, "tpot_s"), rel=0.02)
    assert any("stay in step" in note for note in open_.notes)
    assert not any("stay in step" in note for note in (*alone.notes, *stated.notes))


def test_validate_judges_the_interval_that_predict_states():
    cells = {"model": "llama3.1-8b", "device": "h100-sxm", "backend": "vllm", "precision": "bf16", "tp": "1", "ep": "1"}
    cells |= {"input_len": "512", "output_len": "64", "concurrency": "16", "ttft_s": "0.1", "tpot_s": "0.01"}
    row = CsvRow(2, cells)
    result = predict(serving_rows.experiment(row))
    ttft, tpot = serving_rows.cases(row)[:2]
    assert ttft.spread == pytest.approx(spread(result, "ttft_s"))
    assert tpot.spread == pytest.approx(spread(result, "tpot_s"))
