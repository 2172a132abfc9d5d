"""Attention within documents and windows by the kernel that PyTorch has for GPUs: on a CPU in its stead, attention by
its definition, of whose gradients every term is written out."""

import pytest
import torch
from tests.nn.conftest import randomize, spec_of

from ridgeline.nn import build
from ridgeline.nn.model import attention, flash_blocks, mask, transformer
from ridgeline.nn.model.flash_blocks import Sequences, fits_varlen, varlen_attention
from ridgeline.nn.model.loss import token_loss

LENGTHS = [[3, 7, 2], [12], [1, 1, 10]]
DOCUMENTS = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
BATCH, LENGTH = DOCUMENTS.shape


def scores_of(q, k, ends, i, left, right):
    """Rows of a sequence, heads that share a key head, and scores [H, L, L] of what queries see: from ``left`` keys
    before their own place to ``right`` after it."""
    rows = slice(int(ends[i]), int(ends[i + 1]))
    far = torch.arange(rows.stop - rows.start)
    far = far[None] - far[:, None]  # of the key from the query
    hidden = (far > right if right >= 0 else far < -LENGTH) | (-far > left if left >= 0 else far < -LENGTH)
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows].repeat_interleave(repeat, 1)) * q.shape[2] ** -0.5
    return rows, repeat, scores.masked_fill(hidden, float("-inf"))


def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
            window_size_right=None, **more):  # fmt: skip
    """``aten::_flash_attention_forward`` of packed sequences, with what its kernel requires."""
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert max_q == max_k == int(cum_q.diff().max())
    assert int(cum_q[-1]) == len(q)
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    assert not dropout
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for i in range(len(cum_q) - 1):
        rows, repeat, scores = scores_of(q, k, cum_k, i, window_size_left, window_size_right)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows].repeat_interleave(repeat, 1))
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, state, q.new_empty(0)


def backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *, scale=None,
             window_size_left=None, window_size_right=None):  # fmt: skip
    """``aten::_flash_attention_backward``, from the log-sum-exp that it is given."""
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for i in range(len(cum_q) - 1):
        rows, repeat, scores = scores_of(q, k, cum_k, i, window_size_left, window_size_right)
        p = (scores - lse[:, rows, None]).exp()
        dp = torch.einsum("qhd,khd->hqk", grad[rows], v[rows].repeat_interleave(repeat, 1))
        ds = p * (dp - (grad[rows] * out[rows]).sum(-1).T[..., None]) * q.shape[2] ** -0.5
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, k[rows].repeat_interleave(repeat, 1))
        for d, weights, by in ((dk, ds, q), (dv, p, grad)):
            d[rows] = torch.einsum("hqk,qhd->khd", weights, by[rows]).unflatten(1, (-1, repeat)).sum(2)
    return dq, dk, dv


@pytest.fixture
def kernel(monkeypatch):
    """The kernel on a CPU, in fp64; the list of its calls' longest sequences."""
    calls = []

    def counted(*args, **more):
        calls.append(args[5])
        return forward(*args, **more)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", counted, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        for module in (mask, transformer):
            monkeypatch.setattr(module, "has_varlen", lambda device: True)
        monkeypatch.setattr(attention, "_each", attention._packed)
        monkeypatch.setattr(transformer, "fits_varlen", lambda dtype, width: True)
        yield calls


SPECS = {
    "groups": ("llama", {}),
    "windows": ("mistral", {}),
    "sinks": ("llama", {"attention_sinks": True}),
    "windows and sinks": ("gpt_oss", {}),
    "some windows": ("mistral", {"window_every": 2}),
    "latent": ("deepseek_v3", {}),
    "both ways": ("bert", {}),
}


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_documents_and_windows_are_as_under_a_mask(kernel, name, separate):
    """Loss and gradients beside the definition's, in fp64."""
    family, changes = SPECS[name]
    spec = spec_of(family).model_copy(update=changes)
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(spec.vocab_size, (BATCH, LENGTH), generator=g) for _ in range(2))
    places = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(BATCH, LENGTH)
    packed = {"positions": places, "documents": DOCUMENTS} if separate else {}
    found = {}
    for backend in ("naive", "flash"):
        model = build(spec, torch.device("cpu"), torch.float64, 0)
        randomize(model)
        model.set_attention(backend)
        given = {"sequences": Sequences.of_documents(DOCUMENTS)} if separate else {}
        hidden = model(ids, return_hidden=True, **packed, **given)
        loss = token_loss(hidden, model.head, labels)[0]
        loss.backward()
        found[backend] = loss, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    windowed = spec.num_layers if spec.window_every == 1 else spec.windowed_layers
    layers = spec.num_layers if separate else windowed * (spec.sliding_window is not None)
    assert kernel == [12] * layers  # the longest document is a whole row
    assert torch.allclose(found["flash"][0], found["naive"][0], rtol=1e-12)
    assert torch.allclose(found["flash"][1], found["naive"][1], rtol=1e-9, atol=1e-11)


def test_what_the_kernel_lacks_keeps_its_mask(kernel):
    for family, changes in (("llama", {"attention_soft_cap": 20.0}), ("bloom", {})):
        model = build(spec_of(family).model_copy(update=changes), torch.device("cpu"), torch.float64, 0)
        model.set_attention("flash")
        model(torch.zeros(BATCH, LENGTH, dtype=torch.long), documents=DOCUMENTS,
              sequences=Sequences.of_documents(DOCUMENTS))  # fmt: skip
    assert not kernel


def test_where_documents_end():
    ends, longest, _ = Sequences.of_documents(DOCUMENTS)
    assert ends.tolist() == [0, 3, 10, 12, 24, 25, 26, 36]
    assert longest == 12
    ends, longest, _ = Sequences.of_documents(torch.tensor([[5, 5], [5, 5]]))  # a row's end is a document's
    assert (ends.tolist(), longest) == ([0, 2, 4], 2)
    assert Sequences.of_rows(3, 4, torch.device("cpu")).ends.tolist() == [0, 4, 8, 12]


@pytest.mark.parametrize("made_for", [1, 2, 4])
def test_ranks_may_divide_a_layer_by_rows(made_for):
    """And then compute others than those that enter the model, for which sequences were made."""
    q, k, v = torch.randn(3, 2, 2, LENGTH, 16).unbind()
    rows, fitting = (Sequences.of_rows(n, LENGTH, torch.device("cpu")) for n in (made_for, 2))
    causal = mask.Mask(None, True)
    assert torch.equal(attention.flash_attention(q, k, v, causal._replace(sequences=rows)),
                       attention.flash_attention(q, k, v, causal._replace(sequences=fitting)))  # fmt: skip


def test_dtypes_and_heads_of_the_kernel():
    assert fits_varlen(torch.bfloat16, 128)
    assert not fits_varlen(torch.float32, 128)
    assert not fits_varlen(torch.float16, 264)
    assert not fits_varlen(torch.float16, 100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("window", "causal", "sinks"), [(0, True, False), (5, True, False), (5, True, True), (0, False, False)]
)
def test_the_kernel_itself(window, causal, sinks):
    """In bf16 beside the definition in fp64, with gradients."""
    g = torch.Generator().manual_seed(2)
    given = [torch.randn(BATCH, n, LENGTH, 64, generator=g, dtype=torch.float64) for n in (4, 2, 2)]
    given += [torch.randn(4, generator=g, dtype=torch.float64)] if sinks else []
    runs = Sequences.of_documents(DOCUMENTS)
    left, right = (window - 1 if window else -1), (0 if causal else -1)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        q, k, v, *s = (t.to(device, dtype).requires_grad_() for t in given)
        if device == "cuda":
            out = varlen_attention(q, k, v, Sequences(runs.ends.cuda(), runs.longest), causal, window, *s)
        else:
            out = torch.empty(BATCH * LENGTH, 4, 64, dtype=dtype)
            flat = [flash_blocks._flat(t) for t in (q, k, v)]
            for i in range(len(runs.ends) - 1):
                rows, repeat, scores = scores_of(*flat[:2], runs.ends, i, left, right)
                scores = torch.cat([scores, s[0][:, None, None].expand(-1, scores.shape[1], 1)], -1) if s else scores
                p = scores.softmax(-1)[..., : rows.stop - rows.start]
                out[rows] = torch.einsum("hqk,khd->qhd", p, flat[2][rows].repeat_interleave(repeat, 1))
            out = out.unflatten(0, (BATCH, LENGTH)).transpose(1, 2)
        out.pow(2).sum().backward()
        results.append([out.detach().cpu().double(), *(t.grad.cpu().double() for t in (q, k, v, *s))])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()
