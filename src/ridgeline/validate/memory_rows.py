"""Published memory and step times of Megatron's recomputation study (arXiv:2205.05198): per-rank categories."""

from __future__ import annotations

import math
from functools import lru_cache

from ridgeline.predict.common import source_of
from ridgeline.predict.predict import predict
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.registry import brief, resolve
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import MOST_DEVICES, BadCell, CsvRow
from ridgeline.validate.dtypes import precision_of
from ridgeline.validate.nouns import device_of, model_of

NAME = "memory"
REQUIRED = ("model", "quantity", "value", "num_procs", "tensor_par", "pipeline_par", "activation_recompute")
_GIB = 2**30
_IN_PRODUCTS = 0.4
"""Part of the summing of gradients that goes away where weight-gradient products do it, as in Megatron-LM since 2022:
8 bytes per element instead of 2 and 10."""
_STATES = ("parameters", "gradients", "optimizer")
_DEVICE = "a100-80g-sxm"
"""The system of the study, Selene; a ``device`` column overrides it."""


def cases(row: CsvRow) -> list[Case]:
    """Predict one published quantity of one run. Raises :class:`BadCell` for an unknown quantity."""
    quantity, measured = row.text("quantity"), row.number("value", above=0.0)
    e = experiment(row)
    result = _predicted(e)
    plan = " ".join(brief(e.plan))
    if quantity == "iteration_time_s":
        step = result.metrics["step_time_s"].value
        flops = result.metrics["hfu"].value * step
        sums = sum(r.seconds for r in result.breakdown if r.kind == "accumulate")
        return [_case(row, e, quantity, measured, step - _IN_PRODUCTS * sums, (flops,), plan)]
    states = _categories(result, *_STATES)
    kept = _categories(result, "activations")
    if quantity == "weights+optim_GiB":
        return [_case(row, e, quantity, measured, states, (e.model.num_parameters * 18 / e.world / _GIB,), plan)]
    stream = (
        e.training.seq_len * e.micro_batch_size * e.model.hidden_size * e.model.num_layers / e.parallel.get("tp", 1)
    )
    if quantity == "activations_GiB":
        return [_case(row, e, quantity, measured, kept, (34 * stream / _GIB,), plan)]
    if quantity == "activation_pct_of_baseline":
        base = _categories(_predicted(experiment(row, baseline=True)), "activations")
        return [_case(row, e, quantity, measured, 100 * kept / base, (1.0,), plan)]
    raise BadCell(f"column 'quantity': {quantity!r} is not known")


def experiment(row: CsvRow, baseline: bool = False) -> Experiment:
    """The run of a row; ``baseline``: without recomputation and sequence parallelism."""
    tp, pp, ranks = row.count("tensor_par"), row.count("pipeline_par"), row.count("num_procs", most=MOST_DEVICES)
    spec = model_of(row).model_copy(update={"dropout": 0.1})
    each = math.gcd(8, ranks)
    device = device_of(row, _DEVICE)
    dtype = "bf16" if precision_of(row, "datatype", "float16") == "bf16" else "fp16"
    plan = [f"mixed_precision:dtype={dtype},weights=low", "fused_layers:loss=false,chunked=false"]
    if tp > 1:
        plan.append(f"tensor_parallel:degree={tp}")
        if row.text("tensor_par_comm_type", "ar") != "ar" and not baseline:
            plan.append("sequence_parallel")
    micro = row.count("microbatch_size", 1)
    share = max(1, ranks // (tp * pp)) * micro
    micros = max(1, round(row.count("batch_size") / share))  # the nearest number that divides
    chunks = row.count("pipeline_interleaving", 1)
    if pp > 1:
        fits = chunks > 1 and micros % pp == 0
        how = f"schedule=interleaved,chunks={chunks}" if fits else "schedule=1f1b"
        plan.append(f"pipeline:degree={pp},{how}")
    policy = row.cells.get("activation_recompute", "").strip().lower()
    if policy not in ("", "none", "attn_only", "full"):
        raise BadCell(f"column 'activation_recompute': {policy!r} is neither full nor attn_only nor none")
    if policy in ("full", "attn_only") and not baseline:
        plan.append("recompute:early_stop=false" if policy == "full" else "recompute:policy=selective")
    workload = Pretrain(
        seq_len=row.count("seq_len", spec.max_positions),
        batch_size=micros * share,
        micro_batch_size=micro,
    )
    cluster = Cluster(device=device, devices_per_node=each, nodes=ranks // each)
    return resolve(Experiment(model=spec, cluster=cluster, workload=workload, plan=Plan.parse(plan)))[0]


@lru_cache(maxsize=64)
def _cached(key: str) -> Result:
    return predict(Experiment.model_validate_json(key))


def _predicted(e: Experiment) -> Result:
    return _cached(e.model_dump_json())


def _categories(result: Result, *names: str) -> float:
    return sum(m.bytes for m in result.memory if m.category in names) / _GIB


def _case(row: CsvRow, e: Experiment, quantity: str, measured: float, predicted: float, terms: tuple[float, ...],
          plan: str) -> Case:  # fmt: skip
    time = quantity == "iteration_time_s"
    return Case(
        group=f"{e.cluster.device.name} {quantity}",
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        label=f"{e.model.name} {row.text('mode', '')}: {plan}",
        terms=terms,
        alternatives=(e.model.name, e.world, e.batch_size) if time else None,
        source=source_of(e.cluster) if time else "formulas",
        line=row.line,
    )
