"""The campaign of measurements on a GPU, run in small on the CPU so that it works when there is one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "campaign"
SMALL = ("--small", "--on", "local")


def run(out, *args):
    # Nothing finds the project by itself: the campaign does.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(CAMPAIGN), "--out", str(out), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done


def test_a_part_is_predicted_measured_and_not_repeated(tmp_path):
    first = run(tmp_path, *SMALL, "--part", "kernels", "--only", "norm", "--only", "rotary")
    assert "2 of 2 to measure" in first.stdout
    said = json.loads((tmp_path / "predictions.json").read_text())["lines"]["kernels"]
    held = json.loads((tmp_path / "kernels.json").read_text())
    assert len(said) == len(held["lines"]) == 2
    assert held["environment"]["small"]
    for line in held["lines"]:
        assert line["status"] == "ok", line
        assert line["measured"]["error"] < 1e-5
        assert line["goals"]["error"]["met"]
        assert line["predicted"] == said[line["name"]]
        assert line["predicted"]["created"] <= line["created"]
        assert line["predicted"]["figures"]["seconds"] > 0
    again = run(tmp_path, *SMALL, "--part", "kernels", "--only", "norm", "--only", "rotary")
    assert "0 of 2 to measure" in again.stdout
    assert json.loads((tmp_path / "kernels.json").read_text()) == held
    page = (tmp_path / "report.html").read_text()
    assert all(line["name"] in page for line in held["lines"])


def test_a_decode_step_and_its_share_of_the_bandwidth(tmp_path):
    run(tmp_path, *SMALL, "--part", "serving", "--only", "decode")
    (line,) = json.loads((tmp_path / "serving.json").read_text())["lines"]
    assert line["status"] == "ok", line
    assert line["measured"]["share_of_bandwidth"] > 0
    assert line["predicted"]["figures"]["step_s"] > 0


def test_every_line_of_a_gpu_is_predicted_without_one(tmp_path):
    run(tmp_path, "--predict", "--on", "h100-sxm")
    parts = json.loads((tmp_path / "predictions.json").read_text())["lines"]
    assert list(parts) == ["correctness", "probe", "kernels", "training", "serving", "offload"]
    for part, lines in parts.items():
        assert not [n for n, said in lines.items() if "refused" in said["figures"]]
        if part == "correctness":
            continue
        told = {n: said["figures"] for n, said in lines.items() if n != "ridgeline probe"}  # as a whole
        names = {"seconds", "step_s", "step_time_s", "tokens_per_s"}
        assert not [n for n, figures in told.items() if not any(figures.get(name, 0) > 0 for name in names)]
    assert parts["training"]["llama3.2-1b, bf16"]["figures"]["mfu"] > 0.3
    assert parts["serving"]["llama3.1-8b, int4, decode, batch 1, 512 tokens"]["figures"]["step_s"] > 0


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_what_is_measured_when_a_call_ends_early_is_kept(tmp_path, end):
    """By Ctrl-C with one message, and after a kill by the next call."""
    given = (*SMALL, "--part", "kernels", "--only", "rotary", "--only", "product")
    command = [sys.executable, str(CAMPAIGN), "--out", str(tmp_path), *given]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which shells have their background jobs ignore
    call = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            preexec_fn=heard)  # fmt: skip
    log = tmp_path / ".kernels.jsonl"
    while call.poll() is None and not (log.is_file() and "\n" in log.read_text()):
        time.sleep(0.01)
    call.send_signal(end)
    _, said = call.communicate()
    if end != signal.SIGKILL:
        assert call.returncode == 130
        assert said.strip().endswith("the same command goes on from there")
        assert "Traceback" not in said
        assert (tmp_path / "report.html").is_file()
    kept = (
        [line["name"] for line in json.loads((tmp_path / "kernels.json").read_text())["lines"]]
        if call.returncode > 0
        else []
    )
    again = run(tmp_path, *given)
    assert f"{5 - len(kept)} of 5 to measure" in again.stdout
    held = json.loads((tmp_path / "kernels.json").read_text())
    assert len(held["lines"]) == 5
    assert all(line["status"] == "ok" and line["predicted"] for line in held["lines"])
    assert end == signal.SIGKILL or kept


@pytest.mark.nightly
def test_every_part(tmp_path):
    run(tmp_path, *SMALL)
    for part in ("correctness", "probe", "kernels", "training", "serving", "offload"):
        held = json.loads((tmp_path / f"{part}.json").read_text())
        assert held["finished"]
        for line in held["lines"]:
            assert line["status"] == "ok", line
            assert all(goal["met"] for goal in line["goals"].values()), line
    training = json.loads((tmp_path / "training.json").read_text())["lines"][0]
    assert training["measured"]["step_time_s"] > 0
    assert training["predicted"]["figures"]["step_time_s"] > 0


def test_goals_relative_to_other_lines_are_judged(tmp_path):
    def part(name, **rates):
        lines = [{"name": n, "status": "ok", "measured": {"tokens_per_s": r},
                  "predicted": {"figures": {"tokens_per_s": 1000.0}}} for n, r in rates.items()]  # fmt: skip
        data = {"part": name, "environment": {"on": "h100-sxm"}, "finished": True, "lines": lines}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))

    part("training", **{"llama3.2-1b, bf16": 1000.0, "llama3.2-1b, fp8": 1250.0,
                        "llama3.2-3b, bf16, recompute": 1000.0,
                        "llama3.2-3b, fp8 by rows, recompute": 1400.0})  # fmt: skip
    part("serving", **{"llama3.2-1b, bf16, decode, batch 8, 512 tokens": 1300.0,
                       "llama3.2-1b, bf16, decode, batch 1, 512 tokens": 500.0,
                       "llama3.2-1b, vLLM, decode, batch 8": 1600.0})  # fmt: skip
    run(tmp_path, "--predict", "--on", "h100-sxm", "--part", "probe", "--only", "copy of")
    goals = (tmp_path / "report.html").read_text().partition("Goals")[2].partition("Predictions")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", r) for r in goals.split("<tr>") if "<td" in r]
    assert [(*r[:2], *r[-2:]) for r in rows] == [
        ("training", "llama3.2-1b, fp8", "1.25 x", "✗"),
        ("training", "llama3.2-3b, fp8 by rows, recompute", "1.40 x", "✓"),
        ("serving", "llama3.2-1b, bf16, decode, batch 8, 512 tokens", "0.81 x", "✓"),
        ("training", "predictions", "12.5 %", "✓"),
        ("serving", "predictions", "50.0 %", "✗"),
    ]
    assert "3 of 5 met" in goals
