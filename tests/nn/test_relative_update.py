"""AdaLomo's kernels (in Triton's interpreter, where there is no GPU) against PyTorch's operators and fp64."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.trials import tried

from ridgeline.nn.kernels import relative_update as kernel
from ridgeline.runtime import relative_update
from ridgeline.runtime.optimizers import AdaLomoOptimizer

LR = 0.02


def definition(p, g, s, t):
    """Algorithm 1 of arXiv:2310.10195, in fp64."""
    if p.ndim == 3:
        return torch.stack([definition(p[i], g[i], s.setdefault(i, {}), t) for i in range(len(p))])
    b = 1 - t**-0.8
    if p.ndim == 1:
        s["v"] = v = b * s.get("v", 0.0) + (1 - b) * g**2
    else:
        s["r"] = b * s.get("r", 0.0) + (1 - b) * (g**2).mean(1)
        s["c"] = b * s.get("c", 0.0) + (1 - b) * (g**2).mean(0)
        v = torch.outer(s["r"], s["c"]) / s["r"].mean()
    u = g / v.sqrt()
    sizes = [float((x**2).mean() ** 0.5) for x in (p, u)]
    return p - LR * max(1e-3, sizes[0]) * u / max(1.0, sizes[1])


@pytest.mark.parametrize("shape", [(130, 300), (1, 7), (5, 1), (3, 70, 33), (2, 20, 150), (700,), (40,), (1,)])
@pytest.mark.parametrize(("programs", "growth", "size"), [(1, 10.0, 1.0), (3, 0.1, 1.0), (1000, 0.1, 1e-5)])
def test_updates_are_those_of_the_operators_and_of_fp64(shape, programs, growth, size, monkeypatch):
    """Of gradients that grow, updates are cut to the parameter's size; of those that shrink they are not. A parameter
    that is nearly zero is taken to have some size."""
    monkeypatch.setattr(kernel, "PER_PROCESSOR", programs)
    monkeypatch.setattr(kernel, "processors", lambda device: 1)
    g = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=g).to(DEVICE) * size
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [AdaLomoOptimizer([{"params": [p]}], LR, 0.8, 1e-3) for p in (ours, theirs)]
    want, state = start.double(), {}
    for t in range(1, 4):
        grad = torch.randn(shape, generator=g).to(DEVICE) * growth ** (t - 2)
        want = definition(want, grad.double(), state, t)
        for p, optimizer, by_kernel in zip((ours, theirs), optimizers, (True, False), strict=True):
            p.grad = grad.clone()
            with torch.no_grad():
                optimizer.apply(p, optimizer.param_groups[0], by_kernel)
    assert float((ours.detach() - want).norm()) < 1e-6 * float(want.norm())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * size)
    for name, t in optimizers[0].state[ours].items():
        torch.testing.assert_close(t, optimizers[1].state[theirs][name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(40, 50), (50,)])
def test_weights_in_16_bits_and_a_parameter_without_gradient(shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    for grad in (torch.ones_like(start), torch.zeros_like(start)):
        p = torch.nn.Parameter(start.clone())
        p.grad = grad
        optimizer = AdaLomoOptimizer([{"params": [p]}], LR, 0.8, 1e-3)
        with torch.no_grad():
            optimizer.apply(p, optimizer.param_groups[0], True)
        moved = start.double() - p.double()
        rms = float(start.double().square().mean().sqrt())
        torch.testing.assert_close(moved, LR * rms * grad.double(), rtol=0, atol=2e-3)
        assert bool(moved.any()) == bool(grad.any())


@pytest.mark.parametrize("off", ["", "update_matrix", "update_vector"])
def test_they_are_tried_before_they_are_used(off, monkeypatch):
    def wrong(*given):
        *most, lr, least = given
        plain(*most, lr * 1.2, least)

    if off:
        plain = getattr(kernel, off)
        monkeypatch.setattr(kernel, off, wrong)
    said = ["PyTorch's operators compute AdaLomo's updates, as our kernel is wrong"]
    assert tried(relative_update, monkeypatch) == said * bool(off)
