"""Generation and serving under the profiler: rows add up, FLOPs are the counter's, and slow modules show."""

from collections import Counter

import pytest
import torch
from tests.training import MODEL
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import catalog
from ridgeline.jobs.job import DissectOptions, RankContext
from ridgeline.measure import bench
from ridgeline.measure.cells.generation_cell import timed_generation
from ridgeline.measure.dissect import dissect_cell
from ridgeline.measure.dissect_generation import evenly
from ridgeline.nn.kernels import native
from ridgeline.nn.model.init import build
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.predict import predict
from ridgeline.predict.predict import serving_prompts
from ridgeline.report.dissection import parts_of, parts_table
from ridgeline.serve.scheduler import Scheduler
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Generate, Serve
from ridgeline.techniques.matrix import CPU

PROMPT, OUTPUT, BATCH = 12, 4, 3
MODULES = {"embedding", "qkv", "rope", "attention", "output", "mlp", "norm", "residual", "head", "sampling"}


def experiment(workload):
    return Experiment(model=MODEL, cluster=Cluster(device=CPU), workload=workload)


def generation(**work):
    return experiment(Generate(**{"prompt_len": PROMPT, "output_len": OUTPUT, "batch_size": BATCH, **work}))


def serving(**work):
    return experiment(Serve(**{"prompt_len": PROMPT, "output_len": OUTPUT, "requests": 4, "kv_cache_bytes": 1 << 20,
                               **work}))  # fmt: skip


def dissect(e, **options):
    return Result.model_validate(dissect_cell(e, DissectOptions(**options), RankContext(torch.device("cpu"))))


def added_up(r, metric):
    assert sum(row.seconds for row in r.breakdown) == pytest.approx(r.metrics[metric].value)
    assert all(c.passed for c in r.checks), [c.name for c in r.checks if not c.passed]


@pytest.fixture(scope="module")
def generated():
    return dissect(generation(), profiled=1)


def test_a_generations_rows_add_up_and_hold_every_module(generated):
    added_up(generated, "profiled_e2e_s")
    seen = {tuple(name.split("/")) for name in parts_of(generated)}
    for phase in ("prefill", "decode"):
        assert {(phase, m) for m in MODULES} <= seen
    assert generated.metrics["profiler_overhead"].value == pytest.approx(
        generated.metrics["profiled_e2e_s"].value / generated.metrics["e2e_s"].value
    )


def test_its_flops_are_those_that_torch_counts(generated):
    model = build(MODEL, torch.device("cpu"), torch.float32, 0)
    model.set_attention("naive")
    prompt = torch.zeros(BATCH, PROMPT, dtype=torch.long)
    with FlopCounterMode(display=False) as whole, torch.inference_mode():
        timed_generation(model, prompt, OUTPUT)
    with FlopCounterMode(display=False) as first, torch.inference_mode():
        timed_generation(model, prompt, 1)
    counted = Counter()
    for row in generated.breakdown:
        counted[row.phase] += row.flops
    assert counted["prefill"] == first.get_total_flops()
    assert counted["decode"] == pytest.approx(whole.get_total_flops() - first.get_total_flops())
    projections = [r for r in generated.breakdown if r.operator == "mm" and r.module == "attention.q_proj"]
    per_token = 2 * MODEL.hidden_size * MODEL.num_heads * MODEL.head_dim * MODEL.num_layers
    assert {r.phase: r.flops for r in projections} == {
        "prefill": BATCH * PROMPT * per_token, "decode": pytest.approx(BATCH * (OUTPUT - 1) * per_token)
    }  # fmt: skip


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_compiled_kernels_are_operators_of_their_modules():
    before = native.lowbit_linear
    r = dissect(generation(output_len=4).model_copy(update={"plan": Plan.parse(["rtn:bits=8"])}), profiled=1)
    added_up(r, "profiled_e2e_s")
    assert native.lowbit_linear is before
    calls = {(x.phase, x.module): x.count for x in r.breakdown if x.operator == "lowbit_linear"}
    assert calls[("prefill", "mlp.up_proj")] == MODEL.num_layers
    assert calls[("decode", "attention.q_proj")] == 3 * MODEL.num_layers
    assert {x.kind for x in r.breakdown if x.operator == "lowbit_linear"} == {"gemm"}


def test_steps_that_are_not_profiled_are_stood_for(monkeypatch):
    monkeypatch.setattr("ridgeline.measure.dissect_generation.STEPS", 2)
    sampled = dissect(generation(output_len=9), profiled=1)
    calls = {r.phase: r.count for r in sampled.breakdown if (r.module, r.operator) == ("mlp.up_proj", "mm")}
    assert calls == {"prefill": MODEL.num_layers, "decode": 8 * MODEL.num_layers}
    assert any("2 of 8 decode steps" in note for note in sampled.notes)


def test_evenly_spaced():
    assert evenly(5, 9) == [0, 1, 2, 3, 4]
    assert evenly(8, 2) == [2, 6]
    assert evenly(3, 0) == [1]
    assert evenly(0, 4) == []


@pytest.mark.nightly  # how rows add up has tests of its own
def test_a_module_made_slower_shows_there(monkeypatch):
    plain, much = RMSNorm.forward, torch.ones(600, 600)

    def slow(self, x):
        much @ much
        return plain(self, x)

    monkeypatch.setattr(RMSNorm, "forward", slow)
    for r, passes in ((dissect(generation(), profiled=1), OUTPUT), (dissect(serving(concurrency=1)), OUTPUT)):
        rows = [x for x in r.breakdown if x.operator == "mm" and "norm" in x.module]
        layers = MODEL.num_layers
        assert {x.module for x in rows} == {"attention_norm", "mlp_norm", "norm"}
        per_pass = sum(x.count for x in rows) / (passes if "profiled_e2e_s" in r.metrics else 1)
        assert per_pass == pytest.approx(2 * layers + 1)
        assert sum(x.flops for x in rows) == pytest.approx(sum(x.count for x in rows) * 2 * 600**3)
        products = [x for x in r.breakdown if x.operator == "mm" and "norm" not in x.module]
        assert sum(x.seconds for x in rows) > 2 * sum(x.seconds for x in products)


@pytest.mark.parametrize("work", [{"concurrency": 2}, {"rate": 300.0}], ids=str)
def test_servings_rows_add_up_and_know_the_hosts_part(work):
    r = dissect(serving(**work))
    added_up(r, "profiled_step_s")
    seen = {tuple(name.split("/")) for name in parts_of(r)}
    for phase in ("prefill", "decode"):
        assert {(phase, m) for m in MODULES} <= seen
    assert {("host", m) for m in ("requests", "scheduler", "batch", "engine")} <= seen
    steps, metrics = r.metrics["steps"].value, r.metrics
    assert metrics["prefill_steps"].value + metrics["decode_steps"].value == steps
    assert metrics["batch_mean"].value * steps == 4 * OUTPUT
    products = sum(row.flops for row in r.breakdown if row.operator == "mm" and row.module == "mlp.up_proj")
    tokens = 4 * (PROMPT + OUTPUT - 1)  # the last token of each request is not read
    assert products * steps == pytest.approx(2 * tokens * MODEL.hidden_size * MODEL.intermediate_size * 2)


def test_a_slow_scheduler_is_the_hosts(monkeypatch):
    plain = Scheduler.schedule

    def slow(self):
        sum(i * i for i in range(300_000))
        return plain(self)

    monkeypatch.setattr(Scheduler, "schedule", slow)
    r = dissect(serving(concurrency=4))
    longest = max((row for row in r.breakdown if row.kind != "unattributed"), key=lambda row: row.seconds)
    assert (longest.phase, longest.module) == ("host", "scheduler")


def test_predicted_prompts_are_the_loads():
    """Rows of prompts per mean iteration, times iterations: the FLOPs of all prompts, by arithmetic."""
    w = Serve(prompt_len=64, output_len=8, requests=16, concurrency=4)
    e = Experiment(model=catalog.model("llama2-7b"), cluster=catalog.cluster("a100-80g-sxm"), workload=w)
    batch = predict(e).metrics["batch_mean"].value
    rows = serving_prompts(e)
    assert {r.phase for r in rows} == {"prefill"}
    down = next(r for r in rows if r.operator == "mlp.down_proj")
    iterations = 16 * 8 / batch
    m = e.model
    assert down.flops * iterations == pytest.approx(16 * 64 * 2 * m.hidden_size * m.intermediate_size * m.num_layers)
    one = serving_prompts(e.model_copy(update={"workload": w.model_copy(update={"concurrency": 1})}))
    alone = next(r for r in one if r.operator == "mlp.down_proj")
    assert 0 < down.seconds * iterations < alone.seconds * 16 * 8, "four prompts at once are faster than one by one"


def test_predicted_and_measured_stand_in_one_table(generated):
    predicted = predict(generation())
    table = parts_table(predicted, generated)
    by = {tuple(row[:2]): row for row in table.rows}
    for module in MODULES - {"sampling"}:
        assert "–" not in by["decode", module], module
    assert by["decode", "sampling"][2] == "–"


def test_a_divided_engine_in_processes_of_its_own(tmp_path):
    w = Serve(prompt_len=PROMPT, output_len=OUTPUT, requests=4, concurrency=2, kv_cache_bytes=1 << 20)
    cluster = Cluster(device=CPU, devices_per_node=2)
    e = Experiment(model=MODEL, cluster=cluster, workload=w, plan=Plan.parse(["tensor_parallel:degree=2"]))
    predicted, measured = bench.dissect(e, tmp_path / "trace.json", lambda message: None)
    added_up(measured, "profiled_step_s")
    phases = {row.phase for row in measured.breakdown}
    assert {"prefill", "decode", "host", "communication"} <= phases
    assert {"prefill", "decode", "communication"} <= {row.phase for row in predicted.breakdown}
    calls = sum(r.count for r in measured.breakdown if r.phase == "communication" and r.operator == "allreduce_")
    assert calls == pytest.approx(2 * MODEL.num_layers), "two sums in each layer of every step"
    assert "module::layers.0.attention" in (tmp_path / "trace.json").read_text()


def test_what_is_not_dissected_says_so():
    work = {"kind": "compress", "checkpoint": "x"}
    with pytest.raises(UserError, match="not dissected"):
        bench.require_dissectible(Experiment(model=MODEL, cluster=Cluster(device=CPU), workload=work))
