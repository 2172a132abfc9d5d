"""A dtype that a GPU has no arithmetic for is said."""

import pytest

from ridgeline import experiments
from ridgeline.predict import predict

TRAINING = {"kind": "pretrain", "seq_len": 128, "batch_size": 1}
GENERATION = {"kind": "generate", "prompt_len": 64, "output_len": 4, "batch_size": 1}


@pytest.mark.parametrize(
    ("on", "workload", "plan", "said"),
    [
        ("v100-32g-sxm", GENERATION, [], True),
        ("v100-32g-sxm", {**GENERATION, "dtype": "bf16"}, [], True),
        ("v100-32g-sxm", {**GENERATION, "dtype": "fp16"}, [], False),
        ("v100-32g-sxm", TRAINING, [], False),
        ("v100-32g-sxm", TRAINING, ["mixed_precision"], True),
        ("v100-32g-sxm", TRAINING, ["mixed_precision:dtype=fp16"], False),
        ("a100-40g-sxm", GENERATION, [], False),
        ("a100-40g-sxm", TRAINING, ["mixed_precision"], False),
    ],
)
def test_bf16_that_a_gpu_lacks_is_noted(on, workload, plan, said):
    notes = predict(experiments.make("gpt2", on, workload, plan)).notes
    assert any("no arithmetic in bf16" in note and "dtype=fp16" in note for note in notes) == said
