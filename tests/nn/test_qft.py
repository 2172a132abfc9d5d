"""Integer training: rounding without bias, Lion's step against its formula, bytes that are really integer."""

import pytest
import torch
from torch import nn

from ridgeline.nn.quant.quantized import expanded
from ridgeline.techniques.optimizers import qft_linear_torch as qft
from ridgeline.techniques.optimizers.qft_linear_torch import (
    IntegerEmbedding,
    IntegerLinear,
    encode_rows,
    expand,
    lion_rows,
    outliers_of,
    quantize,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_stochastic_rounding_has_no_bias():
    x = torch.tensor([-2.0, -1.7, -0.25, 0.0, 0.001, 0.5, 0.9, 3.0])
    n = 10_000
    got = qft.stochastic_round(x.repeat(n, 1), generator())
    assert bool(((got - x).abs() < 1).all())
    assert torch.equal(got[:, [0, 3, 7]], x[[0, 3, 7]].expand(n, 3)), "integers stay"
    error = (got.mean(0) - x).abs()
    assert bool((error <= 4 * (0.25 / n) ** 0.5).all()), error


def test_a_matrix_is_codes_and_its_largest_weights():
    w = torch.randn(16, 200, generator=generator()) * 0.02
    w[3, 7] = 5.0
    stored = quantize(w)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in stored.items()} == {
        "codes": (torch.int8, (16, 200)),
        "scale": (torch.float32, (16, 1)),
        "columns": (torch.int32, (16, 2)),
        "outliers": (torch.float32, (16, 2)),
    }
    back = expand(stored.values() if list(stored) == ["codes", "scale", "columns", "outliers"] else (), torch.float32)
    assert float(back[3, 7]) == 5.0
    assert bool(((back - w).abs() <= stored["scale"] / 2 * 1.001).all())
    plain, scale = encode_rows(w)
    assert float((back - w)[3].norm()) < 0.05 * float((plain * scale - w)[3].norm()), "an outlier spoils its whole row"
    assert outliers_of(10) == 1


def grids(layer: IntegerLinear) -> torch.Tensor:
    return expand(layer.parts(), torch.float64)


def test_output_and_gradients_are_those_of_the_expanded_weight():
    torch.manual_seed(0)
    taken = []
    layer = IntegerLinear(nn.Linear(32, 12), lambda module, dw: taken.append((module, dw)))
    w = expand(layer.parts(), torch.float32).requires_grad_()
    x = torch.randn(3, 5, 32, requires_grad=True)
    want = nn.functional.linear(x, w) + layer.bias
    y = layer(x)
    assert torch.equal(y, want)
    out = torch.randn_like(y)
    dx, dw = torch.autograd.grad(want, (x, w), out)
    (got,) = torch.autograd.grad(y, x, out)
    assert torch.allclose(got, dx, atol=1e-6)
    assert taken[0][0] is layer
    assert torch.allclose(taken[0][1], dw, atol=1e-5)


def test_a_table_takes_gradients_though_nothing_in_it_can():
    torch.manual_seed(0)
    taken = []
    table = IntegerEmbedding(nn.Embedding(20, 16), lambda module, dw: taken.append(dw))
    w = expand(table.parts(), torch.float32).requires_grad_()
    ids = torch.tensor([[1, 5, 5], [0, 19, 1]])
    y, want = table(ids), nn.functional.embedding(ids, w)
    assert torch.equal(y, want)
    out = torch.randn_like(y)
    y.backward(out)
    assert torch.allclose(taken[0], torch.autograd.grad(want, w, out)[0], atol=1e-6)
    with torch.no_grad():
        assert not table(ids).requires_grad


def test_the_mean_step_is_lions():
    """Many roundings of one step: weights and momentum move, in the mean, as the formula says in fp64."""
    torch.manual_seed(0)
    source = nn.Linear(100, 4, bias=False)
    first = IntegerLinear(source, lambda *_: None)
    g = torch.randn(4, 100) * torch.rand(4, 1)
    momentum, momentum_scale = encode_rows(torch.randn(4, 100))
    w, m = grids(first), momentum.double() * momentum_scale.double()
    lr, decay, betas = 3e-4, 0.1, (0.9, 0.99)
    want_w = w * (1 - lr * decay) - lr * torch.sign(betas[0] * m + (1 - betas[0]) * g.double())
    want_m = betas[1] * m + (1 - betas[1]) * g.double()
    got_w, got_m, n = torch.zeros_like(w), torch.zeros_like(m), 2000
    random = generator()
    for _ in range(n):
        layer = IntegerLinear(source, lambda *_: None)
        codes, scale = momentum.clone(), momentum_scale.clone()
        with torch.no_grad():
            lion_rows(layer, slice(None), g.clone(), codes, scale, lr=lr, decay=decay, betas=betas, generator=random)
        got_w += grids(layer) / n
        got_m += codes.double() * scale.double() / n
    spread = float(first.scale.max()) * 0.5 / n**0.5
    assert float((got_w - want_w).abs().max()) < 6 * spread
    assert float((got_w - w).abs().mean()) > 20 * spread, "the signal"
    assert float((got_m - want_m).abs().max()) < 6 * float(momentum_scale.max()) * 0.5 / n**0.5


def test_a_row_that_outgrows_its_scale_gets_a_wider_one():
    layer = IntegerLinear(nn.Linear(50, 2, bias=False), lambda *_: None)
    before = grids(layer)
    with torch.no_grad():
        lion_rows(
            layer, slice(None), -torch.ones(2, 50), torch.zeros_like(layer.codes), torch.zeros_like(layer.scale),
            lr=1.0, decay=0.0, betas=(0.9, 0.99), generator=generator(),
        )  # fmt: skip
    assert float((grids(layer) - before - 1).abs().max()) < 2 * float(layer.scale.max())
    assert int(layer.codes.abs().max()) <= 127


def test_an_expanded_state_is_the_plain_models():
    holder = nn.ModuleDict({"q_proj": IntegerLinear(nn.Linear(64, 8), lambda *_: None), "norm": nn.LayerNorm(8)})
    state = expanded(holder.state_dict(), IntegerLinear)
    assert set(state) == {"q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias"}
    x = torch.randn(3, 64)
    assert torch.equal(nn.functional.linear(x, state["q_proj.weight"]) + state["q_proj.bias"], holder["q_proj"](x))


@pytest.mark.parametrize("width", [64, 1024])
def test_stored_bytes(width):
    layer = IntegerLinear(nn.Linear(width, 32, bias=False), lambda *_: None)
    assert sum(p.nbytes for p in layer.parameters()) == 32 * (width + 4 + 8 * outliers_of(width))
