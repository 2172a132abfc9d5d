"""Rows for calibration, and the commands that judge and fit them."""

from __future__ import annotations

import json

import pytest

from ridgeline import catalog, cli
from ridgeline.predict.operators.kernel import op_time
from ridgeline.spec.errors import UserError
from ridgeline.validate.samples import as_samples, samples

HEADER = "device,dtype,m,n,k,seconds,source"


def lines(device="h100-sxm", factor=1.0):
    out = []
    for m in (1, 8, 64, 256, 1024, 4096):
        for n, k in (
            (1024, 4096),
            (4096, 4096),
            (8192, 1024),
            (4096, 14336),
            (512, 512),
            (32000, 4096),
            (2048, 8192),
            (8192, 8192),
        ):
            (s,) = as_samples([{"device": device, "dtype": "bf16", "m": m, "n": n, "k": k, "seconds": 1.0}])
            out.append(f"{device},bf16,{m},{n},{k},{op_time(s.ops[-1], catalog.device(device)).seconds * factor},here")
    return out


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))

    def call(*args):
        monkeypatch.setattr("sys.argv", ["ridgeline", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        got = capsys.readouterr()
        return code, got.out, got.err

    return call


def test_rows_of_one_device(tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text("\n".join([HEADER, *lines(), "a100-80g-sxm,bf16,8,8,8,1e-5,x", "h100-sxm,bf16,8,eight,8,1e-5,x"]))
    found, skipped = samples([tmp_path], "h100")
    assert len(found) == 48
    assert [s.line for s in skipped] == [51]
    assert "'n': 'eight' is not a number" in skipped[0].reason
    with pytest.raises(UserError, match=r"no row of device 'l4'.*a100-80g-sxm, h100-sxm"):
        samples([file], "l4")
    file.write_text("\n".join([HEADER, *lines(), "h100-sxm,bf16,8,8"]))
    with pytest.raises(UserError, match=r"no row of device 'l4'.*they hold"):
        samples([file], "l4")
    assert [s.line for s in samples([file], "h100-sxm")[1]] == [50]
    file.write_text("\n".join([HEADER, "h100-sxm,bf16,8,8"]))
    with pytest.raises(UserError, match=r"can be read: line 2: gemm\.csv"):
        samples([file], "l4")


def test_calibrate_keeps_a_profile_that_predictions_then_use(run, tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text("\n".join([HEADER, *lines(factor=1.5)]))
    code, out, err = run("calibrate", file, "--device", "h100-sxm", "--json")
    assert code == 0
    said = json.loads(out)
    (fit,) = said["fits"]
    assert fit["rows"] == 48
    assert fit["before"] == pytest.approx(1 / 3, abs=0.01)
    assert fit["after"] < 0.05
    assert "profile kept in" in err
    code, out, _ = run("validate", file, "--json")
    assert code == 0
    assert json.loads(out)["groups"][0]["mean_ape"] < 0.05
    code, out, _ = run("predict", "llama2-7b", "--on", "8xh100-sxm", "--with", "zero", "--json")
    assert json.loads(out)["metrics"]["step_time_s"]["source"] == "measured profile"


def test_too_few_rows_change_nothing(run, tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text("\n".join([HEADER, *lines()[:3]]))
    code, _, err = run("calibrate", file, "--device", "h100-sxm")
    assert code == 1
    assert "too few rows" in err


def test_validate_counts_what_it_skips(run, tmp_path):
    file = tmp_path / "gemm.csv"
    rows = lines()
    file.write_text(
        "\n".join([HEADER, *rows, "h100-sxm,bf16,x,8,8,1e-5,here", "no-such-gpu,bf16,8,8,8,1e-5,here", "1,2"])
    )
    code, out, _ = run("validate", file, "--json")
    assert code == 0
    said = json.loads(out)
    (group,) = said["groups"]
    assert group["n"] == len(rows)
    assert group["mean_ape"] == pytest.approx(0, abs=1e-6)
    assert set(group) >= {"file", "group", "n", "median_ape", "mean_ape", "p90_ape", "bias", "within_10", "within_20",
                          "baseline_mean_ape"}  # fmt: skip
    assert said["skipped"] == 3
    assert said["regret"] is None
    reasons = {s["line"]: s["reason"] for s in said["skipped_rows"]}
    assert "column 'm': 'x' is not a number" in reasons[50]
    assert "no-such-gpu" in reasons[51]
    assert "2 cells for 7 columns" in reasons[52]
    code, out, err = run("validate", file, "--plot", tmp_path / "page.html")
    assert code == 0
    assert "line 50" in err
    assert "h100-sxm bf16" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "device,dtype,m,n,k\n",
            "line 1: its columns are of no known schema; nearest is 'gemm', which also needs seconds",
        ),
        ("", "no CSV header"),
        ("hello\n", "no CSV header"),
    ],
)
def test_files_of_no_schema(run, tmp_path, text, says):
    file = tmp_path / "x.csv"
    file.write_text(text)
    code, _, err = run("validate", file)
    assert code == 2
    assert says in err


def test_nothing_to_judge(run, tmp_path):
    assert run("validate", tmp_path / "none")[0] == 2
    assert run("validate", tmp_path)[0] == 2
    (tmp_path / "gemm.csv").write_text(HEADER + "\n")
    code, _, err = run("validate", tmp_path)
    assert code == 1
    assert "no row could be judged" in err


def test_rows_of_the_device_that_cannot_be_read_are_told(tmp_path):
    file = tmp_path / "gemm.csv"
    file.write_text("device,dtype,m,n,k,seconds\na100-80g-sxm,bf16,many,1,1,1\n")
    with pytest.raises(UserError, match=r"no row of device 'a100-80g-sxm'.* can be read.*line 2.*gemm\.csv.*many"):
        samples([file], "a100-80g-sxm")
