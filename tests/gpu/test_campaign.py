"""The campaign of measurements on a GPU, run in small on the CPU so that it works when there is one."""

import json
import os
import subprocess
import sys
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


def test_every_line_of_a_gpu_is_predicted_without_one(tmp_path):
    run(tmp_path, "--predict", "--on", "h100-sxm")
    parts = json.loads((tmp_path / "predictions.json").read_text())["lines"]
    assert list(parts) == ["correctness", "probe", "kernels", "training", "serving", "offload"]
    for part, lines in parts.items():
        assert not [n for n, said in lines.items() if "refused" in said["figures"]]
        if part in ("probe", "kernels"):
            assert all(said["figures"]["seconds"] > 0 for said in lines.values())
    assert parts["training"]["llama3.2-1b, bf16"]["figures"]["mfu"] > 0.3
    assert parts["serving"]["llama3.1-8b, int4, decode, batch 1, 512 tokens"]["figures"]["step_s"] > 0


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
