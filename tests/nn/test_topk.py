"""Two-level search against PyTorch's own selection."""

import pytest
import torch

from ridgeline.serve import topk


@pytest.mark.parametrize("width", [5, 127, 128, 129, 1000, 32000])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_top_k_is_exact(width, k):
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(width + k))
    x[1, : width // 2] = float("-inf")
    values, ids = topk.top_k(x, k)
    expected = x.topk(min(k, width), dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@pytest.mark.parametrize("width", [5, 129, 4097])
def test_argmax_takes_the_first_of_equals(width):
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width))
    x[2, width // 2] = x[2, -1] = 9.0
    assert topk.argmax(x).tolist() == [int((row == row.max()).nonzero()[0]) for row in x]


def test_a_draw_inverts_the_cumulative_sum():
    x = torch.randn(3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    upto = x.softmax(1).cumsum(1)
    for u in torch.linspace(0, 0.999999, 200, dtype=torch.float64):
        expected = [int(torch.searchsorted(row, u, right=True)) for row in upto]
        assert topk.draw(x, u.expand(3)).tolist() == expected


def test_a_draw_never_takes_what_has_no_weight():
    x = torch.full((2, 300), float("-inf"))
    x[:, 7], x[:, 250] = 0.0, -1.0
    for u in (0.0, 0.5, 0.9999999, 1 - 2**-53):
        assert set(topk.draw(x, torch.tensor([u, u], dtype=torch.float64)).tolist()) <= {7, 250}
