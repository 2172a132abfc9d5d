"""serving.csv: closed-loop serving at fixed concurrency, mean time to the first token and per further token."""

from __future__ import annotations

from typing import Any

from ridgeline.predict.common import source_of
from ridgeline.predict.interval import stated_spread
from ridgeline.predict.known import ALIKE, state
from ridgeline.predict.serving.engine_costs import ALIASES
from ridgeline.predict.serving.simulate import predict_serving
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import resolve
from ridgeline.validate.case import Case, largest_kinds
from ridgeline.validate.csv_table import MOST_TOKENS, BadCell, CsvRow
from ridgeline.validate.degrees import tensor_degree
from ridgeline.validate.generation_rows import cluster_of, long_enough
from ridgeline.validate.nouns import device_of, model_of
from ridgeline.validate.precisions import plan_of

NAME = "serving"
REQUIRED = ("model", "device", "tp", "input_len", "output_len", "concurrency", "ttft_s", "tpot_s")

JITTER = 0.064
"""Default coefficient of variation of lengths: drawn uniformly within a fifth of the longest."""
SPREAD = ALIKE
"""The same of the lengths of clients of whom nothing is known. Exactly equal clients would stay in step for ever, and
every prompt wait for all others. An assumption, chosen on TensorRT-LLM's open rows on H100, which want at most this;
vLLM's want more, and are further off with it (docs/accuracy.md)."""
WAVES = 10
"""Requests per client, the first of which all come at once. An assumption: the files do not say."""

_CLIENTS = 4096
"""Most clients of a row: each is simulated, and rows of the open data have up to 512."""
_TOKENS = 500_000_000
"""Most tokens of all requests, for the same reason: ten times those of the largest row of the open data."""
_BUDGET = 2048
"""Tokens: the least budget of an iteration behind TensorRT-LLM's rows. An assumption, chosen on those rows; vLLM's have
its default."""

ALONE = ", fields only"
"""Suffix of the groups of predictions that use nothing from the judged rows."""


def stated(prompt: int, output: int) -> dict[str, Any]:
    """Workload fields as the row has them, with the engine's own token budget, for any backend. All clients start at
    once; lengths vary by a few percent about the stated ones."""
    return {"prompt_len": prompt, "output_len": output, "length_cv": SPREAD}


def harness(backend: str, prompt: int, output: int, clients: int) -> dict[str, Any]:
    """Workload fields of the load generator taken to be behind a backend's rows.

    The files do not say; these assumptions were inferred from the open rows. vLLM: lengths drawn evenly between 0.8 and
    1 of the stated ones, so that clients fall out of step. TensorRT-LLM: exact lengths, and a token budget of 2048, or
    of one long prompt beside the decoding batch (whose time to the first token is the same multiple of a prefill at
    every length).
    """
    if backend == "trtllm":
        budget = max(_BUDGET, prompt + clients)
        return {"prompt_len": prompt, "output_len": output, "max_num_batched_tokens": budget}
    mean = {"prompt_len": max(1, round(0.9 * prompt)), "output_len": max(1, round(0.9 * output))}
    return {**mean, "length_cv": JITTER}


def experiment(row: CsvRow, inferred: bool = True) -> Experiment:
    """The row as an experiment, of the load that :func:`harness` takes to be behind it, or as :func:`stated`.

    Raises :class:`BadCell` or :class:`UserError` for what cannot be read or predicted.
    """
    return _settled(row, inferred)[0]


def _settled(row: CsvRow, inferred: bool) -> tuple[Experiment, str]:
    """The row as an experiment, and what of it was chosen here; empty: nothing."""
    tp, chosen = tensor_degree(row, lambda degree: predict_serving(*resolve(_of_degree(row, degree, inferred))))
    return _of_degree(row, tp, inferred), chosen


def _of_degree(row: CsvRow, tp: int, inferred: bool) -> Experiment:
    prompt, output = (row.count(name, most=MOST_TOKENS) for name in ("input_len", "output_len"))
    clients = row.count("concurrency")
    if clients > _CLIENTS:
        raise BadCell(f"column 'concurrency': {clients} clients are more than the {_CLIENTS} that are simulated")
    if (tokens := WAVES * clients * (prompt + output)) > _TOKENS:
        raise BadCell(
            f"{clients} clients with {prompt} + {output} tokens: {tokens:.0e} tokens in all are not simulated"
        )
    ep = row.count("ep", 1, least=0)
    if row.count("pp", 1) > 1:
        raise UserError("serving over pipeline stages is not predicted", "use rows with pp = 1")
    model = model_of(row)
    backend = row.text("backend", "vllm").lower()
    software = ALIASES.get(backend, backend)
    fields = harness(software, prompt, output, clients) if inferred else stated(prompt, output)
    workload = Serve(concurrency=clients, requests=WAVES * clients, engine=backend, **fields)
    plan = plan_of(model, row.text("precision", "bf16"), software)
    plan += [f"tensor_parallel:degree={tp}"] if tp > 1 else []
    plan += [f"expert_parallel:degree={ep}"] if ep > 1 else []
    return resolve(
        Experiment(
            model=long_enough(model, prompt + output),
            cluster=cluster_of(device_of(row), tp),
            workload=workload,
            plan=Plan.parse(plan),
        )
    )[0]


def cases(row: CsvRow) -> list[Case]:
    """Mean time to the first token and per further token of one row, with what is taken of its load generator; and
    what the row's own fields alone give."""
    return [*_judged(row, True), *_judged(row, False)]


def _judged(row: CsvRow, inferred: bool) -> list[Case]:
    settled, chosen = _settled(row, inferred)
    e, techniques = resolve(settled)
    w = e.workload
    assert isinstance(w, Serve)
    result = predict_serving(e, techniques)
    if "ttft_s" not in result.metrics:
        raise UserError(f"no request fits: {result.reason}")
    known = state(e, techniques, result)
    model, device = e.model, e.cluster.device
    lengths = f"input {row.text('input_len')} output {row.text('output_len')} concurrency {w.concurrency}"
    label = f"{model.name} {w.engine} {row.text('precision', 'bf16')} tp{e.parallel.get('tp', 1)} {lengths}"
    label += f" ({chosen})" if chosen else ""
    group = f"{device.name} {model.name} {w.engine}"
    # The trivial baseline: prefill at peak, and the active weights streamed once per token, plus a constant.
    flops = 2.0 * model.num_active_parameters * w.prompt_len / (e.world * device.peak_flops.get("bf16", 1e15))
    stream = model.num_active_parameters / (e.world * device.memory_bandwidth)
    clients = float(w.concurrency or 1)
    same = (model.name, device.name, w.engine, row.text("input_len"), row.text("output_len"), w.concurrency)
    out, suffix = [], "" if inferred else ALONE
    waits = f"waiting for other requests {result.metrics['waiting_share'].value:.0%}"
    decode = largest_kinds(result.breakdown)
    for name, terms, why in (("ttft_s", (flops, 1.0), waits),
                             ("tpot_s", (stream, flops * clients / w.output_len, 1.0), decode)):  # fmt: skip
        if row.has(name) and not (name == "tpot_s" and row.count("output_len") < 2):
            m = result.metrics[name]
            out.append(
                Case(f"{group} {name.removesuffix('_s')}{suffix}", name, row.number(name, above=0.0), m.value,
                     label=label, terms=terms, why=why, alternatives=same if name == "tpot_s" and inferred else None,
                     line=row.line, spread=stated_spread(m), known=known, source=source_of(e.cluster))
            )  # fmt: skip
    if not out:
        raise BadCell("columns 'ttft_s' and 'tpot_s' are empty")
    return out
