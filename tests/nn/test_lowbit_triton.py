"""Products with low-bit codes in Triton (its interpreter, where there is no GPU), against the expanded weight."""

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.nn.test_packed_linear import record, rows

from ridgeline.nn.kernels.lowbit_matmul import lowbit_product
from ridgeline.nn.quant.packed import pack_bits


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("out", "width", "group"), [(40, 128, 64), (33, 96, 32), (16, 80, 80), (8, 48, 12)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_product(bits, out, width, group, symmetric):
    p = record(out, width, bits, group, symmetric)
    words = pack_bits(p.codes, bits)
    zero = None if p.zero is None else p.zero.to(DEVICE)
    for m in (3, 18):
        x = rows(m, width)
        got = lowbit_product(x.to(DEVICE), words.to(DEVICE), p.scale.to(DEVICE), zero, bits, group).cpu()
        want = F.linear(x.double(), p.dense(torch.float64))
        close = 1e-5 if DEVICE == "cpu" else 2e-3  # tensor cores round fp32 operands
        assert float((got.double() - want).norm() / want.norm()) < close


def test_splits_of_the_inputs_are_summed():
    p = record(16, 1024, 4, 128, True)
    x = rows(2, 1024).bfloat16()
    got = lowbit_product(x.to(DEVICE), pack_bits(p.codes, 4).to(DEVICE), p.scale.to(DEVICE), None, 4, 128).cpu()
    want = F.linear(x.double(), p.dense(torch.float64))
    assert float((got.double() - want).norm() / want.norm()) < 1e-2
