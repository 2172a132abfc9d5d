"""Our float8 linear layers, and 4-bit weights as PyTorch's kernel reads them, beside torchao's on the CPU: the same
rounded numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is not installed")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from ridgeline.techniques.precision.fp8_linear_torch import Float8Product, fp8_linear


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_linear(dtype, rowwise):
    """Forward product and both gradients, with a scale for each tensor or row; rounding of sums in another order
    aside."""
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(48, n, generator=generator).to(dtype) for n in (64, 32))
    weight = (torch.randn(32, 64, generator=generator) * 3).to(dtype)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    recipe = Float8LinearConfig.from_recipe_name("rowwise" if rowwise else "tensorwise")
    theirs = convert_to_float8_training(model, config=replace(recipe, emulate=True))
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    own = weight.clone().requires_grad_()
    y, right = fp8_linear(mine, own, how=Float8Product(rowwise)), theirs(other)
    y.backward(d)
    right.backward(d)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    rounding = float((right.detach().double() - exact).norm() / exact.norm())
    assert 0.01 < rounding < 0.1
    for a, b in ((y, right), (mine.grad, other.grad), (own.grad, theirs[0].weight.grad)):
        close = 1e-6 if dtype == torch.float32 else 4e-3
        assert float((a.double() - b.double()).norm() / b.double().norm()) < close


def test_tiles_of_4_bit_codes(monkeypatch):
    """What the campaign's line beside our products gives PyTorch's kernel is what torchao gives it."""
    from torchao.quantization.quantize_.workflows import Int4TilePackedTo4dTensor

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "gpu")
    from campaign.products import tinygemm

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    seen = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convert_weight_to_int4pack", lambda t, tiles: seen.append((t.clone(), tiles)) or t.int(), "CPU")
        generator = torch.Generator().manual_seed(0)
        theirs = Int4TilePackedTo4dTensor.from_hp(torch.randn(64, 1024, generator=generator).bfloat16(), [1, 128])
        codes = torch.stack((seen[0][0] >> 4, seen[0][0] & 15), -1).view(64, 1024)
        _, group, table = tinygemm(codes, theirs.scale_and_zero[..., 0].t())
    assert group == 128
    assert seen[0][1] == seen[1][1]
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(table[..., 0], theirs.scale_and_zero[..., 0])
    assert table.shape == theirs.scale_and_zero.shape
