"""Predictions first, then each part: cells in processes of their own, under a time limit, resumable."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from campaign.cells import Cell, NotInstalled, Setting, commit, environment, find_setting, met, now, read, write
from campaign.report import write_report
from ridgeline.measure.environment import code_hash
from ridgeline.spec.errors import UserError

MARGIN = 12.0
"""Seconds of a part's time that are kept for its end."""
POLL = 0.1


def cells_of(part: str, setting: Setting, only: Sequence[str]) -> list[Cell]:
    """A part's cells, in order."""
    every: list[Cell] = importlib.import_module(f"campaign.{part}").cells(setting)
    return [c for c in every if not only or any(text in c.name for text in only)]


def campaign(given: argparse.Namespace, parts: Sequence[str]) -> None:
    """Run parts one after another; the report is written anew after each."""
    setting = find_setting(given.on, given.small, given.predict)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {given.out} cannot be a folder: {e.strerror}", "choose another --out") from None
    todo = {part: cells_of(part, setting, given.only) for part in parts}
    if given.only and not any(todo.values()):
        raise UserError(f"no line of {', '.join(parts)} has {' or '.join(given.only)} in its name", "leave out --only")
    said = predictions(given.out / "predictions.json", todo, setting)
    for part, cells in todo.items():
        try:
            if not given.predict:
                run_part(part, cells, said.get(part, {}), setting, given)
        finally:
            write_report(given.out)
    print(f"report: {given.out / 'report.html'}")


def predictions(path: Path, todo: dict[str, list[Cell]], setting: Setting) -> dict[str, dict[str, Any]]:
    """Predict what has no prediction yet, and keep it: by part and cell."""
    held = read(path) or {"on": setting.on, "lines": {}}
    if held["on"] != setting.on:
        raise UserError(f"{path} predicts {held['on']}, and this is {setting.on}", "choose another --out")
    lines = held["lines"]
    for part, cells in todo.items():
        for cell in cells:
            if cell.name in lines.get(part, {}):
                continue
            try:
                figures = cell.predict()
            except UserError as e:
                figures = {"refused": e.what}
            lines.setdefault(part, {})[cell.name] = {"figures": figures, "created": now(), "commit": commit(),
                                                     "code": code_hash()}  # fmt: skip
    write(path, held)
    return dict(lines)


def run_part(
    part: str, cells: list[Cell], said: dict[str, Any], setting: Setting, given: argparse.Namespace
) -> None:  # fmt: skip
    """Measure the cells that have no result yet, until the time is up."""
    path, start = given.out / f"{part}.json", time.monotonic()
    held = {} if given.again else read(path)
    records: dict[str, dict[str, Any]] = {r["name"]: r for r in held.get("lines", [])}
    waiting = [c for c in cells if not _done(records.get(c.name))]
    known = environment(setting)
    print(f"{part}: {len(waiting)} of {len(cells)} to measure", flush=True)
    given.interrupted = False
    while waiting and (left := given.minutes * 60 - MARGIN - (time.monotonic() - start)) > 0:
        found = _batch(part, waiting, left, given)
        if not found and len(waiting) == len(cells) and not given.interrupted:
            found = [
                (waiting[0].name, {"status": "timeout", "reason": f"took longer than {left:.0f} s: all of --minutes"})
            ]
        for name, record in found:
            if record["status"] == "ok":
                _judge(record, next(c for c in cells if c.name == name))
            records[name] = {"name": name, "predicted": said.get(name), **record, "created": now(), "commit": commit(),
                             "code": code_hash()}  # fmt: skip
            print(f"  {name}: {record['status']} {record.get('reason', '')}".rstrip(), flush=True)
            waiting = [c for c in waiting if c.name != name]
            lines = [records[c.name] for c in cells if c.name in records]
            lines += [r for n, r in records.items() if n not in {c.name for c in cells}]
            write(path, {"part": part, "environment": known, "finished": not waiting and not given.only,
                         "seconds": round(held.get("seconds", 0.0) + time.monotonic() - start, 1),
                         "lines": lines})  # fmt: skip
        if given.interrupted:
            raise KeyboardInterrupt
    if waiting:
        print(f"{part}: {len(waiting)} left for the next call: the time is up", flush=True)


def _done(record: dict[str, Any] | None) -> bool:
    """Whether a cell has its result: what failed is tried again when the code has changed."""
    return record is not None and (record["status"] in ("ok", "not installed") or record["code"] == code_hash())


def _judge(record: dict[str, Any], cell: Cell) -> None:
    record["goals"] = {
        metric: {"goal": f"{sign} {bound:g}", "met": met((sign, bound), record["measured"][metric])}
        for metric, (sign, bound) in cell.goals.items()
        if isinstance(record["measured"].get(metric), (int, float))
    }


def _batch(part: str, cells: list[Cell], left: float, given: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Measure cells one after another in one process, until one fails or the time is up → their records.

    The cell that the process died in is recorded as failed; one that only ran out of the part's time is not.
    """
    log, words = given.out / f".{part}.jsonl", given.out / f".{part}.log"
    if log.is_file():  # of a call that was killed
        known = {c.name for c in cells}
        records = [(r.pop("name"), r) for r in _lines(log) if r.pop("code") == code_hash() and r["name"] in known]
        log.unlink()
        if records:
            return records
    folder = Path(__file__).parent
    command = [sys.executable, str(folder), "--out", str(given.out), "--part", part, *(["--small"] * given.small),
               *(["--on", given.on] if given.on else []), "--child", *(c.name for c in cells)]  # fmt: skip
    with words.open("w") as stream:
        child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    begun, seen, last = time.monotonic(), 0, time.monotonic()
    stopped = ""
    try:
        while child.poll() is None and not stopped:
            time.sleep(POLL)
            count = len(_lines(log))
            if count > seen:
                seen, last = count, time.monotonic()
            limit = cells[min(seen, len(cells) - 1)].limit
            if time.monotonic() - begun > left:
                stopped = "part"
            elif time.monotonic() - last > limit:
                stopped = f"took longer than {limit:.0f} s"
    except KeyboardInterrupt:
        stopped, given.interrupted = "part", True
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    found = _lines(log)
    text = words.read_text(errors="replace")
    log.unlink(missing_ok=True)
    words.unlink(missing_ok=True)
    records = [(r.pop("name"), r) for r in found if r.pop("code")]
    rest = cells[len(records) :]
    if rest and stopped != "part" and (stopped or child.returncode or not records):
        reason = stopped or f"the process ended with {child.returncode}"
        records.append((rest[0].name, {"status": "timeout" if stopped else "failed", "reason": reason,
                                       "log": text[-2000:], "seconds": round(time.monotonic() - last, 1)}))  # fmt: skip
    return records


def _lines(log: Path) -> list[dict[str, Any]]:
    if not log.is_file():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def measure_here(given: argparse.Namespace) -> None:
    """In a child: measure the named cells of a part, one line of results each."""
    import torch

    setting = find_setting(given.on, given.small)
    (part,) = given.part
    by_name = {c.name: c for c in cells_of(part, setting, [])}
    with (given.out / f".{part}.jsonl").open("a", encoding="utf-8") as log:
        for name in given.child:
            start = time.perf_counter()
            record: dict[str, Any]
            try:
                record = {"status": "ok", "measured": by_name[name].measure()}
            except NotInstalled as e:
                record = {"status": "not installed", "reason": str(e)}
            except UserError as e:
                record = {"status": "refused", "reason": f"{e.what}; {e.fix}"}
            except torch.OutOfMemoryError as e:
                record = {"status": "oom", "reason": str(e).splitlines()[0]}
            except Exception as e:
                record = {"status": "failed", "reason": f"{type(e).__name__}: {e}"[:500],
                          "log": traceback.format_exc()[-2000:]}  # fmt: skip
            record["seconds"] = round(time.perf_counter() - start, 2)
            log.write(json.dumps({"name": name, "code": code_hash(), **record}) + "\n")
            log.flush()
            if record["status"] in ("failed", "oom"):
                return  # a device that has failed may fail the next one too
