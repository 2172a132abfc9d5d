"""Fused attention within spans in Triton (its interpreter, where there is no GPU), beside attention by its definition
in fp64: outputs and all gradients."""

import warnings

import pytest
import torch
from tests.nn.interpreter import DEVICE

from ridgeline import catalog
from ridgeline.nn.kernels import flash
from ridgeline.nn.model import span_trial
from ridgeline.nn.model.attention import alibi_slopes, naive_attention
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.spans import make_spans, span_attention

LENGTHS = [[40, 1, 99], [140]]
"""Documents of the rows."""
DOCUMENTS = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
BATCH, LENGTH = DOCUMENTS.shape


def seen(documents, causal, window):
    """Which keys queries see, [B, 1, S, S]."""
    at = torch.arange(LENGTH)
    own = at.expand(BATCH, -1)
    allowed = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    if documents is not None:
        allowed &= documents[:, :, None] == documents[:, None, :]
        own = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(BATCH, LENGTH)
    if causal:
        allowed &= at[None, :] <= at[:, None]
    if window > 0:
        allowed &= at[None, :] > at[:, None] - window
    if window < 0:
        allowed &= (own // -window)[:, :, None] == (own // -window)[:, None, :]
    return allowed[:, None]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 50, -48, -1])
def test_spans_are_what_tokens_see(documents, causal, window):
    spans = make_spans(BATCH, LENGTH, documents, causal, window, torch.device("cpu"))
    assert spans.dtype == torch.int32
    assert (spans.diff(dim=1) >= 0).all()
    allowed = torch.block_diag(*seen(documents, causal, window)[:, 0].int()).bool()
    at = torch.arange(BATCH * LENGTH)
    assert torch.equal(allowed, (at >= spans[0][:, None]) & (at <= spans[1][:, None]))
    assert torch.equal(allowed, (at[:, None] >= spans[2]) & (at[:, None] <= spans[3]))


CASES = {
    "plain": (4, 2, 64, {}),
    "soft caps": (4, 2, 32, {"cap": 3.0}),
    "ALiBi": (2, 2, 64, {"alibi": True}),
    "sinks": (2, 1, 64, {"sinks": True}),
    "windows": (2, 1, 64, {"window": 50}),
    "chunks": (2, 2, 64, {"window": -48}),
    "documents": (2, 2, 64, {"documents": DOCUMENTS}),
    "both ways": (2, 2, 64, {"causal": False, "cap": 3.0, "alibi": True}),
    "both ways, windows, documents": (2, 2, 64, {"causal": False, "window": 50, "documents": DOCUMENTS}),
    "both ways, chunks": (2, 2, 64, {"causal": False, "window": -48, "sinks": True}),
    "soft caps, windows, documents": (2, 1, 64, {"cap": 3.0, "window": 50, "documents": DOCUMENTS}),
    "soft caps, sinks, windows": (2, 1, 64, {"cap": 3.0, "sinks": True, "window": 50}),
    "soft caps, ALiBi, chunks, documents": (2, 1, 64, {"cap": 3.0, "alibi": True, "window": -48,
                                                      "documents": DOCUMENTS}),
    "all but sinks": (4, 2, 80, {"cap": 3.0, "alibi": True, "window": 50, "documents": DOCUMENTS}),
    "heads of 96": (2, 1, 96, {"alibi": True}),
    "heads of 128": (2, 1, 128, {"alibi": True}),
    "heads of 256": (2, 1, 256, {"cap": 3.0}),
}  # fmt: skip


def results(heads, groups, width, dtype, causal=True, cap=None, alibi=False, sinks=False, window=0, documents=None):
    """Outputs and gradients of the kernel in ``dtype``, and of the definition in fp64 of the same numbers."""
    g = torch.Generator().manual_seed(3)
    shapes = [(BATCH, LENGTH, n, width) for n in (heads, groups, groups, heads)] + [(heads,)]
    given = [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]
    given[0] *= 2  # so that weights differ and soft caps bend
    found = []
    for device, wide in ((DEVICE, dtype), ("cpu", torch.float64)):
        q, k, v, grad, s = (t.detach().to(device, wide) for t in given)
        leaves = [t.requires_grad_() for t in ((q, k, v, s) if sinks else (q, k, v))]
        changes = ScoreChanges(cap, alibi_slopes(heads) if alibi else None, s if sinks else None)
        operands = [t.transpose(1, 2) for t in (q, k, v)]
        if wide == dtype:
            own = None if documents is None else documents.to(device)
            spans = make_spans(BATCH, LENGTH, own, causal, window, torch.device(device))
            out = span_attention(*operands, spans, changes)
        else:
            bias = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=wide)
            bias = bias.masked_fill(~seen(documents, causal, window), float("-inf"))
            out = naive_attention(*operands, Mask(bias, False, changes=changes))
        out.backward(grad.transpose(1, 2))
        found.append([t.detach().cpu().double() for t in (out, *(leaf.grad for leaf in leaves))])
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="tiles are chosen for operands of 16 bits")
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_definitions(name):
    heads, groups, width, options = CASES[name]
    for mine, exact in zip(*results(heads, groups, width, torch.float32, **options), strict=True):
        assert (mine - exact).abs().max() < 1e-5 * exact.abs().max()


LOW = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half of the last of a number's 11 or 8 bits."""


# The interpreter has no product of bf16.
NATIVE = [(name, dtype) for name in CASES for dtype in LOW]
INTERPRETED = [(name, torch.float16) for name in ("plain", "all but sinks")]


@pytest.mark.parametrize(("name", "dtype"), NATIVE if DEVICE == "cuda" else INTERPRETED)
def test_in_16_bits(name, dtype):
    """Rounded more often than the definition: weights, gradients of scores, and results."""
    heads, groups, width, options = CASES[name]
    for mine, exact in zip(*results(heads, groups, width, dtype, **options), strict=True):
        assert (mine - exact).norm() < 3 * LOW[dtype] * exact.norm()


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize(("cap", "alibi", "sinks"), [(3.0, False, False), (None, True, False), (None, False, True)])
def test_it_is_tried_before_a_model_trains_by_it(cap, alibi, sinks, off, monkeypatch):
    """Also in a pass without gradients."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    plain = flash.backward
    if off:
        monkeypatch.setattr(flash, "backward", lambda *given: tuple(t * 1.2 for t in plain(*given)))
    changes = {"attention_soft_cap": cap, "position": "alibi" if alibi else "rope", "attention_sinks": sinks}
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    spec = catalog.model("llama-tiny").model_copy(update=changes | sizes)
    span_trial._tried.cache_clear()
    with torch.inference_mode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert span_trial.is_right(spec, torch.device(DEVICE), torch.float16) is not off
    span_trial._tried.cache_clear()
    assert [str(w.message)[:34] for w in said] == ["attention is computed with masks, "] * off
