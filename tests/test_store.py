"""The store keeps what it is given, under concurrent writers, and complains readably."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Memory, Metric, Result
from ridgeline.store import Store


def result(name: str = "baseline", rate: float = 100.0, status: str = "ok", source: str = "measured") -> Result:
    return Result(
        source=source,
        experiment_id="e1",
        name=name,
        experiment={"model": {"name": "tiny"}, "plan": ["zero:stage=2", "lora"]},
        status=status,
        metrics={"tokens_per_s": Metric(value=rate), "step_time_s": Metric(value=1 / rate)} if status == "ok" else {},
        memory=[Memory(category="parameters", bytes=2.5e6), Memory(category="gradients", bytes=1e6)],
        created=f"2026-01-01T00:00:{int(rate) % 60:02d}+00:00",
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.sqlite")


def test_round_trip_and_list(store):
    first, second = store.add_result(result()), store.add_result(result("fast", 110))
    assert store.get(first) == result()
    assert store.get(second[:6]) == result("fast", 110)
    rows = store.list()
    assert [r.id for r in rows] == [second, first], "newest first"
    row = rows[1]
    assert (row.kind, row.source, row.name, row.model, row.plan, row.status) == (
        "result", "measured", "baseline", "tiny", "zero:stage=2 + lora", "ok",
    )  # fmt: skip
    assert (row.tokens_per_s, row.step_time_s, row.peak_bytes) == (100.0, 0.01, 3_500_000)


def test_same_content_same_id(store):
    assert store.add_result(result()) == store.add_result(result())
    assert len(store.list()) == 1


def test_ablation(store):
    outcomes = [
        Outcome(name="baseline", plan=[], measured=result(), predicted=result(source="predicted")),
        Outcome(name="fast", plan=["x"], measured=result("fast", 150)),
        Outcome(name="bad", plan=["y"], measured=result("bad", status="oom")),
    ]
    a = Ablation(id="abc", name="study", baseline="baseline", outcomes=outcomes)
    key = store.add_ablation(a)
    assert store.get(key) == a
    row = store.list(kind="ablation")[0]
    assert (row.kind, row.source, row.plan, row.tokens_per_s) == ("ablation", "both", "3 plans", 150.0)
    assert row.status == "1 of 3 failed"


def test_filters_and_limit(store):
    for i in range(5):
        store.add_result(result(f"p{i}", 10 + i, source="predicted" if i % 2 else "measured"))
    assert len(store.list(limit=3)) == 3
    assert [r.name for r in store.list(name="P4")] == ["p4"]
    assert len(store.list(name="tiny", limit=None)) == 5
    assert {r.name for r in store.list(source="predicted")} == {"p1", "p3"}
    assert store.list(kind="ablation") == []


def test_delete(store):
    key = store.add_result(result())
    assert store.delete(key[:8]) == key
    assert store.list() == []


def test_unknown_and_ambiguous_ids(store):
    with pytest.raises(UserError, match="is empty"):
        store.get("abc")
    ids = [store.add_result(result(f"p{i}", 10 + i)) for i in range(40)]
    shared = next(d for d in "0123456789abcdef" if sum(i.startswith(d) for i in ids) > 1)  # 40 ids, 16 digits
    with pytest.raises(UserError, match=r"begins \d+ run ids"):
        store.get(shared)
    almost = ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1")
    with pytest.raises(UserError) as e:
        store.get(almost)
    assert ids[0] in e.value.fix
    with pytest.raises(UserError):
        store.get("")


def test_default_path(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    assert Store().path.is_relative_to(tmp_path / "home")
    monkeypatch.delenv("RIDGELINE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert Store().path == tmp_path / "xdg" / "ridgeline" / "runs.sqlite"


def test_corrupt_file_is_reported_and_kept(tmp_path):
    path = tmp_path / "runs.sqlite"
    path.write_bytes(b"this is no database at all" * 100)
    before = path.read_bytes()
    with pytest.raises(UserError, match="not a readable store"):
        Store(path)
    assert path.read_bytes() == before


def test_damage_after_opening_is_reported(store):
    key = store.add_result(result())
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE runs SET document = '{'")
    db.close()
    with pytest.raises(UserError, match="not a"):
        store.get(key)


def test_newer_version_is_refused(store):
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="store version 99"):
        Store(store.path)


def test_unusable_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot use the store"):
        Store(tmp_path / "file" / "runs.sqlite")


WRITER = """
import sys
from pathlib import Path
from ridgeline.spec.result import Result
from ridgeline.store import Store
store = Store(Path(sys.argv[1]))
for i in range(25):
    store.add_result(Result(source="measured", experiment_id=f"{sys.argv[2]}-{i}", experiment={}))
"""


def test_several_processes_write_at_once(tmp_path):
    path = tmp_path / "runs.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(i)], stderr=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    for w in writers:
        _, errors = w.communicate(timeout=60)
        assert w.returncode == 0, errors
    assert len(Store(path).list(limit=None)) == 100
