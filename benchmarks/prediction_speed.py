"""How fast predictions are: medians of this machine, as JSON.

    python benchmarks/prediction_speed.py [--out FILE] [--repeats 50] [--workers 2] [--no-plan]

Measures, warm and in one process: one training-step prediction of several layouts; GPT-3 175B on four A100, prefill and
1000 decode steps; the discrete-event simulation in requests per minute of its own time; and the planner on Llama-2-70B
over 64 GPUs (wall time, on ``--workers`` processes).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline import experiments
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.predict import predict
from ridgeline.search import Question, search
from ridgeline.spec.experiment import Experiment

_MEGATRON = ["mixed_precision", "flash_attention", "tensor_parallel:degree=8", "sequence_parallel",
             "pipeline:degree=8,schedule=interleaved,chunks=2", "recompute:policy=full"]  # fmt: skip
STEPS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "llama2-70b, tp 8, pp 8 interleaved, sp, recompute, zero 1": (
        "llama2-70b", "16x8xa100-80g-sxm", {"batch_size": 128, "micro_batch_size": 1}, [*_MEGATRON, "zero:stage=1"]),
    "llama2-7b, zero 3": (
        "llama2-7b", "8xa100-80g-sxm", {"batch_size": 64, "micro_batch_size": 1},
        ["mixed_precision", "flash_attention", "zero:stage=3"]),
    "gpt3-175b, tp 8, pp 8, recompute": (
        "gpt3-175b", "8x8xa100-80g-sxm", {"batch_size": 64, "micro_batch_size": 1, "seq_len": 2048},
        ["mixed_precision", "tensor_parallel:degree=8", "pipeline:degree=8", "recompute:policy=full"]),
}  # fmt: skip
"""Model, cluster, workload and plan of the training steps."""


def median_seconds(e: Experiment, repeats: int) -> dict[str, float]:
    """Median and least seconds of one prediction, after three to warm up."""
    for _ in range(3):
        predict(e)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        predict(e)
        taken.append(time.perf_counter() - start)
    return {"median_s": statistics.median(taken), "least_s": min(taken)}


def simulation(requests: int = 20_000) -> dict[str, float]:
    """Requests that the discrete-event simulation handles per minute of its own time."""
    work = {"kind": "serve", "rate": 20.0, "requests": requests, "prompt_len": 512, "output_len": 128, "length_cv": 0.5}
    e = experiments.make("llama3.1-8b", "h100-sxm", work, [])
    predict(e)
    start = time.perf_counter()
    predict(e)
    seconds = time.perf_counter() - start
    return {"requests": requests, "seconds": seconds, "requests_per_minute": 60 * requests / seconds}


def planning(workers: int) -> dict[str, Any]:
    """Wall seconds of the planner on Llama-2-70B over 64 GPUs, and how many plans it considered."""
    work = {"kind": "pretrain", "seq_len": 4096, "batch_size": 256}
    e = experiments.make("llama2-70b", "8x8xa100-80g-sxm", work, [])
    answer = search(Question(e.model, e.cluster, e.workload), workers=workers)
    return {
        "seconds": answer.seconds,
        "considered": answer.found.counts["considered"],
        "best": answer.best[0].experiment.plan.strings(),
        "workers": workers,
    }


def importing() -> float:
    """Median seconds of ``import ridgeline.predict`` in a new process."""
    code = "import time; t = time.perf_counter(); import ridgeline.predict; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(r.stdout) for r in runs)


def main() -> None:
    """Measure, and print or write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-plan", action="store_true", help="leave the planner out")
    given = parser.parse_args()
    generate = {"kind": "generate", "batch_size": 8, "prompt_len": 1024, "output_len": 1001}
    gpt3 = experiments.make("gpt3-175b", "4xa100-80g-sxm", generate, ["tensor_parallel:degree=4"])
    steps = {
        name: median_seconds(
            experiments.make(model, on, {"kind": "pretrain", "seq_len": 4096, **work}, plan), given.repeats
        )
        for name, (model, on, work, plan) in STEPS.items()
    }
    report = {
        "python": platform.python_version(),
        "import_s": importing(),
        "training_step": steps,
        "gpt3_175b_4xa100_prefill_and_1000_decode_steps": median_seconds(gpt3, given.repeats),
        "simulation": simulation(),
        "plan_llama2_70b_64_gpus": None if given.no_plan else planning(given.workers),
        "load_average": load_average(),
        "environment": fingerprint(),
    }
    text = json.dumps(report, indent=1) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
