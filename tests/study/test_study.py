"""Studies: cells are the experiments that they name, tables hold their numbers, findings are judged by their bounds."""

import csv
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline import catalog, experiments
from ridgeline.cli import app
from ridgeline.predict import predict
from ridgeline.report.charts.study_charts import page_charts
from ridgeline.report.dissection import parts_of
from ridgeline.report.export import export, load_any
from ridgeline.report.study_tables import study_csv, study_html, study_markdown, table_pages
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Result
from ridgeline.spec.study import Study
from ridgeline.store import Store
from ridgeline.study import load_study, run_study
from ridgeline.study import run as study_run
from ridgeline.study.cells import LARGEST, StudyScale, experiment_of, largest
from ridgeline.techniques.registry import registry

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))
SMALL = """
name = "small"
base = ["mixed_precision"]

[platforms]
fast = "8xa100-80g-sxm"

[plans]
naive = ["data_parallel"]
z3 = ["zero:stage=3"]

[[tables]]
name = "train"
workload = { kind = "pretrain", seq_len = 350 }
axes.platform = ["fast", "8xrtx4090"]
axes.plan = ["naive", "z3", "sequence_parallel"]
axes.model = ["llama2-7b"]
axes.each = [1, "max"]
rows = ["plan"]
columns = "platform"

[[tables]]
name = "phases"
workload = { kind = "pretrain", seq_len = 350 }
axes = { plan = ["z3"], platform = ["fast"], each = [1] }
rows = ["plan"]
parts = "phase"

[[tables]]
name = "reduce"
operator = "all_reduce"
axes = { platform = ["fast"], ranks = [2, 8], bytes = [65536, 1073741824] }
rows = ["bytes"]
columns = "ranks"
show = ["operator_s", "bandwidth_bytes_per_s"]

[[tables]]
name = "serve"
workload = { kind = "serve", concurrency = 8, requests = 24, prompt_len = 64, output_len = 16 }
base = []
axes = { platform = ["fast"], engine = ["vllm-2023", "tgi"], plan = ["tensor_parallel:degree=8"] }
rows = ["engine"]
cdf = "e2e"

[[findings]]
says = "z3 is slower"
reported = "slower"
of = { table = "train", platform = "fast", plan = "z3", each = 1 }
over = { table = "train", platform = "8xrtx4090", plan = "z3", each = 1 }
low = 1.0

[[findings]]
says = "never"
reported = "impossible"
of = { table = "train", platform = "fast", plan = "z3", each = 1 }
metric = "mfu"
high = 0.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(file):
    return run_study(load_study(file), file.parent, workers=1)


def cell(found, table, **axes):
    (one,) = (c for c in found.cells if c.table == table and axes.items() <= c.axes.items())
    return one


def test_a_worker_that_is_killed_costs_nothing_but_time(file, found, monkeypatch):
    here, made = os.getpid(), study_run.experiment_of

    def dies(study, table, axes, scale=None):
        if os.getpid() != here and axes.get("plan") == "z3":
            os._exit(9)
        return made(study, table, axes, scale)

    monkeypatch.setattr(study_run, "experiment_of", dies)
    labels = []
    again = run_study(load_study(file), file.parent, workers=2, done=labels.append)
    assert [c.predicted for c in again.cells] == [c.predicted for c in found.cells]
    assert len(labels) == len(again.cells)


def test_a_cell_is_its_experiment(found):
    one = cell(found, "train", platform="fast", plan="z3", each=1)
    work = {"kind": "pretrain", "seq_len": 350, "batch_size": 8}
    r = predict(experiments.make("llama2-7b", "8xa100-80g-sxm", work, ["mixed_precision", "zero:stage=3"]))
    assert one.status == "ok"
    assert one.predicted["tokens_per_s"] == r.metrics["tokens_per_s"].value
    assert one.predicted["peak_bytes"] == r.peak_bytes
    shown = CliRunner().invoke(app, [*one.command.split()[1:], "--json"])
    assert json.loads(shown.stdout)["metrics"]["tokens_per_s"]["value"] == one.predicted["tokens_per_s"]


def test_what_cannot_be_is_a_cell_with_its_reason(found):
    refused = cell(found, "train", platform="fast", plan="sequence_parallel", each=1)
    assert refused.status == "refused"
    assert "tensor" in refused.reason
    large = cell(found, "train", platform="8xrtx4090", plan="naive", each=1)
    assert large.status == "infeasible"
    assert "GiB" in large.reason


def test_the_largest_batch_fits_and_more_does_not(found):
    one = cell(found, "train", platform="fast", plan="z3", each="max")
    each = one.batch_size // 8
    cluster = catalog.cluster("8xa100-80g-sxm")
    work = {"kind": "pretrain", "seq_len": 350}

    def fits(n):
        plan = ["mixed_precision", "zero:stage=3"]
        return predict(experiments.make("llama2-7b", cluster, {**work, "batch_size": 8 * n}, plan)).status == "ok"

    assert fits(each)
    assert not fits(2 ** (each.bit_length()))
    assert not fits(int(1.25 * each) + 1)
    assert largest("llama2-70b", cluster, work, ["data_parallel"], LARGEST).batch_size == 8, (
        "one each, which is too much"
    )


def test_parts_add_up_to_the_step(found):
    parts = cell(found, "phases", plan="z3").parts
    assert {"forward", "backward", "optimizer"} <= set(parts)
    work = {"kind": "pretrain", "seq_len": 350, "batch_size": 8}
    r = predict(experiments.make("llama2-7b", "8xa100-80g-sxm", work, ["mixed_precision", "zero:stage=3"]))
    assert sum(parts.values()) == pytest.approx(r.metrics["step_time_s"].value, rel=1e-6)
    modules = parts_of(r, "module")
    assert sum(modules.values()) == pytest.approx(sum(parts.values()))
    assert {"forward/qkv", "forward/rope", "forward/attention", "forward/output", "forward/mlp", "forward/norm",
            "forward/head", "forward/loss", "forward/embedding", "backward/qkv"} <= set(modules)  # fmt: skip


def test_operators_alone(found):
    few = cell(found, "reduce", ranks=8, bytes=65536).predicted
    many = cell(found, "reduce", ranks=8, bytes=1073741824).predicted
    assert few["operator_s"] < many["operator_s"]
    assert few["bandwidth_bytes_per_s"] < many["bandwidth_bytes_per_s"] < catalog.device("a100-80g-sxm").link.bandwidth
    assert many["bandwidth_bytes_per_s"] == pytest.approx(2 * 7 / 8 * 1073741824 / many["operator_s"])


def test_findings(found):
    first, second = found.findings
    a = cell(found, "train", platform="fast", plan="z3", each=1).predicted["tokens_per_s"]
    b = cell(found, "train", platform="8xrtx4090", plan="z3", each=1).predicted["tokens_per_s"]
    assert first.predicted == pytest.approx(a / b)
    assert (first.verdict, second.verdict) == ("agrees", "disagrees")
    assert first.measured_verdict == "not known"


def test_at_a_scale_only_plans_are_compared(file):
    catalog.allow_unprobed()
    study = load_study(file)
    plans = study.findings[0].model_copy(update={
        "of": {"table": "train", "platform": "fast", "plan": "z3", "each": 1},
        "over": {"table": "train", "platform": "fast", "plan": "naive", "each": 1},
    })  # fmt: skip
    scale = StudyScale("llama-tiny", 2)
    small = scale.study(study)
    todo = [study_run.PlannedCell(table, axes) for table in small.tables for axes in small.cells(table)]
    cells = [study_run.predicted_cell(small, place, scale) for place in todo]
    assert {c.axes["platform"] for c in cells if "platform" in c.axes} == {"this machine"}
    assert len({json.dumps([c.table, c.axes]) for c in cells}) == len(cells)
    verdicts = [study_run.check(f, cells, scale).verdict for f in (plans, *study.findings)]
    assert [v == "not known" for v in verdicts] == [False, True, True]  # machines, and no ratio at all


def test_a_finding_of_no_cell_or_of_many_is_a_mistake(file):
    study = load_study(file)
    cells = run_study(study, file.parent, workers=1).cells
    for plan in ("z9", None):
        place = {"table": "train", "platform": "fast", "each": 1, **({"plan": plan} if plan else {})}
        wrong = study.findings[0].model_copy(update={"of": place})
        with pytest.raises(UserError, match="cells are"):
            study_run.check(wrong, cells)


def test_a_metric_that_does_not_exist_is_a_mistake(file, tmp_path):
    study = load_study(file)
    table, finding = study.tables[0], study.findings[0]
    wrong = table.model_copy(update={"show": ["tokens_per_sec"]})
    for changed in (
        study.model_copy(update={"tables": [wrong, *study.tables[1:]]}),
        study.model_copy(update={"findings": [finding.model_copy(update={"metric": "tokens_per_sec"})]}),
    ):
        with pytest.raises(UserError, match=r"unknown metric 'tokens_per_sec'[\s\S]*'tokens_per_s'"):
            run_study(changed, tmp_path, workers=1)


def test_processes_give_what_one_gives(file, found):
    again = run_study(load_study(file), file.parent, workers=2)
    assert again.cells == found.cells
    assert again.findings == found.findings


def test_tables_hold_every_cell(found):
    (spec,) = (t for t in found.tables if t.name == "train")
    pages = list(table_pages(found, spec))
    assert len(pages) == 2  # each = 1 and the largest
    (line,) = (r for r in pages[0].rows if r[0] == "sequence_parallel")
    assert set(line[1:]) == {"refused"}
    assert "does not fit" in next(r for r in pages[0].rows if r[0] == "naive")


def test_files(found, tmp_path):
    files = {f.stem: f for f in study_csv(found, tmp_path)}
    rows = list(csv.DictReader(files["train"].open()))
    assert len(rows) == 12
    assert float(rows[0]["tokens_per_s"]) == found.cells[0].predicted["tokens_per_s"]
    text = study_html(found, tmp_path / "s.html").read_text()
    assert "z3 is slower" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "z3 is slower" in study_markdown(found)
    export(found, "json", tmp_path / "s.json")
    assert load_any(tmp_path / "s.json") == found


def charts(found, name):
    (spec,) = (t for t in found.tables if t.name == name)
    return page_charts(spec, [c for c in found.cells if c.table == name], name, name)


def test_bars_and_lines_are_the_cells(found):
    (bars,) = page_charts(
        found.tables[0], [c for c in found.cells if c.table == "train" and c.axes["each"] == 1], "", "x"
    )
    drawn = {t["name"]: dict(zip(t["text"], t["x"], strict=True)) for t in bars.figure["data"]}
    one = cell(found, "train", platform="fast", plan="z3", each=1)
    assert drawn["fast"]["z3 fast, predicted"] == pytest.approx(one.predicted["tokens_per_s"] / 1e3)
    assert "naive fast, predicted" not in drawn["fast"]  # does not fit
    sizes = found.tables[2]
    many = [c for c in run_cells(found, "reduce") if c.axes["ranks"] == 8]
    more = [c.model_copy(update={"axes": {**c.axes, "bytes": 4 * c.axes["bytes"]}}) for c in many]
    (lines,) = page_charts(sizes, [*more, *many], "", "x")
    (line,) = lines.figure["data"]
    assert line["x"] == sorted(line["x"])
    assert len(line["x"]) == 4
    assert line["y"][0] == many[0].predicted["bandwidth_bytes_per_s"]
    assert lines.figure["layout"]["xaxis"]["type"] == "log"


def run_cells(found, table):
    return [c for c in found.cells if c.table == table]


def test_parts_are_stacked(found):
    (chart,) = charts(found, "phases")
    (one,) = run_cells(found, "phases")
    seconds = {t["name"]: t["x"][0] for t in chart.figure["data"]}
    assert sum(seconds.values()) == pytest.approx(sum(one.parts.values()) / unit_of(chart), rel=1e-6)
    assert list(seconds)[:2] == ["forward", "backward"]


def unit_of(chart):
    return {"ms": 1e-3, "s": 1.0}[chart.figure["layout"]["xaxis"]["title"]["text"].rpartition(", ")[2]]


def test_the_distribution_of_latencies(found):
    vllm = cell(found, "serve", engine="vllm-2023")
    assert len(vllm.latencies) == 101
    assert vllm.latencies == sorted(vllm.latencies)
    assert vllm.latencies[50] == pytest.approx(vllm.predicted["e2e_p50_s"])
    assert vllm.latencies[99] == pytest.approx(vllm.predicted["e2e_p99_s"])
    (chart,) = charts(found, "serve")
    assert [t["name"] for t in chart.figure["data"]] == ["vllm-2023", "tgi"]
    curve = chart.figure["data"][0]
    assert (curve["y"][0], curve["y"][-1]) == (0, 100)
    assert curve["x"][-1] == pytest.approx(vllm.latencies[-1] / unit_of(chart))


def test_a_study_in_a_notebook(found, tmp_path):
    frame = found.to_pandas()
    assert len(frame) == len(found.cells)
    one = frame[(frame.table == "train") & (frame.platform == "fast") & (frame.plan == "z3") & (frame.each == 1)]
    assert list(one.techniques) == [" ".join(cell(found, "train", platform="fast", plan="z3", each=1).plan)]
    assert "z3 is slower" in found._repr_html_()
    plot = found.plot()
    assert plot.save(tmp_path / "s.html").read_text() == study_html(found, tmp_path / "t.html").read_text()
    assert "<iframe" in plot._repr_html_()


def test_the_store_keeps_a_study(found, tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    key = store.add_study(found)
    assert store.get(key) == found
    (line,) = store.list()
    assert (line.kind, line.name, line.status) == ("study", "small", "1 of 2 findings")


def test_command_line(file, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["study", str(file), "--csv", "out", "--report", "r.html", "--json"])
    assert done.exit_code == 0
    key = Store().list()[0].id
    assert Study.model_validate_json(done.stdout).name == "small"
    assert (tmp_path / "out" / "train.csv").is_file()
    assert CliRunner().invoke(app, ["report", key, "-o", "again.html"]).exit_code == 0
    with pytest.raises(UserError, match="is a study, not one result"):
        CliRunner().invoke(app, ["compare", key, key], catch_exceptions=False)
    assert (tmp_path / "again.html").read_text() == (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('rows = ["plan"]', 'rows = ["plam"]'), "plam"),
        (("8xrtx4090", "8xrtx9090"), "rtx9090"),
        (('table = "train"', 'table = "strain"'), "strain"),
        (("[[tables]]", "[[table]]"), "tables"),
        (("seq_len = 350 }", "seq_len = }"), "not valid TOML"),
        (("llama2-7b", "lama2-7b"), "unknown model 'lama2-7b'"),
        (("zero:stage=3", "zerro:stage=3"), "unknown technique 'zerro'"),
        (("zero:stage=3", "zero:stge=3"), "unknown option 'stge'"),
        (('"sequence_parallel"', '"sequence_paralel"'), "unknown technique 'sequence_paralel'"),
        (('"mixed_precision"', '"mixed_precison"'), "unknown technique 'mixed_precison'"),
        (("seq_len = 350", "seqlen = 350"), "unknown key 'seqlen'"),
        (("axes = { plan", "axes = { lrr = [1], plan"), "unknown key 'lrr'"),
        (('kind = "serve"', 'kind = "sreve"'), "unknown kind 'sreve'"),
        (('plan = "z3", each = 1 }\nmetric', 'plan = "z4", each = 1 }\nmetric'), "which 0 cells are"),
        ((SMALL, "model = 'gpt2'\n[plans]\na = []"), "is an experiment, not a study"),
    ],
)
def test_mistakes_are_one_message(tmp_path, change, says):
    path = tmp_path / "wrong.toml"
    path.write_text(SMALL.replace(*change), encoding="utf-8")
    with pytest.raises(UserError, match=says):
        load_study(path)


def test_no_file():
    with pytest.raises(UserError, match="no study file"):
        load_study(Path("nowhere.toml"))


# ---- on this machine ------------------------------------------------------------------------------------------------


def test_a_scale_shrinks_everything(file):
    study = load_study(ROOT / "studies" / "dissecting.toml")
    scale = StudyScale("llama-tiny", 2)
    for table in study.tables:
        if table.operator is None:
            place = next(iter(study.cells(table)))
            try:
                e = experiment_of(study, table, scale.place(place), scale)
            except UserError:
                continue  # `local` without a profile
            assert e.model.name == "llama-tiny"
            assert e.world <= 2


def test_measured_beside_predicted(file, tmp_path, monkeypatch):
    catalog.allow_unprobed()
    study = load_study(file)
    (table,) = (t for t in study.tables if t.name == "train")
    table = table.model_copy(update={"axes": {**table.axes, "each": [1]}})
    small = study.model_copy(update={"tables": [table], "findings": []})
    scale = StudyScale("llama-tiny", 2, seq_len=16)
    asked = []
    measure = study_run.measure_plan
    monkeypatch.setattr(study_run, "measure_plan", lambda e, **o: asked.append(e.id) or measure(e, **o))
    found = run_study(small, tmp_path, workers=1, scale=scale)
    done = [c for c in found.cells if c.measured_status == "ok"]
    assert {c.axes["plan"] for c in done} >= {"naive"}
    assert all(c.measured["tokens_per_s"] > 0 for c in done)
    assert len(asked) == len(set(asked)), "platforms that are the same machine here are measured once"
    again = run_study(small, tmp_path, workers=1, scale=scale)
    assert len(asked) == len(set(asked)), "measured cells are kept"
    assert [c.measured for c in again.cells] == [c.measured for c in found.cells]
    first, _ = sorted((tmp_path / "cells").iterdir())
    old = Result.load(first)
    old.environment["code"] = "another"
    first.write_text(old.to_json())
    asked.clear()
    run_study(small, tmp_path, workers=1, scale=scale)
    assert asked == [first.stem], "what other code measured is measured again, once"


def test_modules_of_inference_are_measured(tmp_path):
    """The paper's table of prefill and decode at a small scale: a plan that divides the model runs undivided."""
    catalog.allow_unprobed()
    study = load_study(ROOT / "studies" / "dissecting.toml")
    (table,) = (t for t in study.tables if t.name == "inference")
    work = {**table.workload, "prompt_len": 16, "output_len": 4, "batch_size": 2}
    table = table.model_copy(update={"workload": work, "axes": {**table.axes, "model": ["llama2-7b"]}})
    small = study.model_copy(update={"tables": [table], "findings": []})
    found = run_study(small, tmp_path, workers=1, scale=StudyScale("llama-tiny", 2))
    assert {c.measured_status for c in found.cells} == {"ok"}
    assert len({json.dumps(c.measured_parts) for c in found.cells}) == 1, "measured once"
    both = set(found.cells[0].parts) & set(found.cells[0].measured_parts)
    for phase in ("prefill", "decode"):
        assert {f"{phase}/{m}" for m in ("qkv", "rope", "attention", "output", "mlp", "norm", "head")} <= both


# ---- the studies that come with the project --------------------------------------------------------------------------


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_studies_load(path):
    assert load_study(path).tables


def test_the_survey_has_every_technique():
    study = load_study(ROOT / "studies" / "survey.toml")
    shown = {c["plan"] for t in study.tables for c in study.cells(t)}
    for name, cls in registry().items():
        assert name in shown or not cls.card.tasks & {"pretrain", "finetune", "serve", "generate"}, name


@pytest.mark.nightly
def test_the_paper_in_one_command():
    """All its tables; what is predicted wrongly is said so, and is what docs/accuracy.md lists."""
    start = time.monotonic()
    study = load_study(ROOT / "studies" / "dissecting.toml")
    found = run_study(study, Path("unused"))
    assert found.seconds <= time.monotonic() - start
    names = "pretraining megatron scaling phases modules finetuning serving rates inference gemm copies all_reduce"
    assert {t.name for t in found.tables} >= set(names.split())
    assert not [c for c in found.cells if c.status not in ("ok", "infeasible")]
    assert all(f.predicted is not None for f in found.findings)
    reasons = {f.says: f.note for f in study.findings}  # without what is said of cells that do not fit
    assert not [f.says for f in found.findings if f.verdict == "disagrees" and not reasons[f.says]], "with the reason"
