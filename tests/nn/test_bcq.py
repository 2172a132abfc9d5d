"""Binary-coding quantization: errors that fall, the best scales by brute force, gradients by autograd."""

from itertools import pairwise, product

import pytest
import torch
from torch import nn

from ridgeline.nn.quant.bcq import BinaryLinear, expand, fit, pack, unpack
from ridgeline.nn.quant.quantized import expanded


def weight(rows: int = 12, width: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(w: torch.Tensor, bits: int, group: int, rounds: int = 15) -> float:
    signs, scales = fit(w, bits, group, rounds)
    size = group or w.shape[1]
    back = (signs.view(len(w), -1, size, bits) * scales.unsqueeze(2)).sum(-1).view(w.shape)
    return float((w - back).norm() / w.norm())


@pytest.mark.parametrize("group", [0, 32])
def test_error_falls_with_every_bit_and_no_alternation_raises_it(group):
    w = weight()
    by_bits = [error(w, q, group) for q in (1, 2, 3, 4)]
    assert all(b < 0.75 * a for a, b in pairwise(by_bits)), by_bits
    for q in (2, 3, 4):
        by_rounds = [error(w, q, group, rounds) for rounds in (0, 1, 2, 4, 8, 15)]
        assert all(b <= a for a, b in pairwise(by_rounds)), by_rounds
        assert by_rounds[-1] < 0.95 * by_rounds[0], "alternating is better than greedy"
    assert error(w, 3, 32) < error(w, 3, 0), "more scales fit better"


def test_one_bit_is_the_mean_magnitude_and_two_bits_of_four_weights_are_the_best_there_are():
    w = weight(3, 16)
    signs, scales = fit(w, 1)
    assert torch.equal(signs[..., 0] > 0, w >= 0)
    assert torch.allclose(scales[:, 0, 0], w.abs().mean(1))
    w = torch.tensor([[0.9, -0.1, -0.8, 0.2, 0.15, -0.85]], dtype=torch.float64)
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=6)), dtype=torch.float64)
    basis = torch.stack((signs[:, None].expand(64, 64, 6), signs[None].expand(64, 64, 6)), -1)
    left = w[0] - (basis @ (torch.linalg.pinv(basis) @ w[0]).unsqueeze(-1)).squeeze(-1)
    assert error(w, 2, 0) * float(w.norm()) == pytest.approx(float(left.norm(dim=-1).min()), rel=1e-5)


def test_scales_are_positive_and_the_largest_comes_first():
    _, scales = fit(weight(), 4, 16)
    assert bool((scales >= 0).all())
    assert bool((scales.diff(dim=-1) <= 0).all())


def test_packing_is_one_bit_per_weight_and_is_undone():
    signs, scales = fit(weight(), 3, 64)
    planes = pack(signs)
    assert (planes.dtype, tuple(planes.shape)) == (torch.uint8, (12, 3, 16))
    for i in range(3):
        assert torch.equal(unpack(planes[:, i]), signs[..., i].float())
    dense = expand(planes, scales[..., 0], scales[..., 1:])
    want = (signs.view(12, 2, 64, 3) * scales.unsqueeze(2)).sum(-1).view(12, 128)
    assert torch.allclose(dense, want, atol=1e-7)


@pytest.mark.parametrize("group", [0, 16])
def test_output_and_gradients_are_those_of_the_sums(group):
    torch.manual_seed(0)
    layer = BinaryLinear(nn.Linear(48, 20), 3, group)
    signs = torch.stack([unpack(layer.planes[:, i]) for i in range(3)], -1).double().view(20, -1, group or 48, 3)
    alpha = layer.alpha.detach().double().requires_grad_()
    scales = torch.cat((alpha.unsqueeze(-1), layer.rest.double()), -1)
    x = torch.randn(5, 48, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    want = x64 @ (signs * scales.unsqueeze(2)).sum(-1).view(20, 48).T + layer.bias.double()
    y = layer(x)
    assert torch.allclose(y.double(), want, atol=1e-5)
    out = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, layer.alpha), out)
    for a, b in zip(got, torch.autograd.grad(want, (x64, alpha), out.double()), strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-5)
    assert [n for n, p in layer.named_parameters() if p.requires_grad and n != "bias"] == ["alpha"]
    assert layer.alpha.numel() == 20 * (48 // (group or 48))


def test_an_expanded_state_is_the_plain_models():
    holder = nn.ModuleDict({"q_proj": BinaryLinear(nn.Linear(64, 8), 2), "norm": nn.LayerNorm(8)})
    state = expanded(holder.state_dict(), BinaryLinear)
    assert set(state) == {"q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias"}
    x = torch.randn(3, 64)
    assert torch.equal(nn.functional.linear(x, state["q_proj.weight"]) + state["q_proj.bias"], holder["q_proj"](x))
