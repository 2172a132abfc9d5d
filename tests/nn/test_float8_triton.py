"""Float8 codes from Triton (its interpreter, where there is no GPU) against those of PyTorch's operators."""

import math

import pytest
import torch
from tests.nn.interpreter import DEVICE

from ridgeline.nn.kernels import float8
from ridgeline.nn.quant import codec


def both(t, dtype, held=None):
    """Ours in the storage dtype ``held``, and PyTorch's operators'."""
    ours = float8.encode(t.to(DEVICE), held or dtype, codec.LARGEST[dtype])
    scale = codec.scale_for(codec.peak_of(t), dtype)
    return [x.cpu() for x in ours], codec.encode(t, scale, dtype), scale


@pytest.mark.parametrize("dtype", [codec.E4M3])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (70, 130)])
def test_codes(dtype, given, shape):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given) * 3
    # In the interpreter before the last rounding, in which it loses carries into the exponent.
    (codes, scale, inverse), want, expected = both(t, dtype, None if DEVICE == "cuda" else torch.float32)
    assert float(scale) == pytest.approx(float(expected), rel=1e-6)
    assert float(inverse) == pytest.approx(1 / float(expected), rel=1e-6)
    if DEVICE == "cuda":
        assert float((codes.double() != want.double()).double().mean()) < 1e-3  # for scales that differ in a last bit
    else:
        torch.testing.assert_close(codes, t.float() * expected, rtol=1e-6, atol=0)
        assert float(codes.abs().max()) <= codec.LARGEST[dtype]


def test_extremes():
    for bad in (math.inf, -math.inf, math.nan):  # an overflow must not be hidden by saturation
        (_, scale, inverse), _, _ = both(torch.tensor([1.0, bad, 2.0]), codec.E4M3)
        assert math.isnan(float(scale))
        assert math.isnan(float(inverse))
    (codes, scale, _), _, _ = both(torch.zeros(5), codec.E4M3)
    assert float(scale) == 1
    assert codes.double().tolist() == [0.0] * 5
    (_, scale, _), _, expected = both(torch.tensor([1e-38, -1e-38]), codec.E4M3)
    assert float(scale) == float(expected) == 2.0**60


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (130, 70), (257, 64), (320, 128)])
def test_codes_also_transposed(given, shape):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given)
    held = None if DEVICE == "cuda" else torch.float32
    codes, transposed, inverse = float8.encode_transposed(t.to(DEVICE), held or codec.E4M3, 448.0)
    scale = codec.scale_for(codec.peak_of(t), codec.E4M3)
    assert float(inverse) == pytest.approx(1 / float(scale), rel=1e-6)
    assert torch.equal(codes.double(), transposed.double().t())
    if held:
        torch.testing.assert_close(codes, t.float() * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (130, 70), (257, 64), (272, 300), (40, 1100)])
def test_codes_with_a_power_of_two_for_each_row(shape, given, transpose, monkeypatch):
    monkeypatch.setattr(float8, "processors", lambda device: 8)  # programs of 1, 8, 16, 16 and 2 rows
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given)
    t *= torch.logspace(-3, 3, shape[0])[:, None] * torch.logspace(2, -2, shape[1])
    t[1], t[:, 2] = 0, 0
    held = None if DEVICE == "cuda" else torch.float32
    found = float8.encode_rowwise(t.to(DEVICE), held or codec.E4M3, 448.0, transpose)
    want = codec.layouts(t, codec.E4M3, rowwise=True, transpose=transpose)
    straight = *found[:2], want.inverse_scale, t
    across = *found[2:], want.transposed_inverse_scale, t.t()
    for codes, inverse, right, exact in (straight, across):
        if codes is None:
            assert not transpose
            continue
        assert torch.equal(inverse.cpu(), right)  # powers of two
        if held:
            assert torch.equal(codes, exact.float() / right)
    if held is None:
        assert torch.equal(found[0].cpu().double(), want.rows.double())
        assert not transpose or torch.equal(found[2].cpu().double(), want.transposed.double())


def test_a_row_that_overflows_is_alone():
    t = torch.ones(4, 6)
    t[2, 3] = math.inf
    _, inverse, _, transposed_inverse = float8.encode_rowwise(t.to(DEVICE), torch.float32, 448.0, True)
    assert inverse.flatten().isnan().tolist() == [False, False, True, False]
    assert transposed_inverse.flatten().isnan().tolist() == [False] * 3 + [True] + [False] * 2
