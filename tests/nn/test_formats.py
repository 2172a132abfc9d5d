"""Files of compressed weights: packing against slow references, round trips, and loaders that are not ours."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.nn import build, save_checkpoint
from ridgeline.nn.checkpoint.checkpoint import Reader, load_checkpoint
from ridgeline.nn.checkpoint.formats import formats, reader, writer
from ridgeline.nn.checkpoint.formats.compressed_tensors import CompressedTensors
from ridgeline.nn.checkpoint.formats.gptq import GPTQFormat
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, pack_bits, unpack_bits
from ridgeline.runtime.solve.grid import Affine, nearest
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config
from ridgeline.spec.model import ModelSpec

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


def packed(bits=4, group_size=32, symmetric=True, shape=(64, 96), seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    fitted = Affine(bits, group_size, symmetric).fit(weight)
    return fitted.pack(nearest(weight, fitted))


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), n=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_bits_are_packed_end_to_end(bits, rows, n, seed):
    codes = torch.randint(0, 1 << bits, (rows, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-n * bits // 32))
    stream = sum(int(w) % (1 << 32) << (32 * i) for i, w in enumerate(words[0]))  # one long integer per row
    assert [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(n)] == codes[0].tolist()
    assert torch.equal(unpack_bits(words, bits, n), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_of_views_are_packed(bits):
    """Codes need not be contiguous: one zero point for each row is transposed before it is packed."""
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    shifted = torch.cat([codes.new_zeros(3), codes.flatten()])[3:].view(3, 64)
    for view in (codes[:1].t().contiguous().t(), codes[:, 5:38], codes[:, ::2], codes.t(), shifted):
        words = pack_bits(view, bits)
        assert torch.equal(words, pack_bits(torch.empty(view.shape, dtype=torch.uint8).copy_(view), bits))
        assert torch.equal(unpack_bits(words, bits, view.shape[1]), view)


@pytest.mark.parametrize("name", sorted(formats()))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 0), (3, 32), (3, 0), (2, 96)])
def test_round_trip(name, bits, group_size, symmetric):
    p = packed(bits, group_size, symmetric)
    form = writer(name)
    tensors = form.write("m", p)
    config = json.loads(json.dumps(form.config({"m": p}, ["lm_head"], {})))
    found = reader(config).read("m", tensors.get)
    assert torch.equal(found.dense(), p.dense())
    assert torch.equal(found.codes, p.codes)
    assert (found.bits, found.group_size, found.symmetric) == (bits, group_size or 96, symmetric)
    stored = sum(8 * t.nbytes for k, t in tensors.items() if "shape" not in k and "g_idx" not in k)
    if symmetric and name == "compressed-tensors":  # GPTQ's files hold a zero point for each group in any case
        assert stored == pytest.approx(p.bits_per_weight * p.codes.numel())
    assert reader(config).read("another", tensors.get) is None


def test_gptq_words_as_its_kernels_read_them():
    """qweight[i·b/32, o] holds input i of output o; qzeros less one; scales [groups, out]: entry by entry."""
    p = packed(4, 32, symmetric=True, shape=(32, 64))
    t = GPTQFormat().write("m", p)
    words, zeros = (t[f"m.{k}"].numpy().view(np.uint32) for k in ("qweight", "qzeros"))
    for i in range(0, 64, 7):
        for o in range(0, 32, 5):
            code = (int(words[i // 8, o]) >> (4 * (i % 8))) & 15
            group = int(t["m.g_idx"][i])
            zero = ((int(zeros[group, o // 8]) >> (4 * (o % 8))) & 15) + 1
            assert float(t["m.scales"][group, o]) * (code - zero) == pytest.approx(float(p.dense()[o, i]), abs=1e-7)


def test_gptq_says_what_it_cannot():
    with pytest.raises(UserError, match="5 bits"):
        GPTQFormat().write("m", packed(5))
    with pytest.raises(UserError, match=r"shape \[33, 96\]"):
        GPTQFormat().write("m", packed(shape=(33, 96)))
    with pytest.raises(UserError, match="one scheme for all layers"):
        GPTQFormat().config({"a": packed(4), "b": packed(8)}, [], {})
    form, p = GPTQFormat(4), packed(4)
    tensors = form.write("m", p)
    tensors["m.g_idx"] = tensors["m.g_idx"].flip(0)
    with pytest.raises(UserError, match="desc_act"):
        form.read("m", tensors.get)


def test_unknown_methods_are_refused():
    with pytest.raises(UserError, match="quant_method 'aqlm' are not read"):
        reader({"quant_method": "aqlm"})
    with pytest.raises(UserError, match="unknown format 'gptqq'"):
        writer("gptqq")
    with pytest.raises(UserError, match="marlin"):
        CompressedTensors.from_config({"format": "marlin-24"})
    assert reader(None) is None


# ---- whole checkpoints in loaders that are not ours -----------------------------------------------------------------

SPEC = ModelSpec(
    name="small", family="llama", vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, intermediate_size=96, max_positions=64,
)  # fmt: skip
IDS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))


def checkpoint(folder, form, bits, group_size, symmetric, mixed=False, spec=SPEC, code=None):
    """A random model whose linear layers are rounded and written in a format; returns the rounded model."""
    from safetensors.torch import save_file

    from ridgeline.nn.checkpoint.hf_names import links

    model = build(spec, seed=3)
    tensors, layers, inputs = {}, {}, {}
    parameters = dict(model.named_parameters())
    for link in links(spec):
        weight = parameters[link.ours].data
        if "_proj.weight" not in link.ours:
            tensors[link.theirs] = weight
            continue
        own = 8 if mixed and "down_proj" in link.ours else bits
        fitted = Affine(own, group_size, symmetric).fit(weight)
        p = fitted.pack(nearest(weight, fitted))
        weight.copy_(p.dense())
        module = link.theirs.removesuffix(".weight")
        own = None if mixed and "v_proj" in link.ours else code
        tensors.update(form.write(module, p, own))
        if own is not None:
            inputs[module] = own
            tensors.update({} if own.scale is None else {f"{module}.input_scale": torch.tensor([own.scale])})
        layers[module] = p
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**to_hf_config(spec), "dtype": "float32", "quantization_config": form.config(layers, ["lm_head"], inputs)}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def logits(model):
    out = model(IDS)
    return getattr(out, "logits", out)


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "mixed"),
    [(4, 32, True, False), (8, 0, True, False), (4, 32, True, True), (3, 32, True, False), (2, 32, True, False)],
)
def test_transformers_loads_compressed_tensors(tmp_path, bits, group_size, symmetric, mixed):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    ours = checkpoint(tmp_path / "c", CompressedTensors(), bits, group_size, symmetric, mixed)
    assert torch.equal(logits(load_checkpoint(tmp_path / "c")), logits(ours))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert torch.allclose(logits(theirs), logits(ours), atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "group_size", "mixed", "scale"), [(8, 0, False, None), (4, 32, False, 0.03125), (8, 0, True, None)]
)
def test_transformers_loads_layers_with_quantized_inputs(tmp_path, bits, group_size, mixed, scale):
    """Weights are compared: its rounding of inputs is another one (to 1/127.5 of the largest)."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    code = InputCode(8, scale)
    ours = checkpoint(tmp_path / "c", CompressedTensors(), bits, group_size, True, mixed, code=code)
    assert torch.equal(logits(load_checkpoint(tmp_path / "c")), logits(ours)), "with inputs as they are"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert (logits(theirs) - logits(ours)).square().mean().sqrt() < 0.1 * logits(ours).std()
    for i, layer in ours.layers.items():
        for part, their, name in (("attention", "self_attn", "q_proj"), ("attention", "self_attn", "v_proj"),
                                  ("mlp", "mlp", "down_proj")):  # fmt: skip
            found = theirs.get_submodule(f"model.layers.{i}.{their}.{name}")
            assert torch.equal(found.weight, layer.get_submodule(f"{part}.{name}").weight)
            acts = found.quantization_scheme.input_activations
            assert (acts is None) == (mixed and name == "v_proj")
            assert acts is None or acts.dynamic == (scale is None)
            assert scale is None or found.input_scale == scale
            found = Reader(tmp_path / "c", SPEC).input(f"layers.{i}.{part}.{name}.weight")
            assert found == (None if acts is None else code)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_librarys_own_reader_takes_integers(bits, symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    p, form, code = packed(bits, 32, symmetric), CompressedTensors(), InputCode()
    config = form.config({"m": p}, [], {"m": code})
    tensors = form.write("m", p, code)
    assert tensors["m.weight"].dtype == torch.int8
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    found = IntQuantizationCompressor.decompress({k.removeprefix("m."): t for k, t in tensors.items()}, scheme)
    assert torch.allclose(found["weight"].float(), p.dense(), atol=2e-4)  # it computes in the dtype of the scales
    back = reader(config).read("m", tensors.get)
    assert torch.equal(back.codes, p.codes)
    assert torch.equal(back.dense(), p.dense())
    assert (back.bits, back.group_size, back.symmetric) == (bits, 32, symmetric)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_weight_of_integers_may_have_one_scale(shape):
    p, form = packed(8, 0, False), CompressedTensors()
    one = Packed(p.codes, p.scale[:1].repeat(len(p.codes), 1), p.zero[:1].repeat(len(p.codes), 1), 8, p.group_size)
    tensors = form.write("m", one, InputCode())
    for name in ("m.weight_scale", "m.weight_zero_point"):
        tensors[name] = tensors[name][0].reshape(shape)
    back = reader(form.config({"m": one}, [], {"m": InputCode()})).read("m", tensors.get)
    assert torch.equal(back.dense(), one.dense())


def test_inputs_around_another_number_than_zero_are_refused():
    p, code = packed(8, 0, True), InputCode(8, 0.5)
    form = reader(CompressedTensors().config({"m": p}, [], {"m": code}))
    tensors = {"m.input_scale": torch.tensor([0.5]), "m.input_zero_point": torch.zeros(1, dtype=torch.int8)}
    assert form.input("m", tensors.get) == code
    tensors["m.input_zero_point"] += 3
    with pytest.raises(UserError, match="m has an input_zero_point"):
        form.input("m", tensors.get)


@pytest.mark.parametrize(("target", "found"), [("re:.*q_proj", True), ("re:.*k_proj", False), ("a.q_proj", True)])
def test_groups_name_modules_by_patterns_too(target, found):
    config = CompressedTensors().config({"a.q_proj": packed(8, 0)}, [], {"a.q_proj": InputCode()})
    config["config_groups"]["group_0"]["targets"] = [target]
    assert reader(config).input("a.q_proj", {}.get) == (InputCode() if found else None)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_librarys_own_reader_takes_zero_points(bits):
    """Per module: transformers 5.23 makes room for unpacked zero points and so loads no asymmetric checkpoint."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    p = packed(bits, 32, symmetric=False)
    form = CompressedTensors()
    scheme = QuantizationScheme(**form.config({"m": p}, [], {})["config_groups"]["group_0"])
    tensors = {k.removeprefix("m."): t for k, t in form.write("m", p).items()}
    found = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.allclose(found.float(), p.dense(), atol=2e-4)  # it computes in the dtype of the scales


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_checkpoints_load(tmp_path, symmetric):
    ours = checkpoint(tmp_path / "c", GPTQFormat(), 4, 32, symmetric)
    assert torch.equal(logits(load_checkpoint(tmp_path / "c")), logits(ours))


@needs_gguf
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "kind"),
    [(4, 32, True, "Q4_0"), (4, 32, False, "Q4_1"), (8, 32, True, "Q8_0"), (4, 0, True, "Q4_0")],
)
def test_gguf_keeps_every_value(tmp_path, family, bits, group_size, symmetric, kind):
    import gguf

    from ridgeline.nn.checkpoint.formats.gguf import write_gguf

    own = {"qwen2": {"qkv_bias": True, "tie_embeddings": True}, "qwen3": {"qk_norm": True}}
    spec = SPEC.model_copy(update={"family": family, **own.get(family, {})})
    ours = checkpoint(tmp_path / "c", CompressedTensors(), bits, group_size, symmetric, spec=spec)
    write_gguf(tmp_path / "c", tmp_path / "m.gguf")
    kinds = {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if "ffn_up" in t.name}
    assert kinds == {kind}
    tolerance = 0 if symmetric else 2e-3  # Q4_1's minimum is rounded to fp16
    found = load_checkpoint(tmp_path / "m.gguf")
    assert found.spec.model_dump(exclude={"name", "source", "norm_eps"}) == spec.model_dump(
        exclude={"name", "source", "norm_eps"}
    )
    assert (logits(found) - logits(ours)).abs().max() <= tolerance


@needs_gguf
def test_transformers_loads_gguf(tmp_path):
    transformers = pytest.importorskip("transformers")
    from ridgeline.nn.checkpoint.formats.gguf import write_gguf

    ours = checkpoint(tmp_path / "c", CompressedTensors(), 4, 32, True)
    write_gguf(tmp_path / "c", tmp_path / "c" / "m.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "c", gguf_file="m.gguf", dtype=torch.float32, config=transformers.LlamaConfig(**to_hf_config(SPEC))
    )
    assert torch.allclose(logits(theirs), logits(ours), atol=1e-4)


@needs_gguf
def test_gguf_says_what_it_cannot(tmp_path):
    from ridgeline.nn.checkpoint.formats.gguf import blocks_of, require_gguf, write_gguf

    with pytest.raises(UserError, match="3 bits"):
        blocks_of(packed(3), "m")
    with pytest.raises(UserError, match="groups of 16"):
        blocks_of(packed(4, 16), "m")
    with pytest.raises(UserError, match="'gpt2' are not written"):
        require_gguf(SPEC.model_copy(update={"family": "gpt2"}))
    save_checkpoint(build(SPEC), tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": []}}))
    with pytest.raises(UserError, match="Unigram tokenizer"):
        write_gguf(tmp_path / "c", tmp_path / "m.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUFnothing")
    with pytest.raises(UserError, match="not a usable GGUF"):
        load_checkpoint(tmp_path / "x.gguf")


def test_codes_of_another_shape_are_refused(tmp_path):
    checkpoint(tmp_path / "c", CompressedTensors(), 4, 32, True)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["intermediate_size"] = 128
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"shape \[96, 64\].*asks for \[128, 64\]"):
        load_checkpoint(tmp_path / "c")


def test_record_counts_its_bits():
    p = packed(4, 32, symmetric=False)
    assert p.bits_per_weight == 4 + (16 + 4) / 32
    half = p.rows(8, 24)
    assert isinstance(half, Packed)
    assert torch.equal(half.dense(), p.dense()[8:24])
