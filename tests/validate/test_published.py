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

CLAIMED = 0.025
"""docs/accuracy.md: iteration times of Megatron 22B to 1T."""
PTDP = 0.024
"""docs/accuracy.md, table of families: Megatron-LM of 2021, the mean as shipped."""

STUDY = {  # arXiv:2205.05198, table 5: seconds of an iteration with full recomputation, and as the paper proposes
    "megatron-22B": (1.42, 1.10, 8, 1, 4, 4, 1),
    "gpt3-175B": (18.13, 13.75, 64, 8, 64, 1, 3),
    "turing-530B": (49.05, 37.83, 280, 35, 280, 1, 3),
    "megatron-1T": (94.42, 71.49, 512, 64, 512, 1, 1),
}
"""(full, selective with sequence parallelism, GPUs, pipeline, batch, micro-batch, interleaved stages); tensor 8."""
SCALE = [  # arXiv:2104.04473, table 1, teraFLOP/s per GPU
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    (48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    (80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
]
"""(layers, hidden, heads, tensor, pipeline, GPUs, batch, micro-batch, interleaved stages, TFLOP/s)."""
LLAMA = [
    (8192, 2048, 8192, 1, 0.43),
    (16384, 2048, 8192, 1, 0.41),
    pytest.param(16384, 128, 131072, 16, 0.38, marks=pytest.mark.xfail(
        strict=True, reason="published 0.38, predicted 0.66 from 0.47 to 0.92; 0.47 if the paper, which does not say,"
        " counts the causal half of attention only")),
]  # fmt: skip
"""arXiv:2407.21783, table 4: (GPUs, sequences a step, their tokens, context parallel, MFU) of Llama 3 405B in bf16."""


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


def test_megatron_at_scale_on_a100():
    errors = []
    for layers, hidden, heads, tensor, pipeline, ranks, batch, micro, chunks, rate in SCALE:
        (case,) = training.cases(row(
            family="gpt", layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, seq_len=2048,
            device="a100-80g-sxm", n_devices=ranks, tp=tensor, pp=pipeline, micro_batch=micro, global_batch=batch,
            interleave=chunks, recompute="full", precision="fp16", flash=0, inter_node="8x200Gb/s",
            tflops_per_device=rate, flops_formula="96",
        ))  # fmt: skip
        errors.append(abs(case.error))
    print(f"errors {[f'{e:.1%}' for e in errors]}, mean {fmean(errors):.1%}")
    assert fmean(errors) <= PTDP + 0.0005, "what the page rounds away"


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
