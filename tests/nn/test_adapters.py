"""Every kind of adapter against plain code in fp64; merging; several tasks over one base."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.nn import build
from ridgeline.nn.adapters.adapter import Tasks, merge, placed, put, unmerge
from ridgeline.nn.adapters.diff import OPEN, DiffLinear, _draw, open_chance, projected, settled
from ridgeline.nn.adapters.dropout import Dropout
from ridgeline.nn.adapters.lora_linear import LoRALinear
from ridgeline.nn.adapters.mask import MaskLinear, pack, unpack
from ridgeline.nn.quant.nf4 import NF4Linear
from ridgeline.nn.quant.quantized import IntLinear
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.targets import chosen, linears, matching, shortest
from ridgeline.techniques.adapters.bitfit_torch import BitFitLinear
from ridgeline.techniques.adapters.bottleneck_adapter_torch import BottleneckLinear

SPEC = ModelSpec(
    name="test-tiny", family="llama", vocab_size=60, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, intermediate_size=40, max_positions=64,
)  # fmt: skip


def around(kind, base):
    """A fresh adapter of each kind."""
    rng = torch.Generator().manual_seed(0)
    made = {
        "lora": lambda: LoRALinear(base, 3, 0.7, rng),
        "dora": lambda: LoRALinear(base, 3, 0.7, rng, dora=True),
        "bitfit": lambda: BitFitLinear(base),
        "bottleneck": lambda: BottleneckLinear(base, 5, rng),
        "diff": lambda: DiffLinear(base),
        "mask": lambda: MaskLinear(base, 0.02, 0.01),
    }
    return made[kind]()


KINDS = ["lora", "dora", "bitfit", "bottleneck", "diff", "mask"]
LINEAR = [k for k in KINDS if k != "bottleneck"]


def moved(adapter, seed=1):
    """The adapter with values far from the start."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter.state().values():
            p += 0.3 * torch.randn(p.shape, generator=rng, dtype=p.dtype)
    return adapter


def linear(bias=True, dtype=torch.float64):
    torch.manual_seed(3)
    base = nn.Linear(12, 10, bias=bias, dtype=dtype)
    base.requires_grad_(False)
    return base


def plain(kind, base, x, p):
    """What the papers' equations say, for autograd to differentiate."""
    w, b = base.weight, base.bias
    if kind == "lora":
        return F.linear(x, w, b) + 0.7 * x @ p["lora_a"].T @ p["lora_b"].T
    if kind == "dora":
        v = w + 0.7 * p["lora_b"] @ p["lora_a"]
        return F.linear(x, p["lora_m"][:, None] * v / v.norm(dim=1, keepdim=True).detach(), b)
    if kind == "bitfit":
        return F.linear(x, w, b) + p["adapter_bias"]
    if kind == "bottleneck":
        h = F.linear(x, w, b)
        inner = F.gelu(h @ p["adapter_down"].T + p["adapter_down_bias"])
        return h + inner @ p["adapter_up"].T + p["adapter_up_bias"]
    if kind == "diff":
        z = (torch.sigmoid(p["adapter_gate"]) * 1.2 - 0.1).clamp(0, 1)
        return F.linear(x, w + p["adapter_diff"] * z, b)
    s = p["adapter_scores"]
    on = (s > 0.01).to(s.dtype) + s - s.detach()  # straight through
    return F.linear(x, w * on, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_plain_code(kind, bias):
    base = linear(bias)
    adapter = moved(around(kind, base).double())
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 5, 10, dtype=torch.float64)
    copies = {n: p.detach().clone().requires_grad_() for n, p in adapter.state().items()}
    x2 = x.detach().clone().requires_grad_()
    y, want = adapter(x), plain(kind, base, x2, copies)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    assert (y - base(x)).abs().max() > 1e-2
    (y * weight).sum().backward()
    (want * weight).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-11, atol=1e-12)
    for name, p in adapter.state().items():
        torch.testing.assert_close(p.grad, copies[name].grad, rtol=1e-11, atol=1e-12, msg=name)
    # and on a segment of rows, from what the base gave
    torch.testing.assert_close(adapter.delta(x, base(x)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_the_base_to_the_bit(kind, bias):
    base = linear(bias, torch.float32)
    x = torch.randn(7, 12)
    assert torch.equal(around(kind, base)(x), base(x))


def test_drawn_gates_equal_plain_code():
    base = linear()
    noise = Dropout(0.0, 5)
    noise.at(2)
    adapter = moved(DiffLinear(base, noise, layer=3).double())
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(Dropout.seed_of(5, 2, 3, 0))
    u = torch.rand(10, 12, generator=generator, dtype=torch.float64)
    d, gate = (p.detach().clone().requires_grad_() for p in adapter.state().values())
    z = (torch.sigmoid(u.log() - (1 - u).log() + gate) * 1.2 - 0.1).clamp(0, 1)
    want = F.linear(x.detach(), base.weight + d * z, base.bias)
    torch.testing.assert_close(adapter(x), want, rtol=1e-11, atol=1e-12)
    want.square().sum().backward()
    adapter(x).square().sum().backward()
    torch.testing.assert_close(adapter.adapter_diff.grad, d.grad)
    torch.testing.assert_close(adapter.adapter_gate.grad, gate.grad)
    with torch.no_grad():  # evaluation: settled gates
        z = settled(adapter.adapter_gate)
        torch.testing.assert_close(adapter(x), F.linear(x, base.weight + adapter.adapter_diff * z, base.bias))


def test_the_chance_of_an_open_gate_is_what_drawing_gives():
    gate = torch.linspace(-4, 4, 5).repeat_interleave(40_000)
    z, _ = _draw(gate, (1, 2, 3))
    share = (z > 0).double().view(5, -1).mean(1)
    torch.testing.assert_close(share, open_chance(torch.linspace(-4, 4, 5)).double(), atol=0.01, rtol=0)
    assert float(open_chance(torch.tensor(OPEN))) > 0.98


def test_projection_keeps_the_largest_of_all_layers():
    found = projected({"a": torch.tensor([3.0, -0.1, 0.2]), "b": torch.tensor([[0.5], [-4.0]])}, 0.4)
    assert found["a"].tolist() == [3.0, 0.0, 0.0]
    assert found["b"].flatten().tolist() == [0.0, -4.0]


@pytest.mark.parametrize("shape", [(3, 5), (8, 8), (1, 1)])
def test_masks_are_bits(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    bits = pack(mask)
    assert bits.numel() == -(-shape[0] * shape[1] // 8)
    assert torch.equal(unpack(bits, shape), mask)


# ---- dropout --------------------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_seed_and_step():
    base = linear(dtype=torch.float32)
    drop = Dropout(0.4, seed=1)
    adapter = moved(LoRALinear(base, 3, 0.7, torch.Generator().manual_seed(0), drop, layer=2))
    x = torch.randn(2, 50, 12, requires_grad=True)
    still = adapter(x)
    drop.at(0)
    first, again = adapter(x), adapter(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, still)
    with torch.no_grad():
        assert torch.equal(adapter(x), still), "off in evaluation"
    drop.at(1)
    assert not torch.equal(adapter(x), first)
    drop.at(0)
    mask = drop.mask(x, 2, 12, 0, 0)
    assert float((mask == 0).float().mean()) == pytest.approx(0.4, abs=0.05)
    x2 = x.detach().clone().requires_grad_()
    a, b = (p.detach().clone().requires_grad_() for p in (adapter.lora_a, adapter.lora_b))
    want = F.linear(x2, base.weight, base.bias) + 0.7 * (x2 * mask) @ a.T @ b.T
    torch.testing.assert_close(first, want)
    first.square().sum().backward()
    want.square().sum().backward()
    for got, reference in ((x, x2), (adapter.lora_a, a), (adapter.lora_b, b)):
        torch.testing.assert_close(got.grad, reference.grad, rtol=1e-4, atol=1e-4)


# ---- merging --------------------------------------------------------------------------------------------------------


def model_and_adapters(kind, seed=1):
    model = build(SPEC, seed=0)
    model.requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.ndim > 1 else 1)
    return model, adapters_for(model, kind, seed)


def adapters_for(model, kind, seed=1):
    wanted = chosen(SPEC, ["o_proj", "down_proj"] if kind == "bottleneck" else ["all-linear"])
    return {n: moved(around(kind, model.get_submodule(n)), seed) for n in wanted}


def base_bytes(model):
    return {n: t.clone() for n, t in model.state_dict().items()}


IDS = torch.randint(60, (4, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", LINEAR)
@torch.no_grad()
def test_merged_equals_unmerged_and_back(kind):
    model, adapters = model_and_adapters(kind)
    before, plain_logits = base_bytes(model), model(IDS)
    for name, adapter in adapters.items():
        put(model, name, adapter)
    want = model(IDS)
    assert (want - plain_logits).abs().max() > 1e-2
    merge(model)
    torch.testing.assert_close(model(IDS), want, rtol=1e-4, atol=1e-4)
    unmerge(model)
    assert torch.equal(model(IDS), want)
    for name, adapter in adapters.items():
        put(model, name, adapter.base)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_what_cannot_be_merged_says_so():
    with pytest.raises(UserError, match="not linear"):
        around("bottleneck", linear(dtype=torch.float32)).merge()
    quantized = IntLinear(linear(dtype=torch.float32), 8)
    with pytest.raises(UserError, match="quantized base"):
        LoRALinear(quantized, 2, 1.0).merge()


@pytest.mark.parametrize("store", [NF4Linear, lambda base: IntLinear(base, 4), lambda base: IntLinear(base, 8)])
def test_dora_over_codes_starts_as_the_codes_give(store):
    base = store(linear(dtype=torch.float32))
    x = torch.randn(3, 12)
    assert torch.equal(LoRALinear(base, 2, 1.0, dora=True)(x), base(x))


# ---- several tasks --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_tasks_share_one_base():
    model, _ = model_and_adapters("lora")
    before, bare = base_bytes(model), model(IDS)
    tasks = Tasks(model)
    alone = {}
    for i, kind in enumerate(KINDS):
        tasks.add(kind, adapters_for(model, kind, seed=i))
        assert torch.equal(model(IDS), bare), "adding changes nothing"
    for kind in KINDS:
        tasks.activate(kind)
        alone[kind] = model(IDS)
        assert (alone[kind] - bare).abs().max() > 1e-3
    # one batch, rows of several tasks and of none
    order = ("dora", None, "mask", "bottleneck")
    tasks.activate_rows((kind, slice(row, row + 1)) for row, kind in enumerate(order))
    mixed = model(IDS)
    for row, kind in enumerate(order):
        torch.testing.assert_close(mixed[row], alone.get(kind, bare)[row], rtol=1e-4, atol=1e-4)
    tasks.remove("dora")
    assert torch.equal(model(IDS), bare)
    tasks.activate(None)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not list(placed(model))
    with pytest.raises(UserError, match="unknown adapter 'dora'"):
        tasks.activate("dora")
    with pytest.raises(UserError, match="'mask' already"):
        tasks.add("mask", {})


def test_an_adapter_that_is_merged_is_not_switched_away():
    model, adapters = model_and_adapters("lora")
    tasks = Tasks(model)
    tasks.add("one", adapters)
    tasks.activate("one")
    merge(model)
    with pytest.raises(UserError, match="unmerge it first"):
        tasks.activate(None)


# ---- patterns -------------------------------------------------------------------------------------------------------


def test_patterns():
    known = linears(SPEC)
    assert len(known) == 14
    assert matching("all-linear", known) == matching("*", known) == list(known)
    assert matching("q_proj", known) == ["layers.0.attention.q_proj", "layers.1.attention.q_proj"]
    assert matching("layers.1.mlp.*", known) == [f"layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert matching(r".*\.(k|v)_proj", known) == [f"layers.{i}.attention.{n}_proj" for i in (0, 1) for n in "kv"]
    assert matching("proj", known) == matching("(", known) == matching("", known) == []
    assert shortest(["layers.0.attention.q_proj", "layers.1.attention.q_proj"], known) == ["q_proj"]
    assert shortest(["layers.1.mlp.up_proj"], known) == ["1.mlp.up_proj"]
