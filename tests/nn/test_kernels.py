"""Fused kernels and functions against the plain modules and plain formulas."""

import copy
import math
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from ridgeline.nn.kernels import adjacency, functions, native
from ridgeline.nn.model import fused, fused_loss, joined_weights
from ridgeline.nn.model.attention import AttentionBackend, naive_attention
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import token_loss
from ridgeline.spec.model import ModelSpec

_LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": _LLAMA,
    "biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16},
    "granite": {**_LLAMA, "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
                "residual_multiplier": 0.6, "logits_scaling": 1.5},
    "yarn": {**_LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 9},
    "gpt_neox": {**{k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}, "model_type": "gpt_neox"},
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": {**_LLAMA, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                 "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    "llama4": {**_LLAMA, "model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 48, "use_qk_norm": False,
               "num_local_experts": 4, "attention_chunk_size": 9, "no_rope_layer_interval": 2, "floor_scale": 5},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bert": {"model_type": "bert", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64},
}  # fmt: skip

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


def chunks_of(rows):
    return lambda *_: rows


def pair(family, dtype, backend="naive", device="cpu"):
    """A plain model and the fused one with the same weights."""
    plain = build(ModelSpec.from_config(FAMILIES[family], name=family), torch.device(device), dtype, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.05 * torch.randn_like(p))
    other = copy.deepcopy(plain)
    other.tie()
    plain.set_attention(backend)
    other.set_attention(backend)
    merged = fused.merge_projections(other)
    fused.fuse_elementwise(other)
    if backend == "naive":
        other.set_attention(AttentionBackend("naive", fused.fused_naive_attention, wants_bias=True))
    return plain, other, merged


def gradients(model, loss, low=None, shape=(2, 24)):
    ids = torch.randint(96, shape, generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1).clone()
    labels[:, :3] = -100
    device = next(model.parameters()).device
    ids, labels = ids.to(device), labels.to(device)
    with torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None):
        total, count = loss(model(ids, return_hidden=True), model.head, labels)
    (total / count).backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters()}


@needs_kernels
@pytest.mark.parametrize("backend", ["naive", "flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_forward_and_backward_in_fp64(family, backend):
    plain, other, merged = pair(family, torch.float64, backend)
    assert len(merged) == {"llama": 4, "biases": 4, "granite": 4, "yarn": 4, "llama4": 4}.get(family, 2)
    loss, want = gradients(plain, token_loss)
    got_loss, got = gradients(other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(7)))
    assert got_loss == pytest.approx(loss, rel=1e-14)
    assert set(got) == set(want)
    for name, g in got.items():
        if not name.endswith("score_bias"):  # nothing trains it
            assert torch.allclose(g, want[name], rtol=1e-11, atol=1e-14), name


@needs_kernels
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_fp32_and_under_autocast(low):
    plain, other, _ = pair("llama", torch.float32)
    exact = copy.deepcopy(plain).double()
    loss, want = gradients(exact, token_loss)
    _, unfused = gradients(plain, token_loss, low)
    got_loss, got = gradients(other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(16)), low)
    assert got_loss == pytest.approx(loss, rel=1e-6 if low is None else 2e-3)
    for name, g in got.items():  # no further from the truth than the plain operators are, but for chance
        scale = want[name].norm()
        error, usual = (g - want[name]).norm() / scale, (unfused[name] - want[name]).norm() / scale
        assert error < 1.5 * usual + (1e-6 if low is None else 2e-3), name


@needs_kernels
def test_parameters_keep_names_shapes_and_values_in_one_storage():
    plain, other, _ = pair("llama", torch.float32)
    for (a, p), (b, q) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        assert a == b
        assert torch.equal(p, q)
    attention = other.layers["0"].attention
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    whole = adjacency.adjacent(weights)
    assert torch.equal(whole, torch.cat([w.detach() for w in weights]))
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()  # as what gathers shards one by one does
    assert adjacency.adjacent(weights) is None
    ids = torch.randint(96, (1, 8))
    assert torch.allclose(plain(ids), other(ids), atol=1e-5)


@needs_kernels
def test_a_second_backward_of_a_retained_graph_is_the_same_and_a_third_is_refused():
    _, other, _ = pair("llama", torch.float32)
    loss = other(torch.randint(96, (1, 8))).square().sum()
    weights = list(other.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward"):
        torch.autograd.grad(loss, weights)


@needs_kernels
def test_masked_softmax_of_rows_far_apart():
    q, k, v = (100 * torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    from ridgeline.nn.model.mask import Mask

    bias = torch.full((9, 9), torch.finfo(torch.float64).min / 2, dtype=torch.float64).triu(1)
    want = naive_attention(q, k[:, :2], v[:, :2], Mask(bias, False))
    assert torch.allclose(fused.fused_naive_attention(q, k[:, :2], v[:, :2], Mask(bias, False)), want, rtol=1e-9)
    # A kernel that overflows for large scores would show here.
    assert torch.isfinite(want).all()


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_linear_loss_equals_pytorch(bias):
    torch.manual_seed(0)
    x, w = torch.randn(50, 16, dtype=torch.float64), torch.randn(40, 16, dtype=torch.float64)
    b = torch.randn(40, dtype=torch.float64) if bias else None
    labels = torch.randint(40, (50,))
    labels[::7] = -100
    tensors = [t.requires_grad_() for t in (x, w, b) if t is not None]
    want = F.cross_entropy(F.linear(x, w, b), labels, ignore_index=-100, reduction="sum")
    wanted = torch.autograd.grad(3 * want, tensors)
    for rows in (1, 16, 50):
        got = functions.linear_loss(x, w, b, labels, rows, torch.float64)
        assert got.item() == pytest.approx(want.item(), rel=1e-12)
        inputs = torch.autograd.grad(3 * got, tensors[:1], retain_graph=True)  # as a zero-bubble pipeline divides it
        for g, h in zip((*inputs, *torch.autograd.grad(3 * got, tensors[1:])), wanted, strict=True):
            assert torch.allclose(g, h, rtol=1e-10, atol=1e-12)
        got = functions.linear_loss(x, w, b, labels, rows, torch.float64)
        for g, h in zip(torch.autograd.grad(3 * got, tensors), wanted, strict=True):
            assert torch.allclose(g, h, rtol=1e-10, atol=1e-12)
        got = functions.linear_loss(x, w, b, labels, rows, torch.float64)
        torch.autograd.grad(got, tensors[:1], retain_graph=True)
        with pytest.raises(RuntimeError, match="twice with different gradients"):
            torch.autograd.grad(2 * got, tensors[1:])


@needs_kernels
def test_adamw_is_pytorchs():
    torch.manual_seed(0)
    n = 1003  # not a multiple of any vector
    start = torch.randn(n)
    p = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([p], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ours, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    low = torch.empty(n, dtype=torch.bfloat16)
    for step in range(1, 6):
        p.grad = torch.randn(n)
        theirs.step()
        functions.adamw_(low, ours, p.grad, m, v, 3e-3, 0.9, 0.95, 1e-8, 0.1, step)
        torch.testing.assert_close(ours, p.detach())
        assert torch.equal(low, ours.bfloat16())
    assert not torch.equal(ours, start)


def test_without_a_compiler_plain_operators_take_over_with_one_notice(monkeypatch):
    native.library.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    try:
        with pytest.warns(UserWarning, match="fused CPU kernels are off, plain operators.*no C\\+\\+ compiler"):
            assert native.library() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain, other, _ = pair("llama", torch.float32)
            loss, want = gradients(plain, token_loss)
            got_loss, got = gradients(other, lambda *a: fused_loss.chunked_token_loss(*a, rows=chunks_of(16)))
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert all(torch.allclose(got[n], want[n], rtol=1e-4, atol=1e-6) for n in want)
    finally:
        native.library.cache_clear()


def test_a_compiler_that_hangs_or_fails_costs_a_notice(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # any program: none is started
    for error, says in (
        (subprocess.TimeoutExpired("g++", 120), "timed out after 120"),
        (subprocess.CalledProcessError(1, "g++", stderr=b"cpu.cpp: error: no such flag"), "no such flag"),
    ):
        monkeypatch.setattr(subprocess, "run", Mock(side_effect=error))
        native.library.cache_clear()
        with pytest.warns(UserWarning, match=says):
            assert native.library() is None
    native.library.cache_clear()


def test_chunks_take_the_memory_of_the_hidden_states():
    from ridgeline.techniques.kernels.fused_layers import CHUNK, chunk_rows

    assert chunk_rows(64, 512, 32) == 64
    assert chunk_rows(8192, 128256, 4096) == CHUNK * math.ceil(8192 * 4096 / 128256 / CHUNK)
    for rows, vocab, hidden in ((1, 10, 10), (1000, 50, 100), (4096, 32000, 4096)):
        assert 1 <= chunk_rows(rows, vocab, hidden) <= rows


@needs_kernels
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_remembered_of_merged_layers_holds_while_they_are_what_they_were(biased):
    plain, made, _ = pair("biases" if biased else "llama", torch.float32)
    made.requires_grad_(False)
    mlp, want = made.layers["0"].mlp, plain.layers["0"].mlp
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    parts = [mlp.gate_proj, mlp.up_proj]
    known = joined_weights.Known(parts)

    def agree(remembered):
        assert known.holds([mlp.gate_proj, mlp.up_proj]) == remembered
        torch.testing.assert_close(fused.expand_merged(mlp, x, known=known), want.expand(want, x))

    with torch.no_grad():
        agree(True)
        assert joined_weights.merged_weights(x, parts, known) is known.whole
        assert joined_weights.merged_weights(x.double(), parts, known)[0].dtype == torch.float64
        hook = mlp.up_proj.register_forward_hook(lambda *_: None)
        agree(False)
        hook.remove()
        agree(True)
        assert not copy.deepcopy(known).holds(parts)
        mlp.up_proj = torch.nn.Sequential(parts[1])  # as an adapter replaces it
        agree(False)
        mlp.up_proj = parts[1]
        weight = mlp.up_proj.weight
        mlp.up_proj.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        agree(False)
        mlp.up_proj.weight = weight
        agree(True)
        for module in (mlp, want):  # in place: a bias is a copy
            (module.up_proj.bias if biased else module.up_proj.weight).add_(1)
        agree(False)
