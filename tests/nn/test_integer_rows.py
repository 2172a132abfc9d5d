"""Kernels of integer rows (in Triton's interpreter, where there is no GPU) against PyTorch's operators and fp64."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.trials import tried
from torch import nn

from ridgeline.nn.kernels import integer_rows
from ridgeline.techniques.optimizers import qft_linear_torch as qft
from ridgeline.techniques.optimizers.qft_linear_torch import IntegerLinear, encode_rows, expand, lion_rows

HOW = {"decay": 0.1, "betas": (0.9, 0.99)}


def layer(out, width):
    torch.manual_seed(0)
    return IntegerLinear(nn.Linear(width, out, bias=False), lambda *_: None).to(DEVICE)


def random(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


@pytest.mark.parametrize(("out", "width"), [(5, 300), (3, 2500), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_matrices_are_those_of_the_operators(out, width, dtype):
    parts = [p.detach() for p in layer(out, width).parts()]
    found = qft._expand_by_kernel(parts, dtype)
    want = qft._expand_by_operators(parts, dtype)
    same = DEVICE == "cuda" or dtype == torch.float32  # the interpreter truncates where devices round
    torch.testing.assert_close(found, want, rtol=0 if same else 2**-9, atol=0)


def test_vectors_of_a_table():
    parts = [p.detach()[torch.tensor([[2, 0], [1, 1]], device=DEVICE)] for p in layer(4, 48).parts()]
    assert torch.equal(qft._expand_by_kernel(parts, torch.float32), qft._expand_by_operators(parts, torch.float32))


@pytest.mark.parametrize(("out", "width"), [(6, 300), (2, 2500), (1, 7)])
@pytest.mark.parametrize("lr", [1e-3, 5.0])
def test_steps_are_those_of_the_operators(out, width, lr):
    """From the same codes each time. With a large ``lr`` scales grow."""
    ours, theirs = layer(out, width), layer(out, width)
    held = [(torch.zeros_like(ours.codes), torch.zeros_like(ours.scale)) for _ in range(2)]
    g = torch.Generator().manual_seed(1)
    for t in range(3):
        grad = torch.randn(out, width, generator=g).to(DEVICE)
        codes, by = encode_rows(grad)
        with torch.no_grad():
            for mine, their in zip((*ours.parts(), *held[0]), (*theirs.parts(), *held[1]), strict=True):
                their.copy_(mine)
            squares = qft.lion_rows_by_kernel(ours, slice(None), grad, *held[0], lr=lr, generator=random(t), **HOW)
            lion_rows(theirs, slice(None), codes * by, *held[1], lr=lr, generator=random(t), **HOW)
        torch.testing.assert_close(squares, grad.double().square().sum(), rtol=1e-6, atol=0)
        for mine, their in zip((*ours.parts(), *held[0]), (*theirs.parts(), *held[1]), strict=True):
            if mine.dtype == torch.int8:  # one of two where a random number lies between
                apart = (mine.int() - their.int()).abs()
                assert apart.max() <= 1
                assert apart.double().mean() < 2e-3
            else:
                torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-7)
        assert not ours.codes.gather(1, ours.columns.long()).any()
    assert (ours.scale.mean() > 3 * layer(out, width).scale.mean()) == (lr > 1)


def test_the_mean_step_is_lions_in_fp64():
    start = layer(4, 100)
    g = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    momentum, scale = encode_rows(torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).to(DEVICE))
    codes, by = encode_rows(g)
    m, rounded, lr, n = momentum.double() * scale.double(), codes.double() * by.double(), 3e-4, 200
    w = expand([p.detach() for p in start.parts()], torch.float64)
    want_w = w * (1 - lr * 0.1) - lr * torch.sign(0.9 * m + 0.1 * rounded)
    got_w, got_m, random_numbers = torch.zeros_like(w), torch.zeros_like(m), random()
    for _ in range(n):
        again, held = layer(4, 100), (momentum.clone(), scale.clone())
        with torch.no_grad():
            qft.lion_rows_by_kernel(again, slice(None), g, *held, lr=lr, generator=random_numbers, **HOW)
        got_w += expand([p.detach() for p in again.parts()], torch.float64) / n
        got_m += held[0].double() * held[1].double() / n
    spread = 0.5 / n**0.5
    assert float((got_w - want_w).abs().max()) < 6 * spread * float(start.scale.max())
    assert float((got_m - 0.99 * m - 0.01 * rounded).abs().max()) < 6 * spread * float(scale.max())


def test_some_rows_alone():
    ours, whole = layer(6, 64), layer(6, 64)
    grad = torch.ones(2, 64, device=DEVICE)
    momentum, scale = torch.zeros_like(ours.codes), torch.zeros_like(ours.scale)
    with torch.no_grad():
        rows = slice(2, 4)
        qft.lion_rows_by_kernel(ours, rows, grad, momentum[rows], scale[rows], lr=0.1, generator=random(), **HOW)
    moved = (ours.codes != whole.codes).any(1)
    assert moved.tolist() == [False, False, True, True, False, False]
    assert scale.flatten().bool().tolist() == moved.tolist()


@pytest.mark.parametrize("off", ["", "expand_rows", "lion_rows"])
def test_they_are_tried_before_they_are_used(off, monkeypatch):
    def wrong(rows, *given):
        found = plain(rows, *given)
        (given[0] if off == "expand_rows" else rows.scale).mul_(1.2)
        return found

    if off:
        plain = getattr(integer_rows, off)
        monkeypatch.setattr(integer_rows, off, wrong)
    said = ["PyTorch's operators compute integer matrices and their updates, as our kernel is wrong"]
    before = torch.get_rng_state()
    assert tried(qft, monkeypatch) == said * bool(off)
    assert torch.equal(torch.get_rng_state(), before), "random numbers of the run are drawn"
