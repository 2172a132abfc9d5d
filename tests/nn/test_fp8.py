"""Float8 codes and linear layers, against references built from the format's definition."""

import math

import pytest
import torch
from tests.serving import model

from ridgeline.nn.kernels import native
from ridgeline.nn.model import fused, joined_weights, served
from ridgeline.nn.quant import codec
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.nn.quant.quantized import IntLinear
from ridgeline.techniques.precision import fp8_linear_torch as fp8


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest representable numbers by search over all 256 codes (ties to the even code)."""
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = torch.arange(256)
    finite = torch.isfinite(table) & ~((table == 0) & (codes >= 128))
    table, codes = table[finite], codes[finite]
    distance = (values.double().unsqueeze(-1) - table).abs()
    odd = (codes % 2).double() * 1e-300
    return table[(distance + odd).argmin(-1)]


@pytest.mark.parametrize("dtype", [codec.E4M3])
def test_codes_are_the_nearest_numbers(dtype):
    t = torch.randn(64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 64)
    codes, scale = codec.quantize(t, dtype)
    assert float(scale) == pytest.approx(codec.LARGEST[dtype] / float(t.abs().max()))
    assert torch.equal(codes.double(), nearest(t * scale, dtype))
    bits = 3 if dtype == codec.E4M3 else 2
    error = (codec.decode(codes, scale) - t).abs()
    normal = (t * scale).abs() > (2**-6 if dtype == codec.E4M3 else 2**-14)
    assert (error[normal] <= t.abs()[normal] * 2.0 ** -(bits + 1) * 1.001).all()


def test_extremes():
    zero, scale = codec.quantize(torch.zeros(3), codec.E4M3)
    assert codec.decode(zero, scale).tolist() == [0, 0, 0]
    tiny, scale = codec.quantize(torch.tensor([1e-38, -1e-38]), codec.E4M3)
    assert torch.isfinite(codec.decode(tiny, scale)).all()
    for bad in (math.inf, -math.inf, math.nan):  # an overflow must not be hidden by saturation
        codes, scale = codec.quantize(torch.tensor([1.0, bad]), codec.E4M3)
        assert torch.isnan(codec.decode(codes, scale)).all()
    assert codec.quantize(torch.empty(0), codec.E4M3)[0].numel() == 0


def test_linear_layer_is_the_product_of_rounded_numbers():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32, requires_grad=True)
    layer = torch.nn.Linear(32, 48)
    layer.__class__ = fp8.Fp8Linear
    y = layer(x)
    dy = torch.randn_like(y) * torch.logspace(-4, 0, 48)
    y.backward(dy)

    def rounded(t, dtype):
        s = codec.LARGEST[dtype] / t.abs().max()
        return nearest(t.detach() * s, dtype) / s.double()

    x8, w8, g8 = rounded(x, codec.E4M3), rounded(layer.weight, codec.E4M3), rounded(dy, codec.E4M3)
    assert torch.allclose(y.double(), x8 @ w8.t() + layer.bias.double(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad.double(), g8 @ w8, rtol=1e-5, atol=1e-5)
    assert torch.allclose(layer.weight.grad.double(), g8.flatten(0, 1).t() @ x8.flatten(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.allclose(layer.bias.grad, dy.sum((0, 1)), rtol=1e-5)
    wide = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert 1e-3 < ((y - wide).norm() / wide.norm()).item() < 0.05  # it did round, and not too much


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_rowwise_layer_is_the_product_of_rows_rounded_by_powers_of_two(keep, bias):
    torch.manual_seed(0)
    x = (torch.randn(2, 5, 32) * torch.logspace(-3, 3, 32)).requires_grad_()
    layer = torch.nn.Linear(32, 48, bias=bias)
    fp8.use_fp8(torch.nn.ModuleDict({"a_proj": layer}), fp8.Float8Product(rowwise=True, keep=keep))
    y = layer(x)
    dy = torch.randn_like(y) * torch.logspace(-4, 0, 48)
    y.backward(dy)

    def rounded(t, dim):
        """Each vector along ``dim`` by the largest power of two that keeps it within the format."""
        t = t.detach().double()
        power = 2.0 ** torch.floor(torch.log2(codec.LARGEST[codec.E4M3] / t.abs().amax(dim, True)))
        return nearest(t * power, codec.E4M3) / power

    rows, grads, w = x.flatten(0, 1), dy.flatten(0, 1), layer.weight
    right = rounded(rows, 1) @ rounded(w, 1).t() + (layer.bias.double() if bias else 0)
    assert torch.allclose(y.flatten(0, 1).double(), right, rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad.flatten(0, 1).double(), rounded(grads, 1) @ rounded(w, 0), rtol=1e-5, atol=1e-5)
    assert torch.allclose(w.grad.double(), rounded(grads, 0).t() @ rounded(rows, 0), rtol=1e-5, atol=1e-4)
    wide = torch.nn.functional.linear(x, w, layer.bias)
    assert 1e-3 < ((y - wide).norm() / wide.norm()).item() < 0.05


def test_emulation_with_scales_of_rows_equals_the_scaled_product():
    """PyTorch's own, which gives 16 bits."""
    torch.manual_seed(0)
    a, b = (codec.layouts(torch.randn(n, 64) * torch.logspace(-2, 2, 64), codec.E4M3, True) for n in (32, 48))
    try:
        scales = {"scale_a": a.inverse_scale, "scale_b": b.inverse_scale.t()}
        want = torch._scaled_mm(a.rows, b.rows.t(), **scales, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"no float8 product on this CPU: {e}")
    got = fp8.product(a.rows, a.inverse_scale, b.rows, b.inverse_scale, torch.float32)
    torch.testing.assert_close(got.bfloat16(), want)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_merged_projections_multiply_as_one_layer(rowwise, keep):
    """In a whole model: with scales of rows results are those of layers one by one, as rows keep theirs."""
    if native.library() is None:
        pytest.skip("no C++ compiler")
    models = [model("llama-tiny", dtype=torch.float32) for _ in range(2)]
    how = fp8.Float8Product(rowwise, keep)
    for made in models:
        assert len(fp8.use_fp8(made, how)) == 7 * len(made.layers)
    merged = fused.merge_projections(models[1])
    assert len(merged) == 2 * len(models[1].layers)
    models.append(model("llama-tiny", dtype=torch.float32))
    tokens = torch.arange(1, 65).view(2, 32)
    with torch.no_grad():
        separate, one, exact = (made(tokens) for made in models)
    if rowwise:
        assert torch.allclose(separate, one, rtol=1e-4, atol=1e-5)
    assert 1e-3 < ((one - exact).norm() / exact.norm()).item() < 0.1


def rounding(t, dtype, rowwise, dim):
    """The most that rounding moves each number of ``t``: half of its last bit, or of the smallest number's. A scale is
    of all, or of each vector along ``dim``, then a power of two: at least half of what brings the largest magnitude to
    the format's."""
    half, smallest = (2.0**-4, 2.0**-10) if dtype == codec.E4M3 else (2.0**-3, 2.0**-17)
    peak = 2 * t.abs().amax(dim, True) if rowwise else t.abs().amax()
    return torch.maximum(half * t.abs(), smallest * peak / codec.LARGEST[dtype])


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_gradients_of_merged_projections_are_within_the_rounding_of_their_operands(rowwise, keep):
    if native.library() is None:
        pytest.skip("no C++ compiler")
    made = model("llama-tiny", dtype=torch.float32)
    fp8.use_fp8(made, fp8.Float8Product(rowwise, keep))
    fused.merge_projections(made)
    layer = made.layers["0"]
    made.requires_grad_()
    torch.manual_seed(0)
    x = (torch.randn(2, 16, made.spec.hidden_size) * torch.logspace(-2, 1, made.spec.hidden_size)).requires_grad_()

    def check(d, weights):
        """``d`` [rows, n]: the gradient that reaches the product."""
        d, rows, w = d.double(), x.detach().flatten(0, -2).double(), torch.cat([p.detach() for p in weights]).double()
        dw = torch.cat([p.grad for p in weights])
        for a, b, got in ((d, w, x.grad.flatten(0, -2)), (d.t(), rows, dw)):
            da, db = rounding(a, codec.E4M3, rowwise, 1), rounding(b, codec.E4M3, rowwise, 0)
            most = da @ b.abs() + a.abs() @ db + da @ db
            assert ((got - a @ b).abs() <= most * (1 + 1e-5)).all()
            assert not torch.allclose(got.double(), a @ b, rtol=1e-3)  # it did round
        x.grad = None

    attention, mlp = layer.attention, layer.mlp
    q, k, v = attention.project(attention, x, None)
    given = [torch.randn_like(t) * scale for t, scale in ((q, 1.0), (k, 0.1), (v, 10.0))]
    torch.autograd.backward((q, k, v), given)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    check(torch.cat([t.flatten(2) for t in given], -1).flatten(0, 1), [p.weight for p in projections])

    with torch.no_grad():  # the product itself, of the same codes
        pair = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        both = fp8.fp8_linear(x, pair, how=fp8.Float8Product(rowwise)).flatten(0, -2)
    both.requires_grad_()
    y = mlp.expand(mlp, x)
    dy = torch.randn_like(y)
    y.backward(dy)
    gate, up = both.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(dy.flatten(0, -2))
    check(both.grad, [mlp.gate_proj.weight, mlp.up_proj.weight])


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_transposed_codes_are_made_only_where_gradients_are_recorded(merge, rowwise, monkeypatch):
    if merge and native.library() is None:
        pytest.skip("no C++ compiler")
    made = model("llama-tiny", dtype=torch.float32).requires_grad_()
    fp8.use_fp8(made, fp8.Float8Product(rowwise))
    if merge:
        fused.merge_projections(made)
    transposed = []

    def counted(*args):
        codes = codec.layouts(*args)
        transposed.append(codes.transposed is not None)
        return codes

    monkeypatch.setattr(fp8, "layouts", counted)
    with torch.no_grad():
        made(torch.arange(1, 9)[None])
    products, inputs = (4 if merge else 7) * len(made.layers), 4 * len(made.layers)
    assert transposed == [False] * (products + inputs)
    transposed.clear()
    made(torch.arange(1, 9)[None])
    assert transposed == [True] * (products + inputs)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_an_empty_batch_has_zero_gradients(rowwise, keep):
    x = torch.randn(0, 32, requires_grad=True)
    weight = torch.randn(48, 32, requires_grad=True)
    y = fp8.fp8_linear(x, weight, how=fp8.Float8Product(rowwise, keep))
    assert y.shape == (0, 48)
    y.sum().backward()
    assert x.grad.shape == (0, 32)
    assert torch.equal(weight.grad, torch.zeros(48, 32))
    assert fp8.StoredFp8Linear(torch.nn.Linear(32, 48))(x[None]).shape == (1, 0, 48)


def test_only_layers_of_the_same_product_are_merged():
    """Another layer's attribute or method of that name does not count."""

    class Other(torch.nn.Linear):
        product = fp8.Float8Product()

    assert not fused.lay_together([Other(16, 8, bias=False) for _ in range(2)])
    layers = [torch.nn.Linear(16, 8, bias=False) for _ in range(2)]
    assert not fused.lay_together([IntLinear(layer, 8) for layer in layers])
    how = fp8.Float8Product()
    fp8.use_fp8(torch.nn.ModuleDict({"a_proj": layers[0], "b_proj": layers[1]}), how)
    assert fused.lay_together(layers)
    layers[1].product = fp8.Float8Product(rowwise=True)
    assert not fused.lay_together(layers)


def test_emulation_equals_the_scaled_product():
    """PyTorch's own float8 product, which runs (slowly) on the CPU."""
    torch.manual_seed(0)
    a, sa = codec.quantize(torch.randn(32, 64), codec.E4M3)
    b, sb = codec.quantize(torch.randn(48, 64), codec.E4M3)
    try:
        want = torch._scaled_mm(a, b.t(), scale_a=sa.reciprocal(), scale_b=sb.reciprocal(), out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"no float8 product on this CPU: {e}")
    got = fp8.product(a, sa.reciprocal(), b, sb.reciprocal(), torch.float32)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_layers_that_read_one_tensor_share_its_codes(monkeypatch):
    made = []
    inner = codec.layouts
    monkeypatch.setattr(fp8, "layouts", lambda t, *a: made.append(tuple(t.shape)) or inner(t, *a))
    layers = [torch.nn.Linear(16, 8, bias=False) for _ in range(3)]
    for layer in layers:
        layer.__class__ = fp8.Fp8Linear
    x = torch.randn(4, 16)
    for layer in layers:
        layer(x)
    assert made.count((4, 16)) == 1
    x.mul_(2)  # changed in place: other codes
    assert torch.allclose(layers[0](x), layers[0](x.clone()))
    assert made.count((4, 16)) == 3
    del x
    assert fp8._latest is None or fp8._latest[0]() is not None


def test_stored_weights_take_a_byte():
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 48)
    stored = fp8.StoredFp8Linear(layer)
    assert sum(p.nbytes for p in stored.parameters()) == 32 * 48 + 48 * 4
    x = torch.randn(5, 32)
    error = (stored(x) - layer(x)).norm() / layer(x).norm()
    assert 1e-4 < float(error) < 0.04


def test_the_scale_is_part_of_the_state():
    """Of a layer by itself, and of layers that lie together, which read what is loaded."""
    torch.manual_seed(0)
    given, other = ([torch.nn.Linear(32, 16) for _ in range(2)] for _ in range(2))
    for layer in given:
        layer.weight.data.mul_(30)
    saved = torch.nn.ModuleList([fp8.StoredFp8Linear(layer) for layer in given])
    loaded = torch.nn.ModuleList([fp8.StoredFp8Linear(layer) for layer in other])
    assert joined_weights.lay_served_together(list(loaded))
    state = {name: t.clone() for name, t in saved.state_dict().items()}
    assert set(state) == {f"{i}.{leaf}" for i in range(2) for leaf in ("codes", "inverse", "bias")}
    loaded.load_state_dict(state)
    x = torch.randn(5, 32)
    want = [layer(x) for layer in saved]
    assert all(torch.equal(layer(x), y) for layer, y in zip(loaded, want, strict=True))
    torch.testing.assert_close(loaded[0].joined(list(loaded))(x), torch.cat(want, -1))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("units", [False, True])
def test_stored_layers_are_one_product(biased, units, monkeypatch):
    """That of each by itself, also with float8 units: within the rounding of inputs, whatever other rows are."""
    if units:  # multiplied by definition: 40 numbers of a row are none that ``torch._scaled_mm`` takes
        monkeypatch.setattr(fp8, "has_float8", lambda device: True)
    torch.manual_seed(0)
    given = [torch.nn.Linear(40, n, bias=biased) for n in (48, 16, 16)]
    for layer, size in zip(given, (1.0, 30.0, 0.01), strict=True):
        layer.weight.data.mul_(size)
    parts = [fp8.StoredFp8Linear(layer) for layer in given]
    assert parts[0].joined(parts) is None
    x = torch.randn(5, 40) * torch.tensor([1e-3, 1.0, 1e4, 0.0, 30.0])[:, None]
    with torch.no_grad():
        alone = torch.cat([p(x) for p in parts], -1)
        assert joined_weights.lay_served_together(parts)
        assert torch.equal(torch.cat([p(x) for p in parts], -1), alone)
        whole = parts[0].joined(parts)
        got = whole(x)
        assert got.shape == (5, 80)
        few = whole(x[:2])  # without the row of 1e4
    w = torch.cat([p.codes.view(codec.E4M3).double() * p.inverse.double() for p in parts])
    bias = torch.cat([p.bias for p in parts]).double() if biased else 0.0
    exact = x.double() @ w.T + bias
    sums = x.double().abs() @ w.abs().T + abs(bias)
    order = 2 * 41 * 2.0**-24 * sums  # two orders of a sum in fp32, which other numbers of rows and columns may have
    assert ((got.double() - alone).abs() <= order).all()
    assert ((few.double() - got[:2]).abs() <= order[:2]).all()
    rounded = 0.0
    if units:  # 2^-4 of a number, of subnormals half of 2^-9, where a row's largest is between 224 and 448
        peaks = x.abs().amax(1, True).double()
        rounded = torch.maximum(x.double().abs() * 2.0**-4, peaks / 224 * 2.0**-10) @ w.abs().T
    assert ((got.double() - exact).abs() <= rounded + 2.0**-20 * (x.double().abs() @ w.abs().T + 1)).all()


def test_what_differs_is_not_joined():
    layers = [fp8.StoredFp8Linear(torch.nn.Linear(32, 16, bias=bias)) for bias in (True, False)]
    assert not joined_weights.lay_served_together(layers)
    hooked = [fp8.StoredFp8Linear(torch.nn.Linear(32, 16, bias=False)) for _ in range(2)]
    assert joined_weights.lay_served_together(hooked)
    hooked[1].register_forward_hook(lambda *_: None)
    assert not joined_weights.lay_served_together(hooked)


def test_an_experts_input_is_cast_once(monkeypatch):
    """Gate and up projection of an expert are one product of a served model, and its outputs stay what they were."""
    if native.library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(fp8, "has_float8", lambda device: True)
    made = model("mixtral-tiny", dtype=torch.float32)
    fp8.store_experts(made)
    experts = next(iter(made.layers.values())).mlp.experts
    torch.manual_seed(0)
    x, counts = torch.randn(12, made.spec.hidden_size), [5, 0, 3, 4]
    cast = []
    inner = codec.layouts
    monkeypatch.setattr(fp8, "layouts", lambda t, *a: cast.append(tuple(t.shape)) or inner(t, *a))
    with torch.inference_mode():
        given = x.clone()
        want = experts(given, counts)
        assert len(cast) == 9
        served.join_served(made)
        cast.clear()
        got = experts(given, counts)
    assert cast == [(n, width) for n in (5, 3, 4) for width in (made.spec.hidden_size, made.spec.intermediate_size)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"moe_bias": True}, {"gated": False, "activation": "relu"}])
def test_stored_experts_are_within_the_rounding_of_e4m3(fields):
    made = model("mixtral-tiny", dtype=torch.float32, **fields)
    tokens = torch.arange(1, 33)[None]
    want = made(tokens)
    dense = [layer.mlp.experts for layer in made.layers.values()]
    fp8.store_experts(made)
    for before, layer in zip(dense, made.layers.values(), strict=True):
        assert isinstance(layer.mlp.experts, PackedExperts)
        for stored, weight in zip(layer.mlp.experts.up_proj, before.up_proj, strict=True):
            assert stored.codes.nbytes == weight.numel()
            back = stored(torch.eye(weight.shape[1])).T
            assert 1e-3 < (back - weight).norm() / weight.norm() < 0.04
    assert 0 < (made(tokens) - want).norm() / want.norm() < 0.15
