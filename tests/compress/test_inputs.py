"""Quantized inputs: the code itself, scales folded into what produces them, and what repairs planted outliers."""

import json

import pytest
import torch
from tests.compress.conftest import with_outliers

from ridgeline import experiments
from ridgeline.compress.calibration import calibration_windows
from ridgeline.data.batches import load_tokens
from ridgeline.jobs.job import CompressOptions, RankContext
from ridgeline.nn import build
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.checkpoint.formats import reader
from ridgeline.nn.quant.activation_quant import InputCode, fake_quantize
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.runtime.solve.fold import fold, unfoldable
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.quantization.fptq import equalizer
from ridgeline.techniques.registry import check, normalize


def rms(found, wanted):
    return float((found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())


def by_hand(x, bits, scale=None, threshold=0.0):
    """The definition, value by value."""
    top, rows = 2 ** (bits - 1) - 1, x.double().tolist()
    wide = [bool(threshold) and any(abs(row[j]) >= threshold for row in rows) for j in range(x.shape[1])]
    out = []
    for row in rows:
        largest = max([abs(v) for v, w in zip(row, wide, strict=True) if not w], default=0.0)
        step = scale or largest / top or 1.0
        codes = [max(-top, min(top, round(v / step))) * step for v in row]
        out.append([v if w else c for v, w, c in zip(row, wide, codes, strict=True)])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("code", [
    InputCode(8), InputCode(4), InputCode(8, scale=0.02), InputCode(8, threshold=2.0),
    InputCode(4, scale=0.3, threshold=2.5),
], ids=str)  # fmt: skip
def test_the_code_is_its_definition(code):
    x = torch.randn(20, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3] = 0
    torch.testing.assert_close(fake_quantize(x, code), by_hand(x, code.bits, code.scale, code.threshold))


def test_gradients_pass_the_rounding():
    x = torch.randn(3, 4, requires_grad=True)
    fake_quantize(x, InputCode(8)).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_all_inputs_above_the_threshold_stay_as_they_are():
    x = torch.randn(5, 6).abs() + 1
    assert torch.equal(fake_quantize(x, InputCode(8, threshold=0.5)), x)


# ---- folding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {}, {"num_kv_heads": 4}, {"qkv_bias": True, "out_bias": True},
    {"family": "gpt2", "norm": "layernorm", "position": "learned", "gated": False, "activation": "gelu_tanh",
     "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4},
    {"family": "opt", "norm": "layernorm", "position": "learned", "gated": False, "activation": "relu",
     "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "position_offset": 2},
], ids=lambda c: "-".join(map(str, c.values())) or "llama")  # fmt: skip
def test_folding_leaves_the_function_as_it_is(bench, changes):
    from tests.compress.conftest import LLAMA

    model = build(LLAMA.model_copy(update=changes), seed=1).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
        before = model(ids)
        folded = set()
        for block in model.layers.values():
            for site in ("attention.qkv", "attention.o", "mlp.up", "mlp.down"):
                if not unfoldable(block, site):
                    width = {"attention.o": 64, "mlp.down": 128}.get(site, 64)
                    fold(block, site, torch.rand(width, dtype=torch.float64) * 3 + 0.2)
                    folded.add(site)
        torch.testing.assert_close(model(ids), before, rtol=1e-9, atol=1e-9)
    assert ("attention.o" in folded) == (changes.get("num_kv_heads") == 4)
    assert ("mlp.down" in folded) == (changes.get("activation") != "gelu_tanh")
    assert {"attention.qkv", "mlp.up"} <= folded


def test_equalized_inputs_are_logarithms():
    peak = torch.tensor([0.0, 0.5, 14.0, 1022.0])
    torch.testing.assert_close(peak[1:] / equalizer(peak)[1:], torch.log2(2 + peak[1:]))
    assert equalizer(peak)[0] == 1


# ---- planted outliers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(bench):
    """(a trained checkpoint, the same function with inputs of up to 60)."""
    source = bench.checkpoint(steps=30)
    return source, with_outliers(source, bench.folder / "planted", 25.0)


def test_planting_changes_no_logit(planted):
    ids = torch.arange(32).view(2, 16)
    a, b = (load_checkpoint(path)(ids) for path in planted)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_equalization_repairs_what_one_static_scale_breaks(bench, planted):
    """With 8-bit weights, so that the inputs are what differs."""
    errors = {}
    for name, options in (
        ("static", "low=1000,high=1000"),
        ("equalized", "low=15,high=150"),
        ("token", "low=0,high=0"),
    ):
        found, wanted, *_ = bench.walk(planted[1], f"fptq:bits=8,group_size=0,{options}")
        errors[name] = rms(found, wanted)
    assert errors["equalized"] < 0.5 * errors["static"]
    assert errors["equalized"] < errors["token"]


def test_each_site_is_treated_by_its_largest_input(bench, planted):
    _, _, walker, _ = bench.walk(planted[1], "fptq:group_size=32,low=5,high=40")
    for notes in walker.block_notes:
        for site, s in notes.items():
            how = s["inputs"]
            if s["largest"] <= 5:
                assert how == "static"
            elif s["largest"] >= 40:
                assert how == "per token"
            else:
                assert how == "equalized, static" or (site == "attention.o" and "share value channels" in how)
    ways = {s["inputs"] for notes in walker.block_notes for s in notes.values()}
    assert {"static", "per token", "equalized, static"} <= ways
    layers = walker.kept
    for site, names in (("attention.qkv", ("q_proj", "k_proj", "v_proj")), ("mlp.up", ("gate_proj", "up_proj"))):
        kind = site.split(".")[0]
        codes = {layers[f"layers.1.{kind}.{n}"].input for n in names}
        assert len(codes) == 1
        assert (codes.pop().scale is None) == (walker.block_notes[1][site]["inputs"] == "per token")


def test_mixed_decomposition_repairs_what_int8_breaks(bench, planted):
    plain, wanted, *_ = bench.walk(planted[1], "smooth_int8:threshold=0")
    mixed, *_ = bench.walk(planted[1], "smooth_int8")
    smooth, *_ = bench.walk(planted[1], "smooth_int8:threshold=0,alpha=0.5")
    untouched, original, *_ = bench.walk(planted[0], "smooth_int8:threshold=0")
    assert rms(mixed, wanted) < 0.5 * rms(plain, wanted)
    assert rms(smooth, wanted) < 0.5 * rms(plain, wanted)
    assert rms(mixed, wanted) < 1.5 * rms(untouched, original)


def test_a_compression_that_was_stopped_goes_on_with_the_inputs_it_had_decided(bench, planted, tmp_path):
    plan = "fptq:group_size=32,low=5,high=40,solver=gptq"
    bench.compress(planted[1], tmp_path / "whole", plan)

    class Stop(Exception):
        pass

    def stop(message):
        if message.get("stage") == "block 2 of 2":
            raise Stop

    from ridgeline.compress.driver import compress

    e = bench.experiment(planted[1], plan)
    options = CompressOptions(out=str(tmp_path / "parts"), format="compressed-tensors")
    with pytest.raises(Stop):
        compress(e, options, RankContext(torch.device("cpu"), report=stop))
    compress(e, options, RankContext(torch.device("cpu")))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for file in sorted(whole.glob("*.safetensors")):
        assert file.read_bytes() == (parts / file.name).read_bytes()
    assert (whole / "config.json").read_text() == (parts / "config.json").read_text()


@pytest.mark.parametrize(("plan", "form"), [
    ("smooth_int8:threshold=0,alpha=0.5", "compressed-tensors"), ("smooth_int8", "ridgeline"),
    ("fptq:group_size=32,low=5,high=40", "compressed-tensors"), ("fptq:group_size=32,low=5,high=40", "ridgeline"),
])  # fmt: skip
def test_what_is_loaded_computes_what_the_walk_had(bench, planted, tmp_path, plan, form):
    """Folded norms, codes, static scales and thresholds all pass through the file."""
    bench.compress(planted[1], tmp_path / "out", plan, format=form)
    walked, dense, _, _ = bench.walk(planted[1], plan)
    model = load_packed(tmp_path / "out", torch.float32, fast=False)
    model.norm = None
    e = bench.experiment(planted[1], plan)
    windows = calibration_windows(e.workload, load_tokens(bench.text, e.model.vocab_size, str(planted[1])))
    with torch.no_grad():
        loaded = model(windows, return_hidden=True)
    assert rms(loaded, walked) < 0.1 * rms(dense, walked)


@pytest.mark.parametrize(("plan", "says"), [
    (["fptq:group_size=32,low=20,high=10"], "above high"),
    (["smooth_int8", "gptq"], "also decides how weights are stored"),
    (["rtn:bits=3,group_size=7"], "does not divide"),
    (["norm_tweaking"], "nothing is quantized"),
    (["magnitude", "wanda"], "also decides which weights are zero"),
    (["wanda:pattern=3:5"], "do not divide"),
    (["sparsegpt:pattern=4:4"], "nothing to choose"),
])  # fmt: skip
def test_refusals(bench, plan, says):
    with pytest.raises(Incompatible, match=says):
        check(normalize(bench.experiment(bench.checkpoint(), *plan)))


@pytest.mark.parametrize(("option", "says"), [
    ("bits=3", "not 3 bits"), ("symmetric=false", "symmetrically"), ("mse=true", "symmetrically"),
])  # fmt: skip
def test_what_only_compression_can_round_is_refused_under_adapters(option, says):
    with pytest.raises(Incompatible, match=says):
        experiments.make("llama-tiny", "a100", {"kind": "pretrain", "seq_len": 64}, [f"rtn:{option}", "lora"])


def test_bad_patterns_are_named(bench):
    with pytest.raises(UserError, match="pattern"):
        check(normalize(bench.experiment(bench.checkpoint(), "wanda:pattern=2-4")))


def test_our_own_format_says_how_inputs_are_quantized(bench, tmp_path):
    bench.compress(bench.checkpoint(steps=30), tmp_path / "out", "smooth_int8:threshold=4", format="ridgeline")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    form = reader(config)
    assert form.input("model.layers.1.mlp.up_proj", {}.get) == InputCode(8, threshold=4.0)
    assert form.input("lm_head", {}.get) is None
