"""Techniques that replace parts of the model, on families whose blocks, caches or files differ from Llama's: the tokens
of the plan without them."""

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL, checkpoint
from tests.techniques.test_zero_inference import built, tokens

MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
               "logits_scaling": 1.5}  # fmt: skip
YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 8, "attention_factor": 1.2}
FAMILIES = {
    "granite": {**LLAMA, "family": "granite", **MULTIPLIERS},
    "phi3": {**LLAMA, "family": "phi3", "sliding_window": 6},
    "qwen3_moe": {**MIXTRAL, "family": "qwen3_moe", "qk_norm": True},
    "yarn": {**LLAMA, "rope_scaling": YARN},
}
PLANS = ["zero_inference:parameters=nvme", "partial_head_update:rows=3,keys=4", "flash_attention", "flexgen"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {name: checkpoint(folder / name, fields) for name, fields in FAMILIES.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens(sources, family, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    want, got = tokens(built(sources[family])[1]), tokens(built(sources[family], plan)[1])
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", ["experts=2", "experts=1,staging=1,guess=2", "experts=2,parameters=nvme"])
def test_experts_outside_the_device(sources, options, tmp_path):
    want = tokens(built(sources["qwen3_moe"])[1])
    got = tokens(built(sources["qwen3_moe"], f"moe_offload:{options},path={tmp_path / 'scratch'}")[1])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
