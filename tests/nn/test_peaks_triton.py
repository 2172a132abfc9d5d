"""Largest magnitudes that producers find for float8 codes, and codes of SwiGLU's gradient, in Triton (its interpreter,
where there is no GPU): the codes are those of what the plain path writes and encodes."""

import math

import pytest
import torch
from tests import serving
from tests.nn.interpreter import DEVICE

from ridgeline.nn.kernels import float8, float8_gated, functions, gpu, gpu_norms, peaks
from ridgeline.nn.kernels import gather_heads as gathering
from ridgeline.nn.kernels.gather_heads import gather_heads
from ridgeline.nn.kernels.peaks import GatedGradient
from ridgeline.nn.model import fused
from ridgeline.nn.model.init import build
from ridgeline.nn.quant import codec
from ridgeline.techniques.precision.fp8_linear_torch import Float8Product, use_fp8

HELD = torch.float8_e4m3fn if DEVICE == "cuda" else torch.float32
"""In the interpreter codes before the last rounding, in which it loses carries into the exponent."""
WISHES = ["whole", "lines"]


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    monkeypatch.setattr(functions, "call", gpu.call)
    monkeypatch.setattr(peaks, "on_gpu", lambda t: True)
    for module in (
        (gpu_norms, peaks, float8, float8_gated, gathering) if DEVICE == "cpu" else ()
    ):  # few programs, each with several rows
        monkeypatch.setattr(module, "processors", lambda device: 1)


def numbers(*shape, seed=0, dtype=torch.bfloat16):
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (t * torch.logspace(-2, 2, shape[-1])).to(dtype).to(DEVICE)


def right(found, t):
    """Whether peaks are those of ``t``, exactly."""
    bits = t.float().abs().flatten(0, -2).view(torch.int32)
    if found.columns is None:
        return int(found.first.max()) == int(bits.max())
    return torch.equal(found.first, bits.amax(1)) and torch.equal(found.columns, bits.amax(0))


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("centered", [False, True])
def test_norms_know_the_peaks_of_what_they_write(wish, centered):
    x, update = numbers(2, 9, 70, dtype=torch.float32).requires_grad_(), numbers(2, 9, 70, seed=1).requires_grad_()
    w, b = numbers(70, seed=2, dtype=torch.float32), numbers(70, seed=3, dtype=torch.float32) if centered else None
    given = w, b, 1e-5, centered, torch.bfloat16
    total, y = functions.add_norm(x, update, *given, wish=wish, update_wish=wish)
    assert right(peaks.known(y, wish), y)
    plain = functions.add_norm(x, update, *given)
    assert torch.equal(total, plain[0])
    assert torch.equal(y, plain[1])
    alone = functions.norm(x, *given, wish=wish)
    assert right(peaks.known(alone, wish), alone)
    assert torch.equal(alone, functions.norm(x, *given))
    other = WISHES[wish == "whole"]
    assert peaks.known(y, other) is None
    view = peaks.shared(y, y.flatten(0, 1))
    assert peaks.known(view, wish) is not None
    with torch.no_grad():
        y.mul_(2)
    assert peaks.known(y, wish) is None
    assert peaks.known(view, wish) is None


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_update_comes_in_its_dtype_with_its_peaks(wish, stream):
    arrived = []

    class Before(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, d):
            arrived.append((peaks.known(d, wish), d))
            return d

    x, update = numbers(1, 11, 70, dtype=stream).requires_grad_(), numbers(1, 11, 70, seed=1).requires_grad_()
    w = numbers(70, seed=2, dtype=torch.float32).requires_grad_()
    gradients = []
    for more in ({}, {"update_wish": wish}):
        total, y = functions.add_norm(x, Before.apply(update), w, None, 1e-5, False, torch.bfloat16, **more)
        torch.autograd.backward((total, y), (numbers(1, 11, 70, seed=4, dtype=stream), numbers(1, 11, 70, seed=5)))
        gradients.append([t.grad for t in (x, update, w)])
        x.grad = update.grad = w.grad = None
    assert all(map(torch.equal, *gradients))
    (unknown, _), (found, d) = arrived
    assert unknown is None
    assert d.dtype == torch.bfloat16
    torch.testing.assert_close(d.float(), gradients[0][0].float(), rtol=2**-7, atol=0)  # the interpreter truncates
    assert right(found, d)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("shape", [(16, 40), (144, 70)])
def test_codes_by_known_peaks_are_the_same(shape, rowwise):
    t = numbers(*shape)
    found = peaks.room(*shape, "lines" if rowwise else "whole", t.device)
    bits = t.float().abs().view(torch.int32)
    found.first.copy_(bits.amax(1) if rowwise else bits.flatten()[: len(found.first)].fill_(int(bits.max())))
    if rowwise:
        found.columns.copy_(bits.amax(0))
    for known in (found, None):
        if rowwise:
            got = float8.encode_rowwise(t, HELD, 448.0, True, known)
        else:
            got = (*float8.encode_transposed(t, HELD, 448.0, known), *float8.encode(t, HELD, 448.0, known))
        if known is found:
            want = got
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("shape", [(5, 40), (144, 70)])
def test_swiglu_knows_the_peaks_of_its_result(wish, shape):
    both = numbers(shape[0], 2 * shape[1])
    y, found = torch.empty(shape, dtype=both.dtype, device=DEVICE), peaks.room(*shape, wish, both.device)
    float8_gated.activate(both, y, found)
    assert torch.equal(y, functions.bias_activation(both, None, "silu"))
    assert right(found, y)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("shape", [(16, 40), (144, 70)])
def test_codes_of_swiglus_gradient_are_those_of_the_gradient(shape, rowwise):
    both, dy = numbers(shape[0], 2 * shape[1]), numbers(*shape, seed=1)
    wide = both.clone()
    functions._activation_backward(dy, both, None, wide, None, 0)
    got = float8_gated.encode_gated(GatedGradient(dy, both), HELD, 448.0, "lines" if rowwise else "whole")
    if rowwise:
        want = float8.encode_rowwise(wide, HELD, 448.0, True)
    else:
        codes, transposed, inverse = float8.encode_transposed(wide, HELD, 448.0)
        want = codes, inverse, transposed, inverse
    assert all(map(torch.equal, got, want))


def test_an_overflow_of_swiglus_gradient_shows():
    both, dy = numbers(16, 40), numbers(16, 20)
    dy[3, 4] = math.inf
    codes, inverse, _, across = float8_gated.encode_gated(GatedGradient(dy, both), HELD, 448.0, "lines")
    assert inverse.isnan().flatten().nonzero().tolist() == [[3]]
    assert across.isnan().flatten().nonzero().tolist() == [[4], [24]]
    assert codes.shape == both.shape
    assert float8_gated.encode_gated(GatedGradient(dy, both), HELD, 448.0, "whole")[1].isnan()


@pytest.mark.parametrize("wish", ["", *WISHES])
@pytest.mark.parametrize("turned", [0, 6])
@pytest.mark.parametrize("d", [8, 24])
def test_gradients_of_heads_come_together_as_copies_do(wish, turned, d):
    """Of tensors that attention has laid out by heads, and with tables for each row of the batch."""
    parts = [numbers(2, heads, 9, d, seed=i).transpose(1, 2) for i, heads in enumerate((4, 2, 2))]
    rope = tuple(numbers(2, 9, 1, d, seed=i) for i in (7, 8)) if turned else None
    want = torch.cat([t.flatten(2) for t in parts], -1)
    if rope is not None:
        functions._rotate(want, *rope, turned, d, -1)
    got = torch.empty_like(want)
    found = peaks.wanted(got, wish)
    gather_heads(got, parts, rope, turned, found)
    assert torch.equal(got, want)
    assert found is None or right(found, got)


class Noted:
    """A function, or a kernel, whose calls are counted."""

    def __init__(self, what, calls):
        self.what, self.calls = what, calls

    def __call__(self, *args):
        self.calls.append(args)
        return self.what(*args)

    def __getitem__(self, grid):
        self.calls.append(grid)
        return self.what[grid]


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_layer_gives_the_same_gradients_whoever_finds_peaks(rowwise, monkeypatch):
    """Every bit of them, and fewer searches."""
    searches = []
    monkeypatch.setattr(codec, "_encodes", lambda t: True)
    for name in ("_peaks_of", "_peaks_of_both"):
        monkeypatch.setattr(float8, name, Noted(getattr(float8, name), searches))
    results, counts = [], []
    for finds in (True, False):
        made = build(serving.spec(num_layers=1), torch.device(DEVICE), torch.float32, seed=0)
        use_fp8(made, Float8Product(rowwise))
        fused.merge_projections(made)
        fused.fuse_elementwise(made)
        if finds:
            fused.share_peaks(made)
        else:
            monkeypatch.setattr(Float8Product, "encodes_gated", lambda *_: False)
            monkeypatch.setattr(fused, "_wish", lambda reader: "")
            monkeypatch.setattr(peaks, "wanted", lambda *_: None)
        with torch.autocast(DEVICE, torch.bfloat16):
            hidden = made(torch.arange(1, 17, device=DEVICE)[None], return_hidden=True)
        hidden.backward(numbers(*hidden.shape, dtype=hidden.dtype))
        results.append([hidden, *(p.grad for p in made.layers.parameters())])
        counts.append(len(searches))
        searches.clear()
    assert all(map(torch.equal, *results))
    # Of eight operands and four weights. Found elsewhere: those that norms and SwiGLU write, each way, and of
    # the gradients of queries, keys and values.
    assert counts == [6, 12]
