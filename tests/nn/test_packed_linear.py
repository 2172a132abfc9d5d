"""Layers that compute from codes, against the expanded weight in fp64."""

import pytest
import torch
import torch.nn.functional as F

from ridgeline import catalog
from ridgeline.nn.kernels import native
from ridgeline.nn.model import fused, joined_weights, served
from ridgeline.nn.model.attention import Attention, project
from ridgeline.nn.model.mlp import MLP, expand
from ridgeline.nn.quant import native_codes, packed_linear, torch_codes
from ridgeline.nn.quant.activation_quant import InputCode, code_input
from ridgeline.nn.quant.codes import Stripes
from ridgeline.nn.quant.packed import Packed, PackedOutliers
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.lowbit import FEW_ROWS, TILE, held, held_bytes

SHAPES = [(96, 128, 32), (112, 256, 256), (64, 64, 64), (24, 96, 32), (16, 96, 8), (7, 10, 10)]
compiled = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")


@pytest.fixture(params=[pytest.param(True, marks=compiled), False], ids=["ours", "pytorch"])
def kernels(request, monkeypatch):
    """Our compiled kernels, and PyTorch's where there is no compiler."""
    if not request.param:
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def record(out, width, bits, group, symmetric, seed=0, outliers=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (out, width), generator=g, dtype=torch.int32).to(torch.uint8)
    scale = (torch.rand(out, width // group, generator=g) * 0.02 + 0.01).half()
    zero = None
    if not symmetric:
        zero = torch.randint(1 << bits, (out, width // group), generator=g, dtype=torch.int32).to(torch.uint8)
    aside = None
    if outliers:
        index = torch.randperm(out * width, generator=g)[:outliers].sort().values.int()
        aside = PackedOutliers(index, torch.randn(outliers, generator=g).half())
    return Packed(codes, scale, zero, bits, group, aside)


def rows(m, width, seed=1):
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_form_is_the_expanded_weight(bits, symmetric, kernels, monkeypatch):
    if kernels:
        monkeypatch.setattr(native_codes, "wide_dtype", lambda: torch.float32)  # every number of rows
    for out, width, group in SHAPES:
        p = record(out, width, bits, group, symmetric)
        want = p.dense(torch.float64)
        for m in (1, 3, 20, FEW_ROWS + 1):
            x = rows(m, width)
            target = F.linear(x.double(), want)
            exact = PackedLinear(p, fast=False)(x)
            assert torch.allclose(exact.double(), target, rtol=1e-5, atol=1e-4 * float(target.abs().max()))
            fast = PackedLinear(p)(x)
            error = float((fast.double() - target).norm() / target.norm())
            # Ours codes inputs in 16 bits; PyTorch's rounds inputs, scales and sums to bf16, 2^-9 each.
            assert error < (1e-4 if kernels else 1.2e-2), (out, width, group, m, error)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("out", "width", "group"),
    [
        (33, 96, 96),
        (5, 37, 37),
        (64, 1024, 512),
        (70, 328, 328),
        (31, 1056, 352),
        (97, 2112, 2112),
        (70, 100, 100),
        (64, 33, 33),
    ],
)
@compiled
def test_tiles_of_every_number_of_rows_and_uneven_shapes(bits, out, width, group):
    for symmetric in (True, False):
        p = record(out, width, bits, group, symmetric)
        codes, want = native_codes.NativeCodes(p, bits), p.dense(torch.float64)
        assert torch.equal(codes.rows(0, out, torch.float32), p.dense())
        assert torch.equal(codes.rows(out // 2, out, torch.float32), p.dense()[out // 2 :])
        x = rows(71, width)
        x[3] *= 1e4  # a row of another size leaves the others alone
        # Every input is off by at most half of 1 / 32639 of the largest of its group, and sums are rounded to fp32.
        bound = x.abs().amax(1, keepdim=True).double() * want.abs().sum(1) * (0.6 / 32639)
        for m in (1, 2, 3, 4, 5, 6, 7, 11, 64, 71):
            off = (codes._call(x[:m], None, torch.float32, False).double() - F.linear(x[:m].double(), want)).abs()
            assert (off <= bound[:m]).all(), (m, symmetric)
        whole = torch.arange(3.0 * width).view(3, width) % 255 - 127
        target = F.linear(whole.double(), want)
        assert torch.allclose(
            codes.integer_product(whole).double(), target, rtol=1e-5, atol=1e-5 * float(target.abs().max())
        )


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@compiled
def test_bytes_held_are_those_predicted(bits, symmetric):
    for out, width, group in SHAPES:
        for fast in (True, False):
            layer = PackedLinear(record(out, width, bits, group, symmetric), fast=fast)
            got = sum(p.numel() * p.element_size() for p in layer.parameters())
            assert got == held_bytes(out, width, bits, group, symmetric, "cpu", fast)


def test_nibbles_come_apart_as_they_went_in():
    for out in (16, 64, 80, 128, 208):
        codes = torch.randint(16, (out, 64), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        assert torch.equal(torch_codes.unpack_nibbles(packed, 0, out), codes.to(torch.uint8))
        if out > 64:
            assert torch.equal(torch_codes.unpack_nibbles(packed, 64, out), codes[64:].to(torch.uint8))


def test_a_layout_that_is_not_known_is_not_read(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(torch_codes, "nibble_layout", lambda: None)
    p = record(64, 64, 4, 64, True)
    layer = PackedLinear(p)
    assert isinstance(layer.codes, packed_linear.Words)
    x = rows(2, 64)
    assert torch.allclose(layer(x), F.linear(x, p.dense()), atol=1e-4)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
@pytest.mark.parametrize("scale", [None, 0.03])
def test_integer_inputs_are_the_same_in_both_ways(bits, group, scale, kernels):
    p = record(64, 64, bits, group, bits == 8, outliers=9)
    code = InputCode(scale=scale)
    for m in (1, 5, 70):
        x = rows(m, 64)
        q, s, _ = code_input(x, code)
        target = F.linear((q * s).double(), Packed.dense(p, torch.float64)) - F.linear(
            (q * s - x).double(), p.dense(torch.float64) - record(64, 64, bits, group, bits == 8).dense(torch.float64)
        )  # entries kept aside see the input as it is
        exact, fast = PackedLinear(p, input=code, fast=False)(x), PackedLinear(p, input=code)(x)
        assert torch.allclose(exact.double(), target, atol=1e-4)
        close = 1e-4 if bits == 8 or kernels else 2e-2  # exact, but PyTorch's nibbles are summed in bf16
        assert float((fast.double() - target).norm() / target.norm()) < close


def test_a_large_input_keeps_its_precision_and_spares_the_others():
    """LLM.int8: one channel sixty times the rest."""
    p = record(64, 128, 8, 128, True)
    x = rows(12, 128)
    x[:, 17] = 60.0 + x[:, 17]
    want = F.linear(x.double(), p.dense(torch.float64))

    def error(code, fast):
        return float((PackedLinear(p, input=code, fast=fast)(x).double() - want).norm() / want.norm())

    for fast in (True, False):
        plain, mixed = error(InputCode(), fast), error(InputCode(threshold=6.0), fast)
        assert mixed < 0.1 * plain, (plain, mixed)
    x[0, 3] = 6.0
    exact, fast = (PackedLinear(p, input=InputCode(threshold=6.0), fast=f)(x) for f in (False, True))
    assert torch.allclose(exact, fast, atol=1e-3)


def test_bias_and_shape_and_dtype():
    p, bias = record(64, 64, 4, 32, False, outliers=5), torch.randn(64)
    x = rows(6, 64).view(2, 3, 64).bfloat16()
    y = PackedLinear(p, bias)(x)
    assert y.shape == (2, 3, 64)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), F.linear(x.float(), p.dense(), bias), rtol=3e-2, atol=3e-2)


@compiled
def test_biases_of_16_bits_and_gradients():
    p, bias = record(64, 64, 8, 32, True), torch.randn(64).bfloat16()
    x = rows(5, 64)
    layer = PackedLinear(p, bias)
    assert torch.allclose(layer(x), F.linear(x, p.dense(), bias.float()), rtol=1e-3, atol=1e-3)
    x.requires_grad_(True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, p.dense().sum(0).expand(5, -1), rtol=3e-2, atol=3e-2)


def test_forms_are_chosen_by_what_kernels_take():
    assert held(64, 128, 4, 128) == "nibbles"
    assert held(64, 128, 8, 32) == held(64, 128, 8, 0) == "bytes"
    assert held(60, 100, 4, 100) == "nibbles"  # a whole row, of any width
    assert held(64, 128, 4, 16) == "words"  # groups that are no multiple of 32
    assert held(64, 128, 4, 128, fast=False) == held(64, 96, 4, 12, "cuda") == "words"
    assert held(64, 128, 4, 128, "cuda") == "stripes"
    for bits, width, group in ((4, 4096, 128), (3, 96, 32), (8, 80, 80), (2, 768, 64)):
        for symmetric in (True, False):
            codes = Stripes(record(24, width, bits, group, symmetric))
            got = sum(t.numel() * t.element_size() for t in codes.parameters())
            assert got == held_bytes(24, width, bits, group, symmetric, "cuda")


@compiled
def test_a_row_does_not_depend_on_the_others_or_on_the_threads():
    layer = PackedLinear(record(130, 320, 4, 64, False))
    x = rows(70, 320)
    want = torch.cat([layer(row[None]) for row in x[:9]])
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            for m in (2, 3, 5, 9):
                assert torch.equal(layer(x[:m]), want[:m])
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(bad):
    layer, x = PackedLinear(record(40, 64, 8, 64, True)), rows(3, 64)
    x[1, 7] = bad
    good = torch.isfinite(layer(x)).all(1)
    assert good.tolist() == [True, False, True]
    assert layer(torch.zeros(2, 64)).count_nonzero() == 0
    assert torch.isfinite(layer(torch.full((1, 64), 1e-40))).all()


# ---- parts, for several ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("out", "width", "group"), [(96, 128, 32), (112, 256, 256), (64, 64, 64), (24, 96, 32)])
def test_parts_hold_the_very_weight(bits, symmetric, out, width, group, kernels):
    layer = PackedLinear(record(out, width, bits, group, symmetric, outliers=9), rows(1, out)[0])
    whole = layer.dense()
    for dim in (0, 1):
        for of in (2, 4):
            size = (out, width)[dim] // of
            own = isinstance(layer.codes, torch_codes.Nibbles)
            grouped = isinstance(layer.codes, native_codes.NativeCodes) and dim == 1 and group < width
            if (own and size % (16, 32)[dim]) or (grouped and size % 32):
                with pytest.raises(Incompatible, match=f"{size} of {(out, width)[dim]} {('outputs', 'inputs')[dim]}"):
                    layer.part(dim, 0, of)
                continue
            parts = [layer.part(dim, i, of) for i in range(of)]
            assert torch.equal(torch.cat([p.dense() for p in parts], dim), whole)
            bytes_of = [sum(p.nbytes for p in m.parameters()) for m in (layer, *parts)]
            # Whole rows' scales belong to every part of the inputs, a group's to the parts that it falls into; a part's
            # last tile of outputs is filled up.
            more = (
                of * (40 * out + 4 * out * width // 32) if dim else of * held_bytes(TILE, width, bits, group, symmetric)
            )
            assert sum(bytes_of[1:]) <= bytes_of[0] + more
            for m in (1, 3, FEW_ROWS + 1):
                x = rows(m, width)
                if dim == 0:
                    y = torch.cat([p(x) for p in parts], 1)
                else:
                    assert all(p.bias is None for p in parts)
                    y = sum(p(part) for p, part in zip(parts, x.chunk(of, 1), strict=True)) + layer.bias
                want = layer(x)
                assert float((y - want).norm() / want.norm()) < 1.2e-2


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_one_input_are_one_product(bits, symmetric):
    """Codes as a GPU holds them: the parts stay what they were, and become views of one storage."""
    if native.library() is None:
        pytest.skip("no C++ compiler for the activation")
    spec = catalog.model("llama-mini").model_copy(update={"num_heads": 4, "num_kv_heads": 2, "hidden_size": 64})
    spec = spec.model_copy(update={"head_dim": 16, "intermediate_size": 96})
    attention, mlp = Attention(spec), MLP(spec, 96)
    pairs = [(attention, "q_proj", 64), (attention, "k_proj", 32), (attention, "v_proj", 32)]
    for i, (module, name, out) in enumerate([*pairs, (mlp, "gate_proj", 96), (mlp, "up_proj", 96)]):
        layer = PackedLinear(p := record(out, 64, bits, 32, symmetric, i))
        layer.codes = Stripes(p)
        setattr(module, name, layer)
    x = rows(5, 64)[None]
    with torch.inference_mode():
        want, inner = project(attention, x, None), expand(mlp, x)
        groups = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
        held = [[{n: t.clone() for n, t in m.state_dict().items()} for m in group] for group in groups]
        for group, before in zip(groups, held, strict=True):
            assert joined_weights.lay_codes_together(group)
            assert len({m.codes.words.untyped_storage().data_ptr() for m in group}) == 1
            for m, state in zip(group, before, strict=True):
                assert all(torch.equal(t, state[n]) for n, t in m.state_dict().items())
        whole = joined_weights.joined_codes_product(x, groups[0])
        assert whole.shape == (1, 5, 128)
        for got, right in zip(fused.project_merged(attention, x, None), want, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused.expand_merged(mlp, x), inner, rtol=1e-5, atol=1e-5)
        attention.k_proj.codes.words = torch.nn.Parameter(attention.k_proj.codes.words.clone(), requires_grad=False)
        assert joined_weights.joined_codes_product(x, groups[0]) is None  # and each by itself again
        assert all(torch.equal(a, b) for a, b in zip(fused.project_merged(attention, x, None), want, strict=True))


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu"}, {"biases": True}])
def test_gate_and_up_projection_of_an_expert_are_one_product(changes, monkeypatch):
    """Where SwiGLU alone stands between; results are those of each by itself, also when one has moved."""
    if native.library() is None:
        pytest.skip("no C++ compiler for the activation")

    def layers(out, width, seed):
        made = [PackedLinear(record(out, width, 4, 32, False, seed + e)) for e in range(3)]
        for e, layer in enumerate(made):
            layer.codes = Stripes(record(out, width, 4, 32, False, seed + e))
        return made

    biases = {name: torch.nn.Parameter(torch.ones(3, 96)) for name in ("gate_bias", "up_bias")}
    experts = PackedExperts(changes.get("activation", "silu"), layers(96, 64, 0), layers(96, 64, 10),
                            layers(64, 96, 20), biases if "biases" in changes else None)  # fmt: skip
    x, counts = rows(7, 64), [4, 0, 3]
    products = []
    plain = Stripes.linear
    monkeypatch.setattr(Stripes, "linear", lambda c, *given: products.append(c.out) or plain(c, *given))
    with torch.inference_mode():
        want = experts(x, counts)
        assert products == [96, 96, 64] * 2
        served.join_served(torch.nn.ModuleList([experts]))
        for moved in (False, True):
            products.clear()
            if moved:
                words = experts.up_proj[2].codes.words
                experts.up_proj[2].codes.words = torch.nn.Parameter(words.clone(), requires_grad=False)
            torch.testing.assert_close(experts(x, counts), want, rtol=1e-5, atol=1e-5)
            one, both = [192, 64], [96, 96, 64]
            assert sorted(products) == sorted(2 * both if changes else one + (both if moved else one))
