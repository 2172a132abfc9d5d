"""The HTML reports: nothing is loaded, everything is escaped, every chart has its numbers, odd inputs pass."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ridgeline.measure.compare import compare
from ridgeline.report import page
from ridgeline.report.charts.labels import positions
from ridgeline.report.html import ablation_html, comparison_html, headline, result_html
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric, Result, Row

NASTY = '</script><script>alert("x")</script><img src=http://evil.example/x.png>'


@pytest.fixture(autouse=True)
def _light(monkeypatch):
    """Parse our own page, not 0.6 MB of chart code; one test below reads the real file."""
    monkeypatch.setattr(page, "_chart_code", lambda: "/* charts */")


class Loads(HTMLParser):
    """Collects everything a browser would fetch, and the text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster", "background"):
                self.fetched.append(f"{tag} {name}={value}")
            if name == "style" and "url(" in (value or ""):
                self.fetched.append(f"{tag} style={value}")


def parse(path: Path) -> tuple[Loads, str, dict]:
    text = path.read_text(encoding="utf-8")
    loads = Loads()
    loads.feed(text)
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)
    assert found
    return loads, text, json.loads(found.group(1))


def test_nothing_is_loaded(study, tmp_path):
    base, fast = study.outcomes[0].measured, study.outcomes[1].measured
    made = [
        ablation_html(study, tmp_path / "a.html"),
        result_html(fast, tmp_path / "r.html"),
        comparison_html(compare(base, fast), tmp_path / "c.html"),
    ]
    for path in made:
        loads, text, _ = parse(path)
        assert loads.fetched == []
        assert "link" not in loads.tags
        assert "iframe" not in loads.tags
        assert not re.search(r"@import|url\(|https?://", text), "our own page names no address at all"
        assert "default-src 'none'" in text, "the browser itself refuses the network"
        assert "connect-src" not in text


def test_the_real_script_is_inlined_once_and_cannot_end_early(study, tmp_path, monkeypatch):
    monkeypatch.undo()
    loads, text, _ = parse(ablation_html(study, tmp_path / "a.html"))
    assert text.count("var RidgelineCharts") == 1
    assert loads.scripts == 3
    assert loads.fetched == []
    assert len(text) < 1e6


def test_every_chart_is_drawn_from_data_and_has_its_numbers(study, tmp_path):
    _, text, figures = parse(ablation_html(study, tmp_path / "a.html"))
    assert set(figures) == {
        "speedup", "tokens", "trust-speed", "trust-memory", "time-phase", "time-kind", "memory", "waterfall-0",
        "waterfall-1", "roofline-0", "roofline-1", "loss", "loss-distance",
    }  # fmt: skip
    assert re.findall(r'data-chart="([^"]+)"', text) == list(figures)
    assert text.count("<summary>Numbers</summary><div") == len(figures)
    assert text.index("<h2>Verdict</h2>") < text.index("data-chart")
    for word in ("signal 9", "load average", "ridgeline ablate study.toml", "Xeon", "Definitions"):
        assert word in text


def test_bars_show_intervals_and_predictions(study, tmp_path):
    _, _, figures = parse(ablation_html(study, tmp_path / "a.html"))
    bars, dots = figures["speedup"]["data"]
    assert bars["x"][0] == 1.0
    assert bars["x"][6] is None, "the failed plan has no bar"
    assert dots["x"][6] == pytest.approx(1.48 / 1.12)
    assert all(e >= 0 for e in bars["error_x"]["array"])
    memory = figures["memory"]["data"]
    measured = study.outcomes[0].measured
    assert sum(t["x"][0] for t in memory) == pytest.approx(measured.peak_bytes / 2**30)
    phases = figures["time-phase"]["data"]
    assert sum(t["x"][0] for t in phases) == pytest.approx(measured.metric("step_time_s"))


def test_trust_band_is_25_percent(study, tmp_path):
    _, _, figures = parse(ablation_html(study, tmp_path / "a.html"))
    band, line, dots = figures["trust-speed"]["data"]
    assert band["y"][0] / band["x"][0] == pytest.approx(1.25)
    assert band["y"][-1] / band["x"][-1] == pytest.approx(0.75)
    assert line["x"] == line["y"]
    assert len(dots["x"]) == 7


def test_user_text_is_escaped_everywhere(study, tmp_path):
    study.name = study.command = NASTY
    study.notes = [NASTY]
    study.environment = {NASTY: NASTY}
    o = study.outcomes[1]
    o.name, o.plan = NASTY, [NASTY]
    o.measured.breakdown[0].operator = o.measured.breakdown[0].kind = NASTY
    o.measured.memory[0].category = NASTY
    o.measured.name = NASTY
    o.checks[0].name = NASTY
    for path in (ablation_html(study, tmp_path / "a.html"), result_html(o.measured, tmp_path / "r.html")):
        loads, text, figures = parse(path)
        assert (loads.scripts, loads.fetched) == (3, [])
        assert "img" not in loads.tags
        assert "<img" not in json.dumps(figures), "tooltips read HTML"
        assert "alert" in text


def test_odd_results_do_not_break_the_report(tmp_path):
    nan = Result(source="measured", experiment_id="n", experiment={}, metrics={"tokens_per_s": Metric(value=math.nan)})
    guess = Result(source="predicted", experiment_id="p", experiment={}, metrics={"tokens_per_s": Metric(value=5.0)})
    cases = [
        [],
        [Outcome(name="b", plan=[])],
        [Outcome(name="b", plan=[], measured=nan, predicted=guess)],
        [Outcome(name="b", plan=[], predicted=guess, predicted_speedup=1.0)],
    ]
    for i, outcomes in enumerate(cases):
        a = Ablation(id="x", name="", baseline="b", outcomes=outcomes)
        parse(ablation_html(a, tmp_path / f"{i}.html"))
    for r in (nan, guess):
        parse(result_html(r, tmp_path / "r.html"))


def test_a_hopeless_interval_is_told_and_does_not_squeeze_the_chart(study, tmp_path):
    study.outcomes[1].speedup = Metric(value=1.1, low=1e-4, high=5e4)
    _, text, figures = parse(ablation_html(study, tmp_path / "a.html"))
    assert "too wide for a verdict" in text
    assert "[&lt;0.01, &gt;100]" in text
    assert figures["speedup"]["layout"]["xaxis"]["range"][1] < 5


def test_many_kinds_are_lumped_and_nothing_is_lost(study, tmp_path):
    r = study.outcomes[0].measured
    r.breakdown += [Row(phase="other", module="m", operator=f"o{i}", kind=f"k{i}", seconds=1e-4) for i in range(12)]
    _, _, figures = parse(result_html(r, tmp_path / "r.html"))
    parts = {t["name"]: t["x"][0] for t in figures["time-kind"]["data"]}
    assert len(parts) == 10
    assert list(parts)[-2:] == ["smaller kinds", "unattributed"]
    assert sum(parts.values()) == pytest.approx(r.metric("step_time_s"))


def test_headline(study):
    assert headline(study).startswith("Fastest: all, 1.8")
    assert "1 of 8 plans failed" in headline(study)
    for o in study.outcomes:
        o.measured = o.speedup = o.memory_ratio = None
        o.verdict = "failed"
    assert headline(study) == "Predicted only: nothing was measured."


def test_written_whole_or_not_at_all(study, tmp_path):
    path = tmp_path / "deep" / "a.html"
    assert ablation_html(study, path) == path
    assert [p.name for p in path.parent.iterdir()] == ["a.html"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        ablation_html(study, tmp_path / "file" / "a.html")


def test_script_json_is_safe_and_finite():
    text = page.script_json({"a": "</script>&", "b": [math.inf, 1.0]})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script>&", "b": [None, 1.0]}


def test_labels_keep_clear_of_each_other():
    close = [(0.5, 0.5), (0.51, 0.5), (0.5, 0.53)]
    sides = positions(close, ["first", "second", "third"], 400, 300)
    assert len(set(sides)) == 3
    assert positions([(0.99, 0.5)], ["a long label"], 400, 300) == ["middle left"]


def test_no_heavy_imports():
    import subprocess

    code = (
        "import sys, ridgeline.report.html, ridgeline.report.tables, ridgeline.store, ridgeline.measure.compare;"
        "print([m for m in ('torch', 'pandas', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_waterfall_steps_meet_and_end_at_the_peak(study, tmp_path):
    _, _, figures = parse(ablation_html(study, tmp_path / "a.html"))
    (bar,) = figures["waterfall-0"]["data"]
    tops = [base + height for base, height in zip(bar["base"], bar["y"], strict=True)]
    assert bar["base"][1:-1] == pytest.approx(tops[:-2])
    assert (bar["base"][-1], bar["y"][-1]) == (0.0, pytest.approx(tops[-2]))
