"""A prediction card per class of devices: the data its predictions were validated on, and their errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ridgeline import catalog
from ridgeline.docs.markdown import table
from ridgeline.predict.serving.engine_costs import ENGINES
from ridgeline.spec.efficiency import Efficiency

KINDS = {"gemm": "matrix products", "prefill": "attention over a prompt", "decode": "attention of one token",
         "collective": "collectives in one node"}  # fmt: skip
Errors = dict[str, dict[str, float]]


def device_markdown(results: Path) -> str:
    """``docs/prediction-cards.md``, from ``predict_operators.json``, ``predict_training.json`` and
    ``predict_inference.json`` in ``results``, the checkout's ``benchmarks/results``, and from what its
    ``docs/accuracy.md`` says of devices on which nothing was fitted."""
    operators, training, inference = (
        json.loads((results / f"predict_{name}.json").read_text(encoding="utf-8"))
        for name in ("operators", "training", "inference")
    )
    accuracy = (results.parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    classes: dict[str, list[str]] = {}
    for name in catalog.devices():
        classes.setdefault(catalog.device(name).architecture, []).append(name)
    parts = [
        "# Prediction cards",
        "What stands behind a prediction on each class of devices: the measurements it was judged on, the error there,"
        " and the interval that it is given: 95 % lie within 1.96 spreads. Errors are means, in brackets medians, of"
        " \\|predicted ÷ measured − 1\\|; one half of the shapes is predicted from the other. [Accuracy](accuracy.md)"
        " has the data, the baselines and what falls short.",
    ]
    for name, devices in sorted(classes.items()):
        constants = catalog.efficiency(catalog.device(devices[0]))
        published = never_fitted(accuracy, devices)
        parts += [
            f"## {name}",
            _origin(constants, devices, bool(published)),
            _operators(constants, operators),
            _published(published),
            _steps(devices, training, any("runs" in row[1] for row in published)),
            _inference(devices, inference),
        ]
    return "\n\n".join(p for p in parts if p) + "\n"


def never_fitted(accuracy: str, devices: list[str]) -> list[list[str]]:
    """[what, how much, error] of published tables and runs on these devices on which nothing was fitted, as the text of
    ``docs/accuracy.md`` has them: rows of its tables that name a device by the first part of its name."""
    names = "|".join(sorted({re.escape(d.partition("-")[0]) for d in devices}))
    found, unit = [], ""
    for line in accuracy.splitlines():
        cells = [c.strip().replace("**", "") for c in line.strip("|").split("|")]
        if not line.startswith("|"):
            unit = ""
        elif cells[0] == "" and cells[2:4] == ["before", "now"]:
            unit = cells[1]
        elif len(cells) > 3 and (unit == "rows" or (unit == "runs" and "never fitted" in cells[0])):
            what = re.split(r"[;(]", cells[0])[0].strip()
            if re.search(rf"\b({names})\b", what, re.IGNORECASE):
                error = cells[3] if unit == "rows" else f"mean {cells[3].partition(' (')[0]}"
                found.append([what, f"{cells[1]} {unit}", error])
    return found


def _published(rows: list[list[str]]) -> str:
    if not rows:
        return ""
    return (
        "Published tables and runs on which no figure was fitted, though what is modeled was found on some of them"
        " ([Accuracy](accuracy.md)); errors of kernels and collectives are medians, in brackets means:\n\n"
        + table("| | judged | error |", rows)
    )


def _origin(c: Efficiency, devices: list[str], judged: bool) -> str:
    names = ", ".join(f"`{d}`" for d in devices)
    fitted = [d for d in devices if d in c.fitted_on]
    others = "; the others differ by their datasheets" if len(fitted) < len(devices) else ""
    measured = "No constant was fitted on measurements of this class"
    measured = measured if judged else "No measurement of this class was at hand"
    trust = (
        f"The constants were fitted on {', '.join(f'`{d}`' for d in fitted)}{others}."
        if fitted
        else f"**{measured}: every constant is assumed.** Its intervals are those of"
        " devices that were predicted by another's constants."
    )
    return f"{names}. {trust} {c.data}"


def _operators(c: Efficiency, results: dict[str, Any]) -> str:
    if not set(c.fitted_on) & set(results["devices"]):
        rows = [[title, _percent(c.class_spread.get(kind))] for kind, title in KINDS.items()]
        return table("| | spread |", rows)
    rows = []
    for kind, title in KINDS.items():
        own = [_errors(results["devices"][d]["cross_validated"], kind) for d in c.fitted_on]
        pairs = [(*pair.split(" -> "), found) for pair, found in results["leave_device_out"].items()]
        apart = [_errors(found, kind) for _, judged, found in pairs if judged in c.fitted_on]
        rows.append([title, _joined(own), _joined(apart), *(_percent(s.get(kind)) for s in (c.spread, c.class_spread))])
    return table("| | held-out shapes | by another device's constants | spread | spread of the others |", rows)


def _errors(found: Errors, kind: str) -> tuple[float, float] | None:
    """(mean, median) over all kernels of one kind, weighted by their rows."""
    mine = [e for name, e in found.items() if name.split()[0] == kind]
    n = sum(e["n"] for e in mine)
    if not n:
        return None
    return sum(e["n"] * e["mean_ape"] for e in mine) / n, sum(e["n"] * e["median_ape"] for e in mine) / n


def _joined(found: list[tuple[float, float] | None]) -> str:
    return "; ".join(f"{100 * e[0]:.0f} % ({100 * e[1]:.0f})" for e in found if e) or "–"


def _percent(x: float | None) -> str:
    return "–" if x is None else f"{100 * x:.0f} %"


def _steps(devices: list[str], training: dict[str, Any], published: bool) -> str:
    rows = []
    for family, e in training["by family, as shipped"].items():
        stack, device = family.split(" on ")
        if device in devices:
            out = training["by family, left out"][family]
            rows.append([stack, f"`{device}`", str(e["n"]), f"{100 * e['mean']:.0f} % ({100 * e['median']:.0f})",
                         f"{100 * out['mean']:.0f} % ({100 * out['median']:.0f})"])  # fmt: skip
    if not rows:
        return "" if published else "No training run on this class is among the open data."
    return "Whole training steps, as published:\n\n" + table(
        "| stack | device | runs | as shipped | stack left out |", rows
    )


_FIELDS = ", fields only"
"""Suffix of a load's results by who knows only the fields of its file."""


def _inference(devices: list[str], results: dict[str, Any]) -> str:
    """Generation and serving on these devices, by engine; loads as by who knows only their file's fields."""
    found: dict[tuple[str, str, str], dict[str, list[tuple[int, float, float]]]] = {}
    for kind, title in (("generation", "fixed batches"), ("generation_engines", "fixed batches"), ("serving", "loads")):
        for r in results[kind]:
            parts = r["regime"].removesuffix(_FIELDS).rsplit(" ", 3)  # model, device, engine, degree
            if len(parts) < 4 or parts[1] not in devices or r["regime"].endswith(_FIELDS) != (kind == "serving"):
                continue
            errors = found.setdefault((parts[2], parts[1], title), {})
            errors.setdefault(r["quantity"], []).append((r["n"], r["mean_ape"], r["median_ape"]))
    if not found:
        return "No generation or serving on this class is among the open data."
    rows = [
        [f"`{engine}`, {title}", f"`{device}`", *(_pooled(errors.get(q, [])) for q in ("ttft_s", "tpot_s")),
         ENGINES[engine].source]
        for (engine, device, title), errors in sorted(found.items())
    ]  # fmt: skip
    return (
        "Generation and serving, as published; of loads only what their file states is known, not how they"
        " were generated. In brackets: the mean of medians by model and degree, weighted by rows. Constants that"
        " were fitted on these very rows have no held-out error here:\n\n"
        + table("| engine | device | time to first token | time per further token | its constants |", rows)
    )


def _pooled(found: list[tuple[int, float, float]]) -> str:
    """Mean over all rows, in brackets the mean of the groups' medians, weighted by their rows; and how many rows."""
    n = sum(each for each, *_ in found)
    if not n:
        return "–"
    mean, middle = (sum(group[0] * group[i] for group in found) / n for i in (1, 2))
    return f"{100 * mean:.0f} % ({100 * middle:.0f}), {n} row{'s' * (n > 1)}"
