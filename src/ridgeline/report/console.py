"""Terminal output: progress on standard error, tables on standard output; plain text when piped."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ridgeline.report import table as render
from ridgeline.report import units
from ridgeline.report.table import Column, Table
from ridgeline.report.tables import to_rich
from ridgeline.spec.backends import BACKENDS, order

if TYPE_CHECKING:
    from ridgeline.experiments import AblationSpec
    from ridgeline.spec.ablation import Ablation, CellRef
    from ridgeline.spec.comparison import Comparison
    from ridgeline.spec.device import Device
    from ridgeline.spec.result import Result
    from ridgeline.spec.system import System
    from ridgeline.store import Run

PLAIN_WIDTH = 160


def _out() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_tables(*tables: Table) -> None:
    """Tables on standard output."""
    _out().print(render.rich(tables))


def watch_table(table: Callable[[], Table], seconds: float) -> bool:
    """Refresh a table until Ctrl-C; returns False if there is no terminal."""
    from rich.live import Live

    console = _out()
    if not console.is_terminal:
        return False
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render.rich((table(),)), refresh=True)
            time.sleep(seconds)
    return True


# ---- progress -------------------------------------------------------------------------------------------------------


class _Live:
    """A progress bar on standard error; a line per change of stage when that is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TimeRemainingColumn(compact=True), console=self.console, transient=True,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self._last = ""

    def __enter__(self) -> Any:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.progress.stop()

    def line(self, text: str) -> None:
        """One line where there is no bar to update."""
        if not self.console.is_terminal and text != self._last:
            print(text, file=sys.stderr, flush=True)
            self._last = text


class Status(_Live):
    """A job whose length is not known."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.task = self.progress.add_task(title, total=None, note="")

    def message(self, message: Any) -> None:
        """A stage's name, or a worker's message."""
        note = message if isinstance(message, str) else _note(message)
        self.progress.update(self.task, note=note)
        if isinstance(message, str) or "stage" in message:
            self.line(f"{self.title}: {note}")


class CountBar(_Live):
    """Progress over a known number of items."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        super().__init__()
        self.title, self.total, self.done = title, total, done
        self.task = self.progress.add_task(title, total=total, completed=done, note="")

    def advance(self, note: str = "") -> None:
        """Count one more item as done."""
        self.done += 1
        self.progress.update(self.task, note=note, completed=self.done)
        if self.done == self.total or self.done % max(1, self.total // 10) == 0:
            self.line(f"{self.title}: {self.done} of {self.total}, {note}")


class SearchBar(_Live):
    """Progress over a number of items that is known after a while."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title, self.said = title, 0
        self.task = self.progress.add_task(title, total=None, note="")

    def at(self, done: int, of: int) -> None:
        """So many are done."""
        self.progress.update(self.task, completed=done, total=of or None)
        # Tenths are of the total as it is now: those that work say theirs in turn.
        if of and 10 * done // of > 10 * self.said // of:
            self.said = done
            self.line(f"{self.title}: {done} of {of}")


class StepBar(_Live):
    """Optimizer steps of one job."""

    def __init__(self, title: str, steps: int) -> None:
        super().__init__()
        self.title = title
        self.task = self.progress.add_task(title, total=steps or None, note="")

    def message(self, message: dict[str, Any]) -> None:
        """A worker's message."""
        self.progress.update(
            self.task, note=_note(message), total=message.get("steps"), completed=message.get("step", 0)
        )
        if message.get("restart") or message.get("warning"):
            self.progress.console.print(f"{self.title}: {_note(message)}", markup=False)
        step, steps = message.get("step", 0), message.get("steps", 0)
        if "eval_loss" in message or (step and (step == steps or step % max(1, steps // 10) == 0)):
            self.line(f"{self.title}: {_note(message)}")


class AblationBar(_Live):
    """The cells of an ablation."""

    def __init__(self, spec: AblationSpec) -> None:
        super().__init__()
        self.cells = len(spec.plans) * spec.measure.repeats
        self.steps = {name: getattr(e.workload, "steps", 1) for name, e in spec.plans.items()}
        self.finished = 0
        self.task: TaskID = self.progress.add_task(spec.name, total=float(self.cells), note="")

    def watch(self, cell: CellRef, message: dict[str, Any]) -> None:
        """A worker's message, or the end of a cell."""
        where = f"{cell.plan} ({cell.repeat + 1})"
        if "done" in message or "cached" in message:
            self.finished += 1
            outcome = "kept from the earlier run" if "cached" in message else message["status"]
            if message.get("status") == "ok":
                outcome = _beside(message["result"], message["predicted"])
            outcome += f": {message['reason']}" if message.get("reason") else ""
            self.progress.update(self.task, completed=self.finished, note=f"{where}: {outcome}")
            self.line(f"[{self.finished}/{self.cells}] {where}: {outcome}")
            if message.get("status") not in (None, "ok"):
                self.progress.console.print(f"{where}: {outcome}", markup=False)
            return
        share = message.get("step", 0) / max(1, self.steps.get(cell.plan, message.get("steps") or 1))
        self.progress.update(self.task, completed=self.finished + 0.95 * share, note=f"{where}: {_note(message)}")


def _beside(measured: Result, predicted: Result) -> str:
    """Throughput and memory of a process beside what was predicted."""
    parts = []
    for name in ("tokens_per_s", "peak_bytes"):
        own, other = measured.metrics.get(name), predicted.metrics.get(name)
        if own:
            parts.append(units.metric(own.value, own.unit)
                        + (f" (predicted {units.metric(other.value, other.unit)})" if other else ""))  # fmt: skip
    return ", ".join(parts) or "ok"


def _note(message: dict[str, Any]) -> str:
    if "step" in message and "loss" in message:
        return (
            f"step {message['step']}/{message['steps']}  loss {message['loss']:.4f}  {message['seconds'] * 1e3:.0f} ms"
        )
    if "eval_loss" in message:
        return f"step {message['step']}/{message['steps']}  held-out loss {message['eval_loss']:.4f}"
    return str(message.get("stage", ""))


# ---- results --------------------------------------------------------------------------------------------------------


def print_result(result: Result) -> None:
    """One result, its verdict first."""
    console = _out()
    if result.source == "predicted":
        fits = "fits" if result.status == "ok" else "does not fit"
        first, *others = [*([result.reason] if result.reason else []), *result.notes] or [""]
        console.print("\n".join([f"{fits}: {first}", *(f"  {note}" for note in others), ""]), markup=False)
    console.print(to_rich(result, console.width))


def print_pair(predicted: Result, measured: Result) -> None:
    """Predicted beside measured, metric by metric."""
    rows = []
    for name, m in measured.metrics.items():
        p = predicted.metrics.get(name)
        residual = units.percent(m.value / p.value - 1, signed=True) if p and p.value else units.NONE
        spread = f" [{units.metric(m.low, m.unit)}, {units.metric(m.high, m.unit)}]" if m.low is not None else ""
        rows.append(
            [name, units.metric(p.value, p.unit) if p else "–", units.metric(m.value, m.unit) + spread, residual]
        )
    columns = [Column("metric", align="left"), Column("predicted"), Column("measured [95 %]"), Column("residual")]
    title = f"{measured.name or measured.experiment_id}: {measured.status}" + (
        f", {measured.reason}" if measured.reason else ""
    )
    print_tables(Table(title, columns, rows, notes=measured.notes))
    if measured.traffic:
        print_tables(_traffic_table(predicted, measured))


def print_loads(results: Sequence[Result]) -> None:
    """Results of a server under one load or several: throughput, latencies, and notes."""
    from ridgeline.report.tables import fit, load_tables

    console = _out()
    console.print(render.rich([part for t in load_tables(results) for part in fit(t, console.width)]))
    for r in results:
        for note in [*r.notes, *(f"{c.name}: failed" for c in r.checks if not c.passed)]:
            console.print(f"note: {r.name}: {note}", markup=False)


def _traffic_table(predicted: Result, measured: Result) -> Table:
    """Collectives of one step, counted beside predicted."""
    predicted_of = {(t.kind, t.ranks): t for t in predicted.traffic}
    measured_of = {(t.kind, t.ranks): t for t in measured.traffic}
    rows = []
    for key in sorted({*predicted_of, *measured_of}):
        p, m = predicted_of.get(key), measured_of.get(key)
        rows.append(
            [key[0], str(key[1])]
            + [f"{t.calls:g}" if t else "0" for t in (p, m)]
            + [units.metric(t.bytes if t else 0.0, "bytes") for t in (p, m)]
        )
    names = ("ranks", "calls predicted", "calls measured", "bytes predicted", "bytes measured")
    return Table("sent per step and rank", [Column("collective", align="left"), *(Column(n) for n in names)], rows)


def print_ablation(ablation: Ablation) -> None:
    """The ablation's tables."""
    console = _out()
    console.print(to_rich(ablation, console.width))
    for note in ablation.notes:
        console.print(f"note: {note}", markup=False)


def print_dissection(predicted: Result, measured: Result) -> None:
    """Measured and predicted breakdown by module and phase, then operator by operator, then memory."""
    from ridgeline.report.dissection import breakdown_table, memory_table, parts_table

    modules = breakdown_table(measured, by=("module", "phase"), top=20)
    modules.title = "measured: " + modules.title
    expected = breakdown_table(predicted, by=("module", "phase"), top=20)
    expected.title = "predicted: " + expected.title
    console = _out()
    console.print(
        render.rich([parts_table(predicted, measured), modules, expected, breakdown_table(measured),
                     memory_table(measured), memory_table(predicted)])
    )  # fmt: skip
    over = measured.metrics["profiler_overhead"].value
    whole = "generation" if "profiled_e2e_s" in measured.metrics else "step"
    console.print(f"  the profiled {whole} took {over:.2f}x the bare one; shares are of the profiled one", markup=False)


def print_comparison(comparison: Comparison) -> None:
    """The comparison's tables."""
    console = _out()
    console.print(to_rich(comparison, console.width))


def print_plan_predictions(rows: Sequence[tuple[str, Result]], title: str, note: str) -> None:
    """The predictions of an ablation's plans."""
    cells = [
        [name, units.metric(r.metric("tokens_per_s"), "tokens/s"), units.seconds(r.metric("step_time_s")),
         units.size(r.peak_bytes), r.status]
        for name, r in rows
    ]  # fmt: skip
    columns = [
        Column("plan", align="left"),
        Column("tokens/s"),
        Column("step"),
        Column("peak memory"),
        Column("status"),
    ]
    print_tables(Table(title, columns, cells, notes=[note]))


# ---- lists ----------------------------------------------------------------------------------------------------------


def print_runs(rows: Sequence[Run]) -> None:
    """Stored runs, newest first, in as many tables as the terminal's width takes."""
    from ridgeline.report.tables import fit

    cells = [
        [r.id, r.created[:19].replace("T", " "), r.kind, r.source, r.name, r.model, r.plan[:48],
         units.metric(r.tokens_per_s, "tokens/s"), units.size(r.peak_bytes), r.status]
        for r in rows
    ]  # fmt: skip
    names = ("id", "created", "kind", "source", "name", "model", "plan")
    columns = [
        *(Column(n, align="left") for n in names),
        Column("tokens/s"),
        Column("peak"),
        Column("status", align="left"),
    ]
    table = Table("stored runs" if cells else "no stored runs yet", columns, cells)
    print_tables(*fit(table, _out().width))


def print_cards(cards: Sequence[dict[str, Any]]) -> None:
    """All techniques, one a line."""
    cells = [
        [c["name"], c["title"], c["phase"], ", ".join(c["tasks"]), "lossless" if c["lossless"] else "lossy", c["paper"],
         ", ".join(o["name"] for o in c["options"]) or "–"]
        for c in cards
    ]  # fmt: skip
    names = ("technique", "what", "phase", "tasks", "contract", "paper", "options")
    print_tables(Table("techniques", [Column(n, align="left") for n in names], cells,
                 notes=["`ridgeline techniques NAME` shows a card; `--matrix` what works together"]))  # fmt: skip


def print_systems(systems: Sequence[System]) -> None:
    """All systems of the literature, one a line."""
    cells = [[s.name, s.title, s.paper, " ".join(call.partition(":")[0] for call in s.plan)] for s in systems]
    names = ("system", "what", "paper", "techniques")
    print_tables(Table("systems: named plans, for --with as techniques are", [Column(n, align="left") for n in names],
                       cells))  # fmt: skip


def print_models(rows: Sequence[dict[str, Any]], detail: bool) -> None:
    """Models by size, or all fields of one."""
    if detail:
        cells = [[k, str(v)] for k, v in rows[0].items()]
        print_tables(Table(rows[0]["name"], [Column("field", align="left"), Column("value", align="left")], cells))
        return
    cells = [
        [r["name"], r["family"], units.count(r["parameters"]), units.count(r["active_parameters"]),
         str(r["num_layers"]),
         str(r["hidden_size"]), f"{r['num_heads']}/{r['num_kv_heads']}", str(r["vocab_size"]), str(r["max_positions"])]
        for r in rows
    ]  # fmt: skip
    names = ("parameters", "active", "layers", "hidden", "heads/kv", "vocabulary", "positions")
    columns = [Column("model", align="left"), Column("family", align="left"), *(Column(n) for n in names)]
    print_tables(Table("models", columns, cells))


def print_devices(devices: Sequence[Device], detail: bool) -> None:
    """Devices, or all fields of one."""
    if detail:
        device_table(devices[0])
        return
    cells = []
    for d in devices:
        low = d.peak_flops.get("bf16") or d.peak_flops.get("fp16")
        cells.append(
            [d.name, d.architecture, f"{low / 1e12:.0f}" if low else "–", f"{d.peak_flops.get('fp32', 0) / 1e12:.1f}",
             units.size(d.memory_bytes), f"{d.memory_bandwidth / 1e12:.2f}", d.link.name if d.link else "–",
             f"{d.watts:.0f}", f"{d.price_per_hour:.2f}" if d.price_per_hour else "–"]
        )  # fmt: skip
    columns = [Column("device", align="left"), Column("architecture", align="left"), Column("bf16/fp16 TFLOP/s"),
               Column("fp32 TFLOP/s"), Column("memory"), Column("TB/s"), Column("link", align="left"), Column("W"),
               Column("$/h")]  # fmt: skip
    print_tables(Table("devices (dense peaks)", columns, cells))


def device_table(d: Device) -> None:
    """One device with its measured rates."""
    cells = [[k, str(v)] for k, v in d.model_dump(exclude={"rates", "ranks", "kernels"}, exclude_none=True).items()]
    tables = [Table(d.name, [Column("field", align="left"), Column("value", align="left")], cells)]
    if d.rates:
        rows = []
        for key, r in sorted(d.rates.items()):
            shared = next((v[key] for v in d.ranks.values() if key in v), None)
            rows.append([key, *_rate(r), *(_rate(shared) if shared else ["–", "–", "–"])])
        names = ("latency", "GFLOP/s", "GB/s", "shared: latency", "GFLOP/s", "GB/s")
        tables.append(Table("measured rates", [Column("operator", align="left"), *(Column(n) for n in names)], rows))
    if d.kernels:
        rows = [
            [operator, backend, units.seconds(seconds), "taken" if backend == order(operator, held)[0] else ""]
            for operator, held in d.kernels.items()
            if operator in BACKENDS
            for backend, seconds in held.items()
        ]
        left = [Column(n, align="left") for n in ("operator", "back end")]
        tables.append(Table("measured back ends", [*left, Column("time"), Column("", align="left")], rows))
    print_tables(*tables)


def _rate(r: Any) -> list[str]:
    return [
        units.seconds(r.latency),
        f"{r.flop_rate / 1e9:.1f}" if r.flop_rate else "–",
        f"{r.byte_rate / 1e9:.2f}" if r.byte_rate else "–",
    ]
