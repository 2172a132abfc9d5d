"""Effects of one technique in result files, found by their plans: plans that differ in that technique alone.

Every reader takes the parsed file and the technique's name, and yields (setting, what was measured); nothing where the
file is of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.report.units import number, times
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.plan import Plan

Found = Iterator[tuple[str, str]]


def from_ablation(data: dict[str, Any], name: str) -> Found:
    """Reader of the output of ``ridgeline ablate --json``."""
    if not str(data.get("schema", "")).startswith("ridgeline.ablation/"):
        return
    a = Ablation.model_validate(data)
    for o in a.outcomes:
        for b in a.outcomes:
            if o.measured is None or b.measured is None or not _differ(o.plan, b.plan, name):
                continue
            sides = [(r.metric("tokens_per_s"), r.peak_bytes) for r in (b.measured, o.measured)]
            (rate, peak), (new_rate, new_peak) = sides
            if not rate or not new_rate or not peak or not new_peak:
                continue
            ends = o.speedup if b.name == a.baseline else None
            spread = f" [{number(ends.low)}, {number(ends.high)}]" if ends and ends.low and ends.high else ""
            text = f"{times(new_rate / rate)}{spread} tokens/s<br>{times(new_peak / peak)} peak of one rank"
            if o.predicted and b.predicted and (p := b.predicted.metric("tokens_per_s")):
                guesses = (
                    _ratio(o.predicted.metric("tokens_per_s"), p),
                    _ratio(o.predicted.peak_bytes, b.predicted.peak_bytes),
                )
                text += f"<br>(predicted {' and '.join(map(times, guesses))})"
            yield f"plan {o.name} against {b.name} of `{a.command}`", text


def from_rows(data: dict[str, Any], name: str) -> Found:
    """Rows of methods with their plan, step time, peak and held-out loss."""
    rows = [r for r in data.get("rows", []) if "plan" in r and "step_s" in r] if "rows" in data else []
    for r in rows:
        for b in rows:
            if not _differ(r["plan"], b["plan"], name):
                continue
            says = []
            for key, words in (("step_s", "step time"), ("peak_bytes", "peak")):
                both = {side: _ratio(r[key][side], b[key][side]) for side in ("measured", "predicted")}
                says.append(f"{times(both['measured'])} {words} (predicted {times(both['predicted'])})")
            before, after = b["held_out_loss"]["after"], r["held_out_loss"]["after"]
            says.append(f"held-out loss {before:.3f} → {after:.3f}")
            yield f"{r['method']} against {b['method']}, {data['model']}", "<br>".join(says)


def from_compression(data: dict[str, Any], name: str) -> Found:
    """Compressed checkpoints: their perplexity over that of the whole model."""
    for part, table in data.get("parts", data).items():
        rows = list(table["rows"].values()) if isinstance(table, dict) and isinstance(table.get("rows"), dict) else []
        mine = [r for r in rows if name in _names(r.get("plan", [])) and "steps" not in r]
        chosen = [r for r in mine if len(r["plan"]) == 1] or mine
        if chosen:
            yield f"perplexity, {part.replace('_', ' ')}", "<br>".join(map(_compressed, chosen))


def _compressed(r: dict[str, Any]) -> str:
    change = r.get("against_dense") or r["against_whole"]
    value, low, high = (f"{100 * (change[k] - 1):+.2f}" for k in ("value", "low", "high"))
    bits = r.get("bits_per_weight") or r.get("expert_bits")
    weight = f"{bits:.2f} bits per weight" if bits else f"{r['parameters'] / 1e6:.1f}M parameters"
    return f"{' '.join(f'`{c}`' for c in r['plan'])}: {value} % [{low}, {high}], {weight}"


def _names(plan: list[str]) -> set[str]:
    return {c.name for c in Plan.parse(plan).calls}


def _differ(plan: list[str], other: list[str], name: str) -> bool:
    """Whether ``plan`` is ``other`` and the technique ``name``."""
    return [c for c in plan if name not in _names([c])] == other and len(plan) == len(other) + 1


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
