"""Effects of a technique: its paper's claim, the prediction with and without it, and measurements.

Settings of predictions and locations of measured numbers are data, ``docs/effects.toml``; every number is computed
or read from ``benchmarks/results`` when the pages are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline import experiments
from ridgeline.docs.measured import from_ablation, from_compression, from_rows
from ridgeline.predict import predict
from ridgeline.report.units import metric, number, size, times
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric, Result
from ridgeline.techniques.cards import card
from ridgeline.techniques.registry import registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAINING = ("pretrain", "finetune")
SHOWN = {
    "train": ("tokens_per_s", "peak_bytes"),
    "generate": ("tokens_per_s", "peak_bytes"),
    "serve": ("tokens_per_s", "ttft_p50_s", "tpot_p50_s", "kv_cache_tokens"),
}
"""Metrics of each setting's predictions that a page shows."""
WORDS = {"tokens_per_s": "tokens/s", "peak_bytes": "peak of one rank", "ttft_p50_s": "median TTFT",
         "tpot_p50_s": "median TPOT", "kv_cache_tokens": "tokens that the cache holds"}  # fmt: skip


class Effect(NamedTuple):
    """One row of a page's table: the source of the number, its setting, and its text."""

    source: str
    setting: str
    says: str


class Effects:
    """Effects of techniques, from a checkout's ``docs/effects.toml`` and ``benchmarks/results``."""

    def __init__(self, root: Path) -> None:
        try:
            self.data = tomllib.loads((root / "docs" / "effects.toml").read_text(encoding="utf-8"))
        except OSError:
            raise UserError(f"{root} has no docs/effects.toml", "run this in a checkout of the project") from None
        self.results = root / "benchmarks" / "results"

    def of(self, name: str) -> list[Effect]:
        """The rows of a technique's page: the claim, predictions, measurements; missing ones are stated."""
        measured = list(self._measured(name)) or [Effect("measured", "", "not measured")]
        return [Effect("claimed by the paper", "", registry()[name].card.claim), *self._claims(name),
                *self._predicted(name), *measured]  # fmt: skip

    def _claims(self, name: str) -> Iterator[Effect]:
        for c in self.data["claim"]:
            if c["technique"] != name:
                continue
            setting = f"{c['says']}: {_setting(c)}, plan {_code(c['plan'])}"
            got = _predict(c, c["plan"])
            text = _fits(got)
            if "against" in c:
                other = _predict(c, c["against"])
                saved = (other.peak_bytes or 0.0) - (got.peak_bytes or 0.0)
                text = f"{_fits(got)}; {size(saved)} ({saved / 1e9:.1f} GB) less than without"
            yield Effect("predicted for the claim", setting, text)

    def _predicted(self, name: str) -> Iterator[Effect]:
        c = card(registry()[name])
        for key, setting in self.data["setting"].items():
            task = next((t for t in (TRAINING if key == "train" else (key,)) if t in c["tasks"]), None)
            if task is None:
                continue
            if task in c["unpredicted"]:
                yield Effect("predicted", setting["says"], f"no difference: {c['unpredicted'][task]}")
                continue
            yield self._compared(name, key, setting, task)

    def _compared(self, name: str, key: str, setting: dict[str, Any], task: str) -> Effect:
        """With against without it, beside as many of the setting's techniques as it goes with; where it goes with no
        other rank, on one device."""
        cls = registry()[name]
        where = {**setting, **self.data["instead"].get(name, {}).get(key, {})}
        where["workload"] = {**where["workload"], "kind": task}
        if cls.card.needs_model.get("num_experts"):
            where["model"] = setting["mixture"]
        if cls.card.min_ranks > 1:
            where["on"] = self.data["setting"]["train"]["on"]
        needed = card(cls)["requires"] if key == "train" else []
        mine, *others = (self.data["options"].get(n, n) for n in (name, *needed))
        free = [call for call in setting["beside"] if call.partition(":")[0] not in (name, *needed)]
        beside_it = [[*c, *others] for count in range(len(free), -1, -1) for c in combinations(free, count)]
        refusal = ""
        for on in dict.fromkeys((where["on"], _one(where["on"]))):
            for beside in beside_it:
                here = {**where, "on": on}
                where_text = f"{setting['says']}: {_setting(here)}, `{mine}`" + (
                    f" beside {_code(beside)}" if beside else ""
                )
                try:
                    with_it, without = _predict(here, [*beside, mine]), _predict(here, beside)
                except UserError as e:
                    refusal = refusal or f"refused: {e.what}"
                    continue
                return Effect("predicted", where_text, _changes(without, with_it, SHOWN[key]))
        return Effect("predicted", f"{setting['says']}: {_setting(where)}, `{mine}`", refusal)

    def _measured(self, name: str) -> Iterator[Effect]:
        for m in self.data["measured"]:
            if m["technique"] == name:
                data = self._files[m["file"]]
                yield Effect("measured", _where(m["file"], data, m["value"]), _pointed(m, data))
        for file, data in self._files.items():
            for reader in (from_ablation, from_rows, from_compression):
                for setting, says in reader(data, name):
                    yield Effect("measured", f"{setting}; {_where(file, data)}", says)

    @cached_property
    def _files(self) -> dict[str, dict[str, Any]]:
        return {p.name: json.loads(p.read_text(encoding="utf-8")) for p in sorted(self.results.glob("*.json"))}


def _predict(where: dict[str, Any], plan: list[str]) -> Result:
    return _predicted(json.dumps([where["model"], where["on"], where["workload"], plan]))


@cache
def _predicted(key: str) -> Result:
    return predict(experiments.make(*json.loads(key)))


def _one(on: str) -> str:
    """One device of the cluster."""
    count, _, device = on.partition("x")
    return device if count.isdigit() else on


def _setting(where: dict[str, Any]) -> str:
    work = ", ".join(f"{k} {v}" for k, v in where["workload"].items() if k != "kind")
    return f"{where['model']} on {where['on']}, {work}"


def _code(calls: list[str]) -> str:
    return " ".join(f"`{c}`" for c in calls)


def _fits(r: Result) -> str:
    return f"{'fits' if r.status == 'ok' else 'does not fit'}: {size(r.peak_bytes)} per rank"


def _changes(without: Result, with_it: Result, names: tuple[str, ...]) -> str:
    """``1.20× tokens/s (2.1k → 2.5k)`` for each metric that changes; a plan that does not fit is marked as such."""
    out: list[str] = []
    same: list[str] = []
    for name in names:
        sides = [(r.metrics.get(name), r) for r in (without, with_it)]
        texts = [_side(m, r, name) for m, r in sides]
        (a, _), (b, _) = sides
        if a is None and b is None:
            continue
        if texts[0] == texts[1]:
            same.append(f"the same {WORDS[name]} ({texts[0]})")
        else:
            change = f"{times(b.value / a.value)} " if a and b and a.value else ""
            out.append(f"{change}{WORDS[name]} ({' → '.join(texts)})")
    return "<br>".join(out or same) or "fits neither with nor without"


def _side(m: Metric | None, r: Result, name: str) -> str:
    if m is None:
        return "does not fit"
    return metric(m.value, m.unit) + (", does not fit" if name == "peak_bytes" and r.status != "ok" else "")


def _where(file: str, data: dict[str, Any], path: str = "") -> str:
    """Where a file was measured, or the part of it at ``path`` that has an environment of its own."""
    part = data.get(path.partition("/")[0])
    e = part["environment"] if isinstance(part, dict) and "environment" in part else data.get("environment", {})
    cores = e.get("cores", 0)
    return (
        f"`{file}`, {e.get('cpu')}, {cores} core{'s' if cores != 1 else ''}, PyTorch {e.get('torch')},"
        f" code {e.get('code')}"
    )


def _pointed(m: dict[str, Any], data: dict[str, Any]) -> str:
    value = _at(data, m["value"])
    if "over" in m:
        value /= _at(data, m["over"])
    ends = f" [{', '.join(number(_at(data, m[k])) for k in ('low', 'high'))}]" if "low" in m else ""
    return f"{times(value)}{ends} {m['says']}"


def _at(data: Any, path: str) -> float:
    for key in path.split("/"):
        data = data[int(key)] if isinstance(data, list) else data[key]
    return float(data)
