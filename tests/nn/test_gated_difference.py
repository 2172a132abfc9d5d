"""Kernels of gated differences (in Triton's interpreter, where there is no GPU) against PyTorch's operators, fp64."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.trials import tried

from ridgeline.nn.adapters import diff
from ridgeline.nn.adapters.diff import DiffLinear
from ridgeline.nn.adapters.dropout import Dropout
from ridgeline.nn.kernels import gated_difference


def layer(base):
    noise = Dropout(0.0, 5)
    noise.at(2)
    adapter = DiffLinear(base, noise, layer=3)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p, size in ((adapter.adapter_diff, 0.1), (adapter.adapter_gate, 3.0)):
            p.copy_(torch.randn(p.shape, generator=g) * size)
    return adapter.to(DEVICE)


@pytest.mark.parametrize(("out", "width"), [(40, 33), (1, 5), (64, 32)])
@pytest.mark.parametrize("input_gradient", [True, False])
def test_a_layer_is_that_of_the_operators_and_of_fp64(out, width, input_gradient, monkeypatch):
    torch.manual_seed(0)
    base = torch.nn.Linear(width, out)
    adapter = layer(base)
    x = torch.randn(3, 7, width, device=DEVICE, requires_grad=input_gradient)
    dy = torch.randn(3, 7, out, device=DEVICE)
    found = []
    for by_kernels in (True, False):
        monkeypatch.setattr(diff, "_by_kernels", lambda *_, by_kernels=by_kernels: by_kernels)
        y = adapter(x)
        given = [adapter.adapter_diff, adapter.adapter_gate, *[x] * input_gradient]
        found.append([y.detach(), *torch.autograd.grad(y, given, dy)])
    u = diff._noise(adapter.adapter_gate, (5, 2, 3, 0)).double()
    d, gate = (p.detach().double().requires_grad_() for p in (adapter.adapter_diff, adapter.adapter_gate))
    z = (torch.sigmoid(u.log() - (1 - u).log() + gate) * 1.2 - 0.1).clamp(0, 1)
    wide = x.detach().double().requires_grad_()
    y = torch.nn.functional.linear(wide, base.weight.double() + d * z, base.bias.double())
    exact = [y.detach(), *torch.autograd.grad(y, [d, gate, *[wide] * input_gradient], dy.double())]
    for ours, theirs, right in zip(*found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert float((ours - right).norm()) < 2e-6 * float(right.norm())


def test_gates_are_shut_as_by_the_operators(monkeypatch):
    gate = torch.linspace(-9, 9, 1500, device=DEVICE)
    ours, theirs = gate.clone(), gate.clone()
    monkeypatch.setattr(diff, "_by_kernels", lambda *_: True)
    diff.shut(ours, 0.3)
    monkeypatch.undo()
    p = diff.open_chance(theirs)
    torch.testing.assert_close(ours, theirs - 0.3 * p * (1 - p), rtol=1e-6, atol=1e-6)
    assert float((gate - ours).max()) > 0.07


def test_weights_in_16_bits():
    g = torch.Generator().manual_seed(0)
    weight, difference, gate = (torch.randn(20, 30, generator=g).to(DEVICE, torch.float16) for _ in range(3))
    noise = torch.rand(20, 30, generator=g).to(DEVICE, torch.float16)
    found = diff._weight(weight, difference, gate, noise, torch.float16)
    z, _ = diff._gates(gate.float(), noise.float())
    torch.testing.assert_close(found.float(), weight.float() + z * difference.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("kernel", ["gated_weight", "gated_gradients", "shut_gates"])
def test_they_are_tried_before_they_are_used(kernel, off, monkeypatch):
    plain = getattr(gated_difference, kernel)

    def wrong(*given):
        if off and kernel == "shut_gates":
            given = *given[:2], given[2] * 1.1
        plain(*given)
        if off and kernel == "gated_gradients":
            given[4][1].mul_(1.1)  # of the gates
        elif off and kernel == "gated_weight":
            given[4].mul_(1.1)

    monkeypatch.setattr(gated_difference, kernel, wrong)
    said = ["PyTorch's operators compute gated differences of weights, as our kernel is wrong"]
    assert tried(diff, monkeypatch) == said * off
