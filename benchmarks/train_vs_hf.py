"""Training throughput of our baseline against Hugging Face ``Trainer``: same model, data, dtype and batch, one run.

Each contender trains in a process of its own, in ABBA order; every process trains the same token batches from the same
initial weights with AdamW, clipping and the same schedule. Reported: median step time of each, the ratio with its block
bootstrap interval, and the losses (which must agree, or the comparison is void).

    python benchmarks/train_vs_hf.py [--repeats 3] [--steps 12] [--shapes quickstart] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    "quickstart": ({"base": "llama-mini"}, 256, 4),
    "short": ({"base": "llama-mini"}, 128, 8),
    "llama vocabulary": ({"base": "llama-mini", "vocab_size": 32000}, 256, 4),
}
"""Model, sequence length, batch size."""
WORKLOAD = {"kind": "pretrain", "lr": 1e-3, "warmup_steps": 2, "weight_decay": 0.0}
CONTENDERS = ("ridgeline", "ridgeline_flash", "ridgeline_fused", "hf_sdpa", "hf_eager")


def experiment(steps: int, plan: list[str]):
    from ridgeline.experiments import make

    model, seq_len, batch = SHAPES[os.environ.get("BENCH_SHAPE", "quickstart")]
    return make(model, "local", {**WORKLOAD, "seq_len": seq_len, "batch_size": batch, "steps": steps}, plan)


def run_ridgeline(steps: int, plan: list[str]) -> dict:
    import torch

    from ridgeline.jobs.worker import setup
    from ridgeline.train.trainer import Trainer

    trainer = Trainer(experiment(steps, plan), setup(1))
    times, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(trainer.step().loss)
        times.append(time.perf_counter() - start)
    return {"seconds": times, "losses": losses, "threads": torch.get_num_threads()}


def run_hf(steps: int, attention: str) -> dict:
    """The same batches through ``transformers.Trainer``; step times from its own callbacks."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
    from ridgeline.runtime.optimizer import learning_rate
    from ridgeline.train.trainer import Trainer as Ours

    e = experiment(steps, [])
    ours = Ours(e)
    rows = []
    for step in range(steps):
        ids, labels, *_ = ours.run.data.batches.batch(step)
        # Trainer shifts labels itself: give it the ids and the one token beyond.
        rows += [{"input_ids": torch.cat((i, lab[-1:]))} for i, lab in zip(ids, labels, strict=True)]
    folder = tempfile.mkdtemp()
    save_checkpoint(ours.run.model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    del ours

    def collate(items):
        ids = torch.stack([i["input_ids"] for i in items])
        # seq_len + 1 tokens in, the last of them only a label: the same count of predicted tokens as ours.
        return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:].contiguous(), "labels": ids[:, :-1]}

    class Clock(TrainerCallback):
        times: list[float] = []
        losses: list[float] = []

        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.times.append(time.perf_counter() - self.start)

        def on_log(self, args, state, control, logs=None, **__):
            if logs and "loss" in logs:
                self.losses.append(logs["loss"])

    clock = Clock()
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=e.batch_size, max_steps=steps,
        max_grad_norm=1.0, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False, dataloader_pin_memory=False, train_sampling_strategy="sequential", seed=0,
    )  # fmt: skip
    # Trainer's own default optimizer (fused AdamW), under our schedule: its warm-up starts at a rate of zero.
    lr = WORKLOAD["lr"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(e.training, step) / lr)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[clock],
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    start = time.perf_counter()
    trainer.train()
    return {"seconds": clock.times, "losses": clock.losses, "wall": time.perf_counter() - start,
            "threads": torch.get_num_threads(), "optimizer": str(arguments.optim)}  # fmt: skip


def child(name: str, steps: int) -> None:
    runs = {
        "ridgeline": lambda: run_ridgeline(steps, []),
        "ridgeline_flash": lambda: run_ridgeline(steps, ["flash_attention"]),
        "ridgeline_fused": lambda: run_ridgeline(steps, ["flash_attention", "fused_layers"]),
        "hf_sdpa": lambda: run_hf(steps, "sdpa"),
        "hf_eager": lambda: run_hf(steps, "eager"),
    }
    print("RESULT " + json.dumps(runs[name]()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/train_vs_hf.json"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.steps)
        return
    from ridgeline.measure.environment import cores, fingerprint
    from ridgeline.measure.stats import bootstrap_ci, ratio_ci, warmup_steps

    result: dict = {"environment": fingerprint(), "workload": WORKLOAD, "steps": args.steps, "repeats": args.repeats,
                    "shapes": {}}  # fmt: skip
    for shape in args.shapes:
        model, seq_len, batch = SHAPES[shape]
        found: dict[str, list[dict]] = {c: [] for c in CONTENDERS}
        env = {**os.environ, "OMP_NUM_THREADS": str(cores()), "HF_HUB_OFFLINE": "1", "BENCH_SHAPE": shape}
        for r in range(args.repeats):
            for name in CONTENDERS if r % 2 == 0 else CONTENDERS[::-1]:
                command = [sys.executable, __file__, "--child", name, "--steps", str(args.steps)]
                out = subprocess.run(command, env=env, capture_output=True, text=True)
                line = next((x for x in out.stdout.splitlines() if x.startswith("RESULT ")), None)
                if line is None:
                    sys.exit(f"{name} failed:\n{out.stderr[-3000:]}")
                found[name].append(json.loads(line.removeprefix("RESULT ")))
        blocks = {n: [run["seconds"][warmup_steps(run["seconds"]) :] for run in runs] for n, runs in found.items()}
        table = {}
        for name, b in blocks.items():
            step = bootstrap_ci(b)
            table[name] = {
                "step_s": step._asdict(),
                "tokens_per_s": batch * seq_len / step.value,
                "final_loss": found[name][0]["losses"][-1],
                "optimizer": found[name][0].get("optimizer", "AdamW fused"),
            }
        pairs = [("ridgeline", "hf_eager"), ("ridgeline_flash", "hf_sdpa"), ("ridgeline_fused", "hf_sdpa"),
                 ("ridgeline", "hf_sdpa")]  # fmt: skip
        ratios = {f"{a} over {b}": ratio_ci(blocks[b], blocks[a], paired=True)._asdict() for a, b in pairs}
        result["shapes"][shape] = {"model": model, "seq_len": seq_len, "batch_size": batch, "contenders": table,
                                   "ratios": ratios, "samples": blocks}  # fmt: skip
        print(f"{shape}: batch {batch} x {seq_len}")
        for name, row in table.items():
            print(f"  {name:16} {row['tokens_per_s']:7.0f} tokens/s   loss {row['final_loss']:.4f}")
        for name, ratio in ratios.items():
            print(f"  {name:28} {ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
