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


@pytest.mark.parametrize("dtype", [codec.E4M3, codec.E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (70, 130)])
def test_codes(dtype, given, shape):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(given) * 3
    # In the interpreter before the last rounding, in which it loses carries into the exponent.
    (codes, scale, inverse), want, factor = both(t, dtype, None if DEVICE == "cuda" else torch.float32)
    assert float(scale) == pytest.approx(float(factor), rel=1e-6)
    assert float(inverse) == pytest.approx(1 / float(factor), rel=1e-6)
    if DEVICE == "cuda":
        assert float((codes.double() != want.double()).double().mean()) < 1e-3  # for scales that differ in a last bit
    else:
        torch.testing.assert_close(codes, t.float() * factor, rtol=1e-6, atol=0)
        assert float(codes.abs().max()) <= codec.LARGEST[dtype]


def test_extremes():
    for bad in (math.inf, -math.inf, math.nan):  # an overflow must not be hidden by saturation
        (_, scale, inverse), _, _ = both(torch.tensor([1.0, bad, 2.0]), codec.E4M3)
        assert math.isnan(float(scale))
        assert math.isnan(float(inverse))
    (codes, scale, _), _, _ = both(torch.zeros(5), codec.E4M3)
    assert float(scale) == 1
    assert codes.double().tolist() == [0.0] * 5
    (_, scale, _), _, factor = both(torch.tensor([1e-38, -1e-38]), codec.E4M3)
    assert float(scale) == float(factor) == 2.0**60
