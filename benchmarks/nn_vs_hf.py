"""Training speed of the twin against Hugging Face's Llama: loss and gradients, same shapes, turns interleaved.

    python benchmarks/nn_vs_hf.py --threads 2 --json out.json

One step is forward, loss and backward in float32, gradients released after it. Every model has a process of its own,
as in real training: within one process they would share the heap, and the larger one's memory would keep the other's
allocations warm. The processes take turns of a few steps, so that whatever else the machine does slows all alike; the
first step of a turn, which finds the caches full of another's data, is not counted. The figures to quote are the ratios
of medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from ridgeline.nn import build, token_loss
from ridgeline.spec.model import ModelSpec


def twin(config: dict[str, Any], ids: torch.Tensor, attention: str) -> Callable[[], None]:
    model = build(ModelSpec.from_config(config))
    model.set_attention(attention)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)

    def step() -> None:
        total, count = token_loss(model(ids, return_hidden=True), model.head, labels)
        (total / count).backward()
        model.zero_grad()

    return step


def hugging_face(config: dict[str, Any], ids: torch.Tensor, attention: str) -> Callable[[], None]:
    hf = transformers.LlamaConfig(**config)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation=attention).train()

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


CONTENDERS = {
    "twin flash": (twin, "flash"),
    "twin naive": (twin, "naive"),
    "hf sdpa": (hugging_face, "sdpa"),
    "hf eager": (hugging_face, "eager"),
}


def work(pipe: Connection, name: str, config: dict[str, Any], batch: int, sequence: int, threads: int) -> None:
    """One contender: for every message, that many steps, and the seconds of each but the first sent back."""
    torch.set_num_threads(threads)
    ids = torch.randint(config["vocab_size"], (batch, sequence), generator=torch.Generator().manual_seed(0))
    make, attention = CONTENDERS[name]
    step = make(config, ids, attention)
    while turn := pipe.recv():
        step()
        seconds = []
        for _ in range(turn):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        pipe.send(seconds)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--ffn", type=int, default=688)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--sequence", type=int, default=256)
    p.add_argument("--turns", type=int, default=8)
    p.add_argument("--steps", type=int, default=4, help="counted steps per turn")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    config = {
        "model_type": "llama",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads or args.heads,
        "max_position_embeddings": args.sequence,
    }
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in CONTENDERS:
        pipes[name], other = spawn.Pipe()
        shape = (args.batch, args.sequence, args.threads)
        spawn.Process(target=work, args=(other, name, config, *shape), daemon=True).start()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for i in range(args.turns + 1):
        for name, pipe in pipes.items():
            pipe.send(args.steps)
            took = pipe.recv()
            if i > 0:  # the first round is the warm-up
                seconds[name] += took
    for pipe in pipes.values():
        pipe.send(0)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    for name, s in seconds.items():
        low, _, high = (quartile * 1e3 for quartile in statistics.quantiles(s, n=4))
        rate = args.batch * args.sequence / median[name]
        print(f"{name:11} {median[name] * 1e3:7.1f} ms  [{low:.1f}, {high:.1f}]  {rate:7.0f} tokens/s")
    ratios = {
        "flash vs hf sdpa": median["hf sdpa"] / median["twin flash"],
        "naive vs hf eager": median["hf eager"] / median["twin naive"],
    }
    for name, ratio in ratios.items():
        print(f"{name:18} {ratio:.2f}x tokens/s")
    if args.json:
        shape = {k: v for k, v in vars(args).items() if k != "json"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        result = {"shape": shape, "versions": versions, "median_seconds": median, "ratios": ratios, "seconds": seconds}
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
