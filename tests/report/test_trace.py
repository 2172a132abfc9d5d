"""Chrome traces: lanes are named, times are microseconds, predicted and measured lie in one file."""

import json

import pytest

from ridgeline.report.trace import TraceEvent, trace_json, write_trace


def test_trace(tmp_path):
    events = [
        TraceEvent("all-reduce", 0.002, 0.001, "communication", "predicted rank 0", {"bytes": 8}, "communication"),
        TraceEvent("qkv", 0.001, 0.0005, "compute", "predicted rank 0"),
        TraceEvent("qkv", 0.0, 0.0007, "compute", "measured rank 0"),
    ]
    data = json.loads(write_trace(tmp_path / "t.json", events).read_text())
    assert data == trace_json(events)
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in slices] == [
        (0.0, pytest.approx(700)), (1000.0, pytest.approx(500)), (2000.0, pytest.approx(1000)),
    ]  # fmt: skip
    names = {(e["name"], e["args"]["name"]) for e in data["traceEvents"] if e["ph"] == "M"}
    assert names == {
        ("process_name", "predicted rank 0"), ("process_name", "measured rank 0"), ("thread_name", "communication"),
        ("thread_name", "compute"),
    }  # fmt: skip
    assert len({(e["pid"], e["tid"]) for e in slices}) == 3, "equal lane names of two processes are two lanes"
    assert slices[2]["args"] == {"bytes": 8}
    assert slices[2]["cat"] == "communication"
