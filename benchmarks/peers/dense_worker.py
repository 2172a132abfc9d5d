"""Rounds a checkpoint with HQQ, torchao or optimum-quanto and writes the rounded weights densely.

Run by ``compress_vs_peers.py`` in the peer's interpreter: one JSON object on standard input, as the last line of
standard output ``{"version", "seconds", "peak_rss_bytes"}``. None of them calibrates. Seconds count loading, rounding
and writing.
"""

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch


def hqq(weight: torch.Tensor, job: dict) -> torch.Tensor:
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(weight, nbits=job["bits"], group_size=job["group_size"], axis=1, device="cpu",
                                     compute_dtype=torch.float32)  # fmt: skip
    return Quantizer.dequantize(codes, meta).view_as(weight).float()


def torchao(weight: torch.Tensor, job: dict) -> torch.Tensor:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    kind = getattr(torch, f"int{job['bits']}")
    quantize_(linear, IntxWeightOnlyConfig(weight_dtype=kind, granularity=PerGroup(job["group_size"])))
    return linear.weight.dequantize().float()


PEERS = {"hqq": hqq, "torchao": torchao}


def main() -> None:
    job = json.load(sys.stdin)
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(job["threads"])
    start = time.perf_counter()
    tensors = load_file(Path(job["checkpoint"]) / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = PEERS[job["peer"]](weight.float(), job).contiguous()
    out = Path(job["out"])
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((Path(job["checkpoint"]) / "config.json").read_text())
    seconds = time.perf_counter() - start
    # ru_maxrss would start from what the benchmark that started this has.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    print(json.dumps({"version": version(job["peer"]), "seconds": seconds, "peak_rss_bytes": peak}))


if __name__ == "__main__":
    main()
