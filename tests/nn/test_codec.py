"""Blockwise 8-bit dynamic codes: nearest value by plain search, errors by the map's own gaps, and bitsandbytes."""

import pytest
import torch

from ridgeline.nn.quant.codec import decode_blockwise8, dynamic_map, encode_blockwise8


def numbers(n: int = 10_000, seed: int = 0) -> torch.Tensor:
    """Over many magnitudes, as gradients and moments are."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * 10 ** (4 * torch.rand(n, generator=g) - 6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("shape", "block"), [((10_000,), 256), ((40, 250), 2048), ((7,), 256), ((300_000,), 64)])
def test_every_code_is_that_of_the_nearest_value(signed, shape, block):
    n = torch.Size(shape).numel()
    x = numbers(n).view(shape)
    x = x if signed else x.abs()
    codes, peaks = encode_blockwise8(x, signed, block)
    assert (codes.dtype, codes.shape, peaks.shape) == (torch.uint8, x.shape, (-(-n // block),))
    values = dynamic_map(signed)
    whole = peaks.repeat_interleave(block)[:n].view(shape)
    scaled = (x / whole).flatten()
    assert torch.equal(codes.flatten().long(), torch.bucketize(scaled, (values[1:] + values[:-1]) / 2))
    back = decode_blockwise8(codes, peaks, signed, block)
    assert back.shape == x.shape
    assert torch.equal(back, values[codes.long()] * whole)
    gaps = torch.nn.functional.pad(values.diff(), (1, 1))
    half = torch.maximum(gaps[:-1], gaps[1:])[codes.long()] / 2 * whole
    assert bool(((back - x).abs() <= half * 1.001).all())


def test_every_upper_half_of_a_float_leads_to_the_nearest_value():
    """All 2^16 of them, at both ends of what they span: the search's tables have no hole."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    for lower in (0, 1, 0xFFFF):
        x = (upper | lower).view(torch.float32)
        x = x[x.isfinite() & (x.abs() <= 1)]
        x = torch.cat((x, torch.ones(1)))
        codes, _ = encode_blockwise8(x, True, len(x))
        values = dynamic_map(True)
        assert torch.equal(codes.long(), torch.bucketize(x, (values[1:] + values[:-1]) / 2))


def test_zeros_stay_and_what_is_not_finite_shows():
    codes, peaks = encode_blockwise8(torch.zeros(10), block=4)
    assert torch.equal(decode_blockwise8(codes, peaks, block=4), torch.zeros(10))
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(8)
        x[1] = bad
        back = decode_blockwise8(*encode_blockwise8(x, block=4), block=4)
        assert not back[:4].isfinite().any()
        assert torch.equal(back[4:], x[4:])
    assert encode_blockwise8(torch.zeros(0))[0].shape == (0,)


@pytest.mark.parametrize("signed", [True, False])
def test_map_equals_bitsandbytes_and_no_error_is_larger(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed)
    assert torch.equal(theirs, dynamic_map(signed))
    x = numbers(100_000) if signed else numbers(100_000).abs()
    want, state = functional.quantize_blockwise(x, code=theirs, blocksize=256)
    codes, peaks = encode_blockwise8(x, signed, 256)
    assert torch.equal(peaks, state.absmax)
    mine = float((decode_blockwise8(codes, peaks, signed, 256) - x).norm())
    other = float((functional.dequantize_blockwise(want, state) - x).norm())
    print(f"other codes: {float((codes != want).float().mean()):.2g}, error {mine:.6g} against {other:.6g}")
    # Its search on CPUs does not always find the nearest value near zero; where it matters, it does.
    assert other / 1.01 < mine <= other * (1 + 1e-6)
