"""Adapters in files, against the ``peft`` library itself: it computes what we compute, in both directions."""

import json
from itertools import product

import pytest
import torch
from tests.crossings import crossing
from tests.nn.test_huggingface import hf_model

from ridgeline.nn import load_checkpoint
from ridgeline.nn.adapters.adapter import placed
from ridgeline.nn.checkpoint.peft import load_lora, places, save_lora
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Call
from ridgeline.spec.targets import chosen, linears
from ridgeline.train.adapter_folder import Loaded, attach, load_adapter, merged_model

peft = pytest.importorskip("peft")

FAMILIES = ["llama", "llama_mha_bias_tied", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "gpt2", "opt", "bert",
            "gemma2", "gpt_neox", "falcon_grouped"]  # fmt: skip
TARGETS = {
    "two": ["q_proj", "v_proj"],
    "all": ["all-linear"],
    "few": ["layers.1.attention.o_proj", r"layers\.0\.attention\.(q|o)_proj"],
}
OPTIONS = {"plain": {}, "rslora": {"rslora": True}, "dora": {"dora": True}}


def base(name, folder):
    """A Hugging Face checkpoint, and its model, in evaluation."""
    model, _ = hf_model(name)
    model.save_pretrained(folder)
    return model


def filled(ours, options):
    """An adapter on some layers of ``ours`` with values far from the start, and the call that makes it."""
    loaded = Loaded(Call(name="lora", options=options), {})
    technique, state = loaded.technique, {}
    rng = torch.Generator().manual_seed(1)
    for name in chosen(ours.spec, technique.targets):
        fresh = technique.around(ours.get_submodule(name))
        for leaf, value in fresh.state().items():
            state[f"{name}.{leaf}"] = value.detach() + 0.1 * torch.randn(value.shape, generator=rng)
    return Loaded(loaded.call, state)


def test_others_may_read_an_adapter(tmp_path):
    """Its tensors have the permissions of any new file, as its config and whole models have."""
    base("llama", tmp_path / "base")
    model = load_checkpoint(tmp_path / "base")
    options = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}
    loaded = filled(model, options)
    save_lora(tmp_path / "adapter", model.spec, loaded.technique.model_dump(), loaded.state)
    (tmp_path / "new").touch()
    modes = {f.name: f.stat().st_mode for f in (tmp_path / "adapter").iterdir()}
    assert modes == dict.fromkeys(
        ("adapter_config.json", "adapter_model.safetensors"), (tmp_path / "new").stat().st_mode
    )


def logits(model, ids):
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize(("name", "targets", "options"), [
    pytest.param(*case, marks=[] if case[1] == "all" else crossing(" ".join(case), 2))
    for case in product(FAMILIES, TARGETS, OPTIONS)
])  # fmt: skip
def test_peft_loads_what_we_save(name, targets, options, tmp_path, ids):
    if name in ("gpt2", "phi3", "gpt_neox", "falcon_grouped") and options == "dora" and targets != "all":
        pytest.skip("DoRA on a part of a fused module has no form in peft")
    theirs = base(name, tmp_path / "base")
    ours = load_checkpoint(tmp_path / "base", dtype=torch.float32)
    plain = logits(ours, ids)
    call = {"rank": 3, "alpha": 5.0, "targets": TARGETS[targets], **OPTIONS[options]}
    loaded = filled(ours, call)
    save_lora(tmp_path / "adapter", ours.spec, loaded.technique.model_dump(), loaded.state, str(tmp_path / "base"))
    attach(ours, loaded)
    wrapped = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    got, want = logits(wrapped, ids), logits(ours, ids)
    assert (want - plain).abs().max() > 1e-3, "the adapter does nothing"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    # and what we saved, we load: the same layers, the same logits
    again = load_adapter(tmp_path / "adapter", ours.spec)
    assert set(again.state) == set(loaded.state)
    fresh = load_checkpoint(tmp_path / "base", dtype=torch.float32)
    attach(fresh, again)
    torch.testing.assert_close(logits(fresh, ids), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_we_load_what_peft_saves(name, options, tmp_path, ids):
    theirs = base(name, tmp_path / "base")
    ours = load_checkpoint(tmp_path / "base", dtype=torch.float32)
    modules = sorted({p.theirs for p in places(ours.spec).values()})
    flags = {"use_rslora": options == "rslora", "use_dora": options == "dora"}
    pattern = {} if options == "dora" else {"rank_pattern": {modules[0]: 5}, "alpha_pattern": {modules[-1]: 3}}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules, lora_dropout=0.1,
                             fan_in_fan_out=name == "gpt2", **flags, **pattern)  # fmt: skip
    wrapped = peft.get_peft_model(theirs, config).eval()
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for n, p in wrapped.named_parameters():
            if "lora_" in n:
                p += 0.1 * torch.randn(p.shape, generator=rng)
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = load_adapter(tmp_path / "adapter", ours.spec)
    assert loaded.call.options["dropout"] == pytest.approx(0.1)
    attach(ours, loaded)
    want = logits(wrapped, ids)
    torch.testing.assert_close(logits(ours, ids), want, rtol=1e-4, atol=1e-4)
    merged = merged_model(tmp_path / "base", tmp_path / "adapter")
    assert not list(placed(merged))
    torch.testing.assert_close(logits(merged, ids), want, rtol=1e-4, atol=1e-4)


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A llama checkpoint's spec and the folder of an adapter for it."""
    base("llama", tmp_path / "base")
    ours = load_checkpoint(tmp_path / "base", dtype=torch.float32)
    loaded = filled(ours, {"rank": 3, "targets": ["all-linear"]})
    save_lora(tmp_path / "adapter", ours.spec, loaded.technique.model_dump(), loaded.state, "some/base")
    return ours.spec, tmp_path / "adapter"


def test_an_adapter_of_another_base_is_refused(saved):
    spec, folder = saved
    wide = spec.model_copy(update={"hidden_size": 64, "head_dim": 16})
    with pytest.raises(UserError, match=r"model.layers.0.*q_proj.lora_A.*\(3, 32\).*\(3, 64\)(.|\n)*some/base"):
        load_lora(folder, wide)
    short = spec.model_copy(update={"num_layers": 1})
    with pytest.raises(UserError, match=r"adapts model.layers.1"):
        load_lora(folder, short)
    plain = spec.model_copy(update={"gated": False, "activation": "relu"})
    with pytest.raises(UserError, match=r"gate_proj, which .* does not have"):
        load_lora(folder, plain)


@pytest.mark.parametrize(("change", "says"), [
    ({"peft_type": "IA3"}, "IA3, not LORA"),
    ({"bias": "all"}, "trains biases"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
])  # fmt: skip
def test_what_is_not_read_is_refused(saved, change, says):
    spec, folder = saved
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=says):
        load_adapter(folder, spec)


@pytest.mark.parametrize("change", [{"r": 4}, {"r": 16}, {"rank_pattern": {"q_proj": 5}}])
def test_a_rank_that_the_tensors_contradict_is_refused(saved, change):
    """The scale alpha / r would be another than the one it was trained with (peft: size mismatch)."""
    spec, folder = saved
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["r"] not in change.values()
    file.write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match="whose tensors have rank"):
        load_lora(folder, spec)


def test_broken_folders_are_refused(saved, tmp_path):
    spec, folder = saved
    with pytest.raises(UserError, match=r"no adapter_config.json"):
        load_adapter(tmp_path, spec)
    (folder / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="damaged"):
        load_adapter(folder, spec)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no adapter_model.safetensors"):
        load_adapter(folder, spec)


def test_targets_are_as_short_as_they_can_be(saved):
    spec, folder = saved
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {f"{m}_proj" for m in ("q", "k", "v", "o", "gate", "up", "down")}
    options, _ = load_lora(folder, spec)
    assert set(options["targets"]) == {n.rpartition(".")[2] for n in linears(spec)}
