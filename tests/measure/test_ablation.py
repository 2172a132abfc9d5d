"""A whole ablation in processes of its own: interrupted, hit by the out-of-memory killer, resumed, and merged."""

import signal
import sys
from pathlib import Path

import psutil
import pytest
import tomli_w
import torch
from tests.training import MODEL, experiment

from ridgeline import catalog, cli
from ridgeline.experiments import load_ablation
from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.ablate import (
    cell_file,
    cell_key,
    forget,
    order,
    profile_note,
    require_local,
    run_ablation,
    warm_started,
)
from ridgeline.measure.cells.training_cell import training_cell
from ridgeline.measure.merge import merge, sameness
from ridgeline.spec.ablation import Ablation, CellRef, Outcome
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Call, Plan
from ridgeline.spec.result import Metric, Result
from ridgeline.spec.workload import Generate
from ridgeline.techniques.matrix import CPU

TOKENS = 4 * 16


@pytest.fixture
def spec(corpus, tmp_path):
    catalog.save_device(CPU)
    table = {
        "name": "tiny", "on": "local", "model": MODEL.model_dump(exclude_none=True, exclude_defaults=True),
        "workload": {"kind": "pretrain", "data": str(corpus), "seq_len": 16, "batch_size": 4, "steps": 4},
        "measure": {"repeats": 2},
        "plans": {
            "baseline": [],
            "flash": ["flash_attention"],
            "zero": {"with": ["zero:stage=2"], "on": "2xlocal"},
        },
    }  # fmt: skip
    file = tmp_path / "tiny.toml"
    file.write_text(tomli_w.dumps(table))
    return load_ablation(file)


def test_an_ablation_survives_what_happens_to_it(spec, tmp_path, monkeypatch):
    folder = tmp_path / "cells and results"
    cells = order(list(spec.plans), 2)
    events = []

    def times():
        files = {c: cell_file(folder, spec, c) for c in cells}
        return {c: f.stat().st_mtime_ns for c, f in files.items() if f.is_file()}

    # Ctrl-C after two cells.
    def interrupt(cell, message):
        if message.get("done") and cell == cells[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ablation(spec, folder, watch=interrupt)
    first = times()
    assert list(first) == cells[:2]

    # The same again; the out-of-memory killer takes one rank of the next cell.
    def kill(cell, message):
        events.append((cell, message))
        if cell == cells[2] and message.get("step") == 1:
            ranks = psutil.Process().children(recursive=True)
            next(p for p in ranks if p.name() == "rank 1").send_signal(signal.SIGKILL)

    told = []
    hit = run_ablation(spec, folder, watch=kill, announce=lambda predicted: told.append((list(predicted), len(events))))
    assert told == [(list(spec.plans), 0)], "predictions come before anything is measured"
    assert [c for c, m in events if m.get("cached")] == cells[:2]
    assert [c for c, m in events if m.get("done")] == cells[2:]
    second = times()
    assert {c: second[c] for c in cells[:2]} == first
    died = Result.load(cell_file(folder, spec, cells[2]))
    assert (died.status, died.name) == ("oom", "zero")
    assert "killed" in died.reason
    zero = hit.outcomes[2]
    assert zero.measured.status == "ok", "the other repeat stands"
    assert any("1 of 2 processes failed: oom" in note for note in zero.measured.notes)

    # Once more: only what failed is measured again.
    events.clear()
    done = run_ablation(spec, folder, command="ridgeline ablate tiny.toml", watch=lambda c, m: events.append((c, m)))
    assert [c for c, m in events if m.get("done")] == [cells[2]]
    third = times()
    assert [c for c in cells if third[c] != second[c]] == [cells[2]]
    check_ablation(spec, done)
    assert Ablation.load(folder / "ablation.json") == done

    # Intervals that are too wide for a verdict are said so, with how to repeat.
    monkeypatch.setattr("ridgeline.spec.ablation.NOISY", 0.0)
    (note,) = [n for n in run_ablation(spec, folder, command="ridgeline ablate x.toml").notes if "no verdict on" in n]
    assert "no verdict on flash, zero" in note
    assert "ridgeline ablate x.toml --fresh" in note


def check_ablation(spec, done):
    assert [o.name for o in done.outcomes] == ["baseline", "flash", "zero"]
    assert done.outcomes[0].verdict == "baseline"
    for o in done.outcomes:
        m = o.measured
        assert (m.status, o.predicted.status) == ("ok", "ok")
        assert len(m.samples) == 8
        assert {s.repeat for s in m.samples} == {0, 1}
        assert m.samples[0].warmup, "the first step is never steady"
        # Throughput balances: tokens, steps, time and rate.
        assert {s.tokens for s in m.samples} == {TOKENS}
        rate, step = m.metrics["tokens_per_s"], m.metrics["step_time_s"]
        assert rate.value * step.value == pytest.approx(TOKENS)
        assert rate.low <= rate.value <= rate.high
        assert rate.value == pytest.approx(m.metrics["tokens_per_s_per_device"].value * m.environment["ranks"])
        assert next(c for c in m.checks if c.name.startswith("repeats")).passed
        assert m.peak_bytes > 0
        assert m.experiment_id == spec.plans[o.name].id == o.predicted.experiment_id
        assert all(c.passed for c in o.checks)
        assert len(o.checks) == (o.name != "baseline")
        assert o.verdict in ("baseline", "faster", "slower", "no difference")
        assert o.speedup.low <= o.speedup.value <= o.speedup.high
    assert done.outcomes[2].memory_ratio < 1, "half of the states, half of the rows"


def test_another_warm_start_is_trained_anew(spec, tmp_path):
    def started(steps):
        measure = spec.measure.model_copy(update={"warm_start": steps})
        plans = warm_started(spec.model_copy(update={"measure": measure}), tmp_path).plans
        (checkpoint,) = {e.workload.checkpoint for e in plans.values()}
        return Path(checkpoint) / "model.safetensors", plans["baseline"].id

    assert spec.plans["baseline"].id  # what the command line does first
    one, two = started(1), started(2)
    assert one[0].read_bytes() != two[0].read_bytes()
    assert one[1] != two[1], "cells of one must not be taken for those of the other"
    trained = one[0].stat().st_mtime_ns
    assert started(1) == one
    assert one[0].stat().st_mtime_ns == trained


def test_measuring_afresh_removes_cells_and_nothing_else(spec, tmp_path):
    ours = [cell_file(tmp_path, spec, c) for c in order(list(spec.plans), spec.measure.repeats)]
    other = tmp_path / "cells" / "of somebody else.csv"
    other.parent.mkdir()
    for file in (*ours[1:], other):
        file.write_text("x")
    forget(tmp_path, spec)
    assert list(other.parent.iterdir()) == [other]


@pytest.mark.parametrize("command", ["ablate", "train", "bench", "dissect"])
def test_data_that_is_missing_is_found_before_anything_else(spec, command, tmp_path, monkeypatch, capsys):
    assert spec
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    plan = () if command == "ablate" else ("--plan", "flash")
    monkeypatch.setattr(sys, "argv", ["ridgeline", command, "tiny.toml", *plan, "--data", "nowhere.txt"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert "data 'nowhere.txt' is neither a file nor a directory" in err
    assert sorted(tmp_path.rglob("*")) == before, "no empty directories"


def test_experiments_do_not_write_over_each_others_results(spec, tmp_path, monkeypatch, capsys):
    """Two files with a plan of one name."""
    monkeypatch.chdir(tmp_path)
    short = ["workload.steps=1", "measure.repeats=1", "plans={baseline=[]}"]
    for number in ("1", "2"):
        for command, *more in (["dissect", "--plan", "baseline"], ["ablate"]):
            args = ["ridgeline", command, "tiny.toml", *short, f"workload.seed={number}", *more]
            monkeypatch.setattr(sys, "argv", args)
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert stop.value.code in (0, None), capsys.readouterr().err
    written = [p for p in tmp_path.rglob("*") if p.suffix == ".html" or p.parent.name == "dissect"]
    assert len(written) == 2 * 3, "a report and two traces of each"
    assert len([p for p in written if p.name == "report.html"]) == 2


def test_text_of_a_warm_start_that_is_missing_is_found_before_predictions(spec, tmp_path):
    measure = spec.measure.model_copy(update={"warm_start": 1, "warm_start_data": "nowhere"})
    with pytest.raises(UserError, match="data 'nowhere'"):
        run_ablation(spec.model_copy(update={"measure": measure}), tmp_path / "out", announce=pytest.fail)
    assert not (tmp_path / "out").exists()


def test_cells_of_a_draft_model_that_changed_are_others(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    call = Call(name="speculative", options={"draft": str(tmp_path)})
    model, cluster = catalog.model("llama2-7b"), catalog.cluster("h100-sxm")
    e = Experiment(model=model, cluster=cluster, workload=Generate(), plan=Plan(calls=(call,)))
    first = cell_key(e)
    assert cell_key(e) == first
    weights.write_bytes(b"12")
    assert cell_key(e) != first


def test_cells_of_a_profile_that_changed_are_others(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one")
    call = Call(name="hot_neurons", options={"profile": str(text)})
    model, cluster = catalog.model("llama2-7b"), catalog.cluster("h100-sxm")
    e = Experiment(model=model, cluster=cluster, workload=Generate(), plan=Plan(calls=(call,)))
    first = cell_key(e)
    text.write_text("one, two")
    assert cell_key(e) != first


def test_cells_of_data_that_changed_are_others(spec, corpus, tmp_path):
    """Also cells without memory, of the process that would have recorded it."""
    data = tmp_path / "own.txt"
    data.write_bytes(corpus.read_bytes())
    own = load_ablation(tmp_path / "tiny.toml", [f"workload.data={data}"])
    cells = order(list(own.plans), 2)

    def files(spec):
        return [cell_file(tmp_path, spec, c) for c in cells]

    first = files(own)
    assert len({*first}) == len(cells)
    assert files(own) == first
    data.write_bytes(corpus.read_bytes()[:-1])
    second = files(own)
    assert not {*first} & {*second}
    bare = files(own.model_copy(update={"measure": own.measure.model_copy(update={"memory": False})}))
    assert [a == b for a, b in zip(bare, second, strict=True)] == [c.repeat > 0 for c in cells]


def test_the_order_is_abba():
    assert order(["a", "b", "c"], 3) == [
        CellRef(p, r) for r, round_ in enumerate(("abc", "cba", "abc")) for p in round_
    ]  # fmt: skip


def cell(e, repeat=0):
    run = training_cell(e, CellOptions(repeat=repeat), RankContext(torch.device("cpu")))
    return Result.model_validate(run)


def test_a_plan_that_computes_something_else_is_flagged(corpus):
    base = merge([cell(experiment(corpus, lr=0.01))])
    same, other = experiment(corpus, "recompute", lr=0.01), experiment(corpus, "recompute", lr=0.02)
    assert all(c.passed for c in sameness(same, merge([cell(same)]), base))
    (check,) = sameness(other, merge([cell(other)]), base)
    assert not check.passed
    assert check.expected == base.metric("final_loss")
    falls = experiment(corpus, "lora", lr=0.01)
    result = merge([cell(falls)])
    assert "loss falls" in sameness(falls, result, base)[0].name
    result.metrics["eval_loss"].value = result.metrics["eval_loss_start"].value
    assert not sameness(falls, result, base)[0].passed


def test_throughput_that_does_not_balance_is_flagged(corpus):
    def balance(parts):
        return next(c for c in merge(parts).checks if c.name.startswith("rate × step time"))

    good = cell(experiment(corpus))
    for s in good.samples:
        s.seconds = 0.01
    good.metrics["wall_s"].value = 0.05
    assert balance([good]).passed
    wrong = good.model_copy(deep=True)
    for s in wrong.samples:
        s.tokens *= 2  # counted by the engine, not held by the batch
    assert not balance([wrong]).passed
    slow = good.model_copy(deep=True)
    slow.metrics["wall_s"].value = 0.1  # half of the time is in no step
    assert not balance([slow]).passed


def test_repeats_that_train_differently_are_flagged(corpus):
    a, b = cell(experiment(corpus)), cell(experiment(corpus, seed=1), repeat=1)
    assert next(c for c in merge([a, a]).checks if c.name.startswith("repeats")).passed
    assert not next(c for c in merge([a, b]).checks if c.name.startswith("repeats")).passed


def test_a_plan_whose_every_process_failed_keeps_its_first_failure(corpus):
    good = cell(experiment(corpus))
    failed = [good.model_copy(update={"status": s, "reason": s}) for s in ("oom", "timeout")]
    assert merge(failed).reason == "oom"


def test_a_baseline_far_from_its_prediction_puts_the_profile_in_doubt():
    def note(predicted, measured):
        sides = {s: Result(source=s, experiment_id="e", experiment={}, metrics={"tokens_per_s": Metric(value=v)})
                 for s, v in (("predicted", predicted), ("measured", measured))}  # fmt: skip
        return profile_note(Ablation(id="x", name="", baseline="b", outcomes=[Outcome(name="b", plan=[], **sides)]))

    assert note(100, 190) == note(100, 55) == ""
    assert "b ran at 0.4 times its predicted speed" in note(100, 40)
    assert "`ridgeline probe`" in note(100, 300)
    nothing = Ablation(id="x", name="", baseline="b", outcomes=[Outcome(name="b", plan=[])])
    assert profile_note(nothing) == ""


def test_only_this_machine_can_be_measured(corpus):
    e = experiment(corpus)
    require_local(e)
    elsewhere = Cluster(device=catalog.device("a800-80g"))
    with pytest.raises(Incompatible, match="a800-80g is not this machine"):
        require_local(e.model_copy(update={"cluster": elsewhere}))
