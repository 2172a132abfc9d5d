"""Products of all experts with low-bit codes in one launch, against each expert's expanded weight."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.nn.test_lowbit_triton import off
from tests.nn.test_packed_linear import record, rows

from ridgeline import catalog
from ridgeline.nn.kernels import lowbit_matmul
from ridgeline.nn.kernels.dispatch import has_float8
from ridgeline.nn.kernels.expert_rows import most_blocks
from ridgeline.nn.kernels.grouped_codes import grouped_product, starts_of
from ridgeline.nn.model import grouped_experts
from ridgeline.nn.model.grouped_experts import group_experts
from ridgeline.nn.model.moe import Experts, MoE, most_tokens_at_once
from ridgeline.nn.quant import mxfp4
from ridgeline.nn.quant.codec import E4M3
from ridgeline.nn.quant.codes import Stripes
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import BIASES, PackedExperts
from ridgeline.spec.lowbit import FLOAT8_ROWS, MANY_ROWS
from ridgeline.techniques.precision.fp8_linear_torch import store_experts

OUT, WIDTH = 40, 256


def weight(kind, seed):
    if kind == "mxfp4":
        return mxfp4.quantized(torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(seed)))
    bits, group, symmetric = kind
    return record(OUT, WIDTH, bits, group, symmetric, seed=seed)


def multiplied(kind, counts, bias=False, dtype=torch.bfloat16):
    """(result, reference in fp64) of as many rows of each expert."""
    experts, held = len(counts), [weight(kind, e) for e in range(len(counts))]
    codes = [Stripes(p) for p in held]
    first = codes[0]
    words = torch.cat([c.words for c in codes]).to(DEVICE)
    scale = torch.cat([c.scale for c in codes], 1).to(DEVICE)
    zero = None if first.zero is None else torch.cat([c.zero for c in codes], 1).to(DEVICE)
    arrived = torch.cat([c.arrived for c in codes]).to(DEVICE)
    x = rows(sum(counts), WIDTH).to(dtype)
    expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    biases = torch.randn(experts, OUT, generator=torch.Generator().manual_seed(9)).to(dtype)
    got = grouped_product(x.to(DEVICE), starts_of(expert.to(DEVICE), experts), experts, words, scale, zero, first.bits,
                          first.center, first.group, first.stripe, arrived,
                          biases.flatten().to(DEVICE) if bias else None)  # fmt: skip
    assert not arrived.any()
    parts = [F.linear(part.double(), p.dense(torch.float64), b.double() if bias else None)
             for part, p, b in zip(x.split(counts), held, biases, strict=True)]  # fmt: skip
    return got.cpu(), torch.cat(parts)


@pytest.mark.parametrize("kind", ["mxfp4", (4, 64, True), (4, 128, False), (8, 32, True), (2, 64, False)], ids=str)
@pytest.mark.parametrize("counts", [[0, 1, 0, 3], [11, 0, 1, 18, 0], [0, 0, 30]], ids=str)
def test_rows_take_the_weight_of_their_expert(kind, counts):
    got, want = multiplied(kind, counts, bias=len(counts) == 5)
    assert off(got, want) < 2**-7


def test_an_expert_has_more_rows_than_a_program():
    """Blocks of 8 rows, as there are few on average."""
    got, want = multiplied("mxfp4", [*[0] * 9, 37, 1, *[0] * 5], dtype=torch.float16)
    assert off(got, want) < 2**-10


def test_inputs_are_split_where_there_are_few_blocks(monkeypatch):
    apart, want = multiplied("mxfp4", [2, 0, 1])
    monkeypatch.setattr(lowbit_matmul, "processors", lambda device: 0)
    whole, _ = multiplied("mxfp4", [2, 0, 1])
    assert off(apart, want) < 2**-7
    assert off(whole, want) < 2**-7


@pytest.mark.parametrize(("n", "experts", "size"), [(4, 128, 8), (256, 128, 8), (7, 3, 16), (0, 4, 8)])
def test_no_more_blocks_than_that_can_be(n, experts, size):
    """All experts but one have one row, and that has the rest; or one row more than whole blocks."""
    reached = min(n, experts)
    worst = [1] * reached
    if reached:
        worst[0] += n - reached
    spread = [1 + size * (i < (n - reached) // size) for i in range(reached)]
    assert max(sum(-(-c // size) for c in counts) for counts in (worst, spread)) <= most_blocks(n, experts, size)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu"])
def test_experts_of_a_served_layer_at_once_and_one_by_one(biased, activation, monkeypatch):
    """Layers of single experts go on as they are, from parts of what lies together."""
    experts, width = 3, 64
    g = torch.Generator().manual_seed(4)

    def linears(out, inputs):
        held = [mxfp4.quantized(torch.randn(out, inputs, generator=g) / 8) for _ in range(experts)]
        made = [PackedLinear(p, device=DEVICE) for p in held]
        for layer, p in zip(made, held, strict=True):
            layer.codes = Stripes(p).to(DEVICE)  # as on a GPU
        return made

    gate = None if activation == "relu" else linears(width, width)
    biases = {name: torch.nn.Parameter(torch.randn(experts, width, generator=g).bfloat16().to(DEVICE), False)
              for name in (BIASES[gate is None :] if biased else ())}  # fmt: skip
    layer = PackedExperts(activation, gate, linears(width, width), linears(width, width), biases)
    counts = [2, 0, 5]
    x = rows(sum(counts), width).bfloat16().to(DEVICE)
    expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts)).to(DEVICE)
    with torch.inference_mode():
        want = layer(x, counts)
    assert not layer.groupable(x)
    assert group_experts(layer)
    with torch.inference_mode():
        assert torch.equal(layer(x, counts), want)
        got = layer.together(x, expert)
        assert off(got.cpu(), want.cpu().double()) < 2**-6
        assert layer.groupable(x) == (DEVICE == "cuda")
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(grouped_experts, "has_triton", lambda: True)
        assert layer.groupable(x)
        assert not layer.groupable(rows(MANY_ROWS * experts + 1, width).bfloat16())
        assert not layer.groupable(x.float())
        layer.up_proj[0].codes.words = torch.nn.Parameter(layer.up_proj[0].codes.words.clone(), requires_grad=False)
        assert not layer.groupable(x)  # no part of the whole any more


@pytest.mark.parametrize("counts", [[0, 1, 0, 3], [11, 0, 9]], ids=str)
def test_experts_in_float8(counts):
    """Inputs stay in 16 bits: only results are rounded."""
    model = torch.nn.Module()
    shape = catalog.model("mixtral-tiny").model_copy(update={"num_experts": len(counts), "activation": "silu"})
    model.experts = Experts(shape).to(DEVICE)
    for i, p in enumerate(model.experts.parameters()):
        torch.nn.init.normal_(p, std=0.05, generator=torch.Generator(DEVICE).manual_seed(i))
    store_experts(model)
    layer = model.experts
    first = [part for pair in zip(layer.gate_proj, layer.up_proj, strict=True) for part in pair]
    dense = [(p.codes.view(E4M3).double() * p.inverse).cpu() for p in first]
    last = [(p.codes.view(E4M3).double() * p.inverse).cpu() for p in layer.down_proj]
    x = rows(sum(counts), shape.hidden_size).bfloat16()
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(DEVICE)
    assert group_experts(layer)
    with torch.inference_mode():
        got = layer.together(x.to(DEVICE), expert).cpu()
    want = [F.linear(F.silu(F.linear(part.double(), dense[2 * e])) * F.linear(part.double(), dense[2 * e + 1]), last[e])
            for e, part in enumerate(x.split(counts))]  # fmt: skip
    assert off(got, torch.cat(want)) < 2**-6


def test_experts_of_several_kinds_stay_apart():
    codes = [mxfp4.quantized(torch.randn(64, 64)), record(64, 64, 4, 32, True)]
    linears = [[PackedLinear(p) for p in codes] for _ in range(2)]
    for layer, p in zip(linears[0] + linears[1], codes + codes, strict=True):
        layer.codes = Stripes(p)
    layer = PackedExperts("relu", None, *linears)
    assert not group_experts(layer)
    assert layer.grouped is None
    moe = MoE(catalog.model("mixtral-tiny")).bfloat16()
    moe.experts = layer
    assert most_tokens_at_once(moe) == 0


def test_tokens_of_a_step_whose_experts_go_at_once():
    """Of all kinds in a model those of the layer that takes fewest; other layers set no limit. In fp32 none do."""
    spec = catalog.model("mixtral-tiny")
    plain, coded = MoE(spec).bfloat16(), MoE(spec).bfloat16()
    assert most_tokens_at_once(torch.nn.ModuleList([plain])) == math.inf
    holder = torch.nn.Module()
    holder.experts = coded.experts
    store_experts(holder)
    coded.experts = holder.experts
    assert group_experts(coded.experts)
    most = FLOAT8_ROWS if has_float8(torch.device(DEVICE)) else MANY_ROWS
    both = torch.nn.ModuleList([plain, coded])
    assert most_tokens_at_once(both) == most * spec.num_experts / spec.experts_per_token
    assert most_tokens_at_once(both.float()) == most_tokens_at_once(MoE(spec)) == 0
