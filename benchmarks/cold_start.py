"""Seconds from starting `ridgeline serve` to its first token, for a checkpoint of about a billion parameters.

python benchmarks/cold_start.py [--model llama3.2-1b] [--repeat 5] [--cold] [--json FILE]

Random weights in bf16; every start is a process of its own. With --cold the files are dropped from the system's cache
first, as far as the system lets us.
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
import urllib.request
from itertools import chain, islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline import catalog
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build

DTYPES = ("auto", "fp32")


def full_tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of ``size`` entries, each but the bytes joined of two: as long to read as a real one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = chain(product(letters, letters), ((a + b, c) for a, b, c in product(letters, letters, letters)))
    merges = list(islice(pairs, size - len(letters)))
    entries = [*letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def made(name: str, folder: Path) -> Path:
    """A checkpoint of a catalog model with random weights, and a tokenizer as large as the model's."""
    spec = catalog.model(name)
    save_checkpoint(build(spec, dtype=torch.bfloat16), folder)
    full_tokenizer(spec.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def started(folder: Path, dtype: str, port: int, cold: bool) -> float:
    """Seconds until a request for one token is answered."""
    for file in folder.glob("*.safetensors") if cold else ():
        with file.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}).encode()
    command = [sys.executable, "-m", "ridgeline", "serve", str(folder), "--port", str(port), "--dtype", dtype,
               "--served-model-name", "m"]  # fmt: skip
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                ask = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
                )
                try:
                    urllib.request.urlopen(ask, timeout=300).read()
                    return time.perf_counter() - start
                except OSError:
                    time.sleep(0.02)
            raise SystemExit("the server ended by itself")
        finally:
            process.terminate()


def main() -> None:
    """Write medians and ranges."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--port", type=int, default=8931)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = made(given.model, Path(folder))
        seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
        for i in range(given.repeat):
            for dtype in DTYPES:
                seconds[dtype].append(started(checkpoint, dtype, given.port, given.cold))
                print(f"{i + 1} {dtype}: {seconds[dtype][-1]:.2f} s", file=sys.stderr)
    found = {
        dtype: {"median_s": statistics.median(s), "least_s": min(s), "most_s": max(s)} for dtype, s in seconds.items()
    }
    out = {"model": given.model, "repeat": given.repeat, "cold": given.cold, "seconds": found,
           "environment": {**fingerprint(), "load_average": load_average()}}  # fmt: skip
    text = json.dumps(out, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
