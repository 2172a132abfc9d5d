"""NF4 weights from one kernel (in Triton's interpreter, where there is no GPU) against PyTorch's operators and fp64."""

import pytest
import torch
from tests.nn.interpreter import DEVICE
from tests.nn.trials import tried

from ridgeline.nn.kernels import nf4_codes
from ridgeline.nn.quant import nf4
from ridgeline.nn.quant.codec import dynamic_map


def coded(rows, width):
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    codes, peaks = nf4.quantize(weight)
    return codes, *nf4.quantize_peaks(peaks)


@pytest.mark.parametrize(("rows", "width"), [(48, 256), (5, 64), (3, 32), (4, 200), (1, 838)])
def test_weights_are_those_of_the_operators(rows, width):
    codes, scales, spans = coded(rows, width)
    found = nf4._by_kernel(codes, scales, spans, torch.float32)
    assert torch.equal(found, nf4.expand(codes, nf4.dequantize_peaks(scales, spans)))
    largest, mean = spans.view(torch.float32).double().unbind(1)
    peaks = dynamic_map(True, codes.device).double()[scales.int()] * largest[:, None] + mean[:, None]
    both = torch.stack((codes >> 4, codes & 15), -1).flatten(1).int()
    exact = nf4.codebook(codes.device).double()[both] * peaks.repeat_interleave(64, 1)[:, :width]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype):
    codes, scales, spans = coded(7, 192)
    found = nf4._by_kernel(codes, scales, spans, dtype)
    want = nf4.expand(codes, nf4.dequantize_peaks(scales, spans), dtype)
    # The interpreter truncates where devices round.
    torch.testing.assert_close(found, want, rtol=0 if DEVICE == "cuda" else 2**-7, atol=0 if DEVICE == "cuda" else 1e-7)


def test_parts_of_rows_blocks():
    codes, scales, spans = coded(12, 256)
    whole = nf4._by_kernel(codes, scales, spans, torch.float32)
    part = nf4._by_kernel(codes[:, 64:].contiguous(), scales[:, 2:], spans, torch.float32)
    assert torch.equal(part, whole[:, 128:])
    assert nf4._by_kernel(codes[:0], scales[:0], spans[:0], torch.float32).shape == (0, 256)


@pytest.mark.parametrize("off", [False, True])
def test_it_is_tried_before_it_is_used(off, monkeypatch):
    plain = nf4_codes.expand_nf4

    def wrong(codes, scales, spans, values, *rest):
        plain(codes, scales, spans, values * (1.1 if off else 1.0), *rest)

    monkeypatch.setattr(nf4_codes, "expand_nf4", wrong)
    assert tried(nf4, monkeypatch) == ["PyTorch's operators compute NF4 weights, as our kernel is wrong"] * off
