"""Sweeps of collectives and copies: real processes, arithmetic of the bandwidths, tables and pictures."""

import json
import math

import pytest

from ridgeline import catalog
from ridgeline.cli import app
from ridgeline.report.charts.bandwidth import bandwidth_charts
from ridgeline.report.export import export
from ridgeline.report.study_tables import study_tables
from ridgeline.spec.device import Device, Link, Rate
from ridgeline.spec.errors import UserError
from ridgeline.spec.study import Study
from ridgeline.study.operators import bandwidth
from ridgeline.study.sweep import QUICK, sweep

PROFILE = Device(
    name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10,
    disk=Link(name="disk", bandwidth=2e9, latency=1e-4),
    ranks={"2": {f"{k}.fp32": Rate(latency=1e-4, byte_rate=1e9, source="measured")
                 for k in ("all_reduce", "all_gather", "reduce_scatter")}},
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A sweep of two real processes, beside a profile whose predictions are known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_HOME", str(tmp_path_factory.mktemp("home")))
        catalog.save_device(PROFILE, "test")
        yield sweep(("collectives", "copies"), quick=True)


def test_every_operator_is_measured_at_every_size(found):
    sizes = {t.name: [c.axes["bytes"] for c in found.cells if c.table == t.name] for t in found.tables}
    assert {k: v for k, v in sizes.items() if k != "disk_copy"} == {
        k: list(QUICK) for k in ("all_reduce", "all_gather", "reduce_scatter", "host_copy")
    }
    assert sizes["disk_copy"] == [4096, *QUICK[1:]], "whole pages"
    assert all(c.measured_status == "ok" and 0 < c.measured["operator_s"] < math.inf for c in found.cells)
    most = {t.name: {c.axes["bytes"]: c.measured["operator_s"] for c in found.cells if c.table == t.name}
            for t in found.tables}  # fmt: skip
    assert all(times[max(times)] > times[min(times)] for times in most.values()), "4 MiB take longer than 1 KiB"


def test_bandwidths_are_those_of_nccls_tests(found):
    for c in found.cells:
        shares = {"all_reduce": 2 * 1 / 2, "all_gather": 1 / 2, "reduce_scatter": 1 / 2}
        expected = shares.get(c.table, 1.0) * c.axes["bytes"] / c.measured["operator_s"]
        assert c.measured["bandwidth_bytes_per_s"] == pytest.approx(expected)
    assert bandwidth("all_reduce", 8e9, 4, 1.0) == 12e9
    assert bandwidth("disk_copy", 8e9, 4, 1.0) == 8e9


def test_the_prediction_is_the_profiles(found):
    for c in found.cells:
        predicted = c.predicted["operator_s"]
        if c.axes["ranks"] == 2:
            assert predicted == pytest.approx(1e-4 + c.axes["bytes"] / 1e9)
        elif c.table == "disk_copy":
            assert predicted == pytest.approx(1e-4 + c.axes["bytes"] / 2e9)
        else:
            assert predicted == pytest.approx(2 * c.axes["bytes"] / 1e10)


def test_tables_and_pictures(found, tmp_path):
    tables = study_tables(found)
    assert tables[0].title == "All-reduce"
    assert [c.title for c in tables[0].columns] == ["bytes", "2 ranks time", "2 ranks bandwidth"]
    charts = bandwidth_charts(found)
    assert [c.id for c in charts] == [f"bandwidth-{t.name}" for t in found.tables]
    for chart, t in zip(charts, found.tables, strict=True):
        cells = [c for c in found.cells if c.table == t.name]
        measured, predicted = chart.figure["data"]
        assert measured["x"] == [c.axes["bytes"] for c in cells]
        assert measured["y"] == [c.measured["bandwidth_bytes_per_s"] for c in cells]
        assert predicted["y"] == [c.predicted["bandwidth_bytes_per_s"] for c in cells]
        assert chart.figure["layout"]["xaxis"]["type"] == chart.figure["layout"]["yaxis"]["type"] == "log"
        assert len(chart.table.rows) == len(cells)
    export(found, "html", tmp_path / "sweep.html")
    page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert 'data-chart="bandwidth-all_reduce"' in page
    assert len(page) < 1 << 20


def test_a_study_of_predictions_has_no_pictures_of_measurements(found):
    bare = found.model_copy(update={"cells": [c.model_copy(update={"measured": {}}) for c in found.cells]})
    assert bandwidth_charts(bare) == []


@pytest.mark.parametrize(
    ("kinds", "ranks", "says"),
    [(["copys"], 2, "did you mean 'copies'"), (["collectives"], 1, "collectives need two processes")],
)
def test_mistakes(kinds, ranks, says):
    with pytest.raises(UserError) as caught:
        sweep(kinds, ranks)
    assert says in f"{caught.value.what} {caught.value.fix}"


def test_the_command_keeps_the_sweep_and_needs_no_profile(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        app(["probe", "--sweep", "copies", "--quick", "--json"])
    assert not ended.value.code
    out = capsys.readouterr()
    found = Study.model_validate(json.loads(out.out))
    assert {c.table for c in found.cells} == {"host_copy", "disk_copy"}
    assert all(c.status == "refused" and "ridgeline probe" in c.reason and c.measured for c in found.cells)
    assert "ridgeline report" in out.err
    assert not catalog.local_device_path().exists()
