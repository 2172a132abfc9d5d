"""Tables: the numbers in the cells, Markdown that GitHub reads, CSV that machines read, terminals of 120 columns."""

import csv
import io
import re
import sys

import pytest
from rich.console import Console

from ridgeline.measure.compare import compare
from ridgeline.report.console import print_loads, print_pair, print_runs
from ridgeline.report.dissection import attributed, breakdown_table, grouped, memory_table
from ridgeline.report.table import Column, Table, html, markdown
from ridgeline.report.tables import (
    ablation_tables,
    comparison_tables,
    fit,
    result_tables,
    speed_table,
    to_csv,
    to_markdown,
    to_rich,
    verdict_text,
)
from ridgeline.report.units import count, metric, number, percent, seconds, size
from ridgeline.spec.ablation import Ablation, Outcome
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric, Result, Row
from ridgeline.store import Run


def row(table: Table, name: str) -> dict[str, str]:
    cells = next(r for r in table.rows if r[0] == name)
    return dict(zip([c.title for c in table.columns], cells, strict=True))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (seconds(0.41234), "412 ms"), (seconds(1.5), "1.50 s"), (seconds(2.5e-5), "25.0 µs"), (seconds(None), "–"),
        (size(1.5 * 2**30), "1.50 GiB"), (size(300 * 2**20), "300 MiB"), (size(0), "0 B"),
        (count(2.6e12, "FLOP/s"), "2.60 TFLOP/s"), (percent(-0.0912, signed=True), "-9.1 %"), (percent(1.0), "100 %"),
        (metric(2516.3, "tokens/s"), "2.52k tokens/s"), (metric(6.98, "nats/token"), "6.98 nats/token"),
        (number(0.0), "0"), (number(float("nan")), "–"), (number(123456.0), "123456"), (number(1.2e-5), "1.20e-05"),
    ],
)  # fmt: skip
def test_units(said, expected):
    assert said == expected


def test_predicted_stands_next_to_measured(study):
    cells = row(speed_table(study), "mixed_precision")
    assert re.fullmatch(r"5\.06 \| 4\.1\d ± 0\.\d\d", cells["k tokens/s, pred | meas"])
    assert re.fullmatch(r"1\.6\d× \[1\.\d\d, 1\.\d\d\]", cells["Speed-up"])
    assert (cells["Verdict"], cells["Same"]) == ("faster", "✓")
    assert cells["Residual"].startswith("-1")
    failed = row(speed_table(study), "int8+lora")
    assert (failed["Verdict"], failed["Speed-up"], failed["Residual"]) == ("failed: oom", "1.32× pred", "–")


def test_the_reason_of_a_failure_is_told(study):
    assert any("signal 9" in n for n in ablation_tables(study)[0].notes)


def test_markdown_has_the_same_number_of_cells_in_every_line(study):
    lines = [line for line in to_markdown(study).splitlines() if line.startswith("|")]
    counts = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    speed, memory = counts[: len(study.outcomes) + 2], counts[len(study.outcomes) + 2 :]
    assert len(set(speed)) == len(set(memory)) == 1
    assert len(memory) == len(study.outcomes) + 2


def test_markdown_escapes_markup():
    text = markdown([Table("a*b", [Column("x|y")], [["<script>_z_"]])])
    assert "a\\*b" in text
    assert "x\\|y" in text
    assert "\\<script>\\_z\\_" in text


def test_csv_keeps_si_units_and_whole_bytes(study):
    rows = list(csv.DictReader(io.StringIO(to_csv(study))))
    assert [r["plan"] for r in rows] == [o.name for o in study.outcomes]
    assert rows[0]["measured_peak_bytes"].isdigit()
    assert float(rows[1]["measured_step_time_s_low"]) < float(rows[1]["measured_step_time_s"])
    assert rows[6]["measured_status"] == "oom"
    assert rows[6]["measured_tokens_per_s"] == "", "unknown is empty, not zero"
    assert rows[1]["same"] == "yes"


@pytest.mark.parametrize("width", [100, 120, 160])
def test_terminal_tables_fit_without_wrapping(study, width):
    out = io.StringIO()
    Console(width=width, file=out).print(to_rich(study, width))
    text = out.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    for o in study.outcomes:
        assert re.search(rf"^ {re.escape(o.name)} ", text, re.M), f"{o.name} was wrapped"


def test_cutting_a_table_keeps_every_column_once():
    t = Table("t", [Column(c * 10) for c in "abcde"], [list("abcde")], ["note"], total=True)
    parts = fit(t, 30)
    assert [c.title[0] for p in parts for c in p.columns[1:]] == list("bcde")
    assert all(p.columns[0].title == "a" * 10 and p.width <= 36 for p in parts)
    assert [p.notes for p in parts] == [[]] * (len(parts) - 1) + [["note"]]
    assert fit(t, None) == [t]


def test_runs_on_a_narrow_terminal_are_whole_words(monkeypatch, capsys):
    monkeypatch.setattr("ridgeline.report.console._out", lambda: Console(width=80, file=sys.stdout))
    run = Run("450057954d6a", "2026-11-27T10:08:54+00:00", "result", "measured", "a name of a run", "llama2-70b",
              "zero:stage=3 + mixed_precision + flash_attention", 59.8, None, 2**30, "ok")  # fmt: skip
    print_runs([run])
    out = capsys.readouterr().out
    for text in ("2026-11-27 10:08:54", "measured", "a name of a run", "llama2-70b", "59.8 tokens/s", run.plan):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


def test_loads_on_a_narrow_terminal_are_whole_words(monkeypatch, capsys):
    monkeypatch.setattr("ridgeline.report.console._out", lambda: Console(width=80, file=sys.stdout))
    names = ("offered_per_s", "requests_per_s", "tokens_per_s", "goodput_per_s", "slo_share", "concurrency_mean",
             "schedule_lag_s", "requests", "errors", "ttft_s", "ttft_p50_s")  # fmt: skip
    print_loads([Result(source="measured", experiment_id="e", experiment={}, name="llama3.1-8b at 12.5/s",
                        metrics={n: Metric(value=2.0, unit="s") for n in names})])  # fmt: skip
    out = capsys.readouterr().out
    for text in ("limits", "Goodput/s", "Generated", "Sent late"):
        assert text in out
    assert out.count("llama3.1-8b at 12.5/s") >= 3
    assert max(map(len, out.splitlines())) <= 80


def test_verdict_of_what_was_not_measured():
    fine = Result(source="predicted", experiment_id="e", experiment={})
    big = fine.model_copy(update={"status": "infeasible"})
    measured = fine.model_copy(update={"source": "measured"})
    assert verdict_text(Outcome(name="a", plan=[], predicted=fine)) == "not measured"
    assert verdict_text(Outcome(name="a", plan=[], predicted=big)) == "failed: infeasible"
    assert verdict_text(Outcome(name="a", plan=[], measured=measured)) == "no baseline"
    assert verdict_text(Outcome(name="a", plan=[])) == "failed"


def test_an_empty_ablation_has_no_tables_to_break():
    empty = Ablation(id="x", name="", baseline="b", outcomes=[])
    assert to_markdown(empty)
    assert to_csv(empty) == "\n"
    bare = Ablation(id="x", name="", baseline="b", outcomes=[Outcome(name="b", plan=[])])
    assert "failed" in to_markdown(bare)


def test_breakdown_sums_to_the_step(study):
    r = study.outcomes[0].measured
    table = breakdown_table(r, by=("module", "phase"), top=3)
    assert table.rows[-1][0] == "total"
    assert table.rows[-2][0] == "unattributed"
    assert "smaller rows" in table.rows[-3][0]
    times = [float(cells[2]) for cells in table.rows]
    assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.003)
    assert times[-1] == pytest.approx(r.metric("step_time_s"), abs=0.002)


def test_hidden_communication_does_not_hide_the_unattributed_time():
    r = Result(source="measured", experiment_id="e", experiment={}, metrics={"step_time_s": Metric(value=1.0)},
               breakdown=[Row(phase="forward", module="m", operator="o", kind="gemm", seconds=0.7),
                          Row(phase="communication", module="m", operator="ar", kind="collective", seconds=0.5,
                              exposed_seconds=0.1)])  # fmt: skip
    assert attributed(r)[-1].seconds == pytest.approx(0.2)
    assert any("overlap" in n for n in breakdown_table(r).notes)


def test_rows_of_a_profiled_step_are_held_to_the_profiled_step():
    """A profiled step takes longer than a bare one: that is no overlap."""
    rows = [Row(phase="forward", module="m", operator="o", kind="gemm", seconds=1.5)]
    times = {"step_time_s": Metric(value=1.0), "profiled_step_s": Metric(value=1.5)}
    r = Result(source="measured", experiment_id="e", experiment={}, metrics=times, breakdown=rows)
    assert breakdown_table(r).notes == []


def test_residuals_are_measured_over_predicted_everywhere(capsys):
    p, m = (Result(source=s, experiment_id="e", experiment={}, metrics={"step_time_s": Metric(value=v, unit="s")})
            for s, v in (("predicted", 2.0), ("measured", 3.0)))  # fmt: skip
    print_pair(p, m)
    assert "+50.0 %" in capsys.readouterr().out
    (table,) = comparison_tables(compare(p, m))
    assert "+50.0 %" in table.rows[0]


def test_grouping_averages_the_roof_over_time():
    rows = [Row(phase="forward", module="m", operator=o, kind="gemm", seconds=s, roof=roof, flops=1, bytes=2)
            for o, s, roof in (("a", 3.0, 0.5), ("b", 1.0, 0.9), ("c", 1.0, None))]  # fmt: skip
    total = grouped(rows, ())[0]
    assert (total.seconds, total.flops, total.bytes, total.roof) == (5.0, 3, 6, pytest.approx(0.6))


def test_memory_total_is_the_peak(study):
    r = study.outcomes[0].measured
    assert memory_table(r).rows[-1][:2] == ["total", size(r.peak_bytes)]


def test_result_and_comparison_tables(study):
    base, fast = study.outcomes[0].measured, study.outcomes[1].measured
    titles = [t.title for t in result_tables(base)]
    assert titles[0] == "baseline, measured"
    assert titles[1] == "Checks"
    c = compare(base, fast)
    first = comparison_tables(c)[0]
    assert row(first, "tokens_per_s")["Verdict"] == "faster"
    assert "metric" in to_csv(base).splitlines()[0]
    assert "verdict" in to_csv(c).splitlines()[0]
    assert "Residual" in [x.title for x in comparison_tables(compare(base, study.outcomes[0].predicted))[0].columns]


def test_html_table_escapes_and_defines():
    text = html(Table("<b>", [Column("Metric", align="left"), Column("V", "verdict")], [["mfu", "<img src=x>"]],
                      metrics=True))  # fmt: skip
    assert "<img" not in text
    assert "&lt;b&gt;" in text
    assert text.count('class="hint"') == 2


def test_an_ablation_and_a_result_in_a_notebook(study, monkeypatch):
    frame = study.to_pandas()
    assert list(frame.plan) == [o.name for o in study.outcomes]
    one = study.outcomes[0].predicted
    assert dict(zip(one.to_pandas().metric, one.to_pandas().value, strict=True))["tokens_per_s"] == (
        one.metrics["tokens_per_s"].value
    )
    assert study.outcomes[1].name in study._repr_html_()
    assert "<table" in one._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pandas is not installed"):
        one.to_pandas()
