"""The 95 % interval of a prediction: what widens it, and that `validate` judges the one that `predict` states."""

import json
import math
from pathlib import Path

import pytest

from ridgeline import experiments
from ridgeline.predict import interval, predict
from ridgeline.validate import generation_rows, serving_rows
from ridgeline.validate.csv_table import CsvRow

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
    assert spread(assumed, name) > spread(known, name)
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


SERVED = {"model": "llama3.1-8b", "device": "h100-sxm", "backend": "vllm", "precision": "bf16", "tp": "1", "ep": "1",
          "input_len": "512", "output_len": "64", "concurrency": "16", "ttft_s": "0.1", "tpot_s": "0.01"}  # fmt: skip
BATCHED = {"model": "llama2-7b", "device": "a100-80g-sxm", "tp": "1", "prompt_len": "512", "batch": "4",
           "output_len": "64", "ttft_s": "0.1", "tpot_s": "0.01"}  # fmt: skip


def judged(schema, cells):
    """(what predict says of a row's experiment, the row's cases): once for generation, for serving with either load."""
    row = CsvRow(2, cells)
    if schema is generation_rows:
        return [(predict(schema.experiment(row)), schema.cases(row))]
    cases = schema.cases(row)
    return [(predict(schema.experiment(row, inferred)), cases[at : at + 2]) for inferred, at in ((True, 0), (False, 2))]


@pytest.mark.parametrize(("schema", "cells", "why"), [
    (serving_rows, SERVED, "stay in step"),
    (serving_rows, {**SERVED, "backend": "trtllm", "concurrency": "4"}, "stay in step"),
    (serving_rows, {**SERVED, "backend": "sglang"}, "no measurement of this engine"),
    (serving_rows, {**SERVED, "precision": "int8"}, "published measurement was at hand of rtn"),
    (generation_rows, BATCHED, ""),
    (generation_rows, {**BATCHED, "device": "a10g"}, "no measurement of this engine"),
    (generation_rows, {**BATCHED, "backend": "llama.cpp", "precision": "f16", "batch": "1"}, ""),
    (generation_rows, {**BATCHED, "precision": "fp8_kv"}, "published measurement was at hand of kv_quant"),
])  # fmt: skip
def test_validate_judges_the_interval_that_predict_states(schema, cells, why):
    notes = []
    for result, cases in judged(schema, cells):
        notes += [n for n in result.notes if "wider interval" in n]
        for case in cases:
            assert case.predicted == result.metrics[case.quantity].value
            assert case.spread == pytest.approx(spread(result, case.quantity))
    assert any(why in n for n in notes) if why else not notes


def test_constants_are_those_that_the_benchmark_fits():
    """The least, to two places, with which 95 % of the rows are inside."""
    found = json.loads((RESULTS / "predict_inference.json").read_text())["interval_constants"]
    for name, both in found.items():
        outer, _, inner = name.partition(" ")
        value = getattr(interval, outer)
        assert (value[inner] if inner else value) == both["fitted"], name
