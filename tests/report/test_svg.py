"""The ablation as one SVG picture: every number at its place, nothing of the user's taken for markup."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ridgeline.report.charts.svg import BARS, ablation_svg
from ridgeline.report.export import export, load_any
from ridgeline.spec.errors import UserError

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(study, kind, style):
    root = ET.fromstring(ablation_svg(study))
    return [x for x in root.iter(f"{SVG}{kind}") if style in x.get("class", "").split()]


def test_bars_are_as_long_as_their_numbers(study):
    bars = [b for b in drawn(study, "rect", "measured") if b.get("x") != "16"]  # the legend's
    speed = [o.speedup.value for o in study.outcomes if o.speedup]
    peaks = [o.measured.peak_bytes for o in study.outcomes if o.measured and o.measured.peak_bytes]
    assert len(bars) == len(speed) + len(peaks)
    for values, found in ((speed, bars[: len(speed)]), (peaks, bars[len(speed) :])):
        widths = [float(b.get("width")) for b in found]
        assert max(widths) <= BARS
        # Rounded to a tenth of a pixel.
        assert [w / max(widths) for w in widths] == pytest.approx([v / max(values) for v in values], abs=0.1 / BARS)


def test_every_prediction_has_a_diamond(study):
    known = sum(o.predicted_speedup is not None for o in study.outcomes)
    known += sum(bool(o.predicted and o.predicted.peak_bytes) for o in study.outcomes)
    assert len(drawn(study, "path", "predicted")) == known + 1  # the legend's


def test_verdicts_are_told(study):
    said = {t.text or "" for t in drawn(study, "text", "ink")}
    assert {o.name for o in study.outcomes} <= said
    assert any(t.endswith("faster") for t in said)
    assert any(t.startswith("failed") for t in said)


def test_the_picture_in_the_readme_shows_the_stored_measurement():
    stored = load_any(ROOT / "benchmarks" / "results" / "quickstart.json")
    assert ablation_svg(stored) == (ROOT / "docs" / "assets" / "ablation.svg").read_text(encoding="utf-8")
    assert "docs/assets/ablation.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_names_are_no_markup(study):
    study.outcomes[1].name = "<script>&"
    root = ET.fromstring(ablation_svg(study))
    assert not list(root.iter(f"{SVG}script"))
    assert "<script>&" in {t.text for t in root.iter(f"{SVG}text")}


def test_what_cannot_be_drawn_is_refused(study, tmp_path):
    with pytest.raises(UserError, match="one result"):
        export(study.outcomes[0].measured, "svg", tmp_path / "x.svg")
    empty = study.model_copy(update={"outcomes": []})
    with pytest.raises(UserError, match="neither speed-ups nor peaks"):
        export(empty, "svg", tmp_path / "x.svg")
