"""T5 and Switch Transformers against transformers: logits, gradients, generation, each other's checkpoints; and against
themselves."""

import json

import pytest
import torch
from tests.nn.conftest import PAIRS, randomize, spec_of
from tests.nn.test_peft import filled
from torch.utils.checkpoint import checkpoint

from ridgeline.nn import build, load_checkpoint, make_cache, save_checkpoint, token_loss
from ridgeline.nn.checkpoint.peft import save_lora
from ridgeline.nn.model.generate import decode, generate, prefill
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec
from ridgeline.train.adapter_folder import attach, merged_model

transformers = pytest.importorskip("transformers")


def hf_model(name):
    config = dict(PAIRS[name])
    kind, auto = config.pop("model_type"), transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **config), attn_implementation="eager").eval()
    randomize(model)
    return model


@pytest.fixture(params=PAIRS)
def pair(request, tmp_path):
    """transformers' model and ours, which read its checkpoint."""
    theirs = hf_model(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_checkpoint(tmp_path)


@pytest.fixture
def source():
    return torch.randint(96, (2, 15), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", PAIRS)
def test_parameters_are_those_of_the_spec(name):
    model, spec = build(spec_of(name), device="meta"), spec_of(name)
    assert {(n, tuple(p.shape)) for n, p in model.named_parameters()} == {(p.name, p.shape) for p in spec.parameters()}
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


@pytest.mark.parametrize("attention", ["naive", "flash"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_equal_transformers(pair, ids, source, padded, attention):
    theirs, ours = pair
    ours.set_attention(attention)
    mask = torch.ones_like(source)
    mask[1, 9:] = 0 if padded else 1
    with torch.no_grad():
        want = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=ids).logits
        got = ours(ids, source=source, source_mask=mask if padded else None)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gradients_equal_transformers(pair, ids, source):
    theirs, ours = pair
    weight = torch.randn(96, generator=torch.Generator().manual_seed(2))
    norms = []
    for logits, model in ((theirs(input_ids=source, decoder_input_ids=ids).logits, theirs),
                          (ours(ids, source=source), ours)):  # fmt: skip
        (logits.softmax(-1) * weight).sum().backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    torch.testing.assert_close(norms[1], norms[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.embed.tokens.weight.grad, theirs.shared.weight.grad, atol=1e-4, rtol=1e-3)
    for stack in ("encoder", "decoder"):
        want = getattr(theirs, stack).block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        torch.testing.assert_close(getattr(ours.embed, f"{stack}_relative").weight.grad, want, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_our_checkpoint_loads_into_transformers(name, sharded, ids, source, tmp_path):
    ours = build(spec_of(name))
    randomize(ours)
    save_checkpoint(ours, tmp_path, max_shard_bytes=2e4 if sharded else 5e9)
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        want = ours(ids, source=source)
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids, source=source), want, atol=0, rtol=0)
        got = theirs.eval()(input_ids=source, decoder_input_ids=ids).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_greedy_generation_equals_transformers(pair, source):
    theirs, ours = pair
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, decoder_start_token_id=0)
    want = theirs.generate(source, attention_mask=torch.ones_like(source), generation_config=settings)
    assert torch.equal(generate(ours, source, 9), want)


@pytest.mark.parametrize("attention", ["naive", "flash"])
def test_cached_decoding_equals_no_cache(pair, ids, source, attention):
    ours = pair[1]
    ours.set_attention(attention)
    with torch.no_grad():
        cache = make_cache(ours, 2, 12)
        prefill(ours, ids[:, :1], cache, source)
        for i in range(1, 4):  # where nothing exceeds an expert's capacity
            got = decode(ours, ids[:, i], cache)
        torch.testing.assert_close(got, ours(ids[:, :4], source=source)[:, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_autocast_and_checkpointing(name, ids, source):
    """bf16 autocast trains; recomputation under it gives the very same gradients; bf16 is near float32."""
    model = build(spec_of(name))
    model.set_attention("naive")
    with torch.inference_mode():
        want = model(ids, source=source)
    gradients = []
    for recompute in (False, True):
        if recompute:
            for block in model.blocks.values():
                block.forward = lambda *a, f=block.forward: checkpoint(f, *a, use_reentrant=False)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            total, count = token_loss(model(ids, source=source, return_hidden=True), model.head, ids)
        (total / count).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for n, g in gradients[0].items():
        assert g.dtype == torch.float32
        assert torch.equal(g, gradients[1][n]), n
    low = build(spec_of(name), dtype=torch.bfloat16)
    with torch.no_grad():
        got = low(ids, source=source)
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max() + 0.02


@pytest.mark.parametrize("name", PAIRS)
def test_config_round_trip(name):
    spec = spec_of(name)
    config = to_hf_config(spec)
    json.dumps(config)
    assert spec.from_config(config, name=name) == spec


def test_mixtures_elsewhere_are_refused():
    assert [spec_of("switch_third").is_moe_layer(i) for i in range(3)] == [False, True, False]
    with pytest.raises(UserError, match="every N-th layer of both"):
        ModelSpec.from_config({**PAIRS["switch"], "num_layers": 6, "num_sparse_encoder_layers": 2})


def test_peft_loads_an_adapter_of_both_stacks(pair, ids, source, tmp_path):
    peft = pytest.importorskip("peft")
    theirs, ours = pair
    loaded = filled(ours, {"rank": 3, "targets": ["q_proj", "v_proj", "o_proj"]})
    attach(ours, loaded)
    save_lora(tmp_path / "adapter", ours.spec, loaded.technique.model_dump(mode="json"), loaded.state, "")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        want = adapted(input_ids=source, decoder_input_ids=ids).logits
        torch.testing.assert_close(ours(ids, source=source), want, atol=1e-4, rtol=1e-4)
        merged = merged_model(tmp_path, tmp_path / "adapter")
        torch.testing.assert_close(merged(ids, source=source), want, atol=1e-4, rtol=1e-4)
