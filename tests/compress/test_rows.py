"""Every row through the driver: what is written, what is kept, and who beats whom on a layer."""

import pytest
import torch
from tests.compress.test_sweep import error, layer

from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.runtime.compress_build import CompressBuild, LinearLayer, Site
from ridgeline.runtime.solve.fold import readers
from ridgeline.runtime.solve.grid import Affine
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make

MOE = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2}
QUANTIZERS = [
    "rtn:bits=3,group_size=32,symmetric=false,mse=true", "rtn", "finequant:group_size=16",
    "gptq:bits=3,group_size=32,symmetric=false", "quantease:bits=3,group_size=32,passes=3",
    "quantease:bits=4,group_size=0,start=cold,passes=6", "awq:bits=4,group_size=32,steps=4", "smooth_int8:alpha=0.5",
    "fptq:group_size=32,low=1", "fptq:group_size=32,solver=gptq",
]  # fmt: skip
PRUNERS = ["magnitude", "magnitude:pattern=2:4", "wanda:sparsity=0.6", "wanda:pattern=4:8", "sparsegpt:sparsity=0.25",
           "sparsegpt:pattern=2:4"]  # fmt: skip


def site(weight, gram=None):
    return Site("s", [LinearLayer("s.a", weight, weight)], gram, 100, None)


def solved(plan, weight, gram=None):
    """One layer through one technique's step."""
    run = CompressBuild(None, None, torch.device("cpu"))
    make(Call.parse(plan)).compress(run)
    s = site(weight, gram)
    for step in run.at_site:
        step(s)
    return s.layers[0]


@pytest.mark.parametrize(("plan", "changes"), [
    *((p, {}) for p in QUANTIZERS), *((p, MOE) for p in QUANTIZERS if p.startswith(("awq", "smooth", "fptq", "fine"))),
])  # fmt: skip
def test_quantizers_write_what_the_report_says(bench, tmp_path, plan, changes):
    source = bench.checkpoint(steps=30, **changes)
    report = bench.compress(source, tmp_path / "out", plan)
    model, original = load_checkpoint(tmp_path / "out"), load_checkpoint(source)
    bits = {la["layer"]: la["bits"] for la in report["layers"]}
    assert len(bits) == 2 * (7 if not changes else 4 + 3 * 4)
    call = Call.parse(plan)
    wanted = make(call)
    group = wanted.group_size or 128
    assert all(wanted.bits < b <= wanted.bits + (16 + wanted.bits) / min(group, 64) for b in bits.values())
    levels = [len(row.unique()) for block in model.layers.values() for row in readers(block, "attention.o")[0].weight]
    if not wanted.group_size:
        assert max(levels) <= 2**wanted.bits
    ids = torch.arange(64).view(4, 16)
    with torch.no_grad():
        assert float((model(ids) - original(ids)).pow(2).mean() / original(ids).pow(2).mean()) < 0.1
    assert bench.loss(tmp_path / "out") < bench.loss(source) + 0.1


@pytest.mark.parametrize(("plan", "changes"), [
    *((p, {}) for p in PRUNERS), *((p, MOE) for p in PRUNERS if not p.startswith("magnitude")),
])  # fmt: skip
def test_pruners_leave_exactly_so_many_zeros(bench, tmp_path, plan, changes):
    source = bench.checkpoint(steps=30, **changes)
    report = bench.compress(source, tmp_path / "out", plan)
    pruner = make(Call.parse(plan))
    n, m = pruner.groups or (0, 0)
    share = n / m if m else pruner.sparsity
    model, original = load_checkpoint(tmp_path / "out"), load_checkpoint(source)
    names = {name for name, p in original.named_parameters() if name.endswith("_proj.weight") or ".experts." in name}
    for name, p in model.named_parameters():
        old = original.get_parameter(name)
        if name not in names:
            assert torch.equal(p, old)
            continue
        zeros = p == 0
        assert int(zeros.sum()) == pytest.approx(share * p.numel(), abs=0.51 * p.numel() / p.shape[-1])
        if m:
            assert bool((zeros.view(-1, m).sum(-1) == n).all())
        if pruner.card.name == "wanda":
            assert bool((zeros.sum(-1) == round(share * p.shape[-1])).all())
        if pruner.card.name != "sparsegpt":
            assert torch.equal(p[~zeros], old[~zeros])
    assert report["zeros"] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("quantizer", [
    "rtn:bits=4,group_size=32", "rtn:bits=4,group_size=32,symmetric=false,mse=true", "gptq:bits=4,group_size=32",
    "quantease:bits=4,group_size=32", "quantease:bits=4,group_size=32,start=cold,passes=4", "finequant:group_size=16",
    "smooth_int8", "awq:group_size=32,steps=2", "fptq:group_size=32,solver=gptq",
])  # fmt: skip
@pytest.mark.parametrize("pruner", ["sparsegpt", "wanda:pattern=2:4"])
def test_quantizers_keep_the_zeros_of_a_pruned_weight(bench, tmp_path, pruner, quantizer):
    bench.compress(bench.checkpoint(steps=30), tmp_path / "out", quantizer, pruner)
    model = load_checkpoint(tmp_path / "out")
    for name, p in model.named_parameters():
        if name.endswith("_proj.weight"):
            zeros = p == 0
            assert float(zeros.float().mean()) >= 0.5
            if "2:4" in pruner:
                assert int(zeros.view(-1, 4).sum(-1).min()) >= 2


def test_outliers_of_quantease_survive_in_a_dense_file(bench, tmp_path):
    source = bench.checkpoint(steps=30)
    plain = bench.compress(source, tmp_path / "a", "quantease:bits=2,group_size=32", format="dense")
    aside = bench.compress(source, tmp_path / "b", "quantease:bits=2,group_size=32,outliers=0.02", format="dense")
    errors = [sum(la["error"] for la in r["layers"]) for r in (plain, aside)]
    assert errors[1] < errors[0]
    assert aside["bits_per_weight"] == pytest.approx(plain["bits_per_weight"] + 0.02 * 48, abs=0.02)


# ---- one layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3])
def test_calibrated_quantizers_beat_rounding_and_quantease_beats_gptq(bits):
    weight, gram = layer(48, 128)
    plans = ("rtn", "awq", "gptq", "quantease")
    errors = [error(weight, solved(f"{p}:bits={bits},group_size=32,symmetric=true", weight, gram).weight, gram)
              for p in plans]  # fmt: skip
    assert errors[2] < 0.6 * errors[0]
    assert errors[3] <= errors[2]


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4:8"])
def test_sparsegpt_beats_wanda_beats_magnitude(pattern):
    weight, gram = layer(48, 128)
    errors = [error(weight, solved(f"{p}:pattern={pattern}", weight, gram).weight, gram)
              for p in ("sparsegpt", "wanda", "magnitude")]  # fmt: skip
    assert errors[0] < errors[1] < errors[2]


def test_wanda_scores_by_weight_times_input_norm():
    weight, x = torch.randn(3, 8), torch.randn(40, 8) * torch.arange(1, 9)
    kept = solved("wanda:sparsity=0.5", weight, 2 / 40 * x.t() @ x).keep
    for i in range(3):
        scores = [abs(float(weight[i, j])) * float(x[:, j].norm()) for j in range(8)]
        wanted = sorted(range(8), key=lambda j: scores[j])[4:]
        assert kept[i].nonzero().flatten().tolist() == sorted(wanted)


def test_awq_searches_scales_that_lower_the_layer_error():
    weight, gram = layer(32, 64)
    grid, mean = Affine(3, 32, False), (gram.diagonal() / 2).sqrt() * 0.8
    awq = make(Call.parse("awq:bits=3,group_size=32"))
    power, scale = awq.search(weight, gram, mean, grid)
    plain, scaled = (
        solved("rtn:bits=3,group_size=32,symmetric=false", weight),
        solved("rtn:bits=3,group_size=32,symmetric=false", weight * scale),
    )
    assert 0 < power <= 1
    assert error(weight, scaled.weight / scale, gram) < error(weight, plain.weight, gram)


@pytest.mark.parametrize("plan", ["gptq:bits=3,group_size=0", "sparsegpt"])
def test_a_layer_whose_h_is_no_use_is_done_without_and_says_so(plan):
    weight, _ = layer(8, 16)
    broken = torch.eye(16)
    broken[0, 1] = broken[1, 0] = 5  # not positive, whatever is added
    found = solved(plan, weight, broken)
    assert found.notes["damp"] is None
    assert "cannot be factored" in found.notes["fallback"]
    plain = solved("rtn:bits=3" if plan.startswith("gptq") else "magnitude", weight)
    assert torch.equal(found.weight, plain.weight)
    _, gram = layer(8, 16)
    assert solved(plan, weight, gram).notes == {"damp": 0.01}


# ---- finequant ------------------------------------------------------------------------------------------------------


def test_even_weights_keep_one_scale_per_row_and_an_outlier_isolates_itself():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert solved("finequant", weight).notes["group_size"] == 512
    weight[:, 100] *= 60
    found = solved("finequant", weight)
    assert found.notes["group_size"] == 64
    assert found.stored.group_size == 64


@pytest.mark.parametrize("width", [64, 96, 100, 192, 43])
def test_the_chosen_group_divides_the_width(width):
    weight = torch.randn(16, width)
    weight[:, 0] *= 100
    size = solved("finequant:group_size=8", weight).notes["group_size"]
    assert width % size == 0
    assert size >= 8


def test_layers_that_engines_fuse_get_one_group(bench, tmp_path):
    source = bench.checkpoint(steps=30)
    report = bench.compress(source, tmp_path / "out", "finequant:group_size=16,alpha=0.95")
    sizes = {la["layer"]: la["group_size"] for la in report["layers"]}
    for i in range(2):
        assert len({sizes[f"layers.{i}.attention.{n}_proj"] for n in "qkv"}) == 1
        assert len({sizes[f"layers.{i}.mlp.{n}_proj"] for n in ("gate", "up")}) == 1


def test_adaptive_groups_beat_whole_rows_where_there_are_outliers():
    weight, gram = layer(32, 256)
    weight[:, 10] *= 40
    fine = solved("finequant:bits=4,group_size=32", weight)
    rows = solved("rtn:bits=4", weight)
    assert error(weight, fine.weight, gram) < 0.5 * error(weight, rows.weight, gram)
