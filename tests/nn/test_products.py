"""Products in fp32 by oneDNN are those of ``F.linear``; what they do not suit is computed as before."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import catalog
from ridgeline.nn.adapters.lora_linear import LoRALinear
from ridgeline.nn.adapters.mask import MaskLinear
from ridgeline.nn.kernels import products
from ridgeline.nn.model.init import build
from ridgeline.nn.parallel import collectives, divide

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture
def onednn_calls(monkeypatch):
    """Shapes of the products that oneDNN computed, as on a CPU where it is the faster."""
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    shapes, plain = [], products._product

    def count(x, weight, bias):
        shapes.append((*x.shape, *weight.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(products, "_product", count)
    return shapes


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(products, "LARGE", 0)


class Within(torch.autograd.Function):
    """A product within an autograd function, whose results others may write to if they are no views."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.shape = x.shape
        return products.linear(x, weight)

    @staticmethod
    def backward(ctx, d):
        return d.new_ones(ctx.shape), None


def leaves(*shapes, **options):
    return [torch.randn(s, generator=torch.Generator().manual_seed(i), **options) for i, s in enumerate(shapes)]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 1, 24), (0, 24)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("trained", ["", "xwb", "x", "w", "b"])
def test_result_and_gradients(onednn_calls, shape, transposed, trained):
    x, w, b = leaves(shape, (24, 16) if transposed else (16, 24), (16,))
    w = w.t() if transposed else w
    given = [t.detach().requires_grad_(name in trained) for name, t in zip("xwb", (x, w, b), strict=True)]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    y, expected = products.linear(*given), F.linear(*wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert onednn_calls == [(*shape, 16, 24)]
    if trained:
        d = torch.randn_like(expected)
        y.backward(d.float())
        expected.backward(d)
        for own, other in zip(given, wide, strict=True):
            assert (own.grad is None) == (other.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("trained", [False, True])
def test_results_may_be_written_to(onednn_calls, trained):
    """As those of ``F.linear``, within an autograd function too."""
    x, w, _ = leaves((2, 5, 24), (16, 24), (16,))
    w = w.detach().requires_grad_(trained)
    for y in (products.linear(x, w), Within.apply(x, w)):
        assert not y._is_view()
        y.flatten(0, 1).mul_(2)
        if y.requires_grad:
            y.sum().backward()
    assert len(onednn_calls) == 2


@pytest.mark.usefixtures("any_size")
def test_gradients_of_gradients(onednn_calls):
    found = []
    for linear, dtype in ((products.linear, torch.float32), (F.linear, torch.float64)):
        x, w = (t.to(dtype).requires_grad_() for t in leaves((5, 24), (16, 24)))
        (dx,) = torch.autograd.grad(linear(x, w).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), (x, w)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert onednn_calls


def test_what_it_does_not_suit(onednn_calls, monkeypatch):
    large = torch.randn(1 << 11, 1 << 10)
    for x, w in [
        (torch.randn(4, 8), torch.randn(6, 8)),
        (torch.randn(1 << 10), large),
        (torch.randn(2, 1 << 10).double(), large.double()),
        (torch.randn(2, 1 << 10).bfloat16(), large.bfloat16()),
        (torch.randn(2, 1 << 10, device="meta"), large.to("meta")),
        (torch.randn(2, 0), torch.randn(1 << 11, 0)),
    ]:
        y = products.linear(x, w)
        assert y.is_meta or torch.equal(y, F.linear(x, w))
    x = torch.randn(2, 1 << 10)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, large).dtype is torch.bfloat16
    with FlopCounterMode(display=False) as counted:
        products.linear(x, large)
    assert counted.get_total_flops() == 2 * 2 * large.numel()
    _, tangent = torch.func.jvp(lambda t: products.linear(t, large), (x,), (x,))
    assert torch.equal(tangent, F.linear(x, large))
    with monkeypatch.context() as m:
        m.setattr(torch.backends.mkldnn, "enabled", False)
        products.linear(x, large)
    assert not onednn_calls
    products.linear(x, large)
    products.linear(torch.randn(1 << 8, 1 << 9), large.view(1 << 12, 1 << 9)[: 1 << 9])
    assert onednn_calls == [(2, 1 << 10, 1 << 11, 1 << 10), (1 << 8, 1 << 9, 1 << 9, 1 << 9)]


@pytest.mark.usefixtures("any_size")
def test_biases_that_are_not_whole_vectors(onednn_calls):
    """oneDNN reads a bias without looking at its shape or strides."""
    x, w, whole = leaves((3, 24), (16, 24), (16, 2))
    for bias in (whole[:, 0], whole[:1, 0].expand(16), whole[0, 0], whole[:1, 0], whole[:, 0].view(1, 16)):
        assert torch.equal(products.linear(x, w, bias), F.linear(x, w, bias))
    assert not onednn_calls
    for other, why in ((torch.randn(16, 25), "shapes cannot be multiplied"), (torch.randn(2, 16, 24), "dimensions")):
        with pytest.raises(RuntimeError, match=why):
            products.linear(x, other)


@pytest.mark.usefixtures("any_size")
def test_compilers_trace_plain_layers(onednn_calls):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    products.choose_products(layer)
    torch._dynamo.reset()
    found = torch._dynamo.explain(layer)(torch.randn(2, 8))
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    assert not onednn_calls
    torch._dynamo.reset()


@pytest.mark.usefixtures("onednn_calls")
def test_a_layer_that_is_gone_keeps_no_weights():
    layer = nn.Linear(8, 6)
    products.choose_products(layer)
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("any_size")
def test_copies_of_a_layer_are_their_own_and_changed_layers_compute_themselves(onednn_calls):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = nn.Linear(8, 6)
    products.choose_products(layer)
    x, one = torch.randn(3, 8), layer(input=torch.zeros(1, 8)) + 1
    shallow = copy.copy(layer)
    shallow._parameters = {}
    shallow.weight, shallow.bias = (nn.Parameter(p.clone()) for p in layer.parameters())
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer.forward).__self__, shallow
    for own in copies:
        with torch.no_grad():
            own.weight.zero_()
            own.bias.fill_(1)
        assert torch.equal(own(x), torch.ones(3, 6))
    assert not torch.equal(layer(torch.zeros(1, 8)), one), "the layer itself is as it was"
    before, count = layer(x), len(onednn_calls)
    layer.__class__ = Twice
    torch.testing.assert_close(layer(x), 2 * before)
    assert len(onednn_calls) == count
    layer.__class__ = nn.Linear
    layer.forward = len  # as ranks that share a layer replace it
    products.choose_products(layer)
    assert layer.forward is len
    del layer.forward
    torch.testing.assert_close(layer(x), before)
    assert len(onednn_calls) == count + 1


@pytest.mark.usefixtures("any_size")
def test_a_bare_layer_is_scripted_and_exported(onednn_calls):
    layer = nn.Linear(8, 6)
    products.choose_products(layer)
    x = torch.randn(3, 8)
    for made in (torch.jit.script(layer), torch.export.export(layer, (x,)).module()):
        torch.testing.assert_close(made(x), F.linear(x, layer.weight, layer.bias))
    assert not onednn_calls


@pytest.mark.usefixtures("any_size")
def test_adapters_and_divided_layers_too(onednn_calls):
    x = torch.randn(3, 8)
    for adapter in (LoRALinear(nn.Linear(8, 6), 2, 4.0), MaskLinear(nn.Linear(8, 6), 1.0, 0.5)):
        count = len(onednn_calls)
        adapter(x)
        assert len(onednn_calls) > count, adapter
    for divided in (divide._replicated, divide._product):
        count = len(onednn_calls)
        torch.testing.assert_close(divided(layer := nn.Linear(8, 6, bias=False), x), F.linear(x, layer.weight))
        assert len(onednn_calls) == count + 1
    count = len(onednn_calls)
    collectives.linear(x, torch.randn(6, 8))
    assert len(onednn_calls) == count + 1


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_a_model_computes_the_same_either_way(onednn_calls, monkeypatch, name):
    spec = catalog.model(name)
    ids = torch.randint(spec.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    for on in (True, False):
        monkeypatch.setattr(products, "by_onednn", lambda on=on: on)
        model, count = build(spec), len(onednn_calls)
        loss = model(ids).float().logsumexp(-1).sum()
        loss.backward()
        assert (len(onednn_calls) > count) == on
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    peak = max(float(g.abs().max()) for g in found[1][1].values())  # keys' biases have gradients of rounding alone
    for n, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][n], rtol=1e-4, atol=1e-5 * peak, msg=n)
