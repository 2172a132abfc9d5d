"""The hand-written gradients, the loss and the expert dispatch, each against a plain reference."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.nn.conftest import randomize, spec_of

from ridgeline.nn import token_loss
from ridgeline.nn.model import attention, flash_blocks
from ridgeline.nn.model.attention import flash_attention, naive_attention
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.mlp import gated
from ridgeline.nn.model.moe import Experts, MoE
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.nn.model.rotary import Rotary, rotate


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_rmsnorm_gradient():
    norm = RMSNorm(6, 1e-5).double()
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (normal(2, 3, 6), normal(6))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_equals_torch(dtype):
    norm = RMSNorm(16, 1e-6).to(dtype)
    x, w = normal(2, 3, 16, dtype=dtype), normal(16, dtype=dtype, seed=1)
    with torch.no_grad():
        norm.weight.copy_(w)
    dy = normal(2, 3, 16, dtype=dtype, seed=2).detach()
    norm(x).backward(dy)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
    F.rms_norm(wide_x, (16,), wide_w, 1e-6).backward(dy.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(x.grad.double(), wide_x.grad, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(norm.weight.grad.double(), wide_w.grad, atol=tolerance, rtol=tolerance)


def test_gated_gradients():
    for activation in ("silu", "gelu_tanh"):
        assert torch.autograd.gradcheck(lambda g, u, a=activation: gated(a, g, u), (normal(2, 5), normal(2, 5, seed=1)))


def test_rotation_gradient_and_norm():
    tables = Rotary(spec_of("llama3")).tables(None, 3, 4, torch.device("cpu"), torch.float64)
    x = normal(2, 4, 3, 16)
    assert torch.autograd.gradcheck(lambda x: rotate(x, tables), (x,))
    torch.testing.assert_close(rotate(x, tables).norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_backends_agree(heads):
    q, k, v = normal(2, 4, 6, 8), normal(2, heads, 6, 8, seed=1), normal(2, heads, 6, 8, seed=2)
    bias = torch.full((6, 6), -1e30, dtype=torch.float64).triu(1)
    results = []
    for function, mask in ((naive_attention, Mask(bias, False)), (flash_attention, Mask(None, True))):
        out = function(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1])
    last = q[:, :, -1:]
    torch.testing.assert_close(
        naive_attention(last, k, v, Mask(None, False)), flash_attention(last, k, v, Mask(None, False))
    )


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_loss_equals_cross_entropy(chunk):
    head = torch.nn.Linear(8, 50, bias=True).double()
    hidden, labels = normal(2, 16, 8), torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(3))
    labels[0, :5] = -100
    want = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    inputs = (hidden, *head.parameters())
    wanted = torch.autograd.grad(want * 0.3, inputs)
    got, count = token_loss(hidden, head, labels, chunk)
    torch.testing.assert_close(torch.autograd.grad(got * 0.3, inputs), wanted)
    torch.testing.assert_close(got, want)
    assert int(count) == 27
    with torch.no_grad():
        torch.testing.assert_close(token_loss(hidden, head, labels, chunk)[0], want)


def test_loss_without_labels_is_zero():
    head, hidden = torch.nn.Linear(8, 50), normal(1, 4, 8, dtype=torch.float32)
    total, count = token_loss(hidden, head, torch.full((1, 4), -100))
    total.backward()
    assert float(total.detach()) == 0
    assert int(count) == 0
    assert (hidden.grad == 0).all()


def test_loss_of_huge_logits_is_finite():
    head = torch.nn.Linear(8, 50)
    total, _ = token_loss(normal(1, 4, 8, dtype=torch.float32) * 1e6, head, torch.zeros(1, 4, dtype=torch.long))
    assert total.isfinite()


def test_second_backward_is_refused_not_wrong():
    total, _ = token_loss(normal(1, 4, 8), torch.nn.Linear(8, 50).double(), torch.zeros(1, 4, dtype=torch.long))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


def dense_reference(moe, x):
    """Every expert on every token, the unchosen ones weighted 0."""
    logits = x @ moe.router.weight.T
    probabilities = logits.softmax(-1)
    kept = probabilities.topk(moe.k, dim=-1)
    weights = torch.zeros_like(probabilities).scatter(-1, kept.indices, kept.values)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    e = moe.experts
    inner = F.silu(torch.einsum("...h,efh->...ef", x, e.gate_proj)) * torch.einsum("...h,efh->...ef", x, e.up_proj)
    return torch.einsum("...ef,ehf,...e->...h", inner, e.down_proj, weights)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 10])
def test_dispatch_equals_dense_reference(normalize, tokens):
    """One token leaves experts without work: their gradients must be zero, not missing."""
    moe = MoE(spec_of("mixtral").model_copy(update={"normalize_router": normalize})).double()
    randomize(moe)
    x = normal(1, tokens, 32)
    inputs = (x, *moe.parameters())
    got, want = moe(x), dense_reference(moe, x)
    torch.testing.assert_close(got, want)
    dy = normal(*got.shape, seed=9).detach()
    torch.testing.assert_close(torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy))


@pytest.mark.parametrize("bias", [False, True])
def test_experts_in_one_grouped_product(bias):
    """Against the products of one expert after the other in fp64; the second of the experts has no rows."""
    experts = Experts(spec_of("mixtral").model_copy(update={"moe_bias": bias}))
    randomize(experts)
    counts = [5, 0, *[3] * (len(experts.up_proj) - 2)]
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rows, wide = normal(sum(counts), 32, dtype=torch.bfloat16), copy.deepcopy(experts).double()
    low, exact = experts.bfloat16(), rows.detach().double().requires_grad_()
    got, want = low.together(rows, expert), wide(exact, counts)
    dy = normal(*got.shape, seed=9).detach()
    pairs = zip(
        (got, *torch.autograd.grad(got, (rows, *low.parameters()), dy.to(got.dtype))),
        (want, *torch.autograd.grad(want, (exact, *wide.parameters()), dy.double())), strict=True,
    )  # fmt: skip
    for g, w in pairs:
        g, w = g.detach().double(), w.detach()
        assert float((g - w).norm() / w.norm()) < 0.02  # three products, 2^-8 for each rounding


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_fp32_where_its_16_bit_kernel_fails(monkeypatch, causal):
    monkeypatch.setattr(flash_blocks, "_packs_for_amx_alone", lambda: True)
    q, k, v = (normal(2, 4, 64, 32, dtype=torch.bfloat16, seed=s) for s in range(3))
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    out = attention.fused(q, k, v, causal=causal)
    exact = F.scaled_dot_product_attention(*wide, is_causal=causal)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())
    out.float().sum().backward()
    exact.bfloat16().float().sum().backward()
    for low, high in zip((q, k, v), wide, strict=True):
        assert torch.equal(low.grad, high.grad.bfloat16())
