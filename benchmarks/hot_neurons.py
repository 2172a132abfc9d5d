"""Hot neurons (PowerInfer) on a ReLU model that was really trained: what is computed, what it costs, what it saves.

    ridgeline train benchmarks/relu_opt.toml --out runs/relu          # 6 million parameters, 2 minutes
    python benchmarks/hot_neurons.py runs/relu/model [--json benchmarks/results/hot_neurons.json]

Parts:
    quality  decoding held-out text token by token, by share on the device and threshold: share of the other neurons
             that is computed, recall of the predictors (active neurons that were computed), error of the logits, and
             perplexity over that of the whole model
    speed    a model of the same shape as OPT-1.3B's layers, random weights and given activity (one neuron in ten, as
             the paper finds in OPT), so that weights come from memory: seconds of a feed-forward layer and of a decode
             step, whole and divided
    offload  the trained model: tokens/s of the divided model over `zero_inference` from host memory and from disk,
             interleaved, with the bytes of weights on the device
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from ridgeline import experiments
from ridgeline.measure.cells.generation_cell import build_generation
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.mlp import MLP
from ridgeline.runtime.train_build import Build
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.memory.hot_neurons import HotNeurons
from ridgeline.techniques.memory.hot_neurons_torch import ComputedNeurons, DividedMLP, Predictor
from ridgeline.techniques.registry import resolve

PROMPT, TOKENS, TEXTS = 16, 112, 4
THRESHOLDS = (0.0, 0.02, 0.1, 0.3)
SHARES = (0.1, 0.3)
PROFILE = "stdlib"
HELD_OUT = Path(__file__)
"""Text that training never saw: this file, which is newer."""


def built(checkpoint: Path, plan: list[str]) -> Build:
    """The model of the checkpoint with a plan."""
    w = {"kind": "generate", "batch_size": 1, "prompt_len": PROMPT, "output_len": TOKENS, "dtype": "fp32",
         "checkpoint": str(checkpoint)}  # fmt: skip
    e, techniques = resolve(experiments.make(str(checkpoint), "local", w, plan))
    return build_generation(e, torch.device("cpu"), techniques)


@torch.inference_mode()
def decoded(run: Build, text: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Logits [tokens, V] and seconds of every token of ``text`` [1, …] behind the prompt."""
    cache = make_cache(run.model, 1, text.shape[1])
    prefill(run.model, text[:, :PROMPT], cache)
    logits, seconds = [], []
    for i in range(PROMPT, text.shape[1]):
        start = time.perf_counter()
        logits.append(decode(run.model, text[:, i], cache))
        seconds.append(time.perf_counter() - start)
    return torch.cat(logits), seconds


def loss(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Mean loss of the tokens that follow."""
    return float(F.cross_entropy(logits[:-1].float(), text[0, PROMPT + 1 :]))


class Recall:
    """Counts, of the neurons outside the device that are active, those that are computed."""

    def __init__(self, run: Build) -> None:
        self.active = self.found = 0
        for block in run.model.layers.values():
            mlp = block.mlp
            if isinstance(mlp, DividedMLP) and mlp.predictor is not None:
                mlp.register_forward_pre_hook(self._count)

    def _count(self, mlp: Any, args: tuple[torch.Tensor]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        if len(x) <= mlp.rows:
            active = (F.linear(x, mlp.cold_up, mlp.cold_bias) > 0).any(0)
            chosen = (mlp.predictor.logits(x) > mlp.limit).any(0)
            self.active += int(active.sum())
            self.found += int((active & chosen).sum())


def quality(checkpoint: Path, texts: list[torch.Tensor]) -> dict[str, Any]:
    """Errors by share and threshold."""
    whole = built(checkpoint, [])
    active = []
    for block in whole.model.layers.values():
        block.mlp.register_forward_hook(lambda m, a, o: active.append(float((m.up_proj(a[0]) > 0).float().mean())))
    want = [decoded(whole, t)[0] for t in texts]
    base = statistics.fmean(loss(x, t) for x, t in zip(want, texts, strict=True))
    rows = []
    for hot in SHARES:
        for threshold in THRESHOLDS:
            run = built(checkpoint, [f"hot_neurons:hot={hot},threshold={threshold},profile={PROFILE},tokens=8192"])
            recall = Recall(run)
            found = [decoded(run, t)[0] for t in texts]
            error = statistics.fmean(float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True))
            mean = statistics.fmean(loss(x, t) for x, t in zip(found, texts, strict=True))
            rows.append({
                "hot": hot, "threshold": threshold, "recall": recall.found / recall.active if recall.active else 1.0,
                **{name: read() for name, read in run.metrics.items()}, "logits_error": error,
                "perplexity_ratio": math.exp(mean - base),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return {"perplexity": math.exp(base), "active": statistics.fmean(active), "rows": rows}


def layer_speed(rounds: int) -> list[dict[str, Any]]:
    """A feed-forward layer of OPT-1.3B, whose weights take turns with others' so that they come from memory."""
    hidden, inner, copies, activity = 2048, 8192, 6, 0.1
    spec = ModelSpec(name="layer", family="opt", vocab_size=8, hidden_size=hidden, num_layers=1, num_heads=16,
                     num_kv_heads=16, head_dim=128, intermediate_size=inner, max_positions=8, activation="relu",
                     gated=False, mlp_bias=True)  # fmt: skip
    torch.manual_seed(0)
    wholes, divided = [], {}
    for _ in range(copies):
        mlp = MLP(spec)
        for p in mlp.parameters():
            p.data.normal_(0, 0.02)
        wholes.append(mlp.requires_grad_(False))
    for hot in (0.0, 0.2):
        for rank in (64, 128, 256):
            how = HotNeurons(hot=hot, threshold=0.5, rank=rank)
            parts = []
            for mlp in wholes:
                counts = ComputedNeurons()
                part = DividedMLP(mlp, torch.arange(inner), int(hot * inner), how, counts, torch.device("cpu"))
                part.predictor = Predictor(hidden, rank, inner - int(hot * inner)).requires_grad_(False)
                bias = part.predictor.outer.bias
                bias.fill_(-10.0)  # and the share of the paper's neurons that is active anywhere
                part.predictor.outer.weight.data.mul_(1e-6)
                bias[torch.randperm(len(bias))[: int(activity * len(bias))]] = 10.0
                parts.append(part)
            divided[hot, rank] = parts
    x = torch.randn(1, hidden)
    times: dict[Any, list[float]] = {key: [] for key in ("whole", *divided)}
    with torch.inference_mode():
        for r in range(rounds + 1):
            for key, layers in (("whole", wholes), *divided.items()):
                for mlp in layers:
                    start = time.perf_counter()
                    mlp(x)
                    if r:
                        times[key].append(time.perf_counter() - start)
    base = statistics.median(times["whole"])
    rows = [{"layer": "whole", "seconds": base, "bytes_per_s": 2 * hidden * inner * 4 / base}]
    rows += [{"hot": hot, "rank": rank, "active": activity, "seconds": statistics.median(times[hot, rank]),
              "speedup": base / statistics.median(times[hot, rank])} for hot, rank in divided]  # fmt: skip
    print(json.dumps(rows), flush=True)
    return rows


def offload(checkpoint: Path, texts: list[torch.Tensor], rounds: int) -> list[dict[str, Any]]:
    """Tokens/s within the same device memory."""
    plans = {
        "whole": [],
        "hot_neurons": [f"hot_neurons:hot=0.3,threshold=0.1,profile={PROFILE},tokens=8192"],
        "zero_inference": ["zero_inference:resident=1,prefetch=0"],
        "zero_inference, disk": ["zero_inference:resident=1,parameters=nvme"],
    }
    runs = {name: built(checkpoint, plan) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    held = {}
    for name, run in runs.items():
        meter = Meter(run.model)
        meter.register(run.model.parameters(), "parameters")
        with meter:
            decoded(run, texts[0])
        held[name] = int(meter.peak.categories["parameters"])
    for _ in range(rounds):
        for t in texts:
            for name, run in runs.items():
                seconds[name].append(statistics.fmean(decoded(run, t)[1]))
    rows = []
    for name, times in seconds.items():
        ratios = sorted(b / a for a, b in zip(times, seconds["zero_inference"], strict=True))
        rows.append(
            {
                "plan": name,
                "device_weights_bytes": held[name],
                "tokens_per_s": 1 / statistics.median(times),
                "over_zero_inference": {"median": statistics.median(ratios), "range": [ratios[0], ratios[-1]]},
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(a.checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(HELD_OUT.read_text(encoding="utf-8")).ids
    length = PROMPT + TOKENS
    texts = [torch.tensor([ids[i * length : (i + 1) * length]]) for i in range(TEXTS)]
    found = {
        "environment": {**fingerprint(), "threads": torch.get_num_threads()},
        "quality": quality(a.checkpoint, texts),
        "layer": layer_speed(a.rounds * 4),
        "offload": offload(a.checkpoint, texts, a.rounds),
    }
    if a.json:
        a.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
