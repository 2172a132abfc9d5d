"""A mixture's operators on a CPU: the graph's calls are those that PyTorch makes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline import catalog
from ridgeline.graph import tokens_graph
from ridgeline.nn.model.init import build

NARROW = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_kv_heads": 2,
          "head_dim": 16, "vocab_size": 64}  # fmt: skip
FREE = {"view", "_unsafe_view", "t", "transpose", "unsqueeze", "split", "split_with_sizes", "unbind", "detach", "alias",
        "slice", "select", "expand", "permute", "empty_like", "_reshape_alias", "reshape"}  # fmt: skip
"""They compute nothing."""


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (16, 4)])
def test_one_token_of_a_mixture(experts, chosen):
    spec = catalog.model("mixtral-tiny").changed(**NARROW, num_experts=experts, experts_per_token=chosen)
    moe = build(spec, torch.device("cpu"), torch.float32, 0).requires_grad_(False).layers["0"].mlp
    with torch.no_grad(), Calls() as calls:
        moe(torch.randn(1, 1, spec.hidden_size))
    made = [n for n in calls.names if n not in FREE]
    (block,) = (b for b in tokens_graph(spec, 1, 1, 8, "fp32").blocks if b.is_layer)
    ops = [o for o in block.forward if o.module == "mlp"]
    assert sum(o.calls for o in ops if o.kind == "gemm") == pytest.approx(sum(n in ("mm", "addmm") for n in made))
    gated = chosen  # SwiGLU is two operators, here as in a dense model
    assert sum(o.calls for o in ops) == pytest.approx(len(made) - gated, abs=2), made
