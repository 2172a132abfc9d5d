"""Quantizes a checkpoint with llm-compressor's GPTQ or RTN. Run by ``compress_vs_peers.py`` in the peer's interpreter.

Reads one JSON object on standard input; writes the compressed checkpoint and, as the last line of standard output,
``{"version", "seconds", "peak_rss_bytes"}``. Seconds are those of ``oneshot`` and of saving, imports and model loading
(which it does itself) included where ours are.
"""

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    ids = np.load(job["ids"])
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    weights = {"num_bits": job["bits"], "type": "int", "symmetric": job["symmetric"], "strategy": "group",
               "group_size": job["group_size"]}  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if job["method"] == "gptq":
        recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"], actorder="static", dampening_frac=0.01)
    else:
        recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32)
    oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=ids.shape[1], num_calibration_samples=len(ids))
    model.save_pretrained(job["out"], save_compressed=True)
    seconds = time.perf_counter() - start
    # ru_maxrss would start from what the benchmark that started this has.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(json.dumps({"version": version("llmcompressor"), "seconds": seconds, "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
