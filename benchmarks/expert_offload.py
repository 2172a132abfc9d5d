"""Expert offloading on a mixture that was really trained: routing's locality, and what it is worth.

    ridgeline train benchmarks/compress_moe.toml --out runs/moe        # 7 million parameters, a few minutes
    python benchmarks/expert_offload.py runs/moe/model [--json benchmarks/results/expert_offload.json]

Parts:
    routing  hit share of a cache of k experts a layer, LRU and LFU, and recall of guesses at the next layer's experts,
             over decoding held-out text token by token; beside k of all experts (no locality) and the same model with
             random weights
    speed    tokens/s with experts on disk, interleaved: whole layers fetched (naive), an LRU cache, and the cache with
             guesses; predicted with the measured hit share and recall (run ``ridgeline probe`` first)

Logits are asserted to equal those of the model in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ridgeline import catalog, experiments
from ridgeline.measure.cells.generation_cell import build_generation
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.probing.disk import file_rate
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.predict import predict
from ridgeline.runtime.train_build import Build
from ridgeline.spec.device import Cluster, Link
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import resolve

PROMPT, TOKENS, TEXTS = 32, 160, 4
HELD_OUT = Path(__file__).parent / "expert_offload.py"
"""Text that training never saw: this file, which is newer."""


def experiment(checkpoint: Path | None, model: str, plan: list[str], cluster: Cluster | str = "local") -> Experiment:
    """Generation for one sequence."""
    w = {"kind": "generate", "batch_size": 1, "prompt_len": PROMPT, "output_len": TOKENS, "dtype": "fp32"}
    return experiments.make(model, cluster, {**w, "checkpoint": str(checkpoint)} if checkpoint else w, plan)


def built(e: Experiment) -> Build:
    """The model and its counters."""
    e, techniques = resolve(e)
    return build_generation(e, torch.device("cpu"), techniques)


@torch.inference_mode()
def decoded(run: Build, text: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Logits and seconds of every token of ``text`` [1, PROMPT + TOKENS] after the prompt."""
    cache = make_cache(run.model, 1, text.shape[1] + 1)
    logits, seconds = [prefill(run.model, text[:, :PROMPT], cache)], []
    for i in range(PROMPT, text.shape[1]):
        start = time.perf_counter()
        logits.append(decode(run.model, text[:, i], cache))
        seconds.append(time.perf_counter() - start)
    return torch.stack(logits), seconds


def routing(checkpoint: Path, texts: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Hit share and recall by cached experts, policy and guesses."""
    rows = []
    whole = experiment(checkpoint, str(checkpoint), [])
    want = [decoded(built(whole), t)[0] for t in texts]
    everything = whole.model.num_experts
    for k in range(1, everything):
        for policy, guess in (("lru", 0), ("lfu", 0), ("lru", 1), ("lru", 2)):
            plan = [f"moe_offload:experts={k},policy={policy},guess={guess}"]
            row: dict[str, Any] = {"experts": k, "of": everything, "policy": policy, "guess": guess}
            for name, source in (("trained", checkpoint), ("random", None)):
                e = experiment(source, str(checkpoint), plan)
                run = built(e)
                for t, expected in zip(texts, want, strict=True):
                    found, _ = decoded(run, t)
                    assert source is None or torch.equal(found, expected), "lossless"
                row[name] = {metric: read() for metric, read in run.metrics.items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def speed(checkpoint: Path, texts: list[torch.Tensor], rounds: int) -> dict[str, Any]:
    """Tokens/s with the experts on disk."""
    plans = {
        "in memory": [],
        "naive: whole layers": ["zero_inference:parameters=nvme,prefetch=1"],
        "naive: an expert at a time": ["moe_offload:parameters=nvme,experts=1,guess=0"],
    }
    for k in (2, 4):
        plans[f"LRU of {k}"] = [f"moe_offload:parameters=nvme,experts={k},guess=0"]
        plans[f"LRU of {k}, guesses"] = [f"moe_offload:parameters=nvme,experts={k},guess=2"]
    runs = {name: built(experiment(checkpoint, str(checkpoint), plan)) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for run in runs.values():
        decoded(run, texts[0])
    file = max(checkpoint.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    links = [file_rate(file)]
    for _ in range(rounds):
        for t in texts:
            for name, run in runs.items():
                seconds[name].append(statistics.fmean(decoded(run, t)[1]))
        links.append(file_rate(file))
    disk = Link(name="disk", bandwidth=statistics.median(link.bandwidth for link in links),
                latency=statistics.median(link.latency for link in links), source=links[0].source)  # fmt: skip
    local = catalog.cluster("local")
    cluster = local.model_copy(update={"device": local.device.model_copy(update={"disk": disk})})
    rows = []
    for name, times in seconds.items():
        plan = list(plans[name])
        found = {metric: read() for metric, read in runs[name].metrics.items()}
        if found:
            plan[0] += f",hit_rate={found['expert_hit_share']},recall={min(1.0, found['expert_guess_recall'])}"
        predicted = predict(experiment(checkpoint, str(checkpoint), plan, cluster)).metrics["tpot_s"].value
        ratios = sorted(n / t for n, t in zip(seconds["naive: whole layers"], times, strict=True))
        rows.append({
            "experts on disk": name, "tokens_per_s": 1 / statistics.median(times),
            "predicted_tokens_per_s": 1 / predicted,
            "over_naive": {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]}, **found,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return {"disk": disk.model_dump(), "rows": rows}


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="routing,speed")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(a.checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(HELD_OUT.read_text(encoding="utf-8")).ids
    length = PROMPT + TOKENS
    texts = [torch.tensor([ids[i * length : (i + 1) * length]]) for i in range(TEXTS)]
    model = experiment(a.checkpoint, str(a.checkpoint), []).model
    found: dict[str, Any] = {
        "environment": {**fingerprint(), "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]},
        "model": model.model_dump(exclude_defaults=True),
    }
    if "routing" in a.only:
        found["routing"] = routing(a.checkpoint, texts)
    if "speed" in a.only:
        found["speed"] = speed(a.checkpoint, texts, a.rounds)
    if a.json:
        a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
