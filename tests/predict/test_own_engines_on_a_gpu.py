"""Predictions of our own engines beside what one H100 measured (``benchmarks/results/gpu_h100``): within 15 %, which
is what ``make gpu`` asks of them. Factors and host times were set from the same card: this keeps them as they are."""

import json
import statistics
from pathlib import Path

import pytest

from ridgeline.experiments import make
from ridgeline.predict import predict
from ridgeline.techniques.registry import default_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_h100"
WITHIN = 0.15
BASE = ["mixed_precision", "flash_attention", "fused_layers"]
TRAINED = {
    "bf16": BASE,
    "bf16, compile": [*BASE[:2], "fused_layers:projections=false,elementwise=false", "torch_compile"],
    "fp8": [*BASE, "fp8"],
    "fp8 by rows": [*BASE, "fp8:scaling=rowwise"],
}
SERVED = {"bf16": [], "int8": ["rtn:bits=8,group_size=128"], "int4": ["rtn:bits=4,group_size=128"], "fp8": ["fp8"],
          "mxfp4": ["mxfp4:layers=all"]}  # fmt: skip


def measured(part):
    return {line["name"]: line for line in json.loads((RESULTS / f"{part}.json").read_text())["lines"]}


@pytest.mark.parametrize("name", TRAINED)
def test_training_steps(name):
    work = {"kind": "pretrain", "seq_len": 4096, "batch_size": 4}
    said = predict(make("llama3.2-1b", "h100-sxm", work, TRAINED[name])).metrics["step_time_s"].value
    found = measured("training")[f"llama3.2-1b, {name}"]["measured"]["step_time_s"]
    assert found == pytest.approx(said, rel=WITHIN)


def test_decode_steps():
    found, errors = measured("serving"), []
    for name, plan in SERVED.items():
        for batch in (1, 8, 64):
            work = {"kind": "serve", "prompt_len": 512, "output_len": 64, "concurrency": batch, "requests": batch,
                    "max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 2113, "dtype": "bf16",
                    "engine": "ridgeline"}  # fmt: skip
            said = predict(make("llama3.1-8b", "h100-sxm", work, [*default_plan("serve"), *plan]))
            line = found[f"llama3.1-8b, {name}, decode, batch {batch}, 512 tokens"]
            errors.append(abs(line["measured"]["step_s"] / said.metrics["itl_p50_s"].value - 1))
            assert name != "bf16" or errors[-1] < WITHIN
    assert statistics.median(errors) < WITHIN
