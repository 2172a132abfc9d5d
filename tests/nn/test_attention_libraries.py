"""Our calls of attention libraries, against stand-ins with the libraries' signatures and conditions. None of the
libraries themselves runs without a GPU; on one, ``make gpu`` compares them with our kernel."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch
from tests.nn import attention_stand_ins as stand_ins
from tests.serving import ask, engine, greedy, model, run

from ridgeline.cli import engine_options
from ridgeline.nn.kernels import attention_libraries as libraries
from ridgeline.nn.kernels.backends import Backend, Case, Kernels
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.model.mask import ScoreChanges
from ridgeline.serve.runner import with_libraries
from ridgeline.spec.errors import UserError

LENGTHS = [1, 65, 300, 90]
COUNTS = {"prefill": [1, 1, 3, 70], "decode": [1, 1, 1, 1]}
LOADERS = {"flash-attn": ("flash_attn", stand_ins.flash_2, libraries.flash_attention),
           "flash-attn-3": ("flash_attn_interface", stand_ins.flash_3, libraries.flash_attention_3),
           "flashinfer": ("flashinfer", stand_ins.flashinfer, libraries.flashinfer)}  # fmt: skip


def step(counts, heads, groups, width, block):
    """Queries, stores and pages of a step in fp16."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-max(LENGTHS) // block)
    count = len(LENGTHS) * blocks + 3
    table = torch.randperm(count, generator=generator)[: len(LENGTHS) * blocks].view(-1, blocks).int()
    stores = [torch.randn(1, groups, count * block, width, generator=generator).half() for _ in range(2)]
    q = torch.randn(heads, sum(counts), width, generator=generator).half().transpose(0, 1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return q, stores, make_pages(table, lengths, counts, block, heads // groups, width)


def expected(q, stores, pages, window):
    keys, values = (libraries.by_pages(s, pages.block) for s in stores)
    return stand_ins.attention(q, keys, values, pages.table, pages.lengths, pages.starts, True, window - 1)


def test_a_pool_is_pages_as_it_lies():
    pool = torch.arange(2 * 12 * 3.0).view(1, 2, 12, 3)
    pages = libraries.by_pages(pool, 4)
    assert pages.data_ptr() == pool.data_ptr()
    assert torch.equal(pages[1, 2, 1], pool[0, 1, 6])


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("name", list(LOADERS))
def test_what_a_library_is_given(monkeypatch, name, kind, window):
    module, stand_in, load = LOADERS[name]
    made = stand_in()
    monkeypatch.setitem(sys.modules, module, made)
    q, stores, pages = step(COUNTS[kind], 6, 2, 64, 256 if name == "flash-attn" else 16)
    attend = load()
    got = attend(q, *stores, pages, window)
    torch.testing.assert_close(got, expected(q, stores, pages, window), rtol=2e-3, atol=2e-3)
    if name == "flashinfer":  # every layer of a step has the same plan
        attend(q, *stores, pages, window)
        assert made.BatchPrefillWithPagedKVCacheWrapper.plans == 1


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_pytorch_is_given(kind, window):
    if "block_table" not in inspect.signature(pytest.importorskip("torch.nn.attention.varlen").varlen_attn).parameters:
        pytest.skip("this PyTorch has no block tables")
    with torch.library._scoped_library("aten", "IMPL") as library:
        stand_ins.pytorch(library)
        q, stores, pages = step(COUNTS[kind], 6, 2, 64, 256)
        got = libraries.torch_attention()(q, *stores, pages, window)
    torch.testing.assert_close(got, expected(q, stores, pages, window), rtol=2e-3, atol=2e-3)


def test_sequences_without_new_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_ins.flashinfer())
    q, stores, pages = step([1, 0, 3, 1], 4, 2, 64, 16)
    got = libraries.flashinfer()(q, *stores, pages, 0)
    torch.testing.assert_close(got, expected(q, stores, pages, 0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", list(LOADERS))
def test_captured_steps_with_prompts(monkeypatch, name):
    """Behind the sequences come one of padding and empty ones, and the host knows no more than that there are not more
    new tokens than rows."""
    module, stand_in, load = LOADERS[name]
    monkeypatch.setitem(sys.modules, module, stand_in())
    q, stores, pages = step(COUNTS["prefill"], 6, 2, 64, 256 if name == "flash-attn" else 16)
    n, pads = len(q), 5
    wider = replace(
        pages, table=torch.cat([pages.table, pages.table[:1], pages.table[:1] * 0]), held=(), new=[n + pads],
        lengths=torch.cat([pages.lengths, torch.tensor([pads, 0], dtype=torch.int32)]),
        starts=torch.cat([pages.starts, torch.tensor([n + pads] * 2, dtype=torch.int32)]),
    )  # fmt: skip
    rows = torch.cat([q, q[:pads]])
    if name == "flashinfer":
        with pytest.raises(RuntimeError, match="on the host"):
            load()(rows, *stores, wider, 0)
        return
    got = load()(rows, *stores, wider, 0)
    torch.testing.assert_close(got[:n], expected(q, stores, pages, 0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("backend", "case", "why"), [
    (libraries.FLASH, {"block": 16}, "multiple of 256"), (libraries.FLASH, {"block": 256}, ""),
    (libraries.TORCH, {"block": 64}, "multiple of 256"), (libraries.TORCH, {"block": 256}, ""),
    (libraries.FLASH, {"block": 256, "dtype": torch.float32}, "16 bits"),
    (libraries.FLASH_3, {"block": 16}, ""), (libraries.FLASH_3, {"width": 60}, "multiple of 8"),
    (libraries.FLASHINFER, {"width": 80}, "64, 128 and 256"), (libraries.FLASHINFER, {"coded": True}, "quantized"),
])  # fmt: skip
def test_what_each_cannot(monkeypatch, backend, case, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    given = {"dtype": torch.bfloat16, "width": 128, "block": 16, **case}
    found = backend.cannot(Case(torch.device("cuda"), **given))
    assert why in found
    assert bool(found) == bool(why)


def backend(name, attend, why=""):
    return Backend(name, "torch", "torch", lambda: attend, lambda case: why)


@pytest.fixture
def registered(monkeypatch):
    """A registry of two back ends of decoding, on what seems a GPU."""
    held = {"attention.decode": (backend("torch", "theirs"), backend("flash-attn", "none", "too old")),
            "attention.prefill": ()}  # fmt: skip
    monkeypatch.setattr("ridgeline.nn.kernels.backends.registry", lambda: held)
    return Case(torch.device("cuda"), torch.bfloat16)


def test_the_fastest_is_taken(registered):
    ours, theirs = {"ridgeline": 2.0, "torch": 3.0}, {"ridgeline": 2.0, "torch": 1.0, "flash-attn": 0.5}
    for measured, found in (({}, None), ({"attention.decode": ours}, None), ({"attention.decode": theirs}, "theirs")):
        kernels = Kernels(measured=measured)
        assert kernels.find("attention.decode", registered) == found
        assert kernels.taken["attention.decode"].startswith("torch" if found else "ridgeline")
        assert bool(kernels.notes()) == (found is not None)


def test_kernels_far_from_the_roof_say_so(registered):
    kernels = Kernels()
    kernels.find("attention.prefill", registered)
    kernels.find("attention.decode", replace(registered, coded=True))
    kernels.own("norm", registered.device)
    assert kernels.notes() == [
        "reference kernel, far from the GPU's roof: our own for attention.decode, attention.prefill"
    ]


def test_a_wish_comes_first_or_is_refused(registered):
    measured = {"attention.decode": {"ridgeline": 1.0, "torch": 2.0}}
    assert Kernels({"attention.decode": "torch"}, measured).find("attention.decode", registered) == "theirs"
    fastest = {"attention.decode": {"torch": 1.0}}
    assert Kernels({"attention.decode": "ridgeline"}, fastest).find("attention.decode", registered) is None
    with pytest.raises(UserError, match=r"flash-attn cannot compute attention\.decode: too old"):
        Kernels({"attention.decode": "flash-attn"}).find("attention.decode", registered)
    unused = Kernels({"attention.decode": "torch"})
    with pytest.raises(UserError, match=r"no separate attention\.decode") as refusal:
        unused.require_used()
    assert "flash_attention" in refusal.value.fix  # without it a server has no such operator


@pytest.mark.parametrize("name", ["flash-attn-3", "flashinfer"])
def test_an_engine_serves_through_it(monkeypatch, name):
    module, stand_in, load = LOADERS[name]
    monkeypatch.setitem(sys.modules, module, stand_in(low=False))
    made = model(dtype=torch.float32, sliding_window=40)
    prompts = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 20 * i)] for i in range(3)]
    held = {f"attention.{kind}": (backend(name, load()),) for kind in ("decode", "prefill")}
    monkeypatch.setattr("ridgeline.nn.kernels.backends.registry", lambda: held)
    eng = engine(made, "paged_kv:block_size=4", max_num_batched_tokens=24)

    def none(*args):
        raise AssertionError("our kernel was called")

    case = Case(torch.device("cuda"), torch.float32, block=4)
    eng.runner.layout.kernel = None
    eng.runner.layout.whole = with_libraries(none, Kernels(dict.fromkeys(held, name)), case)
    got = run(eng, *[ask(str(i), p, 6) for i, p in enumerate(prompts)])[0]
    assert got == {(str(i), 0): greedy(made, p, 6) for i, p in enumerate(prompts)}


def test_a_cpu_has_no_choice():
    with pytest.raises(UserError, match="those of a GPU, and this runs on a CPU"):
        engine(model(), kernels={"attention": "flashinfer"})


def test_the_command_line_asks_for_operators_by_name():
    assert engine_options._kernels(["attention.decode=torch", "norm=liger"]) == {
        "attention.decode": "torch", "norm": "liger"}  # fmt: skip
    for given in (["norm"], ["norm=liger", "norm=ridgeline"]):
        with pytest.raises(UserError, match="is not OPERATOR=BACKEND, each once"):
            engine_options._kernels(given)


def test_what_stays_with_our_kernel():
    keys = torch.empty(1, 1, 4, 8)
    assert libraries.takes(keys, 0, None)
    assert libraries.takes(keys, 64, None)
    assert not libraries.takes(keys, -64, None)
    assert not libraries.takes(keys, 0, ScoreChanges(1.5, None, None))
