"""Generates from an OPT checkpoint with FlexGen (FMInference, PyPI's flexgen) on a CPU. Run by ``beyond_memory.py``.

Reads one JSON object on standard input; the last line of standard output is ``{"version", "seconds", "tokens"}``:
seconds of the prefill and of each further token, and the greedy tokens. FlexGen's "gpu" is a second device of the same
processor here, what it asks of CUDA (streams, synchronization, pinned memory) is nothing, and its fp16 is fp32. With
``convert`` in the job it only writes the weights' files that FlexGen reads.
"""

import contextlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Wide:
    """NumPy, whose fp16 is fp32."""

    float16 = np.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def without_cuda() -> None:
    """What FlexGen asks of CUDA does nothing."""
    torch.cuda.Stream = SimpleNamespace  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = torch.cuda.set_device = lambda *args: None  # type: ignore[assignment]
    torch.Tensor.cuda = torch.Tensor.half = lambda self, *args: self  # type: ignore[method-assign, assignment]
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **more: empty(*args, **more)  # type: ignore[assignment]


def arrays(checkpoint: str, folder: Path) -> None:
    """The checkpoint's tensors as FlexGen's files."""
    from safetensors import safe_open

    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(checkpoint).glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                short = name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
                with (folder / short).open("wb") as f:
                    np.save(f, tensors.get_tensor(name))


def main() -> None:
    job = json.load(sys.stdin)
    folder = Path(job["folder"])
    if "convert" in job:
        arrays(job["checkpoint"], folder / "peer-np")
        return
    torch.set_num_threads(job["threads"])
    without_cuda()
    from flexgen import flex_opt, pytorch_backend
    from flexgen.compression import CompressionConfig
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    pytorch_backend.np = Wide()
    source = json.loads((Path(job["checkpoint"]) / "config.json").read_text())
    width = source["hidden_size"]
    config = OptConfig(
        name="peer", num_hidden_layers=source["num_hidden_layers"], max_seq_len=source["max_position_embeddings"],
        hidden_size=width, n_head=source["num_attention_heads"], input_dim=width, ffn_embed_dim=source["ffn_dim"],
        vocab_size=source["vocab_size"], pad_token_id=-1, dtype=np.float32,
    )  # fmt: skip
    none = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    size, parts = job["batch"]
    policy = flex_opt.Policy(size, parts, *job["percent"], True, True, False, False, 1.0, False, none, False, none)
    gpu, cpu = pytorch_backend.TorchDevice("cpu"), pytorch_backend.TorchDevice("cpu")
    disk = pytorch_backend.TorchDisk(str(folder / "disk"))
    env = ExecutionEnv(gpu, cpu, disk, pytorch_backend.TorchMixedDevice([gpu, cpu, disk]))
    model = flex_opt.OptLM(config, env, str(folder), policy)
    timers("generate").reset()
    ids = model.generate(job["prompt"], max_new_tokens=job["output_len"])
    new = ids[:, len(job["prompt"][0]) :].T.tolist()
    print(json.dumps({"version": version("flexgen"), "seconds": timers("generate").costs, "tokens": new}), flush=True)
    os._exit(0)  # its copying threads never end


if __name__ == "__main__":
    main()
