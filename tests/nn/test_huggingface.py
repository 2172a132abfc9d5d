"""Our model and transformers' agree on every family: logits, gradients, generation, and each other's checkpoints."""

import json

import pytest
import torch
from tests.nn.conftest import CONFIGS, DECODERS, PAIRS, randomize, spec_of

from ridgeline.nn import build, load_checkpoint, save_checkpoint
from ridgeline.nn.model.generate import generate
from ridgeline.spec.errors import UserError
from ridgeline.spec.families import FAMILIES
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

transformers = pytest.importorskip("transformers")


def hf_model(name, seed=0, **changed):
    config = {**CONFIGS[name], **changed}
    kind = config.pop("model_type")
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **config), attn_implementation="eager").eval()
    randomize(model, seed)
    return model, auto


@pytest.fixture(params=list(CONFIGS))
def pair(request, tmp_path):
    """transformers' model and ours, which read its checkpoint."""
    theirs, _ = hf_model(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_checkpoint(tmp_path)


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_logits_equal_transformers(pair, ids, attention):
    theirs, ours = pair
    ours.set_attention(attention)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_logits_equal_transformers_with_padding(pair, ids, attention):
    theirs, ours = pair
    ours.set_attention(attention)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.no_grad():
        got, want = ours(ids, attention_mask=mask.bool()), theirs(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", ["llama", "llama4"])
def test_left_padding_with_positions(name, ids, tmp_path):
    # transformers counts padding where it scales queries by their positions: no scaling here
    theirs, _ = hf_model(name, **({"attn_temperature_tuning": False} if name == "llama4" else {}))
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for attention in ("naive", "flash"):
        ours.set_attention(attention)
        with torch.no_grad():
            got = ours(ids, positions=positions, attention_mask=mask.bool())
            want = theirs(ids, position_ids=positions, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)
        assert got.isfinite().all()


def test_bert_token_types(ids, tmp_path):
    theirs, _ = hf_model("bert")
    theirs.save_pretrained(tmp_path)
    types = (torch.arange(12) > 5).long().expand(2, -1)
    with torch.no_grad():
        got, want = load_checkpoint(tmp_path)(ids, token_types=types), theirs(ids, token_type_ids=types).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gradients_equal_transformers(pair, ids):
    """By the norm over all parameters and that of the embedding: names differ, fused tensors too."""
    theirs, ours = pair
    ids = ids.clamp_min(2)  # transformers drops the embedding gradient of padding tokens (0 in BERT, 1 in OPT)
    weight = torch.randn(96, generator=torch.Generator().manual_seed(2))
    norms = []
    for model in (theirs, ours):
        out = model(ids)
        (getattr(out, "logits", out).softmax(-1) * weight).sum().backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.requires_grad]).norm())
    torch.testing.assert_close(norms[1], norms[0], atol=1e-5, rtol=1e-4)
    theirs_embed = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.embed.tokens.weight.grad, theirs_embed, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_our_checkpoint_loads_into_transformers(name, sharded, ids, tmp_path):
    ours = build(spec_of(name))
    randomize(ours)
    save_checkpoint(ours, tmp_path, max_shard_bytes=2e4 if sharded else 5e9)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    _, auto = hf_model(name)
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        want = ours(ids)
        torch.testing.assert_close(theirs.eval()(ids).logits, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids), want, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "phi3", "mixtral", "gpt2", "bert"])
def test_their_sharded_checkpoint_loads(name, ids, tmp_path):
    theirs, _ = hf_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_load(name, ids, tmp_path):
    theirs, _ = hf_model(name)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert any("experts.gate_up_proj" in key for key in f.keys())  # noqa: SIM118
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_llama4_beside_its_image_encoder_loads(ids, tmp_path):
    from safetensors.torch import load_file, save_file

    theirs, _ = hf_model("llama4")
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    whole = {f"language_model.{name}": t for name, t in state.items()} | {
        "vision_model.class_embedding": torch.zeros(8)
    }
    save_file(whole, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama4", "text_config": config, "vision_config": {}})
    )
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_headless_names_load(name, ids, tmp_path):
    """The hub's oldest files: no prefix (gpt2), TensorFlow's norm names (bert)."""
    from safetensors.torch import load_file, save_file

    theirs, _ = hf_model(name)
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {k.removeprefix("transformer."): v for k, v in state.items()}
    if name == "bert":
        old = {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
            for k, v in old.items()
        }
    assert old.keys() != state.keys()
    save_file(old, tmp_path / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "llama3", "llama4", "mistral", "qwen3", "qwen3_moe", "phi3", "granite", "mixtral", "gpt2", "opt"]
)
def test_greedy_generation_equals_transformers(name, ids, tmp_path):
    theirs, _ = hf_model(name)
    theirs.save_pretrained(tmp_path)
    prompt = ids[:, :6]
    want = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0),
    )
    assert torch.equal(generate(load_checkpoint(tmp_path), prompt, 8), want)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_config_round_trip(name):
    spec = spec_of(name)
    config = to_hf_config(spec)
    json.dumps(config)
    assert spec.from_config(config, name=name) == spec
    theirs = transformers.AutoConfig.for_model(**config).to_dict()  # and transformers keeps what we wrote
    assert {k: theirs[k] for k in config if k in theirs and k != "rope_parameters"} == {
        k: v for k, v in config.items() if k in theirs and k != "rope_parameters"
    }


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_the_factor_on_gemmas_embeddings_is_rounded_as_theirs(name, ids, tmp_path):
    theirs, _ = hf_model(name)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    seen = []
    theirs.model.layers[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True)
    with torch.no_grad():
        theirs(ids)
        assert torch.equal(load_checkpoint(tmp_path).embed(ids, None, None), seen[0])


def test_partial_window_is_refused():
    config = {**CONFIGS["qwen2_window"], "max_window_layers": 1}
    with pytest.raises(UserError, match="from layer 1 of 2"):
        ModelSpec.from_config(config)
    assert ModelSpec.from_config({**config, "max_window_layers": 2}).sliding_window is None


def test_decoders_is_complete():
    assert {c["model_type"] for c in (*(CONFIGS[n] for n in DECODERS), *PAIRS.values())} == {*FAMILIES} - {"bert"}
