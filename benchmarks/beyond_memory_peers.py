"""Ours and others beyond memory, each in a memory cgroup; parts ``peers`` and ``many`` of ``beyond_memory.py``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from beyond_memory import OUTPUT, PROMPT, WIDE, prompt, whole_rate

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.spec.device import Host
from ridgeline.spec.experiment import Experiment

HERE = Path(__file__).parent
OURS = [sys.executable, str(HERE / "beyond_memory.py"), "--worker"]
POLICIES = (([64, 2], [0, 0, 0, 0, 0, 100]), ([32, 4], [0, 0, 0, 0, 0, 100]), ([16, 8], [0, 0, 0, 0, 0, 100]),
            ([32, 4], [0, 0, 0, 30, 0, 100]))  # fmt: skip
"""Of FlexGen: sequences of a part and parts; percent of weights, cache and activations on the device and in host
memory."""
MANY = (128, 16, 8)
"""Sequences, tokens of each prompt, tokens of each answer."""
PROCESS, OWN = 500 << 20, 300 << 20
"""What Python, PyTorch and transformers are given for themselves, and what ours takes of it: 180 MB, and the pages of
its libraries. Everybody uses what is left, others as page cache."""
CODED = "ridgeline, 8 bits"
GROUP = Path("/sys/fs/cgroup/memory/ridgeline-benchmark")


def confined(command: list[str], job: dict[str, Any], limit: int) -> dict[str, Any]:
    """The last line of a command's output, run with no more than ``limit`` bytes, page cache included."""
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(limit))
    script = f'echo $$ > {GROUP}/cgroup.procs && exec "$@"'
    p = subprocess.run(["bash", "-c", script, "worker", *command], input=json.dumps(job), text=True,
                       capture_output=True, check=False)  # fmt: skip
    if p.returncode == -signal.SIGKILL:
        raise MemoryError
    if p.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {p.returncode}: {p.stderr[-800:]}")
    found: dict[str, Any] = json.loads(p.stdout.strip().splitlines()[-1])
    return found


def forget(checkpoint: str) -> None:
    """Drop the files from the page cache: what another process read there, a cgroup would not be charged for."""
    for file in (*Path(checkpoint).glob("*.safetensors"), *Path(checkpoint).glob("*.gguf")):
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peers(checkpoint: str, folder: str, rounds: int, llama_cpp: str, deepspeed: str) -> dict[str, Any]:
    """Ours and others in turns, each in a cgroup with a quarter of the checkpoint beside its process."""
    size = sum(f.stat().st_size for f in Path(checkpoint).glob("*.safetensors"))
    limit = size // 4 + PROCESS
    job = {"checkpoint": checkpoint, "threads": torch.get_num_threads(), "folder": folder,
           "output_len": OUTPUT, "gguf": f"{checkpoint}/fp32.gguf"}  # fmt: skip
    small = f"{checkpoint}-8bits"
    contestants = {
        "ridgeline": OURS,
        CODED: OURS,
        "accelerate": [sys.executable, str(HERE / "peers" / "accelerate_worker.py")],
    }
    if deepspeed:
        zero = [deepspeed, str(HERE / "peers" / "deepspeed_worker.py")]
        subprocess.run([*zero, "--build"], check=True, capture_output=True)
        contestants["deepspeed"] = zero
    rows = []
    for batch in (1, 32):
        some = dict(contestants)
        if llama_cpp and batch == 1:
            some["llama.cpp"] = [llama_cpp, str(HERE / "peers" / "llama_cpp_worker.py")]
        steps: dict[str, list[float]] = {name: [] for name in some}
        work = {"batch_size": batch, "prompt_len": PROMPT, "output_len": OUTPUT}
        left = ["zero_inference:parameters=nvme,fetch=modules,prefetch=0.5,resident=auto"]
        plans = {mine: within(mine, work, left, limit - OWN, 0.0).plan.strings() for mine in (checkpoint, small)}
        answers: dict[str, Any] = {}
        versions: dict[str, str] = {}
        for turn in range(rounds):
            for name, command in _from(list(some.items()), turn):
                mine = small if name == CODED else checkpoint
                forget(mine)
                more = {"checkpoint": mine, "plan": plans[mine], "prompt": prompt(batch).tolist()}
                try:
                    found = confined(command, {**job, **more}, limit)
                except MemoryError:
                    some.pop(name)  # killed
                    continue
                steps[name] += found["seconds"][1:]
                known = answers.setdefault("tokens", found["tokens"])
                if name == CODED:
                    same = [a == b for a, b in zip(chain(*known), chain(*found["tokens"]), strict=True)]
                    answers["same"] = statistics.fmean(same)
                else:
                    assert known == found["tokens"], f"{name}: other tokens"
                versions |= {name: found["version"]} if "version" in found else {}
        medians = {name: statistics.median(steps[name]) for name in some}
        rows.append({"batch": batch, "versions": versions, "step_s": medians, "plans": list(plans.values()),
                     "killed": [name for name in steps if name not in some],
                     "spread": {n: statistics.pstdev(steps[n]) / medians[n] for n in some},
                     "ratio": {n: medians[n] / medians["ridgeline"] for n in some},
                     "ratio_8_bits": {n: medians[n] / medians[CODED] for n in some},
                     "same_tokens_8_bits": answers["same"]})  # fmt: skip
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"limit_bytes": limit, "checkpoint_bytes": size, "rows": rows}


def _from(contestants: list[Any], turn: int) -> list[Any]:
    """Another one first in every turn: a disk that is throttled leaves less to those behind one that reads much."""
    first = turn * len(contestants) // 2 % len(contestants)
    return contestants[first:] + contestants[:first]


def within(checkpoint: str, work: dict[str, Any], plan: list[str], room: float, host: float) -> Experiment:
    """Generation with what is left open in the plan settled for ``room`` bytes of a device and ``host`` bytes beside
    it, with the disk's rate as measured."""
    local = catalog.cluster("local")
    beside = Host(name="staging", cores=os.cpu_count() or 1, memory_bytes=max(1.0, host),
                  memory_bandwidth=local.device.memory_bandwidth)  # fmt: skip
    changes = {"memory_bytes": room, "host": beside, "disk": whole_rate(checkpoint)}
    device = local.device.model_copy(update=changes)
    w = {"kind": "generate", "checkpoint": checkpoint, **work}
    return experiments.make(checkpoint, local.model_copy(update={"device": device}), w, plan)


def steady(seconds: list[float]) -> float:
    """Seconds of a generation in which every step after the prefill takes what the median one takes."""
    return seconds[0] + (len(seconds) - 1) * statistics.median(seconds[1:])


def many(checkpoint: str, folder: str, flexgen: str) -> dict[str, Any]:
    """Seconds for MANY sequences within a quarter of the checkpoint's size beside the process."""
    size = sum(f.stat().st_size for f in Path(checkpoint).glob("*.safetensors"))
    limit = size // 4 + PROCESS
    count, length, new = MANY
    prompts = torch.randint(WIDE.vocab_size, (count, length), generator=torch.Generator().manual_seed(2)).tolist()
    work = {"batch_size": count, "prompt_len": length, "output_len": new}
    room, plan = limit - OWN, ["flash_attention", "flexgen:overlap=true"]
    tried = [within(checkpoint, work, plan, room * k / 8, room * (8 - k) / 8) for k in (4, 5, 6, 7)]
    e = max((e for e in tried if predict(e).status == "ok"), key=lambda e: predict(e).metrics["tokens_per_s"].value)
    job = {"checkpoint": checkpoint, "threads": torch.get_num_threads(), "folder": folder,
           "output_len": new, "plan": e.plan.strings()}  # fmt: skip
    forget(checkpoint)
    ours = confined(OURS, {**job, "prompt": prompts}, limit)
    out = {"model": WIDE.name, "checkpoint_bytes": size, "limit_bytes": limit, "sequences": count, "prompt": length,
           "output": new, "plan": e.plan.strings(), "predicted_s": predict(e).metrics["e2e_s"].value,
           "seconds": {"ridgeline": steady(ours["seconds"])}, "same_answers": {}, "versions": {}}  # fmt: skip
    answers = {"accelerate": _accelerate(job, prompts, limit)}
    if flexgen:
        answers["flexgen"] = _flexgen(flexgen, job, prompts, limit)
    for name, found in answers.items():
        out["seconds"][name], out["versions"][name] = found["total"], found["version"]
        pairs = zip(zip(*found["tokens"], strict=True), zip(*ours["tokens"], strict=True), strict=True)
        out["same_answers"][name] = sum(a == b for a, b in pairs)
        out[name] = found["setting"]
    out["ratio"] = {name: s / out["seconds"]["ridgeline"] for name, s in out["seconds"].items()}
    print(json.dumps(out), file=sys.stderr, flush=True)
    return out


def _accelerate(job: dict[str, Any], prompts: list[list[int]], limit: int) -> dict[str, Any]:
    """All answers, with the largest batch that is not killed."""
    command = [sys.executable, str(HERE / "peers" / "accelerate_worker.py")]
    for batch in (64, 32, 16, 8, 4):
        forget(job["checkpoint"])
        try:
            confined(command, {**job, "prompt": prompts[:batch], "output_len": 2}, limit)
        except MemoryError:
            continue
        break
    else:
        raise SystemExit(f"accelerate is killed with {batch} sequences too: give more than {limit} bytes")
    out: dict[str, Any] = {"total": 0.0, "tokens": [[] for _ in range(job["output_len"])], "setting": batch}
    for first in range(0, len(prompts), batch):
        forget(job["checkpoint"])
        found = confined(command, {**job, "prompt": prompts[first : first + batch]}, limit)
        out["total"] += steady(found["seconds"])
        out["tokens"] = [a + b for a, b in zip(out["tokens"], found["tokens"], strict=True)]
    return {**out, "version": found["version"]}


def _flexgen(python: str, job: dict[str, Any], prompts: list[list[int]], limit: int) -> dict[str, Any]:
    """All answers, with the policy that is the fastest in a short trial of those that are not killed."""
    command = [python, str(HERE / "peers" / "flexgen_worker.py")]

    def run(batch: list[int], percent: list[int], new: int) -> dict[str, Any]:
        forget(job["checkpoint"])
        more = {"prompt": prompts, "batch": batch, "percent": percent, "output_len": new}
        try:
            return confined(command, {**job, **more}, limit)
        finally:
            shutil.rmtree(Path(job["folder"]) / "disk", ignore_errors=True)

    subprocess.run(command, input=json.dumps({**job, "convert": True}), text=True, check=True, capture_output=True)
    trials = []
    for batch, percent in POLICIES:
        try:
            trials.append((steady(run(batch, percent, 4)["seconds"]), batch, percent))
        except MemoryError:
            continue
    if not trials:
        raise SystemExit(f"FlexGen is killed with every policy: give more than {limit} bytes")
    _, batch, percent = min(trials)
    found = run(batch, percent, job["output_len"])
    setting = {"batch": batch, "percent": percent, "trials": trials}
    return {**found, "total": steady(found["seconds"]), "setting": setting}
