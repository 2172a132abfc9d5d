"""Thread block folding: rows that are walked in tiles give what whole rows give, at widths beyond one block."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.test_kernels import chunks_of, gradients, pair

from ridgeline.nn.kernels import functions
from ridgeline.nn.model import fused, fused_loss
from ridgeline.nn.model.loss import token_loss

COLUMNS = 1024


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    from ridgeline.nn.kernels import gpu

    monkeypatch.setattr(functions, "call", gpu.call)


def formula(x, update, weight, bias, eps, centered):
    total = (x + update).double()
    r = total - total.mean(-1, keepdim=True) if centered else total
    y = r * (r.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return total, y if bias is None else y + bias.double()


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("size", [12288, 12300, 1025])
def test_norms_of_wide_rows_both_ways(size, centered):
    torch.manual_seed(0)
    x, update = (torch.randn(3, size, requires_grad=True, device=DEVICE) for _ in range(2))
    weight = torch.randn(size, requires_grad=True, device=DEVICE)
    bias = torch.randn(size, requires_grad=True, device=DEVICE) if centered else None
    leaves = [t for t in (x, update, weight, bias) if t is not None]
    d_total, d_y = torch.randn(3, size, device=DEVICE), torch.randn(3, size, device=DEVICE)
    want = formula(x, update, weight, bias, 1e-5, centered)
    grads = torch.autograd.grad(want, leaves, (d_total.double(), d_y.double()))
    got = functions.add_norm(x, update, weight, bias, 1e-5, centered, torch.float32, COLUMNS)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(got, leaves, (d_total, d_y)), grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    alone = functions.norm(x, weight, bias, 1e-5, centered, torch.float32, COLUMNS)
    want = formula(x, torch.zeros_like(x), weight, bias, 1e-5, centered)[1]
    torch.testing.assert_close(alone.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [5000, 4097, 8192])
def test_softmax_of_long_rows_both_ways(length):
    torch.manual_seed(0)
    q = torch.randn(2, 3, 16, requires_grad=True, device=DEVICE)
    k = torch.randn(2, length, 16, requires_grad=True, device=DEVICE)
    bias = torch.randn(3, length, device=DEVICE)
    bias[:, :2000] = float("-inf")  # whole tiles that are masked
    want = (q.double() @ k.double().transpose(1, 2) * 0.25 + bias.double()).softmax(-1)
    got = functions.probabilities(q, k, bias, 0.25, COLUMNS)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-8)
    d = torch.randn_like(got)
    expected = torch.autograd.grad(want, (q, k), d.double())
    for a, b in zip(torch.autograd.grad(got, (q, k), d), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_trains_the_same_on_tiles_of_16(family):
    plain, other, _ = pair(family, torch.float32, device=DEVICE)
    fused.fold(other, 16)
    loss, want = gradients(plain, token_loss, shape=(1, 20))
    got_loss, got = gradients(other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(8)), shape=(1, 20))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    for name, g in got.items():
        if not name.endswith("k_proj.bias"):  # whose gradient is zero but for rounding
            assert float((g - want[name]).norm() / want[name].norm()) < 1e-5, name


def test_folding_reaches_every_kernel(monkeypatch):
    from ridgeline.nn.kernels import gpu

    asked = {}

    def call(name, *args, **walk):
        asked.setdefault(name, set()).add(walk.get("columns", 0))
        return gpu.call(name, *args, **walk)

    monkeypatch.setattr(functions, "call", call)
    _, other, _ = pair("llama", torch.float32, device=DEVICE)
    fused.fold(other, 16)
    gradients(other, token_loss, shape=(1, 6))
    walked = {n for n, columns in asked.items() if columns == {16}}
    assert walked == {"rl_add_norm", "rl_add_norm_backward", "rl_softmax", "rl_softmax_backward"}
