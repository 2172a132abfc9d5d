"""Automatic parallelization: found plans beside presets, Alpa's clusters beside its claims, and plans measured here.

    python benchmarks/auto_parallel.py pairs --json benchmarks/results/auto_parallel.json
    python benchmarks/auto_parallel.py alpa --json benchmarks/results/auto_parallel_alpa.json
    ridgeline probe --ranks 4 && python benchmarks/auto_parallel.py measured \\
        --json benchmarks/results/auto_parallel_measured.json

``pairs``: on 30 pairs of a model and a cluster, the predicted step of the plan that each method finds beside the best
preset's, and the time of the search. ``alpa``: GPT and GShard-like models on up to 8 x 8 V100, 25 Gb/s between nodes
(arXiv:2201.12023, section 8), beside the best plans of the baselines' techniques. ``measured``: predicted and measured
steps of plans on four processes of this machine, and their rank correlation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline import catalog, experiments
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.predict import predict
from ridgeline.search import Question, search
from ridgeline.search.auto.auto_parallel import auto_parallel
from ridgeline.search.auto.explore import TRIALS
from ridgeline.spec.device import Cluster, Device, Link
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Pretrain

MODELS = ("gpt2-xl", "gpt3-2.7b", "llama2-7b", "llama2-13b", "llama2-70b", "mixtral-8x7b", "gpt3-175b", "opt-1.3b")
CLUSTERS = ("4xrtx4090", "8xrtx3090", "8xa100-80g-sxm", "2x8xv100-32g-sxm", "8x8xa100-80g-sxm", "4x8xh100-sxm")
TOO_LARGE = {
    ("llama2-70b", "4xrtx4090"), ("llama2-70b", "8xrtx3090"), ("llama2-70b", "8xa100-80g-sxm"),
    ("llama2-70b", "2x8xv100-32g-sxm"), ("mixtral-8x7b", "4xrtx4090"), ("mixtral-8x7b", "8xrtx3090"),
    ("mixtral-8x7b", "2x8xv100-32g-sxm"), ("gpt3-175b", "4xrtx4090"), ("gpt3-175b", "8xrtx3090"),
    ("gpt3-175b", "8xa100-80g-sxm"), ("gpt3-175b", "2x8xv100-32g-sxm"), ("llama2-13b", "4xrtx4090"),
}  # fmt: skip
"""Pairs of which no preset fits."""
SEQUENCES = 8
"""Of a step, per device."""
TRIAL_BUDGET = 500
LEAST_CORRELATION = 0.9

GPT_SIZES = {  # hidden size, layers, heads; alpa-projects/alpa, benchmark/alpa
    8: ("2.6B", 2560, 32, 32), 16: ("6.7B", 4096, 32, 32), 32: ("15B", 5120, 48, 40), 64: ("39B", 8192, 48, 64),
}  # fmt: skip
MOE_SIZES = {  # hidden size, layers, heads, experts
    8: ("2.4B", 1024, 16, 16, 16), 16: ("10B", 1536, 16, 16, 32), 32: ("27B", 2048, 16, 16, 48),
    64: ("70B", 2048, 32, 16, 64),
}  # fmt: skip
THIN_SIZES = {8: ("1.2B", 1024, 96, 16), 16: ("2.4B", 1024, 192, 16), 32: ("5.4B", 1536, 192, 16)}
"""As deep and narrow transformers as no paper trains: many places to cut, small products."""
PAPER_BATCH = 1024
MEGATRON = frozenset({"tensor_parallel", "pipeline", "data_parallel", "recompute", "mixed_precision", "fused_layers"})
DEEPSPEED = frozenset({"zero", "data_parallel", "expert_parallel", "recompute", "mixed_precision", "fused_layers"})
STAGES_AND_DATA = frozenset({"pipeline", "data_parallel", "recompute", "mixed_precision", "fused_layers"})
"""Alpa's PP-DP: stages and data parallelism without sharding operators."""
LATER = frozenset({"flash_attention", "fp8"})
"""Techniques that the paper's systems did not have."""

SMALL = ModelSpec(name="eight-layers", family="llama", vocab_size=2000, hidden_size=256, num_layers=8, num_heads=8,
                  num_kv_heads=8, head_dim=32, intermediate_size=1024, max_positions=256)  # fmt: skip
RANKS = 4
WORKLOAD = {"kind": "pretrain", "seq_len": 64, "batch_size": 16, "micro_batch_size": 4, "steps": 100, "warmup_steps": 2}
_EVERY = "tensor_parallel:degree={0},sharding=embed={1}+attention={1}+mlp={1}+head={1}"
PLANS: dict[str, tuple[str, ...]] = {
    "data 4": ("data_parallel",),
    "zero 3": ("zero:stage=3",),
    "reduce 4": ("tensor_parallel:degree=4",),
    "scatter 4": (_EVERY.format(4, "scatter"),),
    "batch 4": (_EVERY.format(4, "batch"),),
    "whole 4": (_EVERY.format(4, "whole"),),
    "attention batch, mlp scatter": ("tensor_parallel:degree=4,sharding=embed=batch+attention=batch+mlp=scatter"
                                     "+head=batch",),
    "whole 2 x data 2": (_EVERY.format(2, "whole"), "data_parallel"),
    "reduce 2 x data 2": ("tensor_parallel:degree=2", "data_parallel"),
    "stages 4": ("pipeline:degree=4",),
    "stages 5+1+1+1": ("pipeline:degree=4,layers=5+1+1+1",),
    "stages 2 x data 2": ("pipeline:degree=2", "data_parallel"),
    "stages 6+2 x batch 2": ("pipeline:degree=2,layers=6+2", _EVERY.format(2, "batch")),
    "stages 2 x whole 2": ("pipeline:degree=2", _EVERY.format(2, "whole")),
    "stages 2 x reduce 2, recompute": ("pipeline:degree=2", "tensor_parallel:degree=2", "recompute"),
}  # fmt: skip


def main() -> int:
    """Run one part; what is done so far is written after every row."""
    args = _arguments()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    for row in {"pairs": pairs, "alpa": alpa, "measured": measured}[args.part](args):
        rows.append(row)
        report = {"part": args.part, **_summary(args.part, rows), "rows": rows, "environment": fingerprint()}
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in report.items() if k not in ("rows", "environment")}))
    return int(report.get("least_gain", 1.0) < 1 or report.get("rank_correlation", 1.0) < LEAST_CORRELATION)


def _summary(part: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if part == "measured":
        return {"rank_correlation": _spearman([(r["predicted_s"], r["measured_s"]) for r in rows])}
    gains = [r["gain"] for r in rows if r.get("gain")]
    seconds = [r["seconds"] for r in rows if "seconds" in r]
    return {"pairs": len(rows), "median_gain": statistics.median(gains), "least_gain": min(gains),
            "most_gain": max(gains), "most_seconds": max(seconds)} if gains else {}  # fmt: skip


def pairs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for every pair of a model and a cluster."""
    for name in args.models:
        for on in CLUSTERS:
            if (name, on) in TOO_LARGE:
                continue
            q = _question(catalog.model(name), catalog.cluster(on), SEQUENCES * catalog.cluster(on).size)
            row = _found(q, args.workers)
            if row is None:
                print(f"{name} on {on}: nothing fits", file=sys.stderr)
                continue
            yield _said({"model": name, "on": on, **row})


def _found(q: Question, workers: int) -> dict[str, Any] | None:
    a = auto_parallel(q, "alpa", workers)
    if a is None or a.preset is None:
        return None
    trials = {method: auto_parallel(q, method, workers, budget=TRIAL_BUDGET) for method in TRIALS}
    return {
        "preset_s": a.preset.metrics["step_time_s"], "alpa_s": a.step, "gain": a.gain,
        "seconds": a.seconds, "preset_seconds": a.preset_seconds, "predictions": a.predictions,
        **{f"{method}_s": None if t is None else t.step for method, t in trials.items()},
        "trial_seconds": {method: None if t is None else t.seconds for method, t in trials.items()},
        "preset": a.preset.experiment.plan.strings(), "plan": a.experiment.plan.strings(),
        "micro_batch_size": a.experiment.micro_batch_size, "stages": a.stages(),
    }  # fmt: skip


def _question(m: ModelSpec, cluster: Cluster, batch: int, **more: Any) -> Question:
    return Question(m, cluster, Pretrain(seq_len=min(2048, m.max_positions), batch_size=batch), **more)


# ---- Alpa's clusters ------------------------------------------------------------------------------------------------


def v100_cluster(devices: int) -> Cluster:
    """Nodes of p3.16xlarge: 8 V100 with NVLink, 25 Gb/s per node."""
    device = catalog.device("v100-16g-sxm")
    wire = Link(name="25 Gb/s Ethernet", bandwidth=25e9 / 8 / 8, latency=15e-6, source="arXiv:2201.12023, section 8")
    return Cluster(device=device.model_copy(update={"network": wire}), devices_per_node=8, nodes=devices // 8)


def paper_model(kind: str, devices: int) -> ModelSpec:
    """The model that the paper trains on so many devices."""
    if kind != "moe":
        size, hidden, layers, heads = (GPT_SIZES if kind == "gpt" else THIN_SIZES)[devices]
        more: dict[str, Any] = {"vocab_size": 51200}
    else:
        size, hidden, layers, heads, experts = MOE_SIZES[devices]
        more = {"vocab_size": 32000, "num_experts": experts, "experts_per_token": 2, "moe_every": 2}
    return ModelSpec(
        name=f"{kind}-{size}", family="gpt2", hidden_size=hidden, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, head_dim=hidden // heads, intermediate_size=(8 if kind == "moe" else 4) * hidden,
        max_positions=1024, norm="layernorm", activation="gelu_tanh", gated=False, position="learned", qkv_bias=True,
        out_bias=True, mlp_bias=True, **more,
    )  # fmt: skip


def alpa(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Found plans beside the best of Megatron-LM's techniques (GPT), DeepSpeed's (mixtures of experts), or stages and
    data parallelism (deep and narrow)."""
    for kind, sizes, named, baseline in (("gpt", GPT_SIZES, "Megatron-LM", MEGATRON),
                                         ("moe", MOE_SIZES, "DeepSpeed", DEEPSPEED),
                                         ("thin", THIN_SIZES, "PP-DP", STAGES_AND_DATA)):  # fmt: skip
        for devices in sizes:
            q = _question(paper_model(kind, devices), v100_cluster(devices), PAPER_BATCH, forbid=LATER)
            a = auto_parallel(q, "alpa", args.workers)
            best = search(_question(q.model, q.cluster, PAPER_BATCH, only=baseline), args.workers).best
            theirs = best[0] if best else None
            row: dict[str, Any] = {"model": q.model.name, "devices": devices, "baseline": named}
            if a is not None:
                row |= {"alpa_s": a.step, "seconds": a.seconds, "plan": a.experiment.plan.strings(),
                        "micro_batch_size": a.experiment.micro_batch_size, "gain": a.gain,
                        "stages": a.stages()}  # fmt: skip
            if theirs is not None:
                row |= {"baseline_s": theirs.metrics["step_time_s"],
                        "baseline_plan": theirs.experiment.plan.strings()}  # fmt: skip
            if a is not None and theirs is not None:
                row["speedup"] = theirs.metrics["step_time_s"] / a.step
            yield _said(row)


# ---- measured -------------------------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Predicted and measured seconds of a step of every plan on four processes.

    All plans are trained by the same processes, one step of each in turn, so that whatever else the machine does
    slows all of them.
    """
    cluster = Cluster(device=shared_by_four(catalog.device("local")), devices_per_node=RANKS)
    made = {name: experiments.make(SMALL, f"{RANKS}xlocal", WORKLOAD, list(plan)) for name, plan in PLANS.items()}
    load = load_average()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        ranks = [
            context.Process(target=train_in_turn, args=(r, meet, made, args.rounds, answers)) for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        times: dict[str, list[float]] = answers.get()
        for process in ranks:
            process.join()
    for name, e in made.items():
        predicted = predict(e.model_copy(update={"cluster": cluster}))
        yield _said({"plan": name, "calls": e.plan.strings(), "predicted_s": predicted.metrics["step_time_s"].value,
                     "measured_s": statistics.median(times[name]), "steps_s": times[name],
                     "load_before": load, "load_after": load_average()})  # fmt: skip


def train_in_turn(rank: int, meet: str, made: dict[str, Experiment], rounds: int, answers: Any) -> None:
    """One rank: a trainer for every plan, and steps of each in turn, forth and back."""
    import torch
    import torch.distributed as dist

    from ridgeline.train.trainer import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    trainers = {name: Trainer(e, torch.device("cpu"), rank, RANKS) for name, e in made.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for at in range(rounds + 1):
        for name in list(trainers)[:: 1 if at % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            trainers[name].step()
            dist.barrier()
            if at:  # the first round warms up
                times[name].append(time.perf_counter() - start)
        if rank == 0:
            print(f"round {at} of {rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        answers.put(times)
    dist.destroy_process_group()


def shared_by_four(device: Device) -> Device:
    """The profile with rates for four processes where fewer were measured: two cores' time for twice as many."""
    if "4" in device.ranks:
        return device
    half = {}
    for kind, r in device.ranks["2"].items():
        slower = {"latency": 2 * r.latency, "flop_rate": r.flop_rate / 2, "byte_rate": r.byte_rate / 2}
        half[kind] = r.model_copy(update=slower)
    latency = {**device.host_latency, "4": 2 * device.host_latency["2"]}
    return device.model_copy(update={"ranks": {**device.ranks, "4": half}, "host_latency": latency})


def _spearman(both: list[tuple[float, float]]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*both, strict=True)).statistic) if len(both) > 2 else 1.0


def _said(row: dict[str, Any]) -> dict[str, Any]:
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    left = ("stages", "preset", "plan", "calls", "baseline_plan", "trial_seconds")
    print({k: v for k, v in shown.items() if k not in left or isinstance(v, str)}, flush=True)
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pairs", "alpa", "measured"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, help="pairs: with these models only")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
