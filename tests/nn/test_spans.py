"""Models whose attention in training, on GPUs, is by our kernel: in Triton's interpreter, beside the definition in
fp64."""

import copy

import pytest
import torch
from tests.nn.conftest import randomize, spec_of
from tests.nn.interpreter import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.nn import build
from ridgeline.nn.model import attention, mask, spans, transformer
from ridgeline.nn.model.flash_blocks import Sequences
from ridgeline.nn.model.loss import token_loss
from ridgeline.nn.model.mask import ScoreChanges, make_mask
from ridgeline.nn.model.spans import make_spans, span_attention

LENGTHS = [[3, 7, 2], [12], [1, 1, 10]]
DOCUMENTS = torch.tensor([[n for n, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
BATCH, LENGTH = DOCUMENTS.shape
PLACES = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(BATCH, LENGTH)


@pytest.fixture
def calls(monkeypatch):
    """The kernels for CPUs as if they were GPUs, and fp32 as if it had 16 bits; the number of layers that had ours, and
    of those that had PyTorch's."""
    counts = {"ours": 0, "PyTorch's": 0}
    ours = attention.span_attention

    def counted(*args):
        counts["ours"] += 1
        return ours(*args)

    def theirs(q, k, v, mask, sequences):
        """Within documents only: by their numbers."""
        counts["PyTorch's"] += 1
        at = torch.arange(BATCH * LENGTH)
        document = torch.bucketize(at, sequences.ends, right=True).view(BATCH, 1, LENGTH)
        far = at[:LENGTH, None] - at[:LENGTH]
        hidden = (document.mT != document) | (far < 0) | (far >= (mask.window or LENGTH))
        bias = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None]
        return attention.naive_attention(q, k, v, mask._replace(bias=bias))

    monkeypatch.setattr(attention, "span_attention", counted)
    monkeypatch.setattr(attention, "_within", theirs)
    for module in (mask, transformer):
        monkeypatch.setattr(module, "has_varlen", lambda device: True)
    monkeypatch.setattr(spans, "has_kernel", lambda device: True)
    for module in (spans, transformer):
        monkeypatch.setattr(module, "fits_varlen", lambda dtype, width: True)
    return counts


def losses(spec, packed, ends=False):
    """Loss and gradients by the kernels in fp32, and of the definition in fp64."""
    g = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(spec.vocab_size, (BATCH, LENGTH), generator=g) for _ in range(2))
    given = {"positions": PLACES, "documents": DOCUMENTS} if packed else {}
    plain = build(spec, torch.device("cpu"), torch.float32, 0)
    randomize(plain)
    found = []
    for backend in ("flash", "naive"):
        model = copy.deepcopy(plain) if backend == "flash" else copy.deepcopy(plain).double()
        model.tie()
        model.set_attention(backend)
        more = {"sequences": Sequences.of_documents(DOCUMENTS)} if ends and backend == "flash" else {}
        loss = token_loss(model(ids, return_hidden=True, **given, **more), model.head, labels)[0]
        loss.backward()
        gradients = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        found.append((loss.double(), gradients))
    (loss, gradients), (exact, exact_gradients) = found
    assert torch.allclose(loss, exact, rtol=1e-5)
    assert (gradients - exact_gradients).norm() < 1e-5 * exact_gradients.norm()


CASES = {
    "soft caps, some windows": ("gemma2", {"attention_soft_cap": 2.0}, 2),
    "ALiBi": ("bloom", {}, 2),
    "soft caps, heads of 24": ("llama", {"attention_soft_cap": 2.0, "head_dim": 24}, 2),
    "ALiBi, windows": ("bloom", {"sliding_window": 5}, 2),
}
"""Family, changes, and layers by our kernel."""


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nothing stands in")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_changed_scores_are_by_our_kernel_alone(calls, name, packed):
    family, changes, layers = CASES[name]
    losses(spec_of(family).model_copy(update=changes), packed, ends=packed)
    assert calls == {"ours": layers, "PyTorch's": 0}


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nothing stands in")
@pytest.mark.parametrize(("packed", "ends", "theirs"), [(False, False, 0), (True, True, 1), (True, False, 0)])
def test_chunks_are_by_our_kernel(calls, packed, ends, theirs):
    """Other layers are PyTorch's, where the host knows where documents end."""
    spec = spec_of("llama4")
    losses(spec, packed, ends)
    windowed = spec.windowed_layers
    assert spec.num_layers - windowed == 1
    assert calls == {"ours": windowed + (packed and not ends), "PyTorch's": theirs}


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nothing stands in")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_documents_without_their_ends_are_by_our_kernel(calls, name):
    """Such as in the stages of a pipeline. Layers with windows too: all of gpt-oss have sinks."""
    spec = spec_of(name)
    losses(spec, packed=True)
    assert calls == {"ours": spec.num_layers, "PyTorch's": 0}


class Largest(TorchDispatchMode):
    """The most numbers that an operator's result has."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.found = max([self.found, *sizes])
        return out


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nothing stands in")
@pytest.mark.parametrize(
    ("family", "documents"),
    [pytest.param("gemma2", False, marks=pytest.mark.nightly), ("gemma2", True), ("bloom", False), ("llama4", True)],
)
def test_no_tensor_is_as_large_as_scores(calls, family, documents):
    length = 320
    spec = spec_of(family).model_copy(update={"num_layers": 2, "max_positions": length})
    places = torch.arange(length)[None]
    more = {"documents": places // 50, "positions": places % 50} if documents else {}
    most = {}
    for backend in ("naive", "flash"):
        model = build(spec, torch.device("cpu"), torch.float32, 0)
        model.set_attention(backend)
        with Largest() as largest:
            model(torch.zeros(1, length, dtype=torch.long), return_hidden=True, **more).sum().backward()
        most[backend] = largest.found
    assert most["flash"] < length**2 <= most["naive"]
    assert calls["ours"] == 2


@pytest.mark.parametrize("made_for", [1, 2, 4])
def test_ranks_may_divide_a_layer_by_rows(made_for):
    """And then compute others than those that enter the model, for which spans were made."""
    rows, length = 2, 40
    q, k, v = (torch.randn(rows, 2, length, 16, device=DEVICE) for _ in range(3))
    cap = ScoreChanges(5.0, None, None)
    given, fitting = (make_spans(n, length, None, True, 24, torch.device(DEVICE)) for n in (made_for, rows))
    assert torch.equal(span_attention(q, k, v, given, cap), span_attention(q, k, v, fitting, cap))


def test_a_compiler_leaves_the_kernel_as_it_is():
    q = torch.randn(1, 1, 4, 16, device=DEVICE)
    given = make_spans(1, 4, None, True, 0, torch.device(DEVICE))

    def attend(q):
        return span_attention(q + q, q, q, given, None)

    assert torch.equal(torch.compile(attend, backend="eager")(q), attend(q))


def test_what_neither_kernel_has_keeps_its_mask():
    """In fp32, on CPUs, under padding, with a cache, with places of chunks that are not known, and of latent
    attention."""
    cpu, dtype = torch.device("cpu"), torch.float32
    spec = spec_of("llama4")
    assert not spans.by_spans(spec, torch.zeros(1, 2, 8))
    assert make_mask(spec, True, None, 0, 12, False, cpu, dtype).bias is not None
    assert make_mask(spec, True, torch.ones(2, 12).bool(), 0, 12, False, cpu, dtype, rows=2).bias is not None
    assert make_mask(spec, True, None, 8, 4, False, cpu, dtype, rows=2).bias is not None
    assert make_mask(spec, True, None, 0, 12, False, cpu, dtype, positions=PLACES, rows=BATCH).bias is not None
    found = make_mask(spec, True, None, 0, 12, False, cpu, dtype, rows=2)
    assert (found.bias, tuple(found.spans.shape)) == (None, (4, 24))


def test_models_that_our_kernel_does_not_have(monkeypatch):
    monkeypatch.setattr(spans, "has_kernel", lambda device: True)
    low, wide = (torch.zeros(1, 2, 8, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert spans.by_spans(spec_of("llama"), low)
    assert not spans.by_spans(spec_of("llama"), wide)
    assert not spans.by_spans(spec_of("deepseek_v3"), low)
    assert not spans.by_spans(spec_of("bloom").model_copy(update={"attention_sinks": True}), low)
