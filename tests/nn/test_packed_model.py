"""Compressed checkpoints run from their codes: the same logits as expanded, and no dense weight on the way."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.compress.output import config_of, their_tensors
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ridgeline.nn.checkpoint.formats import writer
from ridgeline.nn.model.init import build
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import PackedExperts, load_packed, packed_layers
from ridgeline.runtime.compress_build import LinearLayer
from ridgeline.runtime.solve.grid import Affine
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

SPEC = ModelSpec(name="t", family="llama", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
                 intermediate_size=96, vocab_size=80, max_positions=64)  # fmt: skip


def write(path, spec, bits=4, group=32, symmetric=True, leave=(), inputs=None, form="compressed-tensors"):
    """A compressed checkpoint of random weights, written as the driver does; ``leave``: parts of names that stay."""
    model = build(spec, seed=3)
    ours = {n: p.detach() for n, p in model.named_parameters()}
    grid = Affine(bits, group, symmetric)
    layers, tensors, stored, codes = {}, {}, {}, {}
    for name, weight in ours.items():
        pieces = {}
        if ".experts." in name:
            stem, _, kind = name.rpartition(".")
            pieces = {f"{stem}.{e}.{kind}": w for e, w in enumerate(weight)}
        elif name.endswith("_proj.weight"):
            pieces = {name.removesuffix(".weight"): weight}
        for at, w in pieces.items():
            layers[at] = LinearLayer(at, w, w)
            if not any(part in at for part in leave):
                layers[at].store(grid.fit(w).pack(w))
    for part in ("embed", *(f"layers.{i}" for i in range(spec.num_layers)), "norm", "head"):
        if part == "head" and spec.tie_embeddings:
            continue
        t, s = their_tensors(spec, part, ours, layers, writer(form), torch.float32)
        tensors.update(t)
        stored.update(s)
    codes = {m: code for m in stored for part, code in (inputs or {}).items() if part in m}
    path.mkdir()
    config = config_of(to_hf_config(spec), spec, spec, torch.float32, writer(form), stored, [], codes)
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path


@torch.inference_mode()
def difference(path, exact=False):
    ids = torch.arange(40).view(2, 20)
    fast, dense = load_packed(path, torch.float32, fast=not exact)(ids), load_checkpoint(path, torch.float32)(ids)
    return float((fast - dense).norm() / dense.norm())


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_expanded_model(tmp_path, form, tied):
    spec = SPEC.model_copy(update={"tie_embeddings": tied})
    path = write(tmp_path / "m", spec, symmetric=form == "gptq", form=form)
    model = load_packed(path, torch.float32)
    assert len(packed_layers(model)) == 14
    assert (model.head.out.weight is model.embed.tokens.weight) == tied
    assert difference(path, exact=True) < 1e-6
    assert difference(path) < 1e-2


def test_layers_that_stay_dense_are_loaded_as_they_are(tmp_path):
    path = write(tmp_path / "m", SPEC, leave=("v_proj", "layers.1.mlp"))
    model = load_packed(path, torch.float32)
    assert isinstance(model.layers["0"].attention.v_proj, torch.nn.Linear)
    assert isinstance(model.layers["1"].mlp.up_proj, torch.nn.Linear)
    assert len(packed_layers(model)) == 9
    assert difference(path) < 1e-2


@pytest.mark.parametrize("leave", [(), ("experts.1.up_proj",)])
def test_experts_run_from_codes(tmp_path, leave):
    spec = SPEC.model_copy(update={"family": "mixtral", "num_experts": 4, "experts_per_token": 2})
    path = write(tmp_path / "m", spec, leave=leave)
    model = load_packed(path, torch.float32)
    experts = model.layers["0"].mlp.experts
    assert isinstance(experts, PackedExperts)
    assert sum(isinstance(m, PackedLinear) for m in experts.up_proj) == 4 - len(leave)
    assert difference(path, exact=True) < 1e-6
    assert difference(path) < 1e-2


def test_input_codes_are_read_back(tmp_path):
    path = write(tmp_path / "m", SPEC, bits=8, group=0, inputs={"mlp": InputCode()})
    model = load_packed(path, torch.float32)
    assert model.layers["0"].mlp.up_proj.input == InputCode()
    assert model.layers["0"].attention.q_proj.input is None
    assert 1e-5 < difference(path) < 2e-2  # eight bits of input are not all of it


def test_a_dense_checkpoint_loads_as_ever(tmp_path):
    save_checkpoint(build(SPEC, seed=3), tmp_path)
    assert not packed_layers(load_packed(tmp_path))
    assert difference(tmp_path) == 0


def test_codes_of_another_model_are_refused(tmp_path):
    path = write(tmp_path / "m", SPEC)
    config = json.loads((path / "config.json").read_text())
    config["intermediate_size"] = 128
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"mlp.gate_proj holds codes of shape \[96, 64\]"):
        load_packed(path)
