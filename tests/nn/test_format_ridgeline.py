import json

import pytest
import torch

from ridgeline.nn.checkpoint.formats import formats, reader, writer
from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline
from ridgeline.nn.quant.activation_quant import InputCode
from ridgeline.nn.quant.packed import Packed, PackedOutliers
from ridgeline.nn.quant.ternary import Ternary
from ridgeline.spec.errors import UserError


def packed(out, width, bits, group, symmetric, outliers):
    g = torch.Generator().manual_seed(bits)

    def draw(*shape):
        return torch.randint(0, 2**bits, shape, generator=g, dtype=torch.uint8)

    aside = None
    if outliers:
        index = torch.randperm(out * width, generator=g)[:outliers].sort().values.to(torch.int32)
        aside = PackedOutliers(index, torch.randn(outliers, generator=g).to(torch.bfloat16))
    scale = torch.rand(out, width // group, generator=g).to(torch.float16)
    return Packed(draw(out, width), scale, None if symmetric else draw(out, width // group), bits, group, aside)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(("width", "group"), [(10, 10), (24, 8), (64, 32)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("outliers", [0, 5])
def test_integers_come_back_number_for_number(bits, width, group, symmetric, outliers):
    record = packed(6, width, bits, group, symmetric, outliers)
    form = writer("ridgeline")
    back = form.read("m", form.write("m", record).get)
    assert (back.bits, back.group_size, back.symmetric) == (bits, group, symmetric)
    for field in ("codes", "scale", "zero"):
        mine, theirs = getattr(back, field), getattr(record, field)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    if outliers:
        assert torch.equal(back.outliers.index, record.outliers.index)
        assert torch.equal(back.outliers.values, record.outliers.values)
    assert torch.equal(back.dense(), record.dense())
    assert form.read("other", {}.get) is None


def test_ternary_words_come_back():
    symbols = torch.randint(0, 3, (5, 33), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    record = Ternary.encode(symbols, torch.full((5,), -2.0), torch.ones(5))
    form = writer("ridgeline")
    tensors = form.write("m", record)
    back = form.read("m", tensors.get)
    assert torch.equal(back.dense(), record.dense())
    assert 8 * (sum(t.nbytes for t in tensors.values()) - 16) == record.bits_per_weight * 5 * 33


def test_config_says_which_dictionary_and_is_refused_with_another():
    record = Ternary.encode(torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2), torch.zeros(2))
    config = Ridgeline().config({"a": record, "b": packed(2, 8, 4, 8, True, 0)}, ["lm_head"], {})
    assert config["method"] == "ridgeline"
    assert config["modules"] == {"4-bit": 1, "ternary": 1}
    assert isinstance(reader(config), Ridgeline)
    assert isinstance(reader({**config, "quant_method": config.pop("method")}), Ridgeline)  # as it was written before
    config["method"] = "ridgeline"
    with pytest.raises(UserError, match="dictionary"):
        reader({**config, "dictionary": {"words": 16}})
    with pytest.raises(UserError, match="version 2"):
        reader({**config, "version": 2})
    assert "ridgeline" in formats()


@pytest.mark.parametrize("lost", ["weight_scale", "weight_packed"])
def test_a_lost_part_is_named(lost):
    form = Ridgeline()
    tensors = form.write("m", packed(2, 8, 4, 8, True, 0))
    del tensors[f"m.{lost}"]
    with pytest.raises(UserError, match=lost):
        form.read("m", tensors.get)


def test_quantized_inputs_come_back():
    codes = {"m": InputCode(8, 0.1, 6.0), "n": InputCode(4)}
    form = reader(json.loads(json.dumps(Ridgeline().config({"m": packed(2, 8, 4, 8, True, 0)}, [], codes))))
    assert {name: form.input(name, {}.get) for name in ("m", "n", "o")} == {**codes, "o": None}


def test_transformers_refuses_what_it_would_read_as_random_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quantization_config": Ridgeline().config({"m": packed(2, 8, 4, 8, True, 0)}, [], {})}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
