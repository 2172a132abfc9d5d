"""Small checkpoints with a byte-level tokenizer, and compressions of them in this process."""

from pathlib import Path

import torch

from ridgeline import experiments
from ridgeline.compress.driver import compress
from ridgeline.data.batches import train_tokenizer
from ridgeline.jobs.job import CompressOptions, RankContext
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec

LLAMA = {
    "family": "llama", "vocab_size": 258, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_positions": 128,
}  # fmt: skip
MIXTRAL = {**LLAMA, "family": "mixtral", "num_experts": 4, "experts_per_token": 2}


def checkpoint(folder, fields, seed=0, dtype=torch.float32, change=lambda model: None):
    """Random weights of ``fields``, wider than at the start of training so that activations matter."""
    model = build(ModelSpec(**fields), seed=seed)
    for name, p in model.named_parameters():
        if name.endswith("_proj.weight") or "_proj" in name:
            p.data.mul_(4)
    change(model)
    save_checkpoint(model.to(dtype), folder)
    train_tokenizer(["a"], 258).save(str(Path(folder) / "tokenizer.json"))
    return folder


def workload(source, data, **fields):
    """Task compress on ``source`` with the text in file ``data``."""
    base = {"kind": "compress", "checkpoint": str(source), "data": str(data), "samples": 8, "seq_len": 32,
            "prompt_len": 8, "output_len": 4}  # fmt: skip
    return {**base, **fields}


def text(folder, size=6000):
    """A file of letters in which few follow each."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 4, (size,), generator=generator).cumsum(0) % 26
    file = Path(folder) / "text.txt"
    file.write_text("".join(chr(97 + int(s)) for s in steps))
    return file


def squeeze(source, out, *calls, form="ridgeline", report=lambda message: None, **fields):
    """Compress ``source`` into ``out`` by the plan ``calls``; returns the report."""
    data = text(Path(out).parent)
    e = experiments.make(str(source), "a100", workload(source, data, **fields), list(calls))
    return compress(e, CompressOptions(out=str(out), format=form), RankContext(torch.device("cpu"), report=report))
