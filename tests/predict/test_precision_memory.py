"""Measured memory of a step in low precision and with fused layers is what ``rewrite`` predicted."""

import pytest
import torch
from tests.training import MODEL, experiment, make_trainer, write_corpus

from ridgeline.experiments import make
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.kernels import native
from ridgeline.predict import predict

BIG = MODEL.model_copy(
    update={"vocab_size": 2000, "hidden_size": 64, "head_dim": 16, "intermediate_size": 176, "max_positions": 128}
)
LOW = "mixed_precision:weights=low"
PLANS = [
    [],
    ["recompute"],
    ["mixed_precision"],
    ["mixed_precision:dtype=fp16", "flash_attention"],
    [LOW],
    [LOW, "lora"],
    [LOW, "flash_attention", "fused_layers"],
    ["fused_layers"],
    ["fused_layers", "lora"],
    ["fused_layers:chunked=false", "mixed_precision"],
    ["fused_layers", "mixed_precision", "recompute"],
    ["mixed_precision", "fp8"],
    [LOW, "fp8:states=true"],
    ["mixed_precision", "fp8", "fused_layers", "flash_attention"],
]


def flash_takes_16_bits():
    """PyTorch's kernel refuses where ``ATEN_CPU_CAPABILITY`` hides AVX-512 that it has packed matrices for."""
    q = torch.zeros(1, 1, 512, 64, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as e:
        return "pack_vnni2" not in str(e)
    return True


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.txt", lines=1500)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("plan", PLANS, ids="+".join)
def test_measured_memory_is_predicted(plan, micro, corpus):
    if native.library() is None and any(p.startswith("fused") for p in plan):
        pytest.skip("no C++ compiler")
    if "flash_attention" in plan and not flash_takes_16_bits():
        pytest.skip("no flash attention in 16 bits with ATEN_CPU_CAPABILITY as it is")
    e = experiment(corpus, *plan, model=BIG, seq_len=128, optimizer="adamw", micro_batch_size=micro)
    trainer = make_trainer(e)
    trainer.step()
    usage = metered_step(trainer)
    predicted = {m.category: m.bytes for m in predict(e).memory}
    measured = usage.categories
    print(f"{usage.instant}: measured {usage.total}, predicted {sum(predicted.values()):.0f}")
    assert sum(predicted.values()) == pytest.approx(usage.total, rel=0.05)
    for category in {*predicted, *measured}:
        assert predicted.get(category, 0) == pytest.approx(measured.get(category, 0), abs=0.05 * usage.total), category
    assert predicted.get("optimizer", 0) == pytest.approx(measured.get("optimizer", 0), rel=0.05, abs=1000)
    if "weights=low" in str(plan):
        assert predicted["parameters"] == pytest.approx(measured["parameters"], rel=0.05)
        assert predicted["gradients"] == pytest.approx(measured["gradients"], rel=0.05)


def test_stages_hold_no_codes_of_weights():
    """A stage would hold them once for each micro-batch in flight: more than the inputs save in fp8."""
    work = {"kind": "pretrain", "seq_len": 2048, "batch_size": 64, "micro_batch_size": 2, "steps": 4}
    plan = ["mixed_precision", "flash_attention", "fused_layers", "pipeline:degree=4"]
    held = [
        next(m.bytes for m in predict(make("llama2-7b", "8xh100-sxm", work, [*plan, *low])).memory
             if m.category == "activations")
        for low in ([], ["fp8"], ["fp8:scaling=rowwise"])
    ]  # fmt: skip
    assert held[1] == held[2] < held[0]
