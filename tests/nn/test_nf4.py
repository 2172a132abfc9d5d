"""NF4 against the published values, a plain search, dense products, and bitsandbytes."""

import pytest
import torch
from torch import nn

from ridgeline.nn.quant.nf4 import NF4Linear, codebook, dequantize, expand, quantize, quantize_peaks
from ridgeline.nn.quant.quantized import expanded

PUBLISHED = [  # arXiv:2305.14314, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def weight(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_the_16_values_are_the_published_ones():
    assert torch.allclose(codebook(), torch.tensor(PUBLISHED), rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(48, 256), (5, 64), (3, 32), (4, 200), (700, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_becomes_the_nearest_value_of_its_block(shape, dtype):
    w = weight(*shape)
    codes, peaks = quantize(w)
    rows, width = shape
    assert (codes.dtype, tuple(codes.shape), tuple(peaks.shape)) == (
        torch.uint8,
        (rows, width // 2),
        (rows, -(-width // 64)),
    )
    whole = peaks.repeat_interleave(64, 1)[:, :width]
    nearest = (w[..., None] / whole[..., None] - codebook()).abs().argmin(-1)
    assert torch.equal(expand(codes, peaks, dtype), (codebook()[nearest] * whole).to(dtype))


def test_double_quantization_costs_little_and_zeros_stay():
    w = weight(64, 4096)
    codes, peaks = quantize(w)
    once = (expand(codes, peaks) - w).norm()
    twice = (dequantize(codes, *quantize_peaks(peaks)) - w).norm()
    assert once < twice < 1.01 * once
    codes, peaks = quantize(torch.zeros(2, 128))
    assert torch.equal(dequantize(codes, *quantize_peaks(peaks)), torch.zeros(2, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_input_gradient_are_those_of_the_expanded_weight(dtype):
    linear = nn.Linear(128, 48)
    coded = NF4Linear(linear)
    dense = coded.expand(coded.codes, coded.scales, coded.spans, dtype=dtype)
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    y = coded(x)
    want = nn.functional.linear(x, dense) + linear.bias.to(dtype)
    assert torch.equal(y, want)
    out = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(v, x, out)[0] for v in (y, want)))
    assert not any(p.requires_grad for n, p in coded.named_parameters() if n != "bias")


def test_parts_along_rows_and_along_blocks_expand_to_parts():
    coded = NF4Linear(nn.Linear(256, 12, bias=False))
    codes, scales, spans = coded.codes, coded.scales, coded.spans
    whole = dequantize(codes, scales, spans)
    assert torch.equal(dequantize(codes[4:8], scales[4:8], spans[4:8]), whole[4:8])
    assert coded.cut_by_input("codes")
    assert not coded.cut_by_input("spans")
    assert torch.equal(dequantize(codes[:, 64:], scales[:, 2:], spans), whole[:, 128:])


def test_stored_bytes_are_half_a_byte_per_weight_and_its_scales():
    coded = NF4Linear(nn.Linear(4096, 64, bias=False))
    assert sum(p.nbytes for p in coded.parameters()) == 64 * (4096 // 2 + 4096 // 64 + 8)


def test_an_expanded_state_is_the_plain_models():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.norm = NF4Linear(nn.Linear(64, 8)), nn.LayerNorm(8)

    holder = Holder()
    state = expanded(holder.state_dict(), NF4Linear)
    assert set(state) == {"q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias"}
    x = torch.randn(3, 64)
    assert torch.equal(nn.functional.linear(x, state["q_proj.weight"]) + state["q_proj.bias"], holder.q_proj(x))


def test_codes_and_errors_equal_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(96, 512)
    theirs, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    codes, peaks = quantize(w)
    assert torch.equal(codes.flatten(), theirs.flatten())
    assert torch.equal(peaks.flatten(), state.absmax)
    assert torch.allclose(expand(codes, peaks), functional.dequantize_4bit(theirs, state), rtol=1e-6, atol=0)


def test_double_quantization_equals_bitsandbytes_where_a_row_is_its_256_blocks():
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(1, 16384)
    theirs, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, peaks = quantize(w)
    scales, spans = quantize_peaks(peaks)
    mine = float((dequantize(codes, scales, spans) - w).norm())
    assert mine == pytest.approx(float((functional.dequantize_4bit(theirs, state) - w).norm()), rel=1e-4)
    assert spans.view(torch.float32)[0, 1] == pytest.approx(float(state.offset), rel=1e-6)
