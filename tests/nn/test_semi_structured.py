"""2:4 weights: told from others anywhere; on sparse tensor cores where there are some."""

import pytest
import torch
from torch import nn

from ridgeline.nn.quant.semi_structured import is_2_4, use_sparse_cores


def pruned(out=128, width=128):
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(0))
    groups = weight.view(-1, 4)
    groups.scatter_(1, groups.abs().topk(2, largest=False).indices, 0)
    return weight


def test_the_pattern_is_recognized():
    weight = pruned()
    assert is_2_4(weight)
    weight[5, 8:11] = 1
    assert not is_2_4(weight)
    assert not is_2_4(torch.zeros(4, 6))


def test_nothing_changes_on_a_cpu():
    model = nn.ModuleDict({"up_proj": nn.Linear(128, 128, bias=False)})
    model["up_proj"].weight.data = pruned()
    assert use_sparse_cores(model) == 0
    assert type(model["up_proj"].weight) is nn.Parameter


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sparse_cores_compute_the_same():
    model = nn.ModuleDict({"up_proj": nn.Linear(128, 128, bias=False)}).cuda().half()
    model["up_proj"].weight.data = pruned().cuda().half()
    x = torch.randn(64, 128, device="cuda", dtype=torch.float16)
    expected = model["up_proj"](x)
    assert use_sparse_cores(model) == 1
    assert torch.allclose(model["up_proj"](x), expected, rtol=2e-2, atol=2e-2)
