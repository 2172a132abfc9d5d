"""What is wrong with a checkpoint is said in one sentence that names the file and the tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.nn.conftest import CONFIGS, randomize, spec_of

from ridgeline.nn import build, load_checkpoint, load_into, save_checkpoint
from ridgeline.nn.checkpoint import checkpoint as module
from ridgeline.nn.quant.packed_model import PackedExperts, load_packed
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def saved(tmp_path):
    model = build(spec_of("llama"))
    randomize(model)
    save_checkpoint(model, tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_checkpoint(build(spec_of("llama")), tmp_path, max_shard_bytes=2e4)
    return tmp_path


def edit(path, change):
    file = path / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def refused(path, *words):
    with pytest.raises(UserError) as e:
        load_checkpoint(path)
    assert e.value.fix
    for word in words:
        assert word in str(e.value)


def test_missing_tensor(saved):
    edit(saved, lambda s: s.pop(Q))
    refused(saved, Q, "missing", str(saved / "model.safetensors"))


def test_wrong_shape(saved):
    edit(saved, lambda s: s.update({Q: torch.zeros(32, 31)}))
    refused(saved, Q, "[32, 31]", "[32, 32]", "model.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 300])
def test_file_cut_in_its_header(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(saved, str(file), "damaged")


def test_truncated_file_names_the_first_tensor_that_is_not_whole(saved):
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    file.write_bytes(whole[: 8 + size + ends[Q] - 1])
    refused(saved, str(file), "truncated", Q)


def test_garbage_file(saved):
    (saved / "model.safetensors").write_bytes(b"\xff" * 4096)
    refused(saved, "model.safetensors")


def test_missing_shard(sharded):
    victim = sorted(sharded.glob("model-*"))[1]
    victim.unlink()
    refused(sharded, victim.name, "does not exist")


def test_corrupt_shard(sharded):
    victim = sorted(sharded.glob("model-*"))[1]
    victim.write_bytes(victim.read_bytes()[:-10])
    refused(sharded, victim.name)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_unusable_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json")


def test_no_weights_or_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(module.to_hf_config(spec_of("llama"))))
    refused(tmp_path, "no model.safetensors")
    with pytest.raises(UserError, match="no checkpoint directory"):
        load_into(build(spec_of("llama")), tmp_path / "absent")


@pytest.mark.parametrize(("first", "second"), [(5e9, 2e4), (2e4, 5e9), (2e4, 4e4)])
def test_saving_again_leaves_no_stale_file(first, second, tmp_path):
    save_checkpoint(build(spec_of("llama"), seed=1), tmp_path, first)
    model = build(spec_of("llama"), seed=2)
    save_checkpoint(model, tmp_path, second)
    assert torch.equal(load_checkpoint(tmp_path).head.out.weight, model.head.out.weight)
    index = tmp_path / "model.safetensors.index.json"
    files = (
        set(json.loads(index.read_text())["weight_map"].values()) | {index.name}
        if second < 5e9
        else {"model.safetensors"}
    )
    assert {f.name for f in tmp_path.iterdir()} == files | {"config.json"}


def test_shards_keep_to_the_limit(sharded):
    sizes = [f.stat().st_size for f in sharded.glob("model-*")]
    assert len(sizes) > 2
    assert max(sizes) < 2e4 + 2000  # and the header


def test_interrupted_save_keeps_the_old_file(saved, monkeypatch):
    before = (saved / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        save_checkpoint(build(spec_of("llama"), seed=5), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert not list(saved.glob(".*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype, tmp_path):
    model = build(spec_of("mixtral"), dtype=dtype)
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    for (n, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), n
        assert b.dtype == dtype
    assert load_checkpoint(tmp_path, dtype=torch.float32).head.out.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pipeline_stage_loads_its_part(name, tmp_path, ids):
    whole = build(spec_of(name))
    randomize(whole)
    save_checkpoint(whole, tmp_path)
    stages = [build(spec_of(name)) for _ in range(2)]
    stages[0].norm = stages[0].head = stages[1].embed = None
    del stages[0].layers["1"], stages[1].layers["0"]
    for stage in stages:
        load_into(stage, tmp_path)
    torch.testing.assert_close(stages[1](stages[0](ids)), whole(ids))
    with pytest.raises(UserError, match="whole model"):
        save_checkpoint(stages[0], tmp_path / "stage")


def test_spec_that_the_family_cannot_express():
    with pytest.raises(UserError, match="normalize_router"):
        module.to_hf_config(spec_of("mixtral").model_copy(update={"normalize_router": False}))


def test_gpt_oss_blocks_are_expanded(tmp_path):
    """MXFP4 codes as gpt-oss is published, against transformers' own expansion."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    config = {**CONFIGS["gpt_oss"], "hidden_size": 64, "intermediate_size": 32}
    model = build(ModelSpec.from_config(config), dtype=torch.bfloat16)
    save_checkpoint(model, tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    dense = {}
    for layer in range(2):
        for name, out, width in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            codes = torch.randint(256, (4, out, width // 32, 16), generator=rng, dtype=torch.uint8)
            scales = torch.randint(110, 135, (4, out, width // 32), generator=rng, dtype=torch.uint8)
            dense[stem] = integration.convert_moe_packed_tensors(codes, scales)
            del tensors[stem]
            tensors |= {f"{stem}_blocks": codes, f"{stem}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": {"quant_method": "mxfp4"}}))
    loaded = load_checkpoint(tmp_path)
    for layer, block in loaded.layers.items():
        both = dense[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        assert torch.equal(block.mlp.experts.gate_proj, both[..., ::2].mT)
        assert torch.equal(block.mlp.experts.up_proj, both[..., 1::2].mT)
        assert torch.equal(block.mlp.experts.down_proj, dense[f"model.layers.{layer}.mlp.experts.down_proj"].mT)
    packed = load_packed(tmp_path)  # which computes from the codes
    for layer, block in packed.layers.items():
        held = block.mlp.experts
        assert isinstance(held, PackedExperts)
        for name in ("gate_proj", "up_proj", "down_proj"):
            whole = getattr(loaded.layers[layer].mlp.experts, name).float()
            for e, linear in enumerate(getattr(held, name)):
                assert torch.equal(linear.dense(), whole[e])
    ids = torch.randint(96, (2, 9), generator=rng)
    with torch.no_grad():
        want, got = loaded.float()(ids), packed.float()(ids)
    assert torch.allclose(got, want, rtol=1e-3, atol=2e-3 * float(want.abs().max()))


def test_fp8_blocks_are_expanded(tmp_path):
    """Weights as DeepSeek-V3 is published, one factor for a block of them; sizes that are no whole blocks too."""
    config = {**CONFIGS["deepseek_v3"], "hidden_size": 40, "num_nextn_predict_layers": 0}
    model = build(ModelSpec.from_config(config), dtype=torch.bfloat16)
    save_checkpoint(model, tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    dense = {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or n.endswith("_with_mqa.weight")]:
        rows, columns = tensors[name].shape
        low = torch.randn(rows, columns, generator=rng).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 16), -(-columns // 16), generator=rng) + 0.5
        dense[name] = torch.stack([
            torch.stack([low[i, j].float() * scales[i // 16, j // 16] for j in range(columns)]) for i in range(rows)
        ]).bfloat16()  # fmt: skip
        tensors |= {name: low, f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps({**written, "quantization_config": quantized}))
    layer = load_checkpoint(tmp_path).layers["1"]
    stem = "model.layers.1"
    assert torch.equal(layer.attention.kv_a_proj.weight, dense[f"{stem}.self_attn.kv_a_proj_with_mqa.weight"])
    assert torch.equal(layer.mlp.shared.up_proj.weight, dense[f"{stem}.mlp.shared_experts.up_proj.weight"])
    assert torch.equal(layer.mlp.experts.down_proj[3], dense[f"{stem}.mlp.experts.3.down_proj.weight"])
    tensors[f"{stem}.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="factors for blocks"):
        load_checkpoint(tmp_path)
