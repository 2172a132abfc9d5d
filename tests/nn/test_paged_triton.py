"""Paged attention in Triton (its interpreter, where there is no GPU), against attention over gathered keys."""

from dataclasses import replace

import pytest
import torch
from tests.crossings import every_value
from tests.nn.interpreter import DEVICE
from tests.serve.drafts import Oracle, drafted_by
from tests.serving import ask, engine, greedy, model, run

from ridgeline.nn.kernels import functions, gpu, paged_store
from ridgeline.nn.kernels.paged_attention import paged_attention
from ridgeline.nn.kernels.paged_store import store_tokens
from ridgeline.nn.memory.step_pages import make_pages
from ridgeline.nn.model import fused
from ridgeline.nn.model.attention import alibi_slopes, naive_attention
from ridgeline.nn.model.mask import Mask, ScoreChanges
from ridgeline.nn.model.rotary import rotate
from ridgeline.nn.quant.quantized_kv import KINDS
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.draft_tree import Draft
from ridgeline.serve.drafting import Drafting
from ridgeline.serve.engine import Engine
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.step_graphs import StepGraphs
from ridgeline.spec.scheduling import Limits

LENGTHS, COUNTS = [1, 65, 300, 17, 90], [1, 1, 3, 0, 70]
"""Tokens of each sequence, and how many of them are new: none (its place in a batch is free), one, a draft, a chunk."""


def step(heads, groups, width, block, kind="", seed=0, dtype=torch.float32):
    """Queries, stores, what the stores hold [G, slots, D], and the pages of a step."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-max(LENGTHS) // block)
    count = len(LENGTHS) * blocks + 3
    table = torch.randperm(count, generator=generator)[: len(LENGTHS) * blocks].view(-1, blocks).int()
    whole = [torch.randn(1, groups, count * block, width, generator=generator).to(dtype) for _ in range(2)]
    stores = whole
    if kind:
        stores = [KINDS[kind](tuple(w.shape), torch.device("cpu")) for w in whole]
        for store, w in zip(stores, whole, strict=True):
            store.write(slice(0, w.shape[2]), w)
        whole = [store.read(slice(0, w.shape[2]), torch.float32) for store, w in zip(stores, whole, strict=True)]
        for store in stores:
            vars(store).update({n: t.to(DEVICE) for n, t in vars(store).items() if isinstance(t, torch.Tensor)})
    else:
        stores = [w.to(DEVICE) for w in whole]
    q = torch.randn(sum(COUNTS), heads, width, generator=generator).to(dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).to(DEVICE)
    return q, stores, [w[0] for w in whole], table, make_pages(
        table.to(DEVICE), lengths, COUNTS, block, heads // groups, width, kind)  # fmt: skip


def expected(q, held, table, block, window=0, changes=None):
    """By the definition of attention in fp64, token by token."""
    rows, row = [], 0
    for b, (length, new) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        for i in range(new):
            end = length - new + i + 1
            first = (end - 1) // -window * -window if window < 0 else max(0, end - window) if window else 0
            at = torch.arange(first, end)
            slots = table[b].long()[at // block] * block + at % block
            k, v = (h[:, slots][None].double() for h in held)
            rows.append(
                naive_attention(q[row][None, :, None].double(), k, v, Mask(None, False, changes=changes))[0, :, 0]
            )
            row += 1
    return torch.stack(rows)


SHAPES = [(4, 4, 16, 1), (6, 2, 24, 16), (8, 1, 64, 4)]
"""Heads, key heads, width of a head, slots of a page."""
SCORES = [(0, ""), (70, ""), (-70, ""), (0, "soft cap"), (70, "alibi"), (0, "sinks")]
"""Window, and what is done to scores."""


@pytest.mark.parametrize(("shape", "scores"), every_value(SHAPES, SCORES))
def test_pages_give_what_gathered_keys_give(shape, scores):
    (heads, groups, width, block), (window, changed) = shape, scores
    q, stores, held, table, pages = step(heads, groups, width, block)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1))
    changes = {"soft cap": ScoreChanges(1.5, None, None), "alibi": ScoreChanges(None, alibi_slopes(heads), None),
               "sinks": ScoreChanges(None, None, sinks)}.get(changed)  # fmt: skip
    there = changes and changes._replace(sinks=None if changes.sinks is None else sinks.to(DEVICE))
    got = paged_attention(q.to(DEVICE), *stores, pages, window, there).cpu()
    want = expected(q, held, table, block, window, changes)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


CODED = [(6, 2, 64, 80), (2, 1, 256, 80), (2, 2, 24, 80), (4, 2, 128, 0)]
"""Heads, key heads, width of a head, window."""


@pytest.mark.parametrize(("kind", "shape"), every_value(["int4", "int8", "fp8"], CODED))
def test_pools_of_codes(kind, shape):
    heads, groups, width, window = shape
    q, stores, held, table, pages = step(heads, groups, width, 16, kind)
    got = paged_attention(q.to(DEVICE), *stores, pages, window).cpu()
    want = expected(q, held, table, 16, window)
    # Nibbles are multiplied before their scale and minimum are applied: sums of some 128 times the values cancel.
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_an_odd_number_of_slots():
    """Whose scales are not whole words of two."""
    q, stores, held, table, pages = step(4, 1, 16, 1, "int8")
    assert stores[0].scale.numel() % 2 == 1
    got = paged_attention(q.to(DEVICE), *stores, pages).cpu()
    torch.testing.assert_close(got.double(), expected(q, held, table, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "changed"), SCORES[1:])
def test_few_rows_over_codes(window, changed):
    """By the kernel whose warps have keys of their own, of one key head and of several parts."""
    heads = 4
    q, stores, held, table, pages = step(heads, 1, 128, 16, "int4" if window else "int8")
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1))
    changes = {"soft cap": ScoreChanges(1.5, None, None), "alibi": ScoreChanges(None, alibi_slopes(heads), None),
               "sinks": ScoreChanges(None, None, sinks)}.get(changed)  # fmt: skip
    there = changes and changes._replace(sinks=None if changes.sinks is None else sinks.to(DEVICE))
    got = paged_attention(q.to(DEVICE), *stores, pages, window, there).cpu()
    torch.testing.assert_close(got.double(), expected(q, held, table, 16, window, changes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "window"), [("", 0), ("", -70), ("int8", 0), ("int4", 70)])
def test_items_of_an_empty_sequence_change_nothing(kind, window):
    """As captured steps have them that have room for more: their programs write nothing."""
    q, stores, held, table, pages = step(4, 1, 128, 16, kind)
    empty, rows = len(LENGTHS) + 1, torch.tensor([0, 0], dtype=torch.int32)
    starts = torch.cat([pages.starts.cpu(), pages.starts.cpu()[-1:], pages.starts.cpu()[-1:]])
    more = [replace(w, items=torch.cat([w.items.cpu(), torch.tensor([[empty, 0]] * 5).int()]).to(DEVICE))
            for w in pages.work]  # fmt: skip
    assert {w.split for w in more} == {True, False}
    wider = replace(pages, table=torch.cat([pages.table, pages.table[:2] * 0]), starts=starts.to(DEVICE),
                    lengths=torch.cat([pages.lengths, rows.to(DEVICE)]), work=tuple(more))  # fmt: skip
    spare = torch.full((3, *q.shape[1:]), 7.0)  # rows behind those of all sequences
    q = torch.cat([q, spare]).to(DEVICE)
    got = paged_attention(q, *stores, wider, window).cpu()
    want = expected(q.cpu()[:-3], held, table, 16, window)
    torch.testing.assert_close(got.double()[:-3], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["", "int4", "fp8"])
def test_half_precision(kind):
    q, stores, held, table, pages = step(6, 2, 64, 16, kind, dtype=torch.float16)  # the interpreter has no dot of bf16
    got = paged_attention(q.to(DEVICE), *stores, pages).cpu()
    want = expected(q, held, table, 16)
    assert float((got.double() - want).norm() / want.norm()) < 2e-3  # weights are rounded to 2^-11 before the product


@pytest.mark.parametrize("kind", ["", "int8", "int4"])
@pytest.mark.parametrize("width", [128, 64, 24])
def test_what_is_written(kind, width):
    """As the stores write it themselves, a code aside where a division rounds otherwise."""
    generator = torch.Generator().manual_seed(width)
    k, v = (torch.randn(1, 9, 3, width, generator=generator).transpose(1, 2) * 4 for _ in range(2))
    shape, slots = (1, 3, 40, width), torch.randperm(40, generator=generator)[:9]
    ours, theirs = [], []
    for made in (ours, theirs):
        for _ in range(2):
            made.append(KINDS[kind](shape, torch.device(DEVICE)) if kind else torch.zeros(shape, device=DEVICE))
            for t in vars(made[-1]).values() if kind else ():
                if isinstance(t, torch.Tensor):
                    t.zero_()
    assert store_tokens(*ours, slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for store, new in zip(theirs, (k, v), strict=True):
        if kind:
            store.write(slots.to(DEVICE), new.to(DEVICE))
        else:
            store[:, :, slots] = new.to(DEVICE)
    for mine, other in zip(ours, theirs, strict=True):
        if not kind:
            assert torch.equal(mine, other)
            continue
        for name, t in vars(other).items():
            if isinstance(t, torch.Tensor) and name == "codes":
                assert float((getattr(mine, name) != t).float().mean()) < 1e-3
            elif isinstance(t, torch.Tensor):
                torch.testing.assert_close(getattr(mine, name), t, rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 80])
def test_what_is_written_to_an_fp8_cache(width, dtype, monkeypatch):
    """Bit for bit what the store writes itself; in the interpreter before the rounding, in which it loses carries."""
    generator = torch.Generator().manual_seed(width)
    k, v = ((torch.randn(1, 3, 9, width, generator=generator) * 300).to(dtype) for _ in range(2))  # some saturate
    k[0, 1, 4, 7] = float("nan")
    shape, slots = (1, 3, 40, width), torch.randperm(40, generator=generator)[:9]
    ours, theirs = ([KINDS["fp8"](shape, torch.device(DEVICE)) for _ in range(2)] for _ in range(2))
    if DEVICE == "cpu":
        monkeypatch.setattr(paged_store, "capability", lambda: 90)
        for store in ours:
            store.codes = torch.zeros(shape)
    assert store_tokens(*ours, slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
    for mine, other, new in zip(ours, theirs, (k, v), strict=True):
        other.write(slots.to(DEVICE), new.to(DEVICE))
        got, want = (s.codes[:, :, slots].to(torch.float8_e4m3fn).float() for s in (mine, other))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "width", "part"), [("", 64, 64), ("", 24, 16), ("int8", 64, 64), ("int4", 64, 64), ("int4", 128, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_turned_on_the_way(kind, width, part, dtype):
    """Views of one merged product: queries are turned in place, keys as they are written, values not at all."""
    generator = torch.Generator().manual_seed(width + part)
    heads, groups, count = 6, 2, 5
    product = torch.randn(1, count, heads + 2 * groups, width, generator=generator).to(dtype)
    angles = torch.rand(count, 1, part // 2, generator=generator) * 6
    rope = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    q, k, v = product.float().split([heads, groups, groups], 2)
    turned = [rotate(t, (rope[0].float(), rope[1].float())).to(dtype).transpose(1, 2) for t in (q, k)]
    shape, slots = (1, groups, 12, width), torch.randperm(12, generator=generator)[:count].to(DEVICE)
    mine, plain = ([KINDS[kind](shape, torch.device(DEVICE)) for _ in range(2)] if kind else
                   [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2))  # fmt: skip
    given = product.to(DEVICE)
    parts = [t.transpose(1, 2) for t in given.split([heads, groups, groups], 2)]
    assert store_tokens(*mine, slots, parts[1], parts[2], parts[0], tuple(t.to(DEVICE) for t in rope))
    assert store_tokens(*plain, slots, turned[1].to(DEVICE), v.to(dtype).transpose(1, 2).to(DEVICE))
    near = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(parts[0].cpu(), turned[0], **near)
    assert torch.equal(given.split([heads, groups, groups], 2)[2].float().cpu(), v)
    for at, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
        got, want = (t[:, :, slots] if not kind else t.read(slots, torch.float32) for t in (ours, theirs))
        if at or not kind:
            torch.testing.assert_close(got.float(), want.float(), **(near if at == 0 else {"rtol": 0, "atol": 0}))
        else:  # what is turned rounds otherwise, and may be another code: the next one
            span = want.amax(-1, keepdim=True) - want.amin(-1, keepdim=True)
            rest = near["atol"] + near["rtol"] * want.abs().amax()
            assert bool(((got - want).abs() <= span / (15 if kind == "int4" else 127) + 2 * rest).all())


def test_codes_that_are_not_written():
    store = KINDS["int4"]((1, 1, 4, 256), torch.device("cpu"))
    x = torch.randn(1, 1, 2, 256)
    assert not store_tokens(store, store, torch.tensor([0, 1]), x, x)


def test_rows_of_a_step_may_have_any_strides():
    q, stores, held, table, pages = step(6, 2, 24, 16)
    turned = q.transpose(0, 1).contiguous().transpose(0, 1).to(DEVICE)
    got = paged_attention(turned, *stores, pages).cpu()
    torch.testing.assert_close(got.double(), expected(q, held, table, 16), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["paged_kv:block_size=4", "kv_quant:dtype=int4"])
def test_an_engine_serves_through_it(plan):
    made = model(dtype=torch.float32, sliding_window=20).to(DEVICE)
    prompts = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 12 * i)] for i in range(3)]

    def served(whole):
        eng = engine(made, plan, max_num_batched_tokens=16)
        if whole:
            eng.runner.layout.kernel, eng.runner.layout.whole = None, paged_attention
            eng.runner.layout.write = store_tokens
        return run(eng, *[ask(str(i), p, 4) for i, p in enumerate(prompts)])[0]

    got = served(True)
    assert all(len(tokens) == 4 for tokens in got.values())
    if "quant" in plan:
        assert got == served(False)
    else:
        assert got == {(str(i), 0): greedy(made, p, 4) for i, p in enumerate(prompts)}


def test_an_engine_serves_fused_layers_through_it(monkeypatch):
    """What a GPU's engine runs: merged products, sums within norms across layers, rotation with the write."""
    made = model(dtype=torch.float32).to(DEVICE)
    prompts = [[(7 * i + 3 * j * j) % 300 for j in range(3 + 12 * i)] for i in range(2)]
    truth = {(str(i), 0): greedy(made, p, 5) for i, p in enumerate(prompts)}
    monkeypatch.setattr(functions, "call", gpu.call)
    fused.fuse_elementwise(made)
    assert len(fused.merge_projections(made)) == 2 * len(made.layers)
    eng = engine(made, "paged_kv:block_size=4", max_num_batched_tokens=16)
    layout = eng.runner.layout
    layout.kernel, layout.whole, layout.write, eng.runner.decoder = None, paged_attention, store_tokens, None
    assert run(eng, *[ask(str(i), p, 5) for i, p in enumerate(prompts)])[0] == truth


@pytest.mark.parametrize(("kind", "drafts"), [("", 0), ("int4", 2)])
def test_captured_steps_are_served_through_it(kind, drafts):
    """With the numbers of captured steps, whose programs have room for more than there is: here they are launched again
    one by one."""
    made, limits = model(dtype=torch.float32, head_dim=16).to(DEVICE), Limits(2, 16)
    prompts = [[(7 * i + 3 * j * j) % 300 for j in range(5 + 9 * i)] for i in range(2)]
    requests = [ask(str(i), p, 3) for i, p in enumerate(prompts)]

    def again(run):
        out = run()
        return (lambda: out.copy_(run())), out

    def served(captured):
        runner = Runner(made, 21 * 4, 4, 64, kind)
        runner.layout.kernel = None
        if captured:
            runner.layout.whole, runner.layout.write = paged_attention, store_tokens
            runner.graphs = StepGraphs(runner, 20, limits, 64, lambda: again, drafts)
            runner.graphs.warm_up()
            plain, runner.graphs.run = runner.graphs.run, lambda step, size: sizes.append(size) or plain(step, size)
        eng = Engine(runner, Blocks(20, 4, True), Sampler(frozenset()), limits, 64)
        if captured and drafts:
            eng.drafter = Drafting(lambda seqs, most: [Draft(s.tokens[-2:]) for s in seqs], drafts)
        return run(eng, *requests)[0]

    sizes = []
    assert served(True) == served(False)
    assert {(s.tokens, s.decoding) for s in sizes if s.prompts} == {(16, 0), (16, 2)}
    if drafts:
        assert sum(s.prompts > 0 for s in sizes) > 2  # drafts are checked by them, too


def test_an_engine_verifies_trees_through_it():
    """Each node is a sequence of its own to the kernel, whose pages are single slots."""
    made = model(dtype=torch.float32, sliding_window=20).to(DEVICE)
    requests = [ask(str(i), [(7 * i + 3 * j * j) % 300 for j in range(3 + 12 * i)], 5) for i in range(2)]
    truth = {(r.id, 0): greedy(made, r.prompt, 5) for r in requests}
    eng = engine(made, "paged_kv:block_size=4")
    eng.runner.layout.kernel, eng.runner.layout.whole = None, paged_attention
    eng.runner.layout.write = store_tokens
    got, _ = run(drafted_by(eng, Oracle(truth, 300, wrong=1)), *requests)
    assert got == truth
    assert eng.stats().accepted_tokens > 2
