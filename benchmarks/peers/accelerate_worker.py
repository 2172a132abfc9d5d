"""Generates from a checkpoint with transformers and accelerate's disk offload. Run by ``beyond_memory.py``.

Reads one JSON object on standard input; the last line of standard output is ``{"version", "seconds", "tokens"}``:
seconds of the prefill and of each further token, and the greedy tokens.
"""

import json
import sys
import time
from importlib.metadata import version


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    config = AutoConfig.from_pretrained(job["checkpoint"])
    around = {"opt": ("embed_tokens", "embed_positions", "final_layer_norm")}
    base = "model.decoder" if config.model_type == "opt" else "model"
    places = {f"{base}.{name}": "cpu" for name in around.get(config.model_type, ("embed_tokens", "norm", "rotary_emb"))}
    places |= {"lm_head": "cpu"} | {f"{base}.layers.{i}": "disk" for i in range(config.num_hidden_layers)}
    model = AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype=torch.float32, device_map=places, offload_folder=job["folder"]
    )
    ids = torch.tensor(job["prompt"])
    seconds, tokens = [], []
    with torch.inference_mode():
        past = None
        for _ in range(job["output_len"]):
            start = time.perf_counter()
            out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
            tokens.append(ids[:, 0].tolist())
    print(json.dumps({"version": version("accelerate"), "seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
