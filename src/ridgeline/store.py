"""The store of runs: one SQLite file that several processes may write at once."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ridgeline.paths import data_dir
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.errors import UserError, nearest
from ridgeline.spec.result import Result
from ridgeline.spec.study import Study

VERSION = 1
BUSY_SECONDS = 30.0
ID_LENGTH = 12

SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  id TEXT PRIMARY KEY, created TEXT NOT NULL, kind TEXT NOT NULL, source TEXT NOT NULL, name TEXT NOT NULL,
  model TEXT NOT NULL, plan TEXT NOT NULL, tokens_per_s REAL, step_time_s REAL, peak_bytes INTEGER,
  status TEXT NOT NULL, document TEXT NOT NULL
)
"""
TAGS = "CREATE TABLE IF NOT EXISTS tags (id TEXT NOT NULL, tag TEXT NOT NULL, PRIMARY KEY (id, tag))"
TAG_LENGTH = 40
BY_TIME = "CREATE INDEX IF NOT EXISTS runs_created ON runs (created)"

Kind = Literal["result", "ablation", "study"]


class Run(NamedTuple):
    """One line of the list of runs. Rates and times of an ablation are those of its fastest plan."""

    id: str
    created: str
    """ISO-8601, UTC."""
    kind: Kind
    source: str
    """predicted, measured, or both."""
    name: str
    model: str
    plan: str
    tokens_per_s: float | None
    step_time_s: float | None
    peak_bytes: int | None
    status: str


Runs = list[Run]
Tags = list[str]
SORTS = ("created", "name", "model", "plan", "tokens_per_s", "step_time_s", "peak_bytes", "status")
"""Columns that a page of runs can be sorted by."""


class Page(NamedTuple):
    """Some of the runs that a question finds, and how many there are."""

    runs: Runs
    total: int


class Store:
    """Results and ablations by id. The id is a hash of the content: adding the same document twice keeps one.

    ``path``: the database file; None: ``runs.sqlite`` in :func:`ridgeline.paths.data_dir`. Every call opens its own
    connection, so a Store may be used from any thread. Raises :class:`UserError` when the file is not a store.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = Path(path) if path is not None else data_dir() / "runs.sqlite"
        with _readable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()

    def add_result(self, result: Result) -> str:
        """Keep a result; returns its id."""
        text = result.to_json(indent=None)
        return self._add(_result_row(_key("result", text), result), text)

    def add_ablation(self, ablation: Ablation) -> str:
        """Keep an ablation; returns its id."""
        text = ablation.to_json(indent=None)
        return self._add(_ablation_row(_key("ablation", text), ablation), text)

    def add_study(self, study: Study) -> str:
        """Keep a study; returns its id."""
        text = study.to_json(indent=None)
        return self._add(_study_row(_key("study", text), study), text)

    def list(
        self, limit: int | None = 20, kind: Kind | None = None, name: str | None = None, source: str | None = None
    ) -> Runs:
        """Newest first. ``name`` keeps runs whose name or model contains it; ``source``: predicted or measured."""
        return self.page(name or "", kind or "", source or "", limit=limit).runs

    def page(
        self, name: str = "", kind: str = "", source: str = "", tag: str = "", sort: str = "created",
        descending: bool = True, offset: int = 0, limit: int | None = 20,
    ) -> Page:  # fmt: skip
        """Runs from ``offset`` on, sorted by a column of :data:`SORTS` (unknown values last). ``name``: what a run's
        name, model or plan contains; empty filters keep all. Raises :class:`UserError` for another column."""
        if sort not in SORTS:
            raise UserError(f"runs cannot be sorted by {sort!r}", f"columns: {', '.join(SORTS)}")
        where, values = ["1"], []
        for column, value in (("kind", kind), ("source", source)):
            if value:
                where.append(f"{column} = ?")
                values.append(value)
        if name:
            columns = ("name", "model", "plan")
            where.append(f"({' OR '.join(f'instr(lower({c}), lower(?))' for c in columns)})")
            values += [name] * len(columns)
        if tag:
            where.append("id IN (SELECT id FROM tags WHERE tag = ?)")
            values.append(tag)
        kept = f"FROM runs WHERE {' AND '.join(where)}"
        order = f"{sort} IS NULL, {sort} {'DESC' if descending else 'ASC'}, id"
        sql = f"SELECT {', '.join(Run._fields)} {kept} ORDER BY {order} LIMIT ? OFFSET ?"
        with self._connect() as db:
            db.execute(TAGS)
            rows = db.execute(sql, (*values, -1 if limit is None else limit, offset)).fetchall()
            total = db.execute(f"SELECT count(*) {kept}", values).fetchone()[0]
        return Page([Run(*row) for row in rows], total)

    def tags(self, ids: Sequence[str]) -> dict[str, Tags]:
        """The tags of these runs, by full id."""
        found: dict[str, Tags] = {}
        with self._connect() as db:
            db.execute(TAGS)
            marks = ", ".join("?" * len(ids))
            for run, tag in db.execute(f"SELECT id, tag FROM tags WHERE id IN ({marks}) ORDER BY tag", tuple(ids)):
                found.setdefault(run, []).append(tag)
        return found

    def all_tags(self) -> Tags:
        """Every tag in use."""
        with self._connect() as db:
            db.execute(TAGS)
            return [row[0] for row in db.execute("SELECT DISTINCT tag FROM tags ORDER BY tag")]

    def set_tags(self, id_or_prefix: str, tags: Sequence[str]) -> Tags:
        """Give a run these tags instead of those it has; returns them, sorted. Raises :class:`UserError` for none or
        many runs, and for a tag that is empty or longer than :data:`TAG_LENGTH`."""
        clean = sorted({t.strip() for t in tags})
        if any(not 0 < len(t) <= TAG_LENGTH for t in clean):
            raise UserError(f"a tag has 1 to {TAG_LENGTH} characters", "shorten it")
        with self._connect() as db:
            db.execute(TAGS)
            full = self._resolve(db, id_or_prefix)
            db.execute("DELETE FROM tags WHERE id = ?", (full,))
            db.executemany("INSERT INTO tags VALUES (?, ?)", [(full, t) for t in clean])
        return clean

    def get(self, id_or_prefix: str) -> Result | Ablation | Study:
        """The document with this id, or the only one whose id begins so. Raises :class:`UserError` for none or many."""
        with self._connect() as db:
            full = self._resolve(db, id_or_prefix)
            kind, text = db.execute("SELECT kind, document FROM runs WHERE id = ?", (full,)).fetchone()
        try:
            if kind == "result":
                return Result.from_json(text, f"run {full}")
            return (Study if kind == "study" else Ablation).model_validate_json(text)
        except ValueError as e:
            raise UserError(f"run {full} in {self.path} is not readable: {str(e).splitlines()[0]}") from None

    def delete(self, id_or_prefix: str) -> str:
        """Remove one document; returns its full id. Raises :class:`UserError` for none or many."""
        with self._connect() as db:
            full = self._resolve(db, id_or_prefix)
            db.execute(TAGS)
            db.execute("DELETE FROM tags WHERE id = ?", (full,))
            db.execute("DELETE FROM runs WHERE id = ?", (full,))
        return full

    def _prepare(self) -> None:
        # Turning on the write-ahead log takes an exclusive lock that ignores the busy timeout, so several processes
        # that create the file at the same moment must try again.
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                with self._open() as db:
                    found = db.execute("PRAGMA user_version").fetchone()[0]
                    if found > VERSION:
                        raise UserError(
                            f"{self.path} has store version {found}; this Ridgeline knows {VERSION}",
                            "upgrade Ridgeline, or set RIDGELINE_HOME to another directory",
                        )
                    if found < VERSION:
                        db.execute("PRAGMA journal_mode = WAL")
                        db.execute("BEGIN IMMEDIATE")
                        db.execute(SCHEMA)
                        db.execute(BY_TIME)
                        db.execute(f"PRAGMA user_version = {VERSION}")
                return
            except sqlite3.OperationalError as e:
                if "locked" not in str(e) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with _readable(self.path), self._open() as db:
            yield db

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS)
        try:
            with db:  # commits, or rolls back on an exception
                yield db
        finally:
            db.close()

    def _add(self, run: Run, text: str) -> str:
        marks = ", ".join("?" * (len(run) + 1))
        with self._connect() as db:
            db.execute(
                f"INSERT OR IGNORE INTO runs ({', '.join(Run._fields)}, document) VALUES ({marks})", (*run, text)
            )
        return run.id

    def _resolve(self, db: sqlite3.Connection, prefix: str) -> str:
        wanted = prefix.strip().lower()
        ids = [row[0] for row in db.execute("SELECT id FROM runs ORDER BY created DESC, id")]
        hits = [i for i in ids if i.startswith(wanted)] if wanted else []
        if wanted in hits or len(hits) == 1:
            return wanted if wanted in hits else hits[0]
        if hits:
            some = ", ".join(hits[:5]) + (", …" if len(hits) > 5 else "")
            raise UserError(f"{prefix!r} begins {len(hits)} run ids: {some}", "give more of the id")
        if not ids:
            raise UserError(f"no run {prefix!r}: the store {self.path} is empty", "measure or predict something first")
        close = nearest(wanted, ids) or ids[:3]
        raise UserError(f"no run {prefix!r} in {self.path}", f"nearest ids: {', '.join(close)}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """SQLite's and the file system's complaints as one readable sentence. The file is never touched."""
    try:
        yield
    except sqlite3.OperationalError as e:
        fix = "another process keeps it busy: try again" if "locked" in str(e) else "check it, or set RIDGELINE_HOME"
        raise UserError(f"cannot use the store {path}: {e}", fix) from None
    except sqlite3.DatabaseError as e:
        raise UserError(
            f"{path} is not a readable store: {e}; it was left as it is", "move the file away and try again"
        ) from None
    except OSError as e:
        raise UserError(
            f"cannot use the store {path}: {e.strerror}", "set RIDGELINE_HOME to a writable directory"
        ) from None


def _key(kind: Kind, text: str) -> str:
    return hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()[:ID_LENGTH]


def _result_row(key: str, r: Result) -> Run:
    peak = r.peak_bytes if r.peak_bytes is not None else r.metric("peak_bytes")
    return Run(
        id=key,
        created=r.created or _now(),
        kind="result",
        source=r.source,
        name=r.name,
        model=_model(r.experiment),
        plan=" + ".join(str(t) for t in r.experiment.get("plan") or []),
        tokens_per_s=r.metric("tokens_per_s"),
        step_time_s=r.metric("step_time_s"),
        peak_bytes=None if peak is None else round(peak),
        status=r.status,
    )


def _ablation_row(key: str, a: Ablation) -> Run:
    results = [o.measured or o.predicted for o in a.outcomes]
    good = [r for r in results if r is not None and r.status == "ok"]
    best = max(good, key=lambda r: r.metric("tokens_per_s") or 0.0, default=None)
    row = _result_row(key, best) if best is not None else None
    sources = {r.source for o in a.outcomes for r in (o.predicted, o.measured) if r is not None}
    return Run(
        id=key,
        created=a.created or _now(),
        kind="ablation",
        source=sources.pop() if len(sources) == 1 else "both",
        name=a.name,
        model=row.model if row else "",
        plan=f"{len(a.outcomes)} plans",
        tokens_per_s=row.tokens_per_s if row else None,
        step_time_s=row.step_time_s if row else None,
        peak_bytes=row.peak_bytes if row else None,
        status="ok" if len(good) == len(results) else f"{len(results) - len(good)} of {len(results)} failed",
    )


def _study_row(key: str, s: Study) -> Run:
    agree = sum(f.verdict == "agrees" for f in s.findings)
    models = dict.fromkeys(str(c.axes["model"]) for c in s.cells if "model" in c.axes)
    return Run(
        id=key, created=s.created or _now(), kind="study", name=s.name, model=", ".join(models),
        source="both" if any(c.measured for c in s.cells) else "predicted", plan=f"{len(s.cells)} cells",
        tokens_per_s=None, step_time_s=None, peak_bytes=None,
        status=f"{agree} of {len(s.findings)} findings" if s.findings else "ok",
    )  # fmt: skip


def _model(experiment: dict[str, Any]) -> str:
    model = experiment.get("model")
    return str(model.get("name", "")) if isinstance(model, dict) else str(model or "")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
