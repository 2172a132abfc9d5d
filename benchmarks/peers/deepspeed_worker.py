"""Generates from a checkpoint with DeepSpeed's ZeRO-Inference, weights on disk, on a CPU. Run by ``beyond_memory.py``.

Reads one JSON object on standard input; the last line of standard output is ``{"version", "seconds", "tokens"}``:
seconds of the prefill and of each further token, and the greedy tokens. ``--build`` compiles DeepSpeed's
operators only.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def load(model: Any, checkpoint: Path) -> None:
    """The checkpoint's tensors, one at a time, into the files of parameters on disk and into those in memory:
    ``from_pretrained`` takes more memory than there is."""
    import deepspeed
    from safetensors import safe_open

    parameters = dict(model.named_parameters())
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                p, value = parameters[name], tensors.get_tensor(name)
                if p.nvme_swapper.swappable_tensor(p):
                    with open(p.nvme_swapper.get_path(p, must_exist=True), "r+b") as f:
                        f.write(value.numpy())
                else:
                    with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
                        p.data.copy_(value)


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
    import deepspeed
    import torch
    import transformers

    if "--build" in sys.argv:
        from deepspeed.ops.op_builder import AsyncIOBuilder
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        AsyncIOBuilder().load()
        ShareMemCommBuilder().load()
        return
    job = json.load(sys.stdin)
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(job["threads"])
    config = AutoConfig.from_pretrained(job["checkpoint"])
    largest = max(config.intermediate_size, config.vocab_size) * config.hidden_size
    layer = (3 * config.intermediate_size + 4 * config.hidden_size) * config.hidden_size
    settings = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": job["folder"], "pin_memory": False, "buffer_count": 6,
                              "buffer_size": largest},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": layer,
            "stage3_prefetch_bucket_size": layer // 2,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 1,
    }  # fmt: skip
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    kept = HfDeepSpeedConfig(settings)  # from_config looks for it
    transformers.integrations.deepspeed.initialize_weights_zero3 = lambda model: None  # gathers all of them
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load(model, Path(job["checkpoint"]))
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    ids = torch.tensor(job["prompt"])
    seconds, tokens = [], []
    with torch.no_grad():
        past = None
        for _ in range(job["output_len"]):
            start = time.perf_counter()
            out = engine.module(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            tokens.append(ids[:, 0].tolist())
    del kept
    print(json.dumps({"version": deepspeed.__version__, "seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
