"""Products of one row in Triton (its interpreter, where there is no GPU), and which products they are."""

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.serving import spec
from torch import nn

from ridgeline.nn.kernels import functions, gemv, gpu, products
from ridgeline.nn.model import fused
from ridgeline.nn.model.init import build
from ridgeline.nn.model.served import join_served
from ridgeline.nn.quant.codes import counters
from ridgeline.nn.quant.quantized import replace_linears
from ridgeline.techniques.precision.fp8_linear_torch import StoredFp8Linear


@pytest.fixture
def found(monkeypatch):
    """Shapes of the weights that the kernel multiplied, of layers on any device."""
    shapes, plain = [], gemv.product_of_row

    def count(x, weight, *more, **named):
        shapes.append(tuple(weight.shape))
        return plain(x, weight, *more, **named)

    monkeypatch.setattr(products, "_for_triton", lambda *_: True)
    monkeypatch.setattr(gemv, "product_of_row", count)
    return shapes


def operands(n, k, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(n)
    return [torch.randn(*s, generator=g).to(DEVICE, dtype) for s in ((1, 1, k), (n, k), (n,))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(16, 1024), (13, 1544), (3, 8), (41, 520)])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_are_fp32(dtype, n, k, biased):
    x, w, bias = operands(n, k, dtype)
    got = gemv.product_of_row(x, w, bias if biased else None)
    assert (got.shape, got.dtype) == ((1, 1, n), dtype)
    want = F.linear(x.double(), w.double(), bias.double() if biased else None)
    # One rounding of the result, which the interpreter truncates, beside sums of k in fp32.
    added = F.linear(x.double().abs(), w.double().abs(), bias.double().abs())
    assert ((got.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2.0**-20 * added).all()
    assert torch.equal(got, gemv.product_of_row(x, w, bias if biased else None))


def coded(n, k):
    """Codes of a weight, all that are numbers among them, and a scale for each row."""
    g = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.uint8)
    codes.view(-1)[:254] = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8)[: n * k]
    codes[(codes & 127) == 127] = 0  # NaN, which no weight is
    scales = torch.rand(n, 1, generator=g) / 256 + 2.0**-12
    return codes.view(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(16, 1024), (13, 1552), (16, 16), (41, 528)])
@pytest.mark.parametrize("native", [False, True])
def test_float8_codes_are_widened_exactly(dtype, n, k, native, monkeypatch):
    """By an instruction that devices have for them, and by shifts: nothing is rounded but the result."""
    if DEVICE == "cpu":  # a GPU's own way is the only one that it has
        monkeypatch.setattr(gemv, "capability", lambda: 90 if native else 80)
    x, _, bias = operands(n, k, dtype)
    codes, scales = coded(n, k)
    got = gemv.product_of_row(x, codes, bias, scales=scales)
    assert (got.shape, got.dtype) == ((1, 1, n), dtype)
    w = codes.double() * scales.double()
    want = F.linear(x.double(), w, bias.double())
    added = F.linear(x.double().abs(), w.abs(), bias.double().abs())
    assert ((got.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2.0**-20 * added).all()
    if n % 2 == 0:
        y = torch.empty(1, n // 2, dtype=dtype, device=DEVICE)
        gpu.rl_activation(False, got.view(1, n), 0, None, 0, y, 1, n // 2, 0)
        assert torch.equal(gemv.product_of_row(x, codes, bias, True, scales)[0], y)


@pytest.mark.parametrize("f", [16, 7])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_of_a_product_is_that_of_its_result(f, biased):
    """To the bit, as the product is rounded in between."""
    x, w, bias = operands(2 * f, 520)
    given = (x[0] / 8, w, bias if biased else None)
    both = gemv.product_of_row(*given)
    y = torch.empty(1, f, dtype=both.dtype, device=DEVICE)
    gpu.rl_activation(False, both, 0, None, 0, y, 1, f, 0)
    assert torch.equal(gemv.product_of_row(*given, gated=True), y)
    assert float(y.double().norm()) > 0.1


def test_what_it_does_not_suit(found):
    x, w, bias = operands(16, 64)
    others = [
        (x.expand(1, 2, 64), w, bias), (x.float(), w.float(), bias.float()), (x, operands(64, 16)[1].t(), bias),
        (x[..., :60], w[:, :60].contiguous(), bias), (x[..., :32], w[:, :32], None), (x, nn.Parameter(w.clone()), None),
        (x[..., :0], w[:, :0], bias), (x, w[:0], None), (x.clone().requires_grad_(), w, bias),
    ]  # fmt: skip
    for given in others:
        torch.testing.assert_close(products.served_linear(*given), F.linear(*given), rtol=0, atol=0)
    torch.set_autocast_enabled("cuda", True)
    try:
        products.served_linear(x, w)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not found
    for one in (x, x[0], x[0, 0]):
        assert products.served_linear(one, w, bias).shape == (*one.shape[:-1], 16)
    assert found == [(16, 64)] * 3


def test_which_float8_codes_it_does_not_suit(found):
    x, _, bias = operands(16, 64)
    codes, scales = coded(16, 64)
    arrived = counters(16, x.device)
    wrong = [
        (x.float(), codes, scales, arrived, bias.float()), (x, codes, scales, arrived, bias.float()),
        (x, codes, scales[:1], arrived, bias), (x[..., :8], codes[:, :8], scales, arrived, bias),
        (x[..., :40], codes[:, :40].contiguous(), scales, arrived, bias),
        (x.clone().requires_grad_(), codes, scales, arrived, bias),
    ]  # fmt: skip
    for rows in (1, 2):
        others = [(given.expand(1, rows, -1), *more) for given, *more in wrong]
        assert [products.product_of_codes(*given) for given in others] == [None] * len(others)
    held = codes, scales, arrived, bias
    assert products.product_of_codes(x.expand(1, 2, 64), *held, gated=True) is None
    assert not found
    assert products.product_of_codes(x[0], *held).shape == (1, 16)
    assert products.product_of_codes(x, *held, gated=True).shape == (1, 1, 8)


@pytest.mark.parametrize("units", [False, True])
def test_how_many_rows_are_multiplied_by_float8_codes(found, units, monkeypatch):
    """A few where the device multiplies float8, of any number where it does not."""
    monkeypatch.setattr(products, "has_float8", lambda device: units)
    codes, scales = coded(16, 64)
    given = codes, scales, counters(16, codes.device), None
    x = operands(160, 64)[1]
    for m in (0, 2, 8, 9, 129):
        got = products.product_of_codes(x[None, :m], *given)
        assert (got is None) == (m == 0 or (units and m > 8))
        if got is not None:
            want = F.linear(x[None, :m].double(), codes.double() * scales.double())
            assert got.shape == want.shape
            assert float((got.double() - want).norm() / want.norm()) < 2**-7
    assert not found


@pytest.mark.parametrize("base", ["llama-mini", "gpt2-tiny"])
def test_every_dense_product_of_a_served_model(base, found):
    """Merged, tied and with biases: of one row and not of two, nor of models that are not served."""
    plain, served = (build(spec(base, tie_embeddings=True), DEVICE, torch.bfloat16, 0) for _ in range(2))
    served.requires_grad_(False)
    fused.fuse_elementwise(served)
    products.choose_served_products(served)
    fused.merge_projections(served)
    ids = torch.tensor([[7, 9]], device=DEVICE)
    with torch.inference_mode():
        want = plain(ids[:, :1])
        served(ids)
        assert not found
        got = served(ids[:, :1])
    assert sum(n * k for n, k in found) == sum(m.weight.numel() for m in plain.modules() if isinstance(m, nn.Linear))
    assert (300, 32) in found
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 0.02  # a few roundings of 2^-9


def test_float8_products_of_a_served_model(found):
    """Merged: queries, keys and values, and gates with what they gate, of one row by the kernel for that, of two by
    that for few. Logits are those of layers one by one, with the same codes."""
    plain, served = (build(spec("llama-mini"), DEVICE, torch.bfloat16, 0) for _ in range(2))
    for made in (plain, served):
        made.requires_grad_(False)
        replace_linears(made, StoredFp8Linear)
    join_served(served)
    ids = torch.tensor([[7, 9]], device=DEVICE)
    with torch.inference_mode():
        both = [made(ids) for made in (plain, served)]
        assert not found
        plain_row = plain(ids[:, :1])
        alone = found.copy()
        found.clear()
        row = served(ids[:, :1])
    layers = len(plain.layers)
    assert (len(alone), len(found)) == (7 * layers, 4 * layers)
    assert sum(n * k for n, k in alone) == sum(n * k for n, k in found)
    for want, got in (both, (plain_row, row)):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 0.02  # a few roundings of 2^-9


def test_gradients_are_pytorchs(found):
    x, w, _ = operands(16, 64)
    parts = [nn.Parameter(w.clone()) for _ in range(2)]
    given = x[0].clone().requires_grad_()
    functions.gated_linear(given, torch.cat([p.detach() for p in parts]), None, [*parts, None, None], None,
                           products.SERVED).sum().backward()  # fmt: skip
    assert given.grad is not None
    assert parts[0].grad is not None
    assert not found
