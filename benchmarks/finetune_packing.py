"""LoRA fine-tuning of conversations of real lengths: examples packed into rows against batches padded to the longest.

    python benchmarks/finetune_packing.py --trace AzureLLMInferenceTrace_conv.csv [--rounds 3] [--json FILE]

Lengths of prompts and answers are those of a recorded trace of a chat service, divided by ``--shorter``; texts are cut
from Python's standard library. Contenders take turns, each in a process of its own, with the same weights, adapter,
optimizer and examples:

    packed    ``ridgeline finetune``: rows of ``--seq-len`` tokens of several examples each
    padded    ``peft`` under ``transformers``' ``Trainer``: ``--batch-size`` examples, padded to the longest of them
    grouped   the same with examples of similar lengths in a batch (``train_sampling_strategy="group_by_length"``)

Reported are examples' tokens per second (padding is not counted) of the steps after the first ``--skip``, medians over
rounds and the ratios of each round. ``worker`` is what the processes run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline import catalog
from ridgeline.data.batches import train_tokenizer
from ridgeline.data.packing import pack
from ridgeline.data.text import documents
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.predict.serving.arrivals import read_trace

RANK, ALPHA, LR = 16, 32, 1e-4
CONTENDERS = ("packed", "padded", "grouped")
SHORTEST = 4
"""Fewest tokens of a prompt and of an answer."""


def main() -> None:
    """Write the examples, and let the contenders take turns."""
    args = _arguments()
    if args.worker:
        print(json.dumps(_padded(args, Path(args.worker), args.grouped)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = _prepare(args, folder)
        for i in range(args.rounds):
            for contender in CONTENDERS if i % 2 == 0 else CONTENDERS[::-1]:
                found[contender].append(_run(args, folder, contender, i, lengths))
                print(contender, json.dumps(found[contender][-1]), flush=True)
    speeds = {name: [r["tokens_per_s"] for r in runs] for name, runs in found.items()}
    report: dict[str, Any] = {
        "environment": {**fingerprint(), "load_average": load_average()}, "model": args.model,
        "seq_len": args.seq_len, "batch_size": args.batch_size, "lengths": lengths, "runs": found,
    }  # fmt: skip
    for name in CONTENDERS[1:]:
        ratios = [a / b for a, b in zip(speeds["packed"], speeds[name], strict=True)]
        report[f"packed over {name}"] = {"value": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        print(f"packed over {name}: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _prepare(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A checkpoint with its tokenizer, and the examples as records of text → what is known of their lengths."""
    texts = [document for document, _ in zip(documents("stdlib"), range(300), strict=False)]
    spec = catalog.model(args.model)
    model = folder / "model"
    save_checkpoint(build(spec, seed=0), model)
    train_tokenizer(texts, min(spec.vocab_size, 2048)).save(str(model / "tokenizer.json"))
    tokenizer = load_tokenizer(str(model))
    ids = [i for text in texts for i in tokenizer.encode(text).ids]
    at, lengths = 0, []
    with (folder / "examples.jsonl").open("w", encoding="utf-8") as f:
        for r in read_trace(args.trace, args.examples):
            prompt = min(max(SHORTEST, r.prompt // args.shorter), args.seq_len // 2)
            answer = min(max(SHORTEST, r.output // args.shorter), args.seq_len // 2)
            at = at if at + prompt + answer < len(ids) else 0
            said = [tokenizer.decode(ids[a:b]) for a, b in ((at, at + prompt), (at + prompt, at + prompt + answer))]
            at += prompt + answer
            lengths.append(sum(len(tokenizer.encode(text).ids) for text in said))
            f.write(json.dumps({"prompt": said[0], "completion": said[1]}) + "\n")
    rows = pack(lengths, args.seq_len, np.arange(len(lengths)))
    return {"examples": len(lengths), "mean": statistics.mean(lengths), "median": statistics.median(lengths),
            "longest": max(lengths), "packed": sum(lengths) / (len(rows) * args.seq_len)}  # fmt: skip


def _run(
    args: argparse.Namespace, folder: Path, contender: str, turn: int, lengths: dict[str, float]
) -> dict[str, float]:
    if contender != "packed":
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)]
        command += ["--grouped"] if contender == "grouped" else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])
    out = folder / f"out{turn}"
    rows = max(1, round(args.batch_size * lengths["mean"] / args.seq_len))
    command = [sys.executable, "-m", "ridgeline", "finetune", str(folder / "model"), "--data",
               str(folder / "examples.jsonl"), "--out", str(out), "--steps", str(args.steps), "--seq-len",
               str(args.seq_len), "--batch-size", str(rows), "--lr", str(LR), "--eval-every", "0", "--dtype", "fp32",
               "--with", f"lora:rank={RANK},alpha={ALPHA},targets=all-linear", "--with", "flash_attention", "--with",
               "fused_layers", "--json"]  # fmt: skip
    home = {"RIDGELINE_HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **home})
    if done.returncode:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    seconds = statistics.mean(result["step_s"][args.skip :])
    filled = lengths["packed"]
    return {"tokens_per_s": filled * rows * args.seq_len / seconds, "step_s": seconds, "filled": filled}


def _padded(args: argparse.Namespace, folder: Path, grouped: bool) -> dict[str, float]:
    """``Trainer`` with ``peft``, timed by step."""
    import peft
    import transformers

    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(folder / "model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder / "model"), dtype=torch.float32, attn_implementation="sdpa"
    )
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    rows = []
    for line in (folder / "examples.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt, answer = (tokenizer.encode(record[key]).ids for key in ("prompt", "completion"))
        ids = (prompt + answer)[: args.seq_len]
        rows.append({"input_ids": ids, "labels": ([-100] * len(prompt) + answer)[: args.seq_len], "length": len(ids)})

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            return torch.tensor([[*v, *[fill] * (longest - len(v))] for v in values])

        ids = [row["input_ids"] for row in batch]
        return {"input_ids": padded(ids, 0), "attention_mask": padded([[1] * len(v) for v in ids], 0),
                "labels": padded([row["labels"] for row in batch], -100)}  # fmt: skip

    times: list[float] = []
    tokens: list[int] = []
    places: list[int] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter() - self.start)

    def counted(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        made = collate(batch)
        tokens.append(int(made["attention_mask"].sum()))
        places.append(made["attention_mask"].numel())
        return made

    settings = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=args.batch_size, max_steps=args.steps,
        learning_rate=LR, optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[],
        use_cpu=True, seed=0, dataloader_num_workers=0,
        train_sampling_strategy="group_by_length" if grouped else "random", length_column_name="length",
        remove_unused_columns=False,
    )  # fmt: skip
    transformers.Trainer(
        model=model, args=settings, train_dataset=rows, data_collator=counted, callbacks=[Clock()]
    ).train()
    count = min(len(times), len(tokens))
    kept = range(args.skip, count)
    seconds, real = sum(times[i] for i in kept), sum(tokens[i] for i in kept)
    return {"tokens_per_s": real / seconds, "step_s": seconds / len(kept),
            "filled": real / sum(places[i] for i in kept)}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default="llama-mini")
    parser.add_argument("--shorter", type=int, default=8, help="divides the trace's lengths")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8, help="examples of a padded batch")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--grouped", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
