"""Training throughput against other engines on the same Experiment, driven through ``--backend``.

    zero   two processes: our ZeRO-2 against DeepSpeed's, and our data parallelism against ``Trainer``'s (DDP)
    lora   one process: our LoRA against ``peft`` under ``Trainer``; lora-32k: with Llama's vocabulary

Every contender trains with the same weights, batches, AdamW, clipping and schedule, in fresh processes, in ABBA order
within one run. Reported: median step time of each with its block bootstrap interval, ratios with theirs, the process's
peak memory, and the losses (which must agree, or the comparison is void). Needs ``pip install
'ridgeline[deepspeed,finetune]'``; what is missing is left out.

    python benchmarks/train_vs_backends.py zero|lora|lora-32k [--repeats 2] [--steps 12] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.measure.ablate import measure_plan
from ridgeline.measure.backends import require
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.stats import bootstrap_ci, ratio_ci, warmup_steps
from ridgeline.spec.errors import UserError

WORKLOAD = {"kind": "pretrain", "seq_len": 256, "batch_size": 4, "lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.0}
LORA = "lora:rank=16,alpha=32,targets=all-linear"
LORA_RUNS = {
    "ridgeline lora, fused": ("native", [LORA, "flash_attention", "fused_layers"]),
    "peft + trainer": ("hf", [LORA, "flash_attention"]),
    "ridgeline lora": ("native", [LORA, "flash_attention"]),
    "ridgeline lora, no flash": ("native", [LORA]),
    "peft + trainer, no flash": ("hf", [LORA]),
}
MINI = {"base": "llama-mini"}
SETS = {
    "zero": (MINI, 2, {
        "ridgeline zero-2": ("native", ["zero:stage=2", "flash_attention"]),
        "deepspeed zero-2": ("deepspeed", ["zero:stage=2", "flash_attention"]),
        "ridgeline ddp": ("native", ["data_parallel", "flash_attention"]),
        "hf trainer ddp": ("hf", ["data_parallel", "flash_attention"]),
    }),
    "lora": (MINI, 1, LORA_RUNS),
    "lora-32k": ({**MINI, "vocab_size": 32000}, 1, LORA_RUNS),
}  # fmt: skip
"""Model, processes and contenders."""
PAIRS = [
    ("ridgeline zero-2", "deepspeed zero-2"), ("ridgeline ddp", "hf trainer ddp"),
    ("ridgeline lora, fused", "peft + trainer"), ("ridgeline lora", "peft + trainer"),
    ("ridgeline lora, no flash", "peft + trainer, no flash"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = {"zero": "train_vs_deepspeed", "lora": "lora_vs_peft", "lora-32k": "lora_vs_peft_32k"}[args.set]
    args.out = args.out or Path(f"benchmarks/results/{name}.json")
    model, procs, contenders = SETS[args.set]
    catalog.allow_unprobed()
    experiments, missing = {}, {}
    for name, (backend, plan) in contenders.items():
        e = make(model, f"{procs}xlocal", {**WORKLOAD, "steps": args.steps}, plan)
        try:
            require(backend, e)
            experiments[name] = e
        except UserError as error:
            missing[name] = error.what
    load = load_average()
    runs: dict[str, list] = {name: [] for name in experiments}
    versions: dict[str, str] = {}
    for repeat in range(args.repeats):
        for name in experiments if repeat % 2 == 0 else reversed(experiments):
            backend = contenders[name][0]
            result = measure_plan(experiments[name], repeat, memory=False, backend=backend)
            if result.status != "ok":
                sys.exit(f"{name} failed: {result.reason}\n" + "\n".join(result.notes))
            runs[name].append(result)
            versions |= {
                k: v for k, v in result.environment.items() if k in ("deepspeed", "transformers", "accelerate", "peft")
            }
            print(f"{name} ({repeat + 1} of {args.repeats})", file=sys.stderr, flush=True)
    seconds = {name: [[s.seconds for s in r.samples] for r in rs] for name, rs in runs.items()}
    blocks = {name: [block[warmup_steps(block) :] for block in found] for name, found in seconds.items()}
    tokens = WORKLOAD["batch_size"] * WORKLOAD["seq_len"]
    table = {}
    for name, block in blocks.items():
        step = bootstrap_ci(block)
        losses = [s.loss for s in runs[name][0].samples]
        table[name] = {
            "backend": contenders[name][0], "plan": experiments[name].plan.strings(), "step_s": step._asdict(),
            "tokens_per_s": tokens / step.value, "losses": losses,
            "rss_peak_bytes": {k: m.value for k, m in runs[name][0].metrics.items() if k.startswith("rss")},
        }  # fmt: skip
    first = next(iter(table.values()))["losses"]
    worst = max(abs(a - b) / b for row in table.values() for a, b in zip(row["losses"], first, strict=True))
    pairs = [(a, b) for a, b in PAIRS if a in blocks and b in blocks]
    ratios = {f"{a} over {b}": ratio_ci(blocks[b], blocks[a], paired=True)._asdict() for a, b in pairs}
    out = {
        "environment": {**fingerprint(), **versions, "load_average_at_start": load, "processes": procs},
        "model": model, "workload": WORKLOAD, "steps": args.steps, "repeats": args.repeats, "contenders": table,
        "ratios": ratios, "largest_relative_loss_difference": worst, "samples": blocks, "missing": missing,
        "command": f"python benchmarks/train_vs_backends.py {args.set}",
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(out, indent=2))
    for name, row in table.items():
        print(f"{name:26} {row['tokens_per_s']:7.0f} tokens/s   loss {row['losses'][-1]:.4f}")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]")
    print(f"losses agree to {worst:.1e}" + (f"; left out: {missing}" if missing else ""))
    if worst > 1e-3:
        sys.exit("the losses differ: the comparison is void")


if __name__ == "__main__":
    main()
