"""Runs of PyTorch's own software against published ones: FSDP2, DTensor, torch.compile and torchao in torchtitan.

Facts from pytorch/torchtitan: ``benchmarks/llama3_h100_202412_torchtitan.md`` (tables 1 to 6, 18 rows),
``benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md``, ``benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md``
and, of August 2024, ``docs/performance.md`` at 3faaa1a; and from the README and ``src/scripts/train`` of
allenai/OLMo-core 1.5.0. Nothing is fitted on them, but for the intervals of memory. Memory is what PyTorch's allocator
has reserved at most, as torchtitan logs it.
"""

from math import log
from statistics import fmean
from typing import NamedTuple

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import CsvRow

LLAMA_8B, LLAMA_70B, LLAMA_405B = (32, 4096, 32, 14336), (80, 8192, 64, 28672), (126, 16384, 128, 53248)
"""(layers, hidden, heads, ffn), all with 8 KV heads."""
LOW_POWER, H200 = "h100-96g-hbm2e-500w", "h200-sxm"
"""H100 with 96 GB of HBM2e, limited to 500 W, as the first two pages state."""


class Run(NamedTuple):
    """One published run; memory in GiB, 0: not stated."""

    rate: float
    memory: float
    model: tuple[int, int, int, int]
    ranks: int
    batch: int
    micro: int
    length: int = 8192
    device: str = LOW_POWER
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    compiled: bool = True
    precision: str = "fp8"
    recompute: str = "full"
    note: str = ""
    compiled_loss: bool = False


SELECTIVE = {"recompute": "selective"}
SHARDED = [
    Run(5762, 82.4, LLAMA_8B, 8, 16, 2, compiled=False, precision="bf16", **SELECTIVE),
    Run(6667, 77.0, LLAMA_8B, 8, 16, 2, precision="bf16", **SELECTIVE),
    Run(8532, 76.8, LLAMA_8B, 8, 16, 2, **SELECTIVE),
    Run(5605, 67.0, LLAMA_8B, 128, 256, 2, compiled=False, precision="bf16", **SELECTIVE),
    Run(6514, 62.0, LLAMA_8B, 128, 256, 2, precision="bf16", **SELECTIVE),
    Run(8380, 61.8, LLAMA_8B, 128, 256, 2, **SELECTIVE),
    Run(3890, 83.9, LLAMA_8B, 8, 8, 1, 32768),
]
"""Tables 1 and 3, and the first row of table 2."""
TENSOR = [
    Run(829, 71.9, LLAMA_70B, 256, 512, 16, tensor=8),
    Run(876, 67.6, LLAMA_70B, 256, 512, 16, tensor=8, note="async"),
]
STAGES = [
    Run(100, 82.5, LLAMA_405B, 512, 256, 4, tensor=8, pipeline=8, note="async"),
    Run(128, 72.7, LLAMA_405B, 512, 256, 4, tensor=8, pipeline=8, chunks=2, note="async"),
    Run(76, 75.3, LLAMA_405B, 512, 64, 1, 32768, tensor=8, pipeline=8, note="async"),
]
CONTEXT = [
    Run(2540, 84.2, LLAMA_8B, 8, 4, 1, 65536, context=2),
    Run(1071, 84.0, LLAMA_8B, 8, 2, 1, 131072, context=4),
    Run(548, 84.5, LLAMA_8B, 8, 1, 1, 262144, context=8),
    Run(47, 75.9, LLAMA_405B, 512, 32, 1, 65536, tensor=8, pipeline=8, context=2, note="async"),
    Run(31, 77.1, LLAMA_405B, 512, 16, 1, 131072, tensor=8, pipeline=8, context=4, note="async"),
    Run(16, 84.9, LLAMA_405B, 512, 8, 1, 262144, tensor=8, pipeline=8, context=8, note="async"),
]
LATER = [
    Run(rate, 0, model, ranks, batch, micro, tensor=8, precision=precision, recompute=recompute, note=note,
        compiled_loss=True)
    for model, ranks, batch, micro, recompute, measured in (
        (LLAMA_70B, 256, 512, 16, "full", (597.3, 652.4, 809.8, 942.4)),
        (LLAMA_8B, 64, 96, 12, "selective", (4378, 4809.4, 5078.1, 5570.1)),
    )
    for rate, precision, note in zip(measured, ("bf16", "bf16", "fp8", "fp8"), ("", "async") * 2, strict=True)
]  # fmt: skip
"""June 2025; of fp8 the rows with a scale for each tensor."""
ON_H200 = [
    Run(10938, 47.96, LLAMA_8B, 32, 64, 2, device=H200, compiled_loss=True, **SELECTIVE),
    Run(10753, 46.97, LLAMA_8B, 64, 128, 2, device=H200, compiled_loss=True, **SELECTIVE),
]
EARLIER = [
    Run(rate, 0, LLAMA_405B, 128, 32, 2, tensor=8, precision=precision, note=note)
    for rate, precision, note in ((109, "bf16", ""), (177, "fp8", ""), (185, "fp8", "async"))
]
CLAIMED = {  # docs/accuracy.md: errors of tokens per second and of memory
    "sharded": (SHARDED, 0.031, 0.055),
    "tensor parallel": (TENSOR, 0.010, 0.061),
    "stages": (STAGES, 0.038, 0.139),
    "context parallel": (CONTEXT, 0.175, 0.131),
    "later": (LATER, 0.038, None),
    "on H200": (ON_H200, 0.048, 0.126),
    "earlier": (EARLIER, 0.048, None),
}
OLMO = [  # (layers, hidden, heads, ffn), micro-batch, batch, tokens/s per H100 in bf16 and fp8
    ((18, 2048, 16, 5632), 4, 1024, 44000, 51000),
    ((32, 4096, 32, 11008), 2, 1024, 10000, 13000),
    ((40, 5120, 40, 13824), 1, 2048, 4600, 5500),
]
"""OLMo-core's own scripts; how many GPUs is not stated, and matters little: 64 are assumed."""
OLMO_CLAIMED = 0.070
SPEED, MEMORY = 0.078, 0.095
"""The same of the 18 rows of December 2024."""


def cases(run):
    layers, hidden, heads, ffn = run.model
    cells = {
        "family": "llama", "gated": 1, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn,
        "vocab": 128256, "seq_len": run.length, "device": run.device, "nodes_of": 8, "n_devices": run.ranks,
        "tp": run.tensor, "pp": run.pipeline, "cp": run.context, "zero_stage": 3, "interleave": run.chunks,
        "micro_batch": run.micro, "global_batch": run.batch, "recompute": run.recompute, "precision": run.precision,
        "compile": int(run.compiled), "compiled_loss": int(run.compiled_loss), "inter_node": "400Gb/s per GPU",
        "source": "pytorch/torchtitan", "note": run.note, "tokens_per_s_per_device": run.rate,
        "memory_bytes": run.memory * 2**30 or "",
    }  # fmt: skip
    return training.cases(CsvRow(2, {k: str(v) for k, v in cells.items()}))


def errors(runs, at):
    found = [c[at].error for c in map(cases, runs) if len(c) > at]
    print(f"{('tokens/s', 'memory')[at]} {[f'{e:+.1%}' for e in found]}, mean {fmean(map(abs, found)):.1%}")
    return fmean(map(abs, found))


@pytest.mark.parametrize("kind", CLAIMED)
def test_torchtitan(kind):
    runs, speed, memory = CLAIMED[kind]
    assert errors(runs, 0) <= speed + 0.0005, "what the page rounds away"
    if memory is not None:
        assert errors(runs, 1) <= memory + 0.0005


def test_torchtitan_altogether():
    runs = [*SHARDED, *TENSOR, *STAGES, *CONTEXT]
    assert errors(runs, 0) <= SPEED + 0.0005
    assert errors(runs, 1) <= MEMORY + 0.0005
    for case in (c for run in [*runs, *ON_H200] for c in cases(run)):
        assert abs(log(case.predicted / case.measured)) <= 1.96 * case.spread, f"{case.quantity} of {case.label}"


def test_olmo_core():
    found = []
    for (layers, hidden, heads, ffn), micro, batch, *rates in OLMO:
        spec = catalog.model("olmo-2-7b").model_dump() | {
            "name": f"olmo-{hidden}", "num_layers": layers, "hidden_size": hidden, "num_heads": heads,
            "num_kv_heads": heads, "intermediate_size": ffn,
        }  # fmt: skip
        loss = "copies" if hidden == 2048 else "compiled"  # which the larger ones' fused loss is nearest to
        plan = [f"mixed_precision:weights=gathered,loss={loss}", "flash_attention", "torch_compile:pieces=true",
                "zero:stage=3"]  # fmt: skip
        workload = {"kind": "pretrain", "seq_len": 4096, "batch_size": batch, "micro_batch_size": micro}
        for more, rate in zip(([], ["fp8"]), rates, strict=True):
            e = experiments.make(spec, "8x8xh100", workload, [*plan, *more])
            found.append(predict(e).metrics["tokens_per_s_per_device"].value / rate - 1)
    print(f"tokens/s {[f'{e:+.1%}' for e in found]}, mean {fmean(map(abs, found)):.1%}")
    assert fmean(map(abs, found)) <= OLMO_CLAIMED + 0.0005
