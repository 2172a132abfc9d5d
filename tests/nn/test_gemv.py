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


@pytest.fixture
def found(monkeypatch):
    """Shapes of the weights that the kernel multiplied, of layers on any device."""
    shapes, plain = [], gemv.product_of_row

    def count(x, weight, bias=None, gated=False):
        shapes.append(tuple(weight.shape))
        return plain(x, weight, bias, gated)

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


def test_gradients_are_pytorchs(found):
    x, w, _ = operands(16, 64)
    parts = [nn.Parameter(w.clone()) for _ in range(2)]
    given = x[0].clone().requires_grad_()
    functions.gated_linear(given, torch.cat([p.detach() for p in parts]), None, [*parts, None, None], None,
                           products.SERVED).sum().backward()  # fmt: skip
    assert given.grad is not None
    assert parts[0].grad is not None
    assert not found
