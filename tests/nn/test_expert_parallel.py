"""Expert parallelism against a layer that has every expert compute every token, and against drops counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.nn.conftest import spec_of
from tests.world import world
from torch import nn

from ridgeline.nn.model.moe import MoE
from ridgeline.techniques.parallel.expert_parallel_torch import TokenExchange

TOKENS = 24


def layer() -> MoE:
    moe = MoE(spec_of("mixtral"))
    generator = torch.Generator().manual_seed(1)
    for p in moe.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
    return moe


def tokens(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(7 + rank), dtype=torch.float64)


def dense(moe: MoE, x: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Every expert computes every token; a token's k best count. ``kept`` [N, k]: what was not dropped."""
    weights, chosen = moe.route(x)
    if kept is not None:
        weights = weights * kept
    e = moe.experts
    gate, up = (torch.einsum("nh,efh->enf", x, w) for w in (e.gate_proj, e.up_proj))
    everything = torch.einsum("enf,ehf->enh", F.silu(gate) * up, e.down_proj)
    share = torch.zeros(x.shape[0], moe.num_experts, dtype=x.dtype).scatter(1, chosen, weights.to(x.dtype))
    return torch.einsum("ne,enh->nh", share, everything)


def kept_by_hand(moe: MoE, x: torch.Tensor, capacity: float) -> torch.Tensor:
    """First come, first served: each expert takes ⌈capacity · N · k / E⌉ of a rank's rows, in order of the tokens."""
    _, chosen = moe.route(x)
    room = -(-int(capacity * chosen.numel()) // moe.num_experts)
    taken = [0] * moe.num_experts
    kept = torch.zeros(chosen.shape)
    for n in range(chosen.shape[0]):
        for j in range(chosen.shape[1]):
            expert = int(chosen[n, j])
            kept[n, j] = float(taken[expert] < room)
            taken[expert] += 1
    return kept


def divided(rank: int, capacity: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's output and gradients, with half of the experts here."""
    moe, x = layer(), tokens(rank).requires_grad_()
    for name, p in list(moe.experts.named_parameters()):
        moe.experts.register_parameter(name, nn.Parameter(p.detach().chunk(2)[rank].clone()))
    moe.run = TokenExchange(dist.group.WORLD, capacity)
    out = moe(x)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in moe.experts.named_parameters()}
    return out.detach(), {**grads, "x": x.grad, "router": moe.router.weight.grad}


def whole(rank: int, capacity: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    moe, x = layer(), tokens(rank).requires_grad_()
    out = dense(moe, x, None if capacity is None else kept_by_hand(moe, x, capacity))
    out.square().sum().backward()
    grads = {name: p.grad for name, p in moe.experts.named_parameters()}
    return out.detach(), {**grads, "x": x.grad, "router": moe.router.weight.grad}


@pytest.mark.parametrize("capacity", [None, 4.0, 1.0, 0.5])
def test_divided_experts_are_dense_dispatch(capacity):
    got, want = world(2).run(divided, capacity), [whole(r, capacity) for r in range(2)]
    for rank in range(2):
        assert torch.allclose(got[rank][0], want[rank][0], atol=1e-10)
        for name in ("x", "router"):
            assert torch.allclose(got[rank][1][name], want[rank][1][name], atol=1e-10), name
        for name in ("gate_proj", "up_proj", "down_proj"):  # an expert's gradient is of all ranks' tokens
            both = want[0][1][name] + want[1][1][name]
            assert torch.allclose(got[rank][1][name], both.chunk(2)[rank], atol=1e-10), name


def test_capacity_drops_what_does_not_fit():
    moe, x = layer(), tokens(0)
    kept = [float(kept_by_hand(moe, x, c).mean()) for c in (4.0, 1.0, 0.5)]
    assert kept[0] == 1.0
    assert 0.5 < kept[1] < 1.0
    assert kept[2] <= 0.5
