"""The Triton kernels against the plain modules: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.test_kernels import chunks_of, gradients, pair

from ridgeline.nn.kernels import functions
from ridgeline.nn.model import fused_loss
from ridgeline.nn.model.loss import token_loss


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    from ridgeline.nn.kernels import gpu

    monkeypatch.setattr(functions, "call", gpu.call)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_forward_and_backward(family):
    plain, other, _ = pair(family, torch.float32, device=DEVICE)
    loss, want = gradients(plain, token_loss, shape=(1, 6))
    got_loss, got = gradients(other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(4)), shape=(1, 6))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    for name, g in got.items():
        if not name.endswith("k_proj.bias"):  # whose gradient is zero but for rounding
            assert float((g - want[name]).norm() / want[name].norm()) < 1e-5, name


def test_bf16_storage():
    plain, other, _ = pair("llama", torch.float32, device=DEVICE)
    loss, want = gradients(plain, token_loss, shape=(1, 6))
    got_loss, got = gradients(
        other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(4)), torch.bfloat16, (1, 6)
    )
    assert got_loss == pytest.approx(loss, rel=2e-3)
    assert all(float((got[n] - want[n]).norm() / want[n].norm()) < 0.05 for n in want)


def test_adamw():
    torch.manual_seed(0)
    n = 1500
    start, g = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    p = torch.nn.Parameter(start.clone())
    p.grad = g
    torch.optim.AdamW([p], lr=3e-3, weight_decay=0.1).step()
    ours, m, v = start.clone(), torch.zeros_like(g), torch.zeros_like(g)
    low = torch.empty_like(g, dtype=torch.bfloat16)
    functions.adamw_(low, ours, g, m, v, 3e-3, 0.9, 0.999, 1e-8, 0.1, 1)
    assert torch.allclose(ours, p.detach(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(low.float(), ours, rtol=2**-7)  # the interpreter truncates where devices round
