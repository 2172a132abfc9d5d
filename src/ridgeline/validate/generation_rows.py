"""generation.csv: fixed batches on serving software, time to the first token and time per further token."""

from __future__ import annotations

from typing import Any

from ridgeline.predict.common import source_of
from ridgeline.predict.interval import stated_spread
from ridgeline.predict.known import state
from ridgeline.predict.serving.engine_costs import find_engine
from ridgeline.predict.serving.static_batch import predict_generation
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Row
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import resolve
from ridgeline.validate.case import Case, largest_kinds
from ridgeline.validate.csv_table import MOST_TOKENS, BadCell, CsvRow
from ridgeline.validate.degrees import tensor_degree
from ridgeline.validate.nouns import device_of, model_of
from ridgeline.validate.precisions import plan_of

NAME = "generation"
REQUIRED = ("model", "device", "tp", "prompt_len", "batch", "output_len", "ttft_s", "tpot_s")

ENGINE = "vllm-2023"
"""What the rows were measured with, unless a column ``backend`` says otherwise."""


CONTAINED = "mlc-ai/llm-perf-bench"
"""Source of published rows whose script, docker/bash.sh, starts containers with Docker's default of 64 MB of shared
memory. That this is why its vLLM is slower than elsewhere is an inference."""


def engine_behind(row: CsvRow) -> str:
    """The engine that a row was measured with: its ``backend``, or where that is empty what its source is known for."""
    contained = row.text("source", "").startswith(CONTAINED)
    return row.text("backend", f"{ENGINE}-docker" if contained else ENGINE)


def experiment(row: CsvRow) -> Experiment:
    """The row as an experiment. Raises :class:`BadCell` or :class:`UserError` for what cannot be read or predicted."""
    return _settled(row)[0]


def _settled(row: CsvRow) -> tuple[Experiment, str]:
    """The row as an experiment, and what of it was chosen here; empty: nothing."""
    if row.count("pp", 1) > 1 and not row.has("tp"):
        raise BadCell("column 'tp' is empty, and is not settled beside pipeline stages")
    tp, chosen = tensor_degree(row, lambda degree: predict_generation(*resolve(_of_degree(row, degree))))
    return _of_degree(row, tp), chosen


def _of_degree(row: CsvRow, tp: int) -> Experiment:
    prompt, output = (row.count(name, most=MOST_TOKENS) for name in ("prompt_len", "output_len"))
    workload = Generate(
        batch_size=row.count("batch", 1), prompt_len=prompt, output_len=output, engine=engine_behind(row)
    )
    model = model_of(row)
    plan = plan_of(model, row.text("precision", "bf16"), workload.engine)
    plan += [f"tensor_parallel:degree={tp}"] if tp > 1 else []
    return resolve(
        Experiment(
            model=long_enough(model, prompt + output),
            cluster=cluster_of(device_of(row), tp),
            workload=workload,
            plan=Plan.parse(plan),
        )
    )[0]


def cluster_of(device: Device, ranks: int, node: int = 8) -> Cluster:
    """The nodes of up to eight devices that hold ``ranks``."""
    if ranks <= node:
        return Cluster(device=device, devices_per_node=ranks)
    return Cluster(device=device, devices_per_node=node, nodes=-(-ranks // node))


def long_enough(model: ModelSpec, length: int) -> ModelSpec:
    """The model with at least ``length`` positions: benchmarks run past them, and the time is the same."""
    return model if model.max_positions >= length else model.model_copy(update={"max_positions": length})


def cases(row: CsvRow) -> list[Case]:
    """Time to the first token and per further token of one row."""
    settled, chosen = _settled(row)
    e, techniques = resolve(settled)
    w = e.workload
    assert isinstance(w, Generate)
    stages, engine = row.count("pp", 1), find_engine(w.engine, e.cluster.device)
    if stages > 1 and not engine.hop_s:
        raise UserError(f"generation of {engine.name} over pipeline stages is not predicted", "use rows with pp = 1")
    result = predict_generation(e, techniques, stages)
    known = state(e, techniques, result)
    name = f"{e.model.name} {engine.name} {row.text('precision', 'bf16')} tp{e.parallel.get('tp', 1)} pp{stages}"
    where = f"{name} batch {w.batch_size} prompt {w.prompt_len} output {w.output_len}"
    if stages == 1 and result.status != "ok":  # the memory of one of several stages is not predicted
        chosen = f"does not fit: {result.reason.split(';')[0]}"
    where += f" ({chosen})" if chosen else ""
    shared: dict[str, Any] = {"label": where, "line": row.line, "source": source_of(e.cluster)}
    m, device = e.model, e.cluster.device
    weights = 2.0 * m.num_active_parameters
    flops = weights * w.batch_size * w.prompt_len / (e.world * device.peak_flops.get("bf16", 1e15))
    stream = weights / (e.world * device.memory_bandwidth)
    out = []
    plan = ("generation", m.name, device.name, engine.name, w.prompt_len, w.batch_size, w.output_len)
    prompt, tokens = _passes(result.breakdown)
    for name, terms, rows in (("ttft_s", (flops, 1.0), prompt), ("tpot_s", (stream, 1.0), tokens)):
        group = f"{device.name} {m.name} {engine.name} {name.removesuffix('_s')}"
        if row.has(name) and not (name == "tpot_s" and w.output_len < 2):
            out.append(
                Case(group, name, row.number(name, above=0.0), result.metrics[name].value,
                     terms=terms, alternatives=(*plan, name) if name == "tpot_s" else None,
                     why=largest_kinds(rows), spread=stated_spread(result.metrics[name]), known=known, **shared)
            )  # fmt: skip
    if not out:
        raise BadCell("columns 'ttft_s' and 'tpot_s' are empty")
    return out


def _passes(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of the prompt, then those of all further tokens; each pass has its own of communication."""
    seen: set[tuple[str, str]] = set()
    for i, row in enumerate(rows):
        if row.phase == "decode" or (row.module, row.operator) in seen:
            return rows[:i], rows[i:]
        seen.add((row.module, row.operator))
    return rows, []
