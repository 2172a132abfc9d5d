"""Products with words of the ternary dictionary in Triton (its interpreter, where there is no GPU)."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from tests.nn.test_ternary import coded, drawn

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from ridgeline.nn.kernels.ternary import ternary_product
from ridgeline.nn.ternary import Ternary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is off", allow_module_level=True)


@pytest.mark.parametrize("zeros", [0.0, 0.6, 0.885, 1.0])
@pytest.mark.parametrize("shape", [(12, 700), (5, 33), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(shape, zeros, dtype):
    code = coded(drawn(*shape, zeros))
    moved = Ternary(*(t.to(DEVICE) for t in (code.codes, code.offsets, code.low, code.high)), code.width)
    for lines in (1, 3, 6):
        x = torch.randn(lines, shape[1], generator=torch.Generator().manual_seed(lines)).to(dtype)
        got = ternary_product(x.to(DEVICE), moved).cpu()
        want = F.linear(x.double(), code.dense(torch.float64))
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(x.norm()))
