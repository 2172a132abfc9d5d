"""Kernels of ours that are tried before an engine serves with them: in Triton's interpreter, as on Hopper."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.nn.interpreter import DEVICE
from tests.nn.test_skinny import found  # noqa: F401
from torch import nn

from ridgeline import catalog
from ridgeline.nn.adapters.lora_slots import LoraSlots
from ridgeline.nn.kernels import lowbit_matmul, products, skinny
from ridgeline.nn.kernels.backends import ADAPTERS, DENSE, EXPERTS, FLOAT8, Backend, Kernels
from ridgeline.nn.kernels.grouped_lora import add_lora
from ridgeline.nn.model import grouped_experts, own_kernels
from ridgeline.nn.model.moe import Experts
from ridgeline.nn.quant.packed_model import PackedExperts
from ridgeline.spec.backends import OURS
from ridgeline.spec.errors import UserError
from ridgeline.techniques.precision import fp8_linear_torch as fp8

ON = torch.device(DEVICE)


@pytest.fixture
def hopper(found, monkeypatch):  # noqa: F811
    """Rows that the kernel for few of them multiplies, as on Hopper."""
    monkeypatch.setattr(own_kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8, "has_float8", lambda device: True)
    monkeypatch.setattr(fp8.StoredFp8Linear, "_by_codes", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(own_kernels, "ROWS", (13, 29))
    return found


def layer(out=48, width=80):
    linear = nn.Linear(width, out, bias=False, device=DEVICE, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight, generator=torch.Generator(DEVICE).manual_seed(out))
    return fp8.StoredFp8Linear(linear)


def settled(model, kernels=None):
    """Who computes what of a model, and what is said."""
    kernels = kernels or Kernels()
    for module in model.modules():
        if isinstance(module, fp8.StoredFp8Linear):
            module.kernels = kernels
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        own_kernels.settle(model, kernels, ON, torch.bfloat16)
    return kernels, [str(w.message) for w in said]


def test_a_kernel_that_is_right_is_taken(hopper):
    model = nn.Sequential(layer(), layer(), layer(32))
    kernels, said = settled(model)
    assert not said
    assert kernels.ours(FLOAT8)
    assert hopper == [13, 13, 29, 29] * 2  # one layer of each shape, twice each
    hopper.clear()
    model[0](torch.ones(9, 80, device=DEVICE, dtype=torch.bfloat16))
    assert hopper == [9]


WRONG = {
    "is wrong here": lambda y, call: y * 1.1,
    r"is wrong here \(error nan\)": lambda y, call: y * float("nan"),
    "gives other results the second time": lambda y, call: y * (1 + 2.0**-7 * call),
}


@pytest.mark.parametrize("says", WRONG)
def test_a_kernel_that_is_wrong_is_not(says, hopper, monkeypatch):
    plain, calls = skinny.product_of_coded_rows, []

    def off(*given):
        calls.append(1)
        return WRONG[says](plain(*given), len(calls))

    monkeypatch.setattr(skinny, "product_of_coded_rows", off)
    model = nn.Sequential(layer())
    kernels, said = settled(model)
    assert len(said) == 1
    assert not kernels.ours(FLOAT8)
    tried = len(calls)
    x = torch.ones(9, 80, device=DEVICE, dtype=torch.bfloat16)
    assert model(x).isfinite().all()
    assert len(calls) == tried == 2


def test_a_kernel_that_does_not_compile_is_not_taken(hopper, monkeypatch):
    def fails(*given):
        raise RuntimeError("PTXAS error\nand more")

    monkeypatch.setattr(skinny, "product_of_coded_rows", fails)
    kernels, said = settled(nn.Sequential(layer()))
    assert said == ["PyTorch's operators compute float8, as our kernel fails here (PTXAS error)"]
    assert kernels.notes() == ["computed by other libraries: float8: torch"]


def test_a_gpu_that_is_lost_is_one_message(hopper, monkeypatch):
    def fails(*given, **more):
        raise RuntimeError("an illegal memory access was encountered")

    model = layer()
    monkeypatch.setattr(skinny, "product_of_coded_rows", fails)
    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(UserError, match="leaves the GPU unusable") as told:
        settled(nn.Sequential(model))
    assert told.value.fix == "start again with --kernels float8=torch"  # what the engine does not have is refused


def test_what_one_model_of_an_engine_found_holds_for_the_next(hopper, monkeypatch):
    """A drafting model's layers of other shapes, for which the kernel is right, do not bring it back."""
    plain = skinny.product_of_coded_rows

    def off(*given):
        y = plain(*given)
        return y * 1.1 if y.shape[-1] == 48 else y

    monkeypatch.setattr(skinny, "product_of_coded_rows", off)
    monkeypatch.setattr(Kernels, "own", lambda kernels, operator, device, coded=False: kernels.taken.update(
        {operator: OURS}))  # fmt: skip
    kernels, said = settled(nn.Sequential(layer()))
    assert len(said) == 1
    settled(nn.Sequential(layer(32)), kernels)
    assert not kernels.ours(FLOAT8)


def test_who_was_measured_to_be_faster_or_is_asked_for_is_taken(hopper, monkeypatch):
    """Without a trial."""
    monkeypatch.setattr(Backend, "refusal", lambda self, case: "")
    for kernels in (Kernels({FLOAT8: "torch"}), Kernels({}, {FLOAT8: {OURS: 2.0, "torch": 1.0}})):
        assert not settled(nn.Sequential(layer()), kernels)[0].ours(FLOAT8)
    assert not hopper
    assert settled(nn.Sequential(layer()), Kernels({}, {FLOAT8: {OURS: 1.0, "torch": 2.0}}))[0].ours(FLOAT8)
    assert hopper


def mixture():
    """A layer of experts in float8, which are computed at once."""
    model = nn.Module()
    shape = catalog.model("mixtral-tiny").model_copy(update={"num_experts": 3, "activation": "silu"})
    model.experts = Experts(shape).to(DEVICE)
    for i, p in enumerate(model.experts.parameters()):
        nn.init.normal_(p, std=0.05, generator=torch.Generator(DEVICE).manual_seed(i))
    fp8.store_experts(model)
    assert grouped_experts.group_experts(model.experts)
    return model


@pytest.mark.parametrize("right", [True, False])
def test_experts_at_once_are_tried_too(right, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(PackedExperts, "groupable", lambda self, rows: True)
    model, plain = mixture(), lowbit_matmul.launch_tiles
    from ridgeline.nn.kernels import grouped_codes

    monkeypatch.setattr(grouped_codes, "launch_tiles", lambda *given: plain(*given) * (1 if right else 1.1))
    kernels, said = settled(model)
    assert kernels.ours(EXPERTS) == right == (model.experts.grouped is not None)
    assert len(said) == (not right)


@pytest.fixture
def dense(hopper, monkeypatch):
    """Rows that the kernel for a few of them multiplies in 16 bits, and a model of two layers."""
    rows, plain = [], skinny.product_of_rows

    def count(x, *more):
        rows.append(len(x))
        return plain(x, *more)

    monkeypatch.setattr(skinny, "product_of_rows", count)
    monkeypatch.setattr(products, "FEW_ROWS", set())
    monkeypatch.setattr(Backend, "refusal", lambda self, case: "")
    model = nn.Sequential(*(nn.Linear(80, 48, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
    products.choose_served_products(model.requires_grad_(False))
    return rows, model


FASTER = Kernels({}, {DENSE: {OURS: 1.0, "torch": 2.0}})


SLOWER = Kernels({}, {DENSE: {OURS: 2.0, "torch": 1.0}})


@pytest.mark.parametrize("kernels", [Kernels(), Kernels({DENSE: "torch"}), SLOWER], ids=["", "asked", "measured"])
def test_products_of_few_rows_are_pytorchs(kernels, dense):
    rows, model = dense
    assert settled(model, kernels)[1] == []
    model[0](torch.ones(9, 80, device=DEVICE, dtype=torch.bfloat16))
    assert not rows


@pytest.mark.parametrize("kernels", [FASTER, Kernels({DENSE: OURS})], ids=["measured", "asked"])
def test_unless_ours_is_faster_or_asked_for(kernels, dense):
    rows, model = dense
    assert settled(model, kernels)[1] == []
    assert rows == [13, 13, 29, 29]  # one layer of each shape, twice each
    rows.clear()
    for m in (2, 9, 128, 129):
        x = torch.randn(1, m, 80, device=DEVICE, dtype=torch.bfloat16)
        wanted = F.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(model[0](x), wanted, atol=2e-2, rtol=2e-2)
    assert rows == [2, 9, 128]
    settled(model, Kernels())  # of another engine
    model[0](x[:, :9])
    assert rows == [2, 9, 128]


def test_and_right(dense, monkeypatch):
    rows, model = dense
    plain = skinny.product_of_rows
    monkeypatch.setattr(skinny, "product_of_rows", lambda *given: plain(*given) * 1.1)
    kernels, said = settled(model, Kernels({DENSE: OURS}))
    assert len(said) == 1
    assert not kernels.ours(DENSE)
    rows.clear()
    model[0](torch.ones(9, 80, device=DEVICE, dtype=torch.bfloat16))
    assert not rows


@pytest.mark.parametrize("kernels", [Kernels(), Kernels({ADAPTERS: "torch"})], ids=["", "asked"])
@pytest.mark.parametrize("factor", [1, 1.1])
def test_adapters_are_added_for_all_rows_at_once_where_that_is_right(kernels, factor, hopper, monkeypatch):
    monkeypatch.setattr(Backend, "refusal", lambda self, case: "")
    calls = []

    def add(x, y, items, stack):
        calls.append(stack.widths)
        add_lora(x, y, items, stack)
        y *= factor

    model = nn.Sequential(nn.Linear(80, 48), nn.Linear(48, 24)).to(DEVICE, torch.bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        taken = own_kernels.settle_lora(LoraSlots(model, add), kernels)
    assert taken == (factor == 1 and not kernels.asked)
    assert len(said) == (factor > 1 and not kernels.asked)
    assert set(calls) == (set() if kernels.asked else {(48,), (24,)} if taken else {calls[0]})
