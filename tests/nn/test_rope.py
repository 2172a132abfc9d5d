"""Scaled rotary embeddings: frequencies, attention factors and logits are transformers', within and past the original
positions."""

import pytest
import torch
from tests.nn.conftest import CONFIGS, randomize

from ridgeline.nn import load_checkpoint
from ridgeline.nn.model.rotary import Rotary
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

LLAMA = {**CONFIGS["llama"], "head_dim": 16, "max_position_embeddings": 64}
_FACTORS = [1.0 + i / 4 for i in range(8)]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_options": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
                     "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn_attention": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32,
                       "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": _FACTORS,
                 "long_factor": [3 * f for f in _FACTORS]},
}  # fmt: skip


def config_of(name):
    return {**LLAMA, "rope_parameters": {"rope_theta": 5000.0, **SCALINGS[name]}}


@pytest.mark.parametrize("length", [16, 17, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor(name, length):
    config = config_of(name)
    kind = config.pop("model_type")
    theirs = transformers.AutoConfig.for_model(kind, **config)
    want, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](theirs, torch.device("cpu"), seq_len=length)
    spec = ModelSpec.from_config(config_of(name))
    got = Rotary(spec).inverse_frequencies(torch.device("cpu"), length)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)
    assert spec.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    cos, sin = Rotary(spec).tables(None, 0, length, torch.device("cpu"), torch.float64)
    assert (cos**2 + sin**2).mean().item() == pytest.approx(factor**2, rel=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_and_both_configurations(name, tmp_path):
    config = config_of(name)
    kind = config.pop("model_type")
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    again = transformers.AutoConfig.for_model(**to_hf_config(ours.spec))
    assert ModelSpec.from_config(again.to_dict(), name=ours.spec.name) == ours.spec
    for length in (12, 80):  # past 64 positions, dynamic scaling grows
        ids = torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = theirs(ids).logits
            torch.testing.assert_close(ours(ids), want, atol=1e-4, rtol=1e-4)
            at = torch.arange(length).expand(2, -1)
            torch.testing.assert_close(ours(ids, positions=at), want, atol=1e-4, rtol=1e-4)


def test_a_ring_refuses_frequencies_that_depend_on_the_length():
    from ridgeline.experiments import make

    spec = ModelSpec.from_config(config_of("longrope"), name="longrope-test")
    workload = {"kind": "pretrain", "batch_size": 2}
    make(spec, "2xa100", {**workload, "seq_len": 16}, ["ring_attention:degree=2", "flash_attention"])
    with pytest.raises(UserError, match="depend on a sequence's length"):
        make(spec, "2xa100", {**workload, "seq_len": 32}, ["ring_attention:degree=2", "flash_attention"])


def test_gguf_refuses_what_it_cannot_hold():
    pytest.importorskip("gguf")
    from ridgeline.nn.checkpoint.formats.gguf import require_gguf

    require_gguf(ModelSpec.from_config(config_of("linear")))
    with pytest.raises(UserError, match="'yarn' needs more"):
        require_gguf(ModelSpec.from_config(config_of("yarn")))
