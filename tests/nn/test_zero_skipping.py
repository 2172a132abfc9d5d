import pytest
import torch
from tests.compressing import LLAMA
from torch import nn

from ridgeline.nn.model.attention import find_backend, naive_attention
from ridgeline.nn.model.init import build
from ridgeline.nn.model.mask import Mask, make_mask
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.pruning.zero_skipping_torch import SkippingLinear, Tally, skipping_attention


def rectified(*shape, seed=0):
    return torch.relu(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40), (3, 40), (2, 2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_at_threshold_zero(shape, bias, dtype):
    linear = nn.Linear(40, 24, bias=bias).to(dtype)
    tally = Tally()
    x = rectified(*shape).to(dtype)
    y = SkippingLinear(linear, 0.0, 8, tally)(x)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(y, linear(x), **tolerance)
    zeros = (x == 0).sum().item()
    assert (tally.flops, tally.skipped) == (2 * x.numel() * 24, 2 * zeros * 24)
    assert tally.share == zeros / x.numel()


def test_rows_without_any_active_entry():
    linear = nn.Linear(6, 4)
    x = rectified(3, 6)
    x[1] = 0
    x[2] = 0
    torch.testing.assert_close(SkippingLinear(linear, 0.0, 8, Tally())(x), linear(x))


def test_many_rows_share_a_dense_product():
    linear, tally = nn.Linear(40, 24), Tally()
    x = rectified(9, 40)
    assert torch.allclose(SkippingLinear(linear, 0.5, 8, tally)(x), linear(x), atol=1e-6)
    assert tally.skipped == 0


@pytest.mark.parametrize(("most", "skips"), [(0.3, False), (0.7, True)])
def test_too_many_active_entries_share_a_dense_product(most, skips):
    linear, tally = nn.Linear(40, 24), Tally()
    x = rectified(4, 40)
    torch.testing.assert_close(SkippingLinear(linear, 0.0, 8, tally, most)(x), linear(x))
    assert (tally.skipped > 0) == skips


@pytest.mark.parametrize("threshold", [0.1, 0.5, 2.0])
def test_error_is_bounded_by_what_was_skipped(threshold):
    linear, tally = nn.Linear(40, 24), Tally()
    x = rectified(4, 40)
    error = (SkippingLinear(linear, threshold, 8, tally)(x) - linear(x)).abs()
    small = x.abs() <= threshold
    bound = threshold * (small.float() @ linear.weight.abs().t())
    assert (error <= bound + 1e-5).all()
    assert error.max() > 0
    assert tally.skipped == 2 * small.sum().item() * 24


def heads(batch, length, total, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, 8, generator=g)
    return q, torch.randn(batch, 2, total, 8, generator=g), torch.randn(batch, 2, total, 8, generator=g)


@pytest.mark.parametrize("window", [None, 6])
def test_keys_that_no_query_sees_are_left_out_exactly(window):
    """The last four of 40 queries see at most a window of keys behind them."""
    spec = ModelSpec(**{**LLAMA, "family": "mistral", "sliding_window": window})
    q, k, v = heads(2, 4, 40)
    mask = make_mask(spec, True, None, 36, 4, True, q.device, q.dtype)
    tally = Tally()
    backend = skipping_attention(0.0, 8, tally)
    torch.testing.assert_close(backend.function(q, k, v, mask), naive_attention(q, k, v, mask))
    blocks = 5 if window is None else 2  # keys 31 … 39 lie in blocks 3 and 4
    assert tally.flops == 2 * 2 * 4 * 4 * 40 * 8
    assert tally.skipped == tally.flops * (5 - blocks) // 5


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.3])
def test_attention_error_is_bounded(threshold):
    q, k, v = heads(2, 1, 37)
    q = 2 * q
    tally = Tally()
    out = skipping_attention(threshold, 4, tally).function(q, k, v, Mask(None, False))
    exact = naive_attention(q, k, v, Mask(None, False))
    weights = torch.softmax((q.view(2, 2, 2, 8) @ k.transpose(-1, -2)) * 8**-0.5, -1)
    left_out = torch.zeros(2, 2, 37, dtype=torch.bool)
    for start in range(0, 37, 4):
        part = slice(start, start + 4)
        left_out[:, :, part] = (weights[..., part].amax((2, 3)) <= threshold)[..., None]
    bound = threshold * (left_out[..., None] * v.abs()).sum(2)  # [B, G, D]
    error = (out - exact).view(2, 2, 2, 8).abs().amax(2)
    assert (error <= bound + 1e-6).all()
    assert tally.skipped == 2 * 2 * 8 * left_out.sum().item()
    assert tally.skipped > 0


def test_whole_model_decodes_alike():
    from ridgeline.nn.model.generate import generate
    from ridgeline.nn.model.mlp import MLP

    spec = ModelSpec(**{**LLAMA, "activation": "relu", "gated": False})
    model = build(spec)
    ids = torch.randint(0, 258, (2, 9), generator=torch.Generator().manual_seed(0))
    model.set_attention(find_backend("naive"))
    expected = generate(model, ids, 12)
    inner, keys = Tally(), Tally()
    for module in model.modules():
        if isinstance(module, MLP):
            module.down_proj = SkippingLinear(module.down_proj, 0.0, 8, inner)
    model.set_attention(skipping_attention(0.0, 4, keys))
    assert torch.equal(generate(model, ids, 12), expected)
    assert 0.2 < inner.share < 0.6
    assert keys.flops > 0
