"""Ridgeline's quantizers beside the field's, on one checkpoint, with the same calibration windows, threads and judge.

    python benchmarks/compress_checkpoints.py runs/compress
    python benchmarks/compress_vs_peers.py runs/compress/llama/model --peer llmcompressor=PYTHON --peer hqq=PYTHON \
        --peer torchao=PYTHON --json benchmarks/results/compress_vs_peers.json

``PYTHON`` is an interpreter that has the peer. Every run is a process of its own; what it wrote is loaded here and its
perplexity taken on the same held-out windows, paired with the dense model's. Seconds are those of loading, compressing
and writing, without imports and without the calibration text, which peers get as token ids; memory is the process's
largest resident set, imports included. ``--repeat`` runs alternate. No peer's default was changed but for bits, group
size, symmetry and the calibration data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.compress.calibration import calibration_windows, held_out_windows, load_text
from ridgeline.jobs.job import CompressOptions, LaunchJob
from ridgeline.jobs.launch import run_job
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity, perplexity_ratio
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.spec.device import Cluster
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Compress
from ridgeline.techniques.matrix import CPU

HERE = Path(__file__).parent
OURS = {"gptq": "gptq", "quantease": "quantease", "rtn": "rtn"}
THEIRS = {"llmcompressor": ("gptq", "rtn"), "hqq": ("hqq",), "torchao": ("rtn",)}
"""What each peer is asked for."""


def experiment(checkpoint: Path, plan: list[str], a: argparse.Namespace) -> Experiment:
    w = Compress(checkpoint=str(checkpoint), data=a.data, samples=a.samples, seq_len=a.seq_len, eval_windows=a.windows)
    return Experiment(model=ModelSpec.from_path(checkpoint), cluster=Cluster(device=CPU), workload=w,
                      plan=Plan.parse(plan))  # fmt: skip


def ours(method: str, bits: int, symmetric: bool, out: Path, a: argparse.Namespace) -> dict[str, Any]:
    call = f"{OURS[method]}:bits={bits},group_size={a.group},symmetric={str(symmetric).lower()}"
    e = experiment(a.checkpoint, [call], a)
    said = run_job(LaunchJob("compress", e, CompressOptions(out=str(out), resume=False)), lambda message: None)
    seconds = said["seconds"] - said["calibration"]["seconds"]
    return {"version": "this one", "seconds": seconds, "peak_rss_bytes": said["peak_rss_bytes"],
            "bits_per_weight": said["bits_per_weight"]}  # fmt: skip


def theirs(peer: str, python: str, job: dict[str, Any]) -> dict[str, Any]:
    worker = HERE / "peers" / ("llmcompressor_worker.py" if peer == "llmcompressor" else "dense_worker.py")
    done = subprocess.run([python, worker], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--methods", default="gptq,quantease,rtn,hqq")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    a.checkpoint = a.checkpoint.resolve()
    e = experiment(a.checkpoint, [], a)
    text = load_text(e.workload, e.model.vocab_size)
    held = held_out_windows(e.workload, text)
    base = window_losses(load_checkpoint(a.checkpoint, dtype=torch.float32), held)
    rows: dict[tuple[str, str, int, bool], list[dict[str, Any]]] = {}
    peers = dict(p.split("=", 1) for p in a.peer)
    with tempfile.TemporaryDirectory() as folder:
        ids = Path(folder) / "ids.npy"
        np.save(ids, calibration_windows(e.workload, text).numpy())
        tasks = []
        for bits in map(int, a.bits.split(",")):
            for symmetric in (False, True):
                tasks += [("ridgeline", m, bits, symmetric) for m in OURS]
                tasks += [(p, m, bits, symmetric) for p in peers for m in THEIRS[p]
                          if symmetric not in {"hqq": (True,), "torchao": (False,)}.get(p, ())]  # fmt: skip
        tasks = [t for t in tasks if t[1] in a.methods.split(",")]
        for round_ in range(a.repeat):
            for task in tasks if round_ % 2 == 0 else reversed(tasks):
                tool, method, bits, symmetric = task
                out = Path(folder) / "out"
                if tool == "ridgeline":
                    said = ours(method, bits, symmetric, out, a)
                else:
                    said = theirs(tool, peers[tool], {
                        "peer": tool, "checkpoint": str(a.checkpoint), "ids": str(ids), "out": str(out),
                        "method": method, "bits": bits, "group_size": a.group, "symmetric": symmetric,
                        "threads": torch.get_num_threads()})  # fmt: skip
                if "failed" not in said and round_ == 0:
                    losses = window_losses(load_checkpoint(out, dtype=torch.float32), held)
                    said["perplexity"] = perplexity(losses)._asdict()
                    said["ratio"] = perplexity_ratio(losses, base)._asdict()
                rows.setdefault(task, []).append(said)
                print(*task, {k: v for k, v in said.items() if k != "perplexity"}, flush=True)
                shutil.rmtree(out, ignore_errors=True)
    table = []
    for (tool, method, bits, symmetric), runs in rows.items():
        good = [r for r in runs if "failed" not in r]
        row: dict[str, Any] = {"tool": tool, "method": method, "bits": bits, "symmetric": symmetric}
        if good:
            seconds = [r["seconds"] for r in good]
            row |= {**good[0], "seconds": statistics.median(seconds), "seconds_all": seconds,
                    "peak_rss_bytes": min(r["peak_rss_bytes"] for r in good)}  # fmt: skip
        else:
            row["failed"] = runs[0]["failed"]
        table.append(row)
    result = {"checkpoint": e.model.name, "parameters": e.model.num_parameters, "dense": perplexity(base)._asdict(),
              "group_size": a.group, "samples": a.samples, "seq_len": a.seq_len, "windows": len(held),
              "threads": torch.get_num_threads(), "rows": table, "environment": fingerprint()}  # fmt: skip
    if a.json:
        a.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
