"""Jobs under way are seen by other processes, and only as long as they run."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ridgeline import catalog
from ridgeline.cli import app
from ridgeline.jobs.job import CellOptions, LaunchJob
from ridgeline.jobs.launch import run_job
from ridgeline.jobs.live import KEPT, announced, live_dir, running
from ridgeline.report.live_jobs import BARS, curve, live_table
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))


def test_a_job_is_seen_while_it_runs():
    seen = []
    e = Experiment(
        name="mine",
        model=catalog.model("llama-tiny"),
        cluster=Cluster(device=catalog.device("xeon")),
        workload=Pretrain(seq_len=16, batch_size=2, steps=3),
        plan=Plan.parse(["recompute"]),
    )
    run_job(LaunchJob("measure", e, CellOptions(memory=False)), lambda m: seen.append((m, running())))
    (job,) = next(jobs for m, jobs in seen if m.get("step") == 1)
    assert (job.kind, job.title, job.plan, job.ranks, job.steps) == ("measure", "mine", "recompute", 1, 3)
    assert job.pid == os.getpid()
    assert job.memory() > 0
    assert running() == []
    assert list(live_dir().iterdir()) == []


def test_messages_are_kept_and_a_long_curve_is_thinned():
    with announced("train", "x", steps=10_000) as message:
        message({"stage": "training", "step": 5000, "steps": 10_000})
    with announced("train", "x", steps=10_000) as message:
        for step in range(1, 3 * KEPT):
            message({"step": step, "steps": 10_000, "loss": 8.0 - step / 1000, "tokens": 64, "seconds": 0.5})
        (job,) = running()
    assert job.steps == 10_000
    assert len(job.losses) <= KEPT


def test_what_ended_without_a_word_is_dropped(tmp_path):
    code = "import os, time\nfrom ridgeline.jobs.live import announced\n"
    code += "with announced('train', 'killed'):\n    print('up', flush=True)\n    time.sleep(600)\n"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert child.stdout.readline() == "up\n"
    assert [job.title for job in running()] == ["killed"]
    child.kill()
    child.wait()
    assert running() == []
    assert list(live_dir().glob("*.json")) == []


def test_a_home_that_cannot_be_written_does_not_stop_the_job(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "file"))
    with announced("train", "x") as message:
        message({"step": 1, "steps": 2, "loss": 1.0})
    assert running() == []


def test_a_damaged_file_is_passed_over():
    live_dir().mkdir(parents=True)
    (live_dir() / "a.json").write_text("{")
    (live_dir() / "b.json").write_text('{"id": "b"}')
    assert running() == []


def test_the_table_says_how_far_and_how_long():
    with announced("train", "mine", "zero:stage=2", ranks=2, steps=40) as message:
        message({"step": 10, "steps": 40, "loss": 2.5, "tokens": 640, "seconds": 0.5})  # resumed after ten steps
        message({"step": 20, "steps": 40, "loss": 2.25, "tokens": 640, "seconds": 0.5})
        (job,) = running()
    job.take({"step": 20, "steps": 40, "loss": 2.25, "tokens": 640, "seconds": 0.5})
    table = live_table([job], now=job.started + 60)
    line = dict(zip((c.title for c in table.columns), table.rows[0], strict=True))
    assert line["step"] == "20/40"
    assert line["left"] == "2:00"  # ten steps took a minute, twenty are left
    assert line["loss"] == "2.2500"
    assert line["throughput"] == "1.28k tokens/s"


def test_a_curve_falls_from_left_to_right():
    drawn = curve([10 - i for i in range(100)])
    assert drawn[0] == BARS[-1]
    assert drawn[-1] == BARS[0]
    assert list(drawn) == sorted(drawn, reverse=True)
    assert curve([1.0]) == ""
    assert set(curve([2.0] * 9)) == {BARS[0]}


def test_command_line():
    with announced("train", "mine", steps=4):
        shown = CliRunner().invoke(app, ["top"])
        jobs = json.loads(CliRunner().invoke(app, ["top", "--json"]).stdout)
    assert "mine" in shown.stdout
    assert jobs[0]["title"] == "mine"
    assert jobs[0]["memory_bytes"] > 0
    assert "no job is running" in CliRunner().invoke(app, ["top", "--once"]).stdout
