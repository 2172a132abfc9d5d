"""Products in 16 bits that are computed in fp32, as on a CPU where that is faster."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ridgeline import catalog
from ridgeline.nn.kernels import products
from ridgeline.nn.kernels import widened as wide
from ridgeline.nn.model.init import build

BF16, FP16 = torch.bfloat16, torch.float16


def tensors(*shapes, dtype=BF16):
    g = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*s, generator=g).to(dtype) for s in shapes]


@pytest.fixture
def widened_rows(monkeypatch):
    """Rows of the products that were computed in fp32."""
    for module in (wide, products):
        monkeypatch.setattr(module, "widened", lambda: frozenset({BF16}))
    rows, plain = [], wide.wide_product

    def count(x, weight, bias=None):
        rows.append(x.numel() // x.shape[-1])
        return plain(x, weight, bias)

    monkeypatch.setattr(wide, "wide_product", count)
    return rows


def near(got, want):
    """Half of the last place of 8 bits, and what sums in fp32 of numbers of this size may be off."""
    assert got.dtype is BF16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("shape", [(70, 24), (2, 40, 24)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("part", [1, 5 * 24, 1 << 20])
def test_one_rounding_of_products_in_fp32(widened_rows, monkeypatch, shape, transposed, biased, part):
    monkeypatch.setattr(wide, "PART", part)
    x, w, b = tensors(shape, (24, 16) if transposed else (16, 24), (16,))
    w, b = w.t() if transposed else w, b if biased else None
    y = products.linear(x, w, b)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert y.shape == exact.shape
    near(y, exact)
    assert widened_rows == [x.numel() // 24]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_gradients_are_rounded_once_too(widened_rows, biased, autocast, trained):
    """Of leaves in fp32 under autocast, which have gradients in fp32, and of leaves in bf16."""
    x, w, b = tensors((2, 40, 24), (16, 24), (16,), dtype=torch.float32 if autocast else BF16)
    given = [x.requires_grad_(trained[0]), w.requires_grad_(trained[1]), *([b.requires_grad_()] if biased else [])]
    exact = [t.detach().to(BF16).double().requires_grad_(t.requires_grad) for t in given]
    with torch.autocast("cpu", BF16, enabled=autocast):
        y = products.linear(*given)
    d = tensors((2, 40, 16))[0]
    want = F.linear(*exact)
    near(y.detach(), want.detach())
    leaves = [(t, e) for t, e in zip(given, exact, strict=True) if t.requires_grad]
    found = torch.autograd.grad(y, [t for t, _ in leaves], d)
    for got, right, (leaf, _) in zip(found, torch.autograd.grad(want, [e for _, e in leaves], d.double()), leaves,
                                     strict=True):  # fmt: skip
        assert got.dtype is leaf.dtype
        near(got.to(BF16), right)
    assert len(widened_rows) == 1 + sum(trained)


class Dtypes(TorchFunctionMode):
    """Dtypes of the products that run."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul, torch.addmm):
            self.found.append(out.dtype)
        return out

    def __init__(self):
        super().__init__()
        self.found = []


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_does_not_round_the_operands_again(widened_rows, trained):
    """Neither in a forward pass nor in a backward pass under it."""
    x, w, b, k = (t.requires_grad_(trained) for t in tensors((2, 80, 24), (16, 24), (16,), (2, 24, 16)))
    with torch.autocast("cpu", BF16), Dtypes() as seen:
        found = [products.linear(x, w), products.linear(x, w, b), wide.matmul(x, k)]
        if trained:
            sum(y.float().sum() for y in found).backward()
    assert len(seen.found) >= 3
    assert set(seen.found) == {torch.float32}


def test_products_in_fp32_are_tensors_of_their_own(widened_rows):
    """On the device of their operands, and not views."""
    x, w = torch.randn(2, 40, 24).bfloat16().requires_grad_(), torch.randn(16, 24).bfloat16()
    with torch.device("meta"):
        y = products.linear(x, w)
    assert y.is_cpu
    assert not y._is_view()
    y.mul_(2).float().sum().backward()
    assert widened_rows == [80, 80]


def test_what_is_not_multiplied_in_fp32(widened_rows):
    few, many, w = torch.randn(8, 24).bfloat16(), torch.randn(70, 24).bfloat16(), torch.randn(16, 24).bfloat16()
    for x, weight in [(few, w), (many.half(), w.half()), (many.float(), w.float())]:
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    with pytest.raises(RuntimeError, match="dtype"):
        products.linear(many, w.float())
    with FlopCounterMode(display=False) as counted:
        products.linear(many, w)
    assert counted.get_total_flops() == 2 * 70 * w.numel()
    with torch.autocast("cpu", FP16):
        assert products.linear(many, w).dtype is FP16
    assert not widened_rows


@pytest.mark.parametrize("shape", [(3, 70, 24, 40), (2, 2, 70, 24, 40)])
@pytest.mark.parametrize("autocast", [False, True])
def test_batches_of_products(widened_rows, shape, autocast):
    *batch, m, k, n = shape
    a, b = (
        t.requires_grad_() for t in tensors((*batch, m, k), (*batch, n, k), dtype=torch.float32 if autocast else BF16)
    )
    exact = [t.detach().to(BF16).double().requires_grad_() for t in (a, b)]
    with torch.autocast("cpu", BF16, enabled=autocast):
        y = wide.matmul(a, b.mT)
    assert "WideMatmul" in y.grad_fn.name()
    d = tensors((*batch, m, n))[0]
    want = torch.matmul(exact[0], exact[1].mT)
    near(y.detach(), want.detach())
    for got, right in zip(torch.autograd.grad(y, (a, b), d), torch.autograd.grad(want, exact, d.double()), strict=True):
        near(got.to(BF16), right)
    few = wide.matmul(a[..., :8, :], b.mT)
    assert "WideMatmul" not in few.grad_fn.name()


def test_products_that_are_not_recorded(widened_rows):
    a, b = tensors((70, 24), (24, 16))
    out = torch.empty(70, 16, dtype=BF16)
    with torch.no_grad():
        near(wide.mm(a, b), a.double() @ b.double())
        assert wide.mm(a, b, out=out) is out
        near(out, a.double() @ b.double())
        assert torch.equal(wide.mm(a[:8], b), a[:8] @ b)
    assert widened_rows == [70, 70]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("how", ["causal", "whole", "bias"])
def test_gradients_of_attention(widened_rows, grouped, how):
    """Results are PyTorch's, gradients those of the definition of what was rounded to bf16."""
    q, k, v = tensors((2, 4, 80, 16), *[(2, 2 if grouped else 4, 80, 16)] * 2)
    bias = None if how != "bias" else torch.randn(80, 80, generator=torch.Generator().manual_seed(3)).bfloat16()
    given = [t.requires_grad_() for t in (q, k, v)]
    y = wide.fused_attention(*given, bias, how == "causal", grouped)
    assert "WideAttention" in y.grad_fn.name()
    plain = F.scaled_dot_product_attention(*given, attn_mask=bias, is_causal=how == "causal", enable_gqa=grouped)
    assert torch.equal(y, plain)
    exact = [t.detach().double().requires_grad_() for t in given]
    want = F.scaled_dot_product_attention(*exact, attn_mask=None if bias is None else bias.double(),
                                          is_causal=how == "causal", enable_gqa=grouped)  # fmt: skip
    d = tensors((2, 4, 80, 16))[0]
    right = torch.autograd.grad(want, exact, d.double())
    ours, theirs = (torch.autograd.grad(out, given, d) for out in (y, plain))
    for a, b, c in zip(ours, theirs, right, strict=True):
        error, others = (float((t.double() - c).norm() / c.norm()) for t in (a, b))
        assert error < max(2**-8, 1.1 * others)
    few = wide.fused_attention(q[:, :, :8], k, v, None, False, grouped)
    assert "WideAttention" not in few.grad_fn.name()


@pytest.mark.parametrize(
    ("q", "k", "bias"),
    [
        ((2, 4, 80, 16), (2, 4, 80, 16), (4, 80, 80)),  # a bias that PyTorch's kernel does not take
        ((2, 4, 80, 16), (1, 4, 80, 16), None),  # batches that it does not spread, and whose memory it leaves
        ((2, 4, 80, 16), (2, 1, 80, 16), None),
        ((2, 4, 80, 16), (2, 4, 0, 16), None),
    ],
)
def test_attention_that_the_fused_kernel_cannot_compute_is_pytorchs(widened_rows, q, k, bias):
    given = [t.requires_grad_() for t in tensors(q, k, k)]
    bias = None if bias is None else tensors(bias)[0]
    y = wide.fused_attention(*given, bias, False, False)
    assert "WideAttention" not in y.grad_fn.name()
    assert torch.equal(y, F.scaled_dot_product_attention(*given, attn_mask=bias))


def test_attention_of_columns_that_are_apart_is_pytorchs(widened_rows):
    q, k, v = (t.mT.requires_grad_() for t in tensors(*[(2, 4, 16, 80)] * 3))
    y = wide.fused_attention(q, k, v, None, False, False)
    assert "WideAttention" not in y.grad_fn.name()


def test_a_layer_without_outputs(widened_rows):
    x, w = (t.requires_grad_() for t in tensors((70, 24), (0, 24)))
    products.linear(x, w).sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_a_model_is_trained_as_by_pytorchs_products(widened_rows, monkeypatch, backend):
    """Gradients in bf16 are as near to those in fp32 as PyTorch's."""
    spec = catalog.model("llama-tiny")
    ids = torch.randint(spec.vocab_size, (2, 70), generator=torch.Generator().manual_seed(1))
    found = []
    for kind in ("exact", "ours", "pytorch"):
        slow = frozenset({BF16} if kind == "ours" else ())
        for module in (wide, products):
            monkeypatch.setattr(module, "widened", lambda slow=slow: slow)
        model, count = build(spec), len(widened_rows)
        model.set_attention(backend)
        products.choose_products(model)
        with torch.autocast("cpu", BF16, enabled=kind != "exact"):
            loss = model(ids).float().logsumexp(-1).sum()
        loss.backward()
        assert (len(widened_rows) > count) == (kind == "ours")
        found.append({n: p.grad for n, p in model.named_parameters()})
    exact, ours, theirs = found
    for name, grad in exact.items():
        error, others = (float((t[name] - grad).norm() / grad.norm()) for t in (ours, theirs))
        assert error < max(2**-7, 1.25 * others), name


def test_hooks_and_classes_of_others_stay(widened_rows):
    """Layers are chosen where the dtype may need it."""
    model = nn.Sequential(nn.Linear(24, 16))
    products.choose_products(model)
    assert type(model[0]) is products.Linear


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="fp32 is multiplied by MKL")
@pytest.mark.parametrize(
    ("maker", "flags", "limit", "slow"),
    [
        ("GenuineIntel", "avx2", "", {BF16, FP16}),
        ("GenuineIntel", "avx2 avx512_bf16 avx512_fp16", "", {BF16}),
        ("GenuineIntel", "avx2 avx512_bf16 avx512_fp16 amx_bf16", "", set()),
        ("GenuineIntel", "avx2 avx512_bf16 avx512_fp16 amx_bf16", "AVX512_CORE_FP16", {BF16}),
        ("GenuineIntel", "avx2 avx512_bf16 avx512_fp16 amx_bf16", "AVX2", {BF16, FP16}),
        ("AuthenticAMD", "avx2 avx512_bf16", "", {FP16}),
        ("AuthenticAMD", "avx2 avx512_bf16", "AVX512_CORE_VNNI", {BF16, FP16}),
    ],
)
def test_which_dtypes_have_fast_units(monkeypatch, maker, flags, limit, slow):
    monkeypatch.setattr(wide, "_told", {"vendor_id": maker, "flags": flags}.get)
    monkeypatch.setattr(wide.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit or "ALL")
    assert wide.widened.__wrapped__() == slow
