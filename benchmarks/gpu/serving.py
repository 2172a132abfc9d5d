"""Decoding of our engine on a GPU by batch: tokens per second and the share of the memory bandwidth, beside
transformers' `generate` with a static cache and `torch.compile`, on the same random weights, in one run.

A step reads all weights but the table of tokens, and the cached keys and values. Seconds are of steady decode steps,
prompts apart; both sides decode greedily and their tokens are compared. Without a GPU it only checks itself
(``--on local --model llama-mini --batch 1 2 --dtype fp32 --no-compile``).

    python benchmarks/gpu/serving.py --on h200 [--model llama3.2-1b] [--out benchmarks/results/gpu_serving.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.spec.model import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def clock() -> float:
    """Seconds, when everything that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def prompts(spec: ModelSpec, batch: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(1, spec.vocab_size, (batch, length), generator=generator).tolist()
    return rows


def ours(folder: Path, args: argparse.Namespace, batch: int, plan: list[str]) -> tuple[float, list[list[int]]]:
    """(median seconds of a decode step, tokens)."""
    total = args.prompt_len + args.tokens + 1
    engine = load_engine(folder, [*DEFAULT_PLAN, *plan], dtype=args.dtype, max_model_len=total, max_num_seqs=batch,
                         max_num_batched_tokens=max(2048, batch))  # fmt: skip
    sampling = Sampling(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    said: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts(engine.spec, batch, args.prompt_len)):
        engine.add(EngineRequest(str(i), prompt, sampling))
        said[str(i)] = []
    times = []
    while engine.has_work():
        decoding = all(said.values())
        start = clock()
        for event in engine.step():
            said[event.request] += event.tokens
        if decoding:
            times.append(clock() - start)
    return statistics.median(times), [said[str(i)] for i in range(batch)]


def theirs(folder: Path, args: argparse.Namespace, batch: int) -> tuple[float, list[list[int]]]:
    """The same of transformers: (seconds per token beyond the first, tokens)."""
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype]).to(device).eval()
    ids = torch.tensor(prompts(ModelSpec.from_path(folder), batch, args.prompt_len), device=device)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if args.compile:
        options |= {"cache_implementation": "static"}
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def run(tokens: int) -> tuple[float, torch.Tensor]:
        start = clock()
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        return clock() - start, out

    for _ in range(2):  # compiling and capturing
        run(args.tokens)
    whole, out = run(args.tokens)
    one, _ = run(1)
    return (whole - one) / (args.tokens - 1), out[:, args.prompt_len :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", required=True, help="catalog name of this GPU: its bandwidth is the roof")
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument(
        "--with", dest="plans", action="append", default=[], metavar="TECHNIQUE", help="beside the plain"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    catalog.allow_unprobed()
    roof = catalog.device(args.on).memory_bandwidth
    spec, rows = catalog.model(args.model), []
    width = DTYPES[args.dtype].itemsize
    with tempfile.TemporaryDirectory() as name:
        save_checkpoint(build(spec).to(DTYPES[args.dtype]), Path(name))
        table = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
        weights = (spec.num_parameters - table) * width
        for batch in args.batch:
            context = args.prompt_len + args.tokens / 2
            cached = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * width * context * batch
            seconds, expected = theirs(Path(name), args, batch)
            row: dict[str, Any] = {"batch": batch, "transformers": {"step_s": seconds, "tokens_per_s": batch / seconds}}
            for plan in ([], *([p] for p in args.plans)):
                step, tokens = ours(Path(name), args, batch, plan)
                same = sum(a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True))
                row[" + ".join(["ours", *plan])] = {
                    "step_s": step, "tokens_per_s": batch / step, "speedup": seconds / step,
                    "share_of_bandwidth": None if plan else (weights + cached) / step / roof,
                    "equal_tokens": same / (batch * args.tokens),
                }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {"model": args.model, "on": args.on, "dtype": args.dtype, "compiled": args.compile, "rows": rows,
              "environment": fingerprint()}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
