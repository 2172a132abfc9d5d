"""Products with words of the ternary dictionary in Triton (its interpreter, where there is no GPU)."""

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.nn.test_ternary import coded, drawn

from ridgeline.nn.kernels.ternary_decode import ternary_product
from ridgeline.nn.quant.ternary import Ternary


@pytest.mark.parametrize("zeros", [0.0, 0.6, 0.885, 1.0])
@pytest.mark.parametrize("shape", [(4, 300), (5, 33), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(shape, zeros, dtype):
    code = coded(drawn(*shape, zeros))
    moved = Ternary(*(t.to(DEVICE) for t in (code.codes, code.offsets, code.low, code.high)), code.width)
    for lines in (1, 3, 6):
        x = torch.randn(lines, shape[1], generator=torch.Generator().manual_seed(lines)).to(dtype)
        got = ternary_product(x.to(DEVICE), moved).cpu()
        want = F.linear(x.double(), code.dense(torch.float64))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(x.norm()))
