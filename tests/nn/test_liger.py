"""Liger Kernel's operators as our engines call them, in Triton's interpreter or on a GPU, against fp64."""

import sys

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE

pytest.importorskip("liger_kernel", reason="Liger Kernel is not installed")

from ridgeline import catalog
from ridgeline.nn.kernels import functions, liger
from ridgeline.nn.model import fused, fused_loss
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import IGNORE

CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3}  # the interpreter does not add in bf16


class Scalar(float):
    """A number as kernels see it: the interpreter leaves Python's, which have no dtype."""

    def to(self, dtype):
        return self


class Interpreted:
    def __init__(self, function):
        self.function = function

    def apply(self, *given):
        return self.function.apply(*(Scalar(x) if type(x) is float else x for x in given))


@pytest.fixture
def norms(monkeypatch):
    found = liger.NORM.load()
    if DEVICE == "cpu":
        import triton.language as tl

        for name in ("rms_norm", "fused_add_rms_norm"):  # whose rsqrt is CUDA's own
            module = sys.modules[f"liger_kernel.ops.{name}"]
            monkeypatch.setattr(module, "rsqrt", lambda x: 1.0 / tl.sqrt(x))
        found._norm, found._add_norm = Interpreted(found._norm), Interpreted(found._add_norm)
    return found


def leaves(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    return [t.requires_grad_() for t in made], [t.detach().double().requires_grad_() for t in made]


def near(found, right, close):
    for a, b in zip(found, right, strict=True):
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < close


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_norms(norms, dtype):
    (x, u, w), (wide_x, wide_u, wide_w) = leaves(dtype, (3, 5, 96), (3, 5, 96), (96,))
    (d, e), (wide_d, wide_e) = leaves(dtype, (3, 5, 96), (3, 5, 96))
    total, y = norms.add_norm(x, u, w, 1e-5)
    summed = wide_x + wide_u
    normed = F.rms_norm(summed, (96,), wide_w, 1e-5)
    near((total, y), (summed, normed), CLOSE[dtype])
    found = torch.autograd.grad((total, y), (x, u, w), (d, e))
    near(found, torch.autograd.grad((summed, normed), (wide_x, wide_u, wide_w), (wide_d, wide_e)), 2 * CLOSE[dtype])
    before = d.clone()
    y = norms.norm(x, w, 1e-5)
    normed = F.rms_norm(wide_x, (96,), wide_w, 1e-5)
    found = torch.autograd.grad(y, (x, w), d)
    near(found, torch.autograd.grad(normed, (wide_x, wide_w), wide_d), 2 * CLOSE[dtype])
    assert torch.equal(d, before)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_swiglu(dtype):
    (x, gate, up, d), wide = leaves(dtype, (7, 16), (24, 16), (24, 16), (7, 24))
    y = functions.gated_linear(x, torch.cat([gate.detach(), up.detach()]), None, [gate, up, None, None],
                               liger.SWIGLU.load())  # fmt: skip
    right = F.silu(F.linear(wide[0], wide[1])) * F.linear(wide[0], wide[2])
    near([y], [right], 2 * CLOSE[dtype])
    near(torch.autograd.grad(y, (x, gate, up), d), torch.autograd.grad(right, wide[:3], wide[3]), 2 * CLOSE[dtype])


@pytest.mark.parametrize("dtype", [*CLOSE, torch.bfloat16])
def test_head_with_loss(dtype):
    close = CLOSE.get(dtype, 1e-2)
    (x, w), (wide_x, wide_w) = leaves(dtype, (40, 16), (64, 16))
    labels = torch.randint(64, (40,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels[3] = IGNORE
    loss = liger.HEAD_LOSS.load()(x, w, None, labels)
    right = F.cross_entropy(F.linear(wide_x, wide_w), labels, reduction="sum")
    near([loss], [right], close)
    near(torch.autograd.grad(loss / 3, (x, w)), torch.autograd.grad(right / 3, (wide_x, wide_w)), close)


def test_a_model_with_all_of_them(norms):
    """Loss and gradients of fused layers on Liger's kernels are those of ours."""
    ids = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def grads(norm, gated, loss):
        model = build(catalog.model("llama-tiny"), torch.device(DEVICE), torch.float32, 0)
        fused.merge_projections(model, gated)
        fused.fuse_elementwise(model, norm)
        total, _ = fused_loss.chunked_token_loss(model(ids, return_hidden=True), model.head, ids, lambda *_: 32, loss)
        total.backward()
        return [total, *(p.grad for p in model.parameters())]

    theirs = grads(norms, liger.SWIGLU.load(), liger.HEAD_LOSS.load())
    near(theirs, [t.double() for t in grads(None, None, None)], 1e-5)
