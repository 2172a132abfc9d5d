"""The constants of A100 and H100 against published runs: facts from papers, held to the errors that the docs state.

They guard what is shipped against drifting unseen; a mean over a handful, so that no single row decides.
"""

from statistics import fmean

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.validate import memory_rows as memory
from ridgeline.validate import training_rows as training
from ridgeline.validate.csv_table import CsvRow

CLAIMED = 0.021
"""docs/accuracy.md: iteration times of Megatron 22B to 1T."""
PTDP, PTD_OPEN, DEEPSPEED, HOPPER = 0.015, 0.017, 0.125, 0.017
"""docs/accuracy.md, runs of papers: Megatron-LM's scaling, beside ZeRO-3, ZeRO-3, and Nemotron-4 340B. ZeRO-3 was
within 0.098 with hops of 8 us between nodes: its rings over 48 to 280 nodes pay for each of them, and small all-reduces
of two nodes, which were measured, want 14."""
FP8_HOPPER, FP8_BLACKWELL = 0.040, 0.064
"""docs/accuracy.md: fp8 on H100, and on B200 and GB200, none of them fitted."""

STUDY = {  # arXiv:2205.05198, table 5: seconds of an iteration with full recomputation, and as the paper proposes
    "megatron-22B": (1.42, 1.10, 8, 1, 4, 4, 1),
    "gpt3-175B": (18.13, 13.75, 64, 8, 64, 1, 3),
    "turing-530B": (49.05, 37.83, 280, 35, 280, 1, 3),
    "megatron-1T": (94.42, 71.49, 512, 64, 512, 1, 1),
}
"""(full, selective with sequence parallelism, GPUs, pipeline, batch, micro-batch, interleaved stages); tensor 8."""
SCALE = [  # arXiv:2104.04473, table 1, teraFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 16, 1, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 4, 1, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 1, 1, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
]
"""(layers, hidden, heads, tensor, pipeline, GPUs, batch, micro-batch, interleaved stages, TFLOP/s)."""
GPT3, TURING = (96, 12288, 96), (105, 20480, 128)
ZERO_3 = [(GPT3, 384, 1536, 4, 144), (GPT3, 768, 1536, 2, 88), (GPT3, 1536, 1536, 1, 44), (TURING, 640, 2560, 4, 138),
          (TURING, 1120, 2240, 2, 98), (TURING, 2240, 2240, 1, 48)]  # fmt: skip
"""arXiv:2104.04473, table 2, ZeRO-3 without model parallelism: (model, GPUs, batch, micro-batch, TFLOP/s)."""
PTD = [(GPT3, 12, 384, 1536, 153), (GPT3, 12, 768, 1536, 149), (GPT3, 12, 1536, 1536, 141),
       (TURING, 35, 560, 2240, 171), (TURING, 35, 1120, 2240, 167), (TURING, 35, 2240, 2240, 159)]  # fmt: skip
"""The same table, tensor (8) and pipeline parallelism with micro-batches of 1: (model, pipeline, GPUs, batch, TFLOP/s).
The number of interleaved stages is not stated."""
NEMOTRON = [(1536, 768, 0.424), (3072, 1536, 0.423), (6144, 2304, 0.410)]
"""arXiv:2406.11704, table 2: (H100, sequences of 4096 tokens a step, MFU) of Nemotron-4 340B, with tensor parallelism 8
and 12 pipeline stages, 8 interleaved on each."""
LLAMA = [(8192, 2048, 8192, 1, 0.43), (16384, 2048, 8192, 1, 0.41), (16384, 128, 131072, 16, 0.38)]
"""arXiv:2407.21783, table 4: (GPUs, sequences a step, their tokens, context parallel, MFU) of Llama 3 405B in bf16."""

LLAMA2_7B, LLAMA2_13B, LLAMA2_70B = (32, 4096, 32, 32, 11008), (40, 5120, 40, 40, 13824), (80, 8192, 64, 8, 28672)
LLAMA3_8B, LLAMA3_405B = (32, 4096, 32, 8, 14336), (126, 16384, 128, 8, 53248)
"""(layers, hidden, heads, KV heads, ffn)."""
GPT_5B, GPT_20B, GPT_175B = (24, 4096, 32), (44, 6144, 48), (96, 12288, 96)
FP8 = [  # NeMo's user guide 24.12, performance summary: H100
    ("h100-sxm", LLAMA2_7B, 4096, 8, 128, 1, 1, 1, 1, 1, 1, 16934),
    ("h100-sxm", LLAMA2_13B, 4096, 16, 128, 1, 1, 1, 4, 1, 10, 8715),
    ("h100-sxm", LLAMA2_70B, 4096, 64, 128, 1, 1, 4, 4, 1, 20, 1728),
    ("h100-sxm", LLAMA3_8B, 8192, 8, 128, 1, 1, 1, 1, 2, 1, 12273),
    ("h100-sxm", GPT_5B, 2048, 64, 2048, 4, 1, 1, 1, 1, 1, 23406),
    ("h100-sxm", GPT_20B, 2048, 64, 256, 2, 1, 2, 1, 1, 1, 5851),
    ("h100-sxm", GPT_175B, 2048, 128, 256, 1, 1, 4, 8, 1, 6, 716),
    ("h100-sxm", GPT_175B, 2048, 512, 2048, 2, 1, 4, 8, 1, 6, 825),
    # NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, 25.11 and 26.06, per-tensor scales
    ("h100-sxm", LLAMA3_8B, 8192, 8, 128, 1, 3, 1, 1, 1, 1, 14451),
    ("h100-sxm", LLAMA3_405B, 8192, 1024, 512, 1, 1, 8, 8, 2, 8, 292),
    ("h100-sxm", LLAMA3_405B, 8192, 1024, 1536, 1, 1, 8, 8, 2, 8, 326),
    ("b200", LLAMA3_8B, 8192, 8, 128, 2, 1, 1, 1, 1, 1, 30624),
    ("b200", LLAMA3_405B, 8192, 128, 64, 1, 1, 4, 8, 2, 8, 661),
    ("gb200", LLAMA3_8B, 8192, 8, 128, 2, 1, 1, 1, 1, 1, 31508),
    ("gb200", LLAMA2_70B, 8192, 64, 256, 2, 3, 1, 1, 1, 1, 4312),
    ("gb200", LLAMA3_405B, 8192, 256, 1536, 1, 1, 4, 16, 1, 4, 843),
]
"""(device, model, tokens of a sequence, GPUs, batch, micro-batch, ZeRO stage, tensor, pipeline, context parallel,
interleaved stages, tokens/s per GPU) of published fp8 runs. Of a GB200's rack 64 of 72 GPUs are one node."""


def row(**cells):
    return CsvRow(2, {k: str(v) for k, v in cells.items()})


def test_recomputation_study_on_a100():
    errors = []
    for model, (full, proposed, ranks, pipeline, batch, micro, chunks) in STUDY.items():
        for seconds, policy, sums in ((full, "full", "ar"), (proposed, "attn_only", "rs_ag")):
            (case,) = memory.cases(row(
                model=model, quantity="iteration_time_s", value=seconds, num_procs=ranks, tensor_par=8,
                pipeline_par=pipeline, data_par=1, batch_size=batch, microbatch_size=micro, datatype="float16",
                activation_recompute=policy, pipeline_interleaving=chunks, tensor_par_comm_type=sums,
            ))  # fmt: skip
            errors.append(abs(case.error))
    print(f"errors {[f'{e:.1%}' for e in errors]}, mean {fmean(errors):.1%}")
    assert fmean(errors) <= CLAIMED + 0.0005, "what the page rounds away"


def gpt(model, ranks, batch, **cells):
    layers, hidden, heads = model
    (case,) = training.cases(row(**{
        "family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 51200,
        "seq_len": 2048, "device": "a100-80g-sxm", "n_devices": ranks, "global_batch": batch, "tp": 1, "pp": 1,
        "recompute": "full", "precision": "fp16", "flash": 0, "inter_node": "8x200Gb/s", "flops_formula": "96", **cells,
    }))  # fmt: skip
    return case.error


def mean(errors):
    print(f"errors {[f'{e:+.1%}' for e in errors]}, mean {fmean(map(abs, errors)):.1%}")
    return fmean(map(abs, errors))


def test_megatron_at_scale_on_a100():
    errors = [
        gpt(tuple(model), ranks, batch, tp=tensor, pp=pipeline, micro_batch=micro, interleave=chunks,
            tflops_per_device=rate)
        for *model, tensor, pipeline, ranks, batch, micro, chunks, rate in SCALE
    ]  # fmt: skip
    assert mean(errors) <= PTDP + 0.0005, "what the page rounds away"


def test_megatron_beside_zero_3_on_a100():
    errors = [
        gpt(model, ranks, batch, tp=8, pp=pipeline, micro_batch=1, tflops_per_device=rate)
        for model, pipeline, ranks, batch, rate in PTD
    ]
    assert mean(errors) <= PTD_OPEN + 0.0005


def test_zero_3_at_scale_on_a100():
    errors = [
        gpt(model, ranks, batch, micro_batch=micro, zero_stage=3, tflops_per_device=rate)
        for model, ranks, batch, micro, rate in ZERO_3
    ]
    assert mean(errors) <= DEEPSPEED + 0.0005


def test_nemotron_on_h100():
    errors = [
        gpt((96, 18432, 96), ranks, batch, kv_heads=8, vocab=256000, seq_len=4096, device="h100-sxm", tp=8, pp=12,
            micro_batch=1, interleave=8, recompute="none", precision="bf16", flash=1, sequence_parallel=1, zero_stage=1,
            inter_node="8x400Gb/s", flops_formula="", mfu=mfu)
        for ranks, batch, mfu in NEMOTRON
    ]  # fmt: skip
    assert mean(errors) <= HOPPER + 0.0005


def fp8(device, model, length, ranks, batch, micro, stage, tensor, pipeline, context, chunks, rate):
    layers, hidden, heads, *rest = model
    kv, ffn = rest or (heads, 4 * hidden)
    vocab = 51200 if not rest else 32000 if length == 4096 else 128256
    (case,) = training.cases(row(
        family="llama" if rest else "gpt", gated=int(bool(rest)), layers=layers, hidden=hidden, heads=heads, ffn=ffn,
        kv_heads=kv, vocab=vocab, seq_len=length, device=device, nodes_of=64 if device == "gb200" else 8,
        n_devices=ranks, global_batch=batch, micro_batch=micro, zero_stage=stage, tp=tensor, pp=pipeline, cp=context,
        interleave=chunks, recompute="none", precision="fp8", flash=1, sequence_parallel=int(tensor > 1),
        inter_node="" if device == "gb200" else "8x400Gb/s", tokens_per_s_per_device=rate,
    ))  # fmt: skip
    return case.error


@pytest.mark.parametrize(("devices", "claimed"), [({"h100-sxm"}, FP8_HOPPER), ({"b200", "gb200"}, FP8_BLACKWELL)])
def test_fp8_where_nothing_was_fitted(devices, claimed):
    assert mean([fp8(*found) for found in FP8 if found[0] in devices]) <= claimed + 0.0005


@pytest.mark.parametrize(("ranks", "batch", "length", "context", "published"), LLAMA)
def test_llama_3_405b_on_h100(ranks, batch, length, context, published):
    """Within the prediction's own interval. The first two set the clock of a hot H100, the third was never
    fitted. (Two of the 128 places for layers are left empty in the paper.)"""
    spec = catalog.model("llama3-70b").model_dump() | {
        "name": "llama3-405b", "num_layers": 128, "hidden_size": 16384, "num_heads": 128, "intermediate_size": 53248,
        "max_positions": 131072,
    }  # fmt: skip
    plan = ["mixed_precision:weights=low", "flash_attention", "fused_layers", "tensor_parallel:degree=8",
            "sequence_parallel", "pipeline:degree=16,schedule=interleaved,chunks=8", "zero:stage=2",
            *([f"ring_attention:degree={context}"] if context > 1 else [])]  # fmt: skip
    workload = {"kind": "pretrain", "seq_len": length, "batch_size": batch, "micro_batch_size": 1}
    mfu = predict(experiments.make(spec, f"{ranks // 8}x8xh100", workload, plan)).metrics["mfu"]
    print(f"{ranks} GPUs, {length} tokens: {mfu.value:.3f} [{mfu.low:.3f}, {mfu.high:.3f}], published {published}")
    assert mfu.low <= published <= mfu.high
