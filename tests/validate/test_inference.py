"""The inference schemas: a row becomes an experiment, its predictions are those of the predictor."""

import pytest

from ridgeline import catalog
from ridgeline.predict import predict
from ridgeline.predict.serving.engine_costs import ENGINES
from ridgeline.spec.errors import UserError
from ridgeline.validate import generation_rows as generation
from ridgeline.validate import serving_rows as serving
from ridgeline.validate.csv_table import BadCell, CsvRow
from ridgeline.validate.precisions import plan_of

GENERATION = {"model": "llama2-7b", "device": "a100-80g-sxm", "tp": "1", "prompt_len": "512", "batch": "4",
              "output_len": "128", "ttft_s": "0.1", "tpot_s": "0.02", "e2e_s": "", "source": "made up"}  # fmt: skip
SERVING = {"model": "Qwen/Qwen3-32B", "device": "h100-sxm", "backend": "trtllm", "precision": "fp8", "tp": "2",
           "pp": "1", "ep": "0", "input_len": "1024", "output_len": "128", "concurrency": "8", "ttft_s": "0.1",
           "tpot_s": "0.02", "source": "made up"}  # fmt: skip


def row(cells, **changes):
    return CsvRow(2, {**cells, **{k: str(v) for k, v in changes.items()}})


def test_generation_cases_are_the_predictors():
    got = {c.quantity: c for c in generation.cases(row(GENERATION))}
    assert set(got) == {"ttft_s", "tpot_s"}
    m = predict(generation.experiment(row(GENERATION))).metrics
    for quantity, case in got.items():
        assert case.predicted == pytest.approx(m[quantity].value)
        assert case.group == f"a100-80g-sxm llama2-7b vllm-2023 {quantity[:4]}"
        assert case.line == 2
        assert all(t >= 0 for t in case.terms)


def test_serving_cases():
    cases = serving.cases(row(SERVING))
    got = {c.quantity: c for c in cases[:2]}
    for case, inferred in zip(cases, (True, True, False, False), strict=True):
        m = predict(serving.experiment(row(SERVING), inferred)).metrics
        assert case.predicted == pytest.approx(m[case.quantity].value)
        assert case.group.endswith(", fields only") != inferred
    assert [c.alternatives for c in cases[2:]] == [None, None], "one plan is no choice between two"
    assert got["tpot_s"].alternatives == serving.cases(row(SERVING, tp=4))[1].alternatives
    assert got["tpot_s"].alternatives != serving.cases(row(SERVING, concurrency=16))[1].alternatives


def test_cases_say_what_bounds_them():
    prompt, token = generation.cases(row(GENERATION, model="llama2-70b", tp="8", batch="1", prompt_len="2048"))
    assert prompt.why.startswith("gemm ")
    assert token.why.startswith("gemm ")
    shares = [{name: int(share[:-1]) for name, share in (part.rsplit(" ", 1) for part in case.why.split(", "))}
              for case in (prompt, token)]  # fmt: skip
    assert all(1 < s["communication"] < 50 for s in shares), shares
    assert shares[0] != shares[1], "each pass has its own collectives"
    alone, crowd = (serving.cases(row(SERVING, concurrency=n))[:2] for n in (1, 64))
    assert all(case.why.startswith("gemm ") for case in (alone[1], crowd[1]))
    waits = [int(cases[0].why.removeprefix("waiting for other requests ").rstrip("%")) for cases in (alone, crowd)]
    assert waits[0] == 0
    assert 50 < waits[1] <= 100


def test_what_is_not_published_is_left_out():
    assert [c.quantity for c in generation.cases(row(GENERATION, ttft_s=""))] == ["tpot_s"]
    with pytest.raises(BadCell, match="empty"):
        generation.cases(row(GENERATION, ttft_s="?", tpot_s=""))
    with pytest.raises(BadCell, match=r"'tpot_s'.*'fast' is not a number"):
        serving.cases(row(SERVING, tpot_s="fast"))
    assert serving.cases(row(SERVING, pp="", ep="", precision=""))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "nobody/nothing-7b"}, "unknown model"),
        ({"device": "h1000"}, "unknown device"),
        ({"precision": "fp12"}, "precision 'fp12' is not known"),
        ({"backend": "ollama"}, "unknown engine 'ollama'"),
        ({"pp": 2}, "pipeline stages"),
        ({"tp": 3}, "do not divide"),
        ({"model": "meta-llama/Llama-3.1-405B", "tp": 1}, "no request fits"),
    ],
)
def test_what_cannot_be_predicted_says_why(change, says):
    with pytest.raises(UserError, match=says):
        serving.cases(row(SERVING, **change))


@pytest.mark.parametrize("device", ["l40s", "l4", "t4", "v100-16g-sxm", "b200", "h200-sxm", "h20", "rtx4090", "mi300x"])
def test_every_device_has_an_answer(device):
    model = "meta-llama/Llama-3.1-8B"
    for case in serving.cases(row(SERVING, model=model, device=device, tp=4)):
        assert 0 < case.predicted < 1000
    for case in generation.cases(row(GENERATION, device=device, tp=4)):
        assert 0 < case.predicted < 1000


@pytest.mark.parametrize("model", ["openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B-FP8", "mistralai/Mixtral-8x7B-v0.1"])
@pytest.mark.parametrize("precision", ["fp8", "fp4", "bf16"])
def test_mixtures(model, precision):
    for case in serving.cases(row(SERVING, model=model, precision=precision, backend="vllm", tp=8)):
        assert 0 < case.predicted < 100


def test_longer_than_the_model_is_still_judged():
    """Benchmarks run past a model's positions; the time is what it is."""
    assert generation.cases(row(GENERATION, prompt_len=8192))


def test_containers_without_shared_memory_wait_for_every_worker():
    """Ray's workers are sent an iteration one by one; a model on one card has none."""
    container = "mlc-ai/llm-perf-bench README.md"
    assert generation.experiment(row(GENERATION, source=container)).workload.engine == "vllm-2023-docker"
    for name in ("mlc", "vllm-2023"):
        assert generation.experiment(row(GENERATION, source=container, backend=name)).workload.engine == name
    each = ENGINES["vllm-2023-docker"].worker_s
    for tp in (1, 2, 4):
        plain, contained = (generation.cases(row(GENERATION, tp=tp, source=s))[1] for s in ("", container))
        assert contained.predicted - plain.predicted == pytest.approx(each * tp if tp > 1 else 0.0)


@pytest.mark.parametrize("empty", ["", "?"])
def test_a_row_without_a_degree_runs_on_the_fewest_devices_that_hold_the_model(empty):
    for schema, cells in ((generation, GENERATION), (serving, {**SERVING, "precision": "bf16", "backend": "vllm"})):
        large = {"model": "llama2-70b", "device": "a100-80g-sxm"}  # 138 GB of weights
        got = schema.cases(row(cells, **large, tp=empty))
        assert all(case.label.endswith("(tp not stated: 2, the fewest that fit)") for case in got)
        assert [c.predicted for c in got] == [c.predicted for c in schema.cases(row(cells, **large, tp=2))]
        assert "tp1 " in schema.cases(row(cells, model="llama2-7b", device="a100-80g-sxm", tp=empty))[0].label
        with pytest.raises(BadCell, match="column 'tp' is empty, and on none of 1, 2, 4, 8 devices does it fit"):
            schema.cases(row(cells, model="llama3.1-405b", device="t4", tp=empty))
    with pytest.raises(BadCell, match="column 'tp' is empty"):
        generation.cases(row(GENERATION, tp=empty, pp=2))


def test_a_stated_degree_that_does_not_fit_is_judged_and_said():
    got = generation.cases(row(GENERATION, model="llama2-70b", device="a100-80g-sxm", tp=1))
    assert len(got) == 2
    assert all("tp1" in case.label and "(does not fit: needs 1" in case.label for case in got)
    assert not any("fit" in case.label for case in generation.cases(row(GENERATION)))


def test_rows_of_transformers_attend_as_its_default_does():
    """By PyTorch's ``scaled_dot_product_attention`` (since 4.36); other engines' plans need not name it."""
    llama = catalog.model("llama2-7b")
    assert plan_of(llama, "bf16", "hf") == plan_of(llama, "bf16", "transformers") == ["flash_attention"]
    assert plan_of(llama, "int8", "hf") == ["flash_attention", "rtn:bits=8"]
    assert plan_of(llama, "bf16", "vllm") == plan_of(llama, "bf16", "") == []
