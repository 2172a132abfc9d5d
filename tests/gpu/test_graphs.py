"""Steps captured and replayed: the same tokens as launched one by one.

On a GPU by CUDA graphs. Without one by a recorder that does what they do: it runs the very same operators again on the
very same memory, and nothing of Python in between; what would have to wait for data cannot be captured.
"""

import gc
import math
import random
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.serving import LORAS, adapted, adapters_in, ask, greedy, in_slots, model, run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ridgeline.nn.kernels import native
from ridgeline.nn.model.moe import Experts
from ridgeline.nn.model.served import join_served
from ridgeline.serve import build_engine, step_graphs
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.draft_tree import Draft
from ridgeline.serve.drafting import Drafting, ModelDrafter
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.step_graphs import CudaCapture, StepGraphs
from ridgeline.spec import scheduling
from ridgeline.spec.scheduling import Limits
from ridgeline.techniques.registry import registry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAITS = {"item", "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}
SIZE, BLOCKS = 4, 40
LIMITS = Limits(4, 20)
"""Four sequences and twenty tokens a step: those with prompts are captured for 16 and 20 tokens, each for none and for
four sequences that decode."""


class Recorder(TorchDispatchMode):
    """CUDA graphs on the CPU."""

    def __call__(self, run):
        self.run_first(run)
        return self.record(run)

    def run_first(self, run):
        run()

    def record(self, run):
        self.calls = calls = []
        plain, sums = torch.Tensor.tolist, dist.all_reduce
        torch.Tensor.tolist = self.waits
        # While it is captured nothing is sent.
        dist.all_reduce = lambda t, group: calls.append((sums, (t,), {"group": group}, [], []))
        try:
            with self:
                out = run()
        finally:
            torch.Tensor.tolist, dist.all_reduce = plain, sums
        return lambda: [self.again(*c) for c in calls], out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in WAITS:
            raise RuntimeError(f"{func} waits for data")
        given = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, [t.untyped_storage().data_ptr() not in given for t in made], made))
        return out

    @staticmethod
    def waits(*_):
        raise RuntimeError("tolist waits for data")

    @staticmethod
    def again(func, args, kwargs, new, made):
        found = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        for fresh, place, t in zip(new, made, found, strict=True):
            if fresh and "empty" not in func._schema.name:
                place.copy_(t)


CAPTURE = Recorder if DEVICE.type == "cpu" else CudaCapture


def reference(q, keys, values, pages, window=0, changes=None):
    """Attention over all slots of each sequence's table, without looking at any number on the host."""
    slots = (pages.table.long()[:, :, None] * pages.block + torch.arange(pages.block, device=q.device)).flatten(1)
    at = torch.arange(slots.shape[1], device=q.device)
    held = (at < pages.lengths[:, None])[:, None, :, None]  # what was never written may be anything
    read = (t[:, :, slots] if isinstance(t, torch.Tensor) else t.read(slots, q.dtype) for t in (keys, values))
    k, v = (t[0].transpose(0, 1).where(held, 0.0) for t in read)
    row = torch.repeat_interleave(
        torch.arange(len(pages.lengths), device=q.device),
        (pages.starts[1:] - pages.starts[:-1]).long(),
        output_size=len(q),
    )
    ends = pages.lengths.long()[row] - (pages.starts[1:].long()[row] - torch.arange(len(q), device=q.device)) + 1
    seen = at < ends[:, None]
    if window > 0:
        seen = seen & (at >= ends[:, None] - window)
    out = F.scaled_dot_product_attention(q[:, :, None], k[row], v[row], seen[:, None, None], enable_gqa=True)
    return out[:, :, 0]


@pytest.fixture
def made(monkeypatch):
    """An engine, and its captured steps if it is to have them."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(Experts, "groupable", lambda *_: True)  # as on a GPU in 16 bits
        monkeypatch.setattr(step_graphs, "most_tokens_at_once", lambda _: math.inf)

    def make(base, graphs, kind="", drafts=0, **fields):
        dtype = torch.float64 if DEVICE.type == "cpu" and base != "mixtral-tiny" else torch.float32
        runner = Runner(model(base, dtype, **fields).to(DEVICE), (BLOCKS + 1) * SIZE, SIZE, 96, kind)
        if DEVICE.type == "cpu":
            runner.layout.whole = reference
        if graphs:
            runner.graphs = StepGraphs(runner, BLOCKS, LIMITS, 96, CAPTURE, drafts)
            runner.graphs.warm_up()
        return Engine(runner, Blocks(BLOCKS, SIZE, True), Sampler(frozenset()), LIMITS, 96)

    return make


def test_what_a_replay_reads_stays_in_memory(made):
    """A CUDA graph holds addresses, not tensors: here the capture holds nothing at all."""
    read = []

    def capture(run):
        out = run()
        pages = runner.layout.pages
        tensors = (pages.table, pages.lengths, pages.starts, *(w.items for w in pages.work), runner.layout.slots)
        assert not any(t.data_ptr() % 16 for t in tensors)  # for whose addresses kernels are compiled once
        read.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return (lambda: None), out

    runner = made("llama-mini", graphs=False).runner
    runner.graphs = StepGraphs(runner, BLOCKS, LIMITS, 96, lambda: capture)
    runner.graphs.warm_up()
    runner.layout.pages = runner.layout.slots = None
    gc.collect()
    assert len(read) == 5 * len(runner.graphs.graphs) + sum(s.decoding > 0 < s.prompts for s in runner.graphs.graphs)
    assert not any(ref.expired() for ref in read)


def requests(shared=0):
    """Prompts and lengths of all kinds, of which the first ``shared`` tokens are the same."""
    draw = random.Random(1)
    first = [draw.randrange(300) for _ in range(shared)]
    for i, (length, new) in enumerate([(3, 9), (11, 4), (30, 12), (7, 2), (19, 20), (5, 7)]):
        sampling = Sampling(max_tokens=new, temperature=0.0 if i % 2 else 0.8, seed=i, top_k=20 * (i == 2))
        yield EngineRequest(f"r{i}", first + [draw.randrange(300) for _ in range(length)], sampling)


def replayed(engine):
    """The steps that ``engine`` replays from now on, each with the size of its graph."""
    graphs, found = engine.runner.graphs, []
    plain = graphs.run
    graphs.run = lambda step, size: found.append((step, size)) or plain(step, size)
    return found


def drafted(seqs, most):
    """Drafts of which some tokens are right: those that stood at the same distance before."""
    return [Draft(s.tokens[-3:][:n]) for s, n in zip(seqs, most, strict=True)]


@pytest.mark.parametrize(("base", "fields"), [
    ("llama-mini", {}), ("mixtral-tiny", {}), ("llama-mini", {"sliding_window": 9}), ("llama-mini", {"kind": "int8"}),
    ("llama-mini", {"kind": "int4"}), ("llama-mini", {"num_heads": 3, "num_kv_heads": 1}),
])  # fmt: skip
def test_replayed_steps_give_the_same_tokens(made, base, fields):
    if base == "mixtral-tiny" and DEVICE.type == "cuda":
        pytest.skip("a GPU's grouped product takes 16 bits, in which a pad's other kernel may choose other tokens")
    want, _ = run(made(base, False, **fields), *requests())
    engine = made(base, True, **fields)
    steps = replayed(engine)
    got, _ = run(engine, *requests())
    assert got == want
    decoding = [(len(step.ids), size.tokens) for step, size in steps if not size.prompts]
    assert len(decoding) > 10
    assert {1, 3, 4} <= {n for n, _ in decoding}
    assert (3, 4) in decoding  # with a pad
    prompts = [(len(step.ids), step, size) for step, size in steps if size.prompts]
    assert {size[:2] for *_, size in prompts} >= {(16, 4), (20, 0), (20, 4)}
    assert {tokens == size.tokens for tokens, _, size in prompts} == {True, False}
    assert any(p.length > p.stop - p.start > 1 for _, step, _ in prompts for p in step.pieces)  # a part of a prompt
    engine.check()


def test_replayed_steps_read_what_is_cached_of_a_prompt(made):
    """Behind prefixes that were computed for others."""
    engine, plain = made("llama-mini", True), made("llama-mini", False)
    steps = replayed(engine)
    for request in requests(shared=9):
        assert run(engine, request)[0] == run(plain, request)[0]
    first = [step.pieces[0] for step, size in steps if size.prompts]
    assert sum(p.length - (p.stop - p.start) == 8 for p in first) >= 4


def test_few_tokens_behind_many_are_launched_by_themselves(made, monkeypatch):
    """Their keys are divided over programs, which captured steps do for decoding sequences only."""
    monkeypatch.setattr(scheduling, "FAR", 40)
    engine, plain = made("llama-mini", True), made("llama-mini", False)
    find, sizes = engine.runner.graphs.find, {}
    engine.runner.graphs.find = lambda step: sizes.setdefault(step.pieces[-1].length, find(step))
    for length in (39, 42):  # whose prefix is computed by the first requests, in chunks of 20 tokens
        for name in ("first", "second"):
            request = EngineRequest(f"{name} {length}", list(range(5, 5 + length)), Sampling(max_tokens=3))
            assert run(engine, request)[0] == run(plain, request)[0]
    assert sizes[39].prompts
    assert sizes[42] is None
    assert not sizes[43].prompts


@pytest.mark.parametrize(
    ("sequences", "alone"),
    [
        ([(12, 9000)], True),
        ([(17, 9000)], False),  # 68 rows, as many as a prompt's
        ([(12, 8000)], False),
        ([(1, 9000), (100, 100)], True),
        ([(1, 9000)] * 9 + [(100, 100)], False),  # as many programs as without a graph
        ([(1, 9000)] * 9 + [(12, 9000)], True),
    ],
)
def test_which_long_sequences_are_read_faster_without_a_graph(sequences, alone):
    assert scheduling.divides_far_keys(sequences, 1, 4) == alone


@pytest.mark.parametrize("drafts", [0, 3])
def test_replayed_steps_check_drafts(made, drafts):
    """As sequences of few tokens where they are expected, else as prompts."""
    want, _ = run(made("llama-mini", False), *requests())
    engine = made("llama-mini", True, drafts=drafts)
    engine.drafter = Drafting(drafted, 3)
    engine.drafter.observe = lambda *_: None  # which would switch them off by the clock
    steps = replayed(engine)
    got, _ = run(engine, *requests())
    assert got == want
    checked = [size for step, size in steps if {p.stop - p.start for p in step.pieces} == {4}]
    assert len(checked) > 5
    assert {size.decoding > 0 for size in checked} == {drafts > 0}


def test_a_model_drafts_by_replayed_steps(made):
    """With tokens of the pass before that the host does not know: it waits once for a whole draft."""
    asked = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in requests()]
    want, _ = run(made("llama-mini", False), *asked)
    engine, small = made("llama-mini", False), made("llama-mini", True)
    drafter = ModelDrafter(small.runner.model, BLOCKS, SIZE, 96)
    drafter.runner = small.runner
    engine.drafter = Drafting(drafter, 3)
    engine.drafter.observe = lambda *_: None
    steps = replayed(small)
    got, _ = run(engine, *asked)
    assert got == want
    stats = engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 20  # the same model
    assert sum(not size.prompts and step.late == step.sources for step, size in steps) > 10
    assert any(not size.prompts and step.late != step.sources for step, size in steps)  # one has all it wants
    assert any(size.prompts for _, size in steps)


def test_replayed_steps_take_their_tokens_from_the_step_before(made):
    """Asynchronous scheduling: the host does not know them when it launches a replay."""
    want, _ = run(made("llama-mini", False), *requests())
    engine = made("llama-mini", True)
    assert engine.go_ahead() == ""
    steps = replayed(engine)
    got, _ = run(engine, *requests())
    engine.close()
    assert got == want
    late = [(step.late, step.sources, size.prompts > 0) for step, size in steps if step.late]
    assert len(late) > 10
    assert any(rows != sources for rows, sources, _ in late)  # others have ended, or come
    assert any(prompts for *_, prompts in late)


@pytest.mark.parametrize("kind", ["", "int4"])
def test_padding_changes_nothing_and_is_finite(made, kind):
    """Steps by the graphs of all sizes, whatever was in the block of padding: the same rows, and no row that is not a
    number, which a maximum over all of them would find."""
    engine = made("llama-mini", True, kind=kind)
    graphs, plain = engine.runner.graphs, made("llama-mini", False, kind=kind).runner
    padding = slice(BLOCKS * SIZE, (BLOCKS + 1) * SIZE)
    used = set()

    def run(step, _):
        want = plain.execute(step)
        for size, graph in graphs.graphs.items():
            several = sum(p.stop - p.start > 1 for p in step.pieces)
            if len(step.ids) > size.tokens or len(step.pieces) - several > size.decoding or several > size.prompts:
                continue
            for t in (t for layer in engine.runner.pool() for t in layer if t.is_floating_point()):
                t[:, :, padding] = float("nan")
            got = type(graphs).run(graphs, step, size)
            torch.testing.assert_close(got, want)
            assert torch.isfinite(graph.out).all()
            used.add(size)
        return got

    graphs.run = run
    for request in requests():
        engine.add(request)
        if request.id == "r0":
            engine.step()  # a short prompt alone
    while engine.has_work():
        engine.step()
    assert used == set(graphs.graphs)


def test_only_steps_with_copies_of_blocks_are_not_replayed(made):
    engine = made("llama-mini", True)
    find = engine.runner.graphs.find
    for request in requests():
        engine.add(request)
    engine.add(EngineRequest("forked", [5, 6, 7, 8, 9], Sampling(max_tokens=6, n=2, temperature=0.8, seed=3)))
    seen = []
    engine.runner.graphs.find = lambda step: seen.append((step, find(step))) or seen[-1][1]
    while engine.has_work():
        engine.step()
    for step, size in seen:
        assert (size is None) == bool(step.copies)
    assert {size is None for _, size in seen} == {True, False}


def test_tables_grow_in_steps():
    graphs = StepGraphs(Runner(model(), 8, 4, 96), 1, Limits(100, 300), 4 * 1000, Recorder)
    assert graphs.batches == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert graphs.widths == [64, 256, 1000]
    assert graphs.prompt_sizes[:5] == [(16, 0, 8, 1000), (16, 16, 8, 1000), (32, 0, 9, 1000), (32, 16, 9, 1000),
                                       (32, 32, 9, 1000)]  # fmt: skip
    assert graphs.prompt_sizes[-1] == (300, 100, 17, 1000)


def test_no_step_is_captured_in_which_the_host_waits_for_experts(monkeypatch):
    """One size that cannot be captured would leave all of them out."""
    monkeypatch.setattr(step_graphs, "most_tokens_at_once", lambda _: 20)
    graphs = StepGraphs(Runner(model(), 8, 4, 96), 1, Limits(100, 300), 4 * 1000, Recorder)
    assert graphs.batches == [1, 2, 4, 8, 16]
    assert {size.tokens for size in graphs.prompt_sizes} == {16}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is nothing that cannot be captured")
def test_what_waits_for_data_stays_as_it_was(made, monkeypatch):
    runner = made("mixtral-tiny", False).runner
    monkeypatch.setattr(Experts, "groupable", lambda *_: False)  # a loop over experts, which counts their rows
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build_engine._capture(runner, StepGraphs(runner, BLOCKS, LIMITS, 96, Recorder))
    assert runner.graphs is None
    assert "without CUDA graphs" in str(said[0].message)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is nothing that cannot be captured")
def test_decode_steps_are_captured_where_steps_with_prompts_cannot_be(made, monkeypatch):
    want, _ = run(made("mixtral-tiny", False), *requests())
    engine = made("mixtral-tiny", False)
    runner = engine.runner
    monkeypatch.setattr(Experts, "groupable", lambda _, rows: len(rows) <= 8)  # of four tokens, each for two experts
    with pytest.warns(UserWarning, match="steps with prompts run without CUDA graphs"):
        build_engine._capture(runner, StepGraphs(runner, BLOCKS, LIMITS, 96, Recorder))
    steps = replayed(engine)
    assert run(engine, *requests())[0] == want
    assert len(steps) > 10
    assert not any(size.prompts for _, size in steps)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = LORAS | {"dora": {"rank": 2, "targets": ["q_proj"], "dora": True}}
    return adapters_in(tmp_path_factory.mktemp("adapters"), kinds=kinds)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="operators stand for the kernels, in fp64")
@pytest.mark.parametrize(("joined", "ahead"), [(False, True), (True, False)])
def test_adapters_come_and_go_between_replays(made, folders, joined, ahead):
    """The graphs of the base stay those of the base; the others are captured as they are needed, and again only where
    there are too few slots, or another layer has an adapter."""
    engine = made("llama-mini", True)
    if joined:
        join_served(engine.model)
    in_slots(engine, 1e6)
    if ahead:
        assert engine.go_ahead() == ""
    graphs, slots = engine.runner.graphs, engine.runner.slots
    steps, captured, plain = replayed(engine), [], graphs._captured
    graphs._captured = lambda size, *more: captured.append(size) or plain(size, *more)
    lengths = {"": 5, "lora": 7, "wide": 11, "other": 3, "dora": 9}
    prompts = {name: [(5 * j + n) % 300 for j in range(n)] for name, n in lengths.items()}
    want = {name: greedy(adapted(folders[name]) if name else model(), prompt, 8) for name, prompt in prompts.items()}

    def served(*names):
        """Whose tokens are right, and how many steps with adapters were replayed, of prompts and of others."""
        steps.clear(), captured.clear()
        got, _ = run(engine, *[replace(ask(n, prompts[n], 8), adapter=n) for n in names])
        assert {name: tokens for (name, _), tokens in got.items()} == {name: want[name] for name in names}
        with_adapters = [bool(size.prompts) for step, size in steps if step.segments]
        return with_adapters.count(True), with_adapters.count(False)

    engine.load_adapter("lora", folders["lora"])
    assert served("") == (0, 0)
    assert steps
    assert not captured
    assert min(served("", "lora")) > 0
    assert len(captured) == len(set(captured)) > 1
    engine.load_adapter("wide", folders["wide"])  # with others of its layers
    assert min(served("wide", "lora", "")) > 0
    version = slots.version
    engine.load_adapter("other", folders["other"])
    assert served("wide", "other", "lora", "")[1] > 4
    for gone in ("lora", "wide"):
        engine.unload_adapter(gone)
    engine.load_adapter("wide", folders["wide"])
    assert served("wide", "")[1] > 4
    assert served("other", "wide", "")[1] > 4
    assert served("other", "wide", "")[1] > 4
    assert not captured
    assert slots.version == version
    engine.load_adapter("dora", folders["dora"])
    assert served("dora") == (0, 0)
    assert not steps
    assert served("other")[1] > 4
    for name in ("dora", "wide", "other"):
        engine.unload_adapter(name)
    assert served("") == (0, 0)
    engine.load_adapter("lora", folders["lora"])
    assert served("lora")[1] > 4
    assert captured
    captured.clear()
    engine.load_adapter("dora", folders["dora"])
    engine.warm_up_adapters()
    assert set(captured) < {*graphs.prompt_sizes, *graphs.decode_sizes}  # but for those above
    assert min(served("lora", "")) > 0
    assert served("lora")[1] > 4
    assert not captured
    engine.close()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="operators stand for the kernels, in fp64")
def test_steps_with_adapters_that_cannot_be_captured_run_without(made, folders, monkeypatch):
    engine = in_slots(made("llama-mini", True), 1e6)
    engine.load_adapter("lora", folders["lora"])
    add = engine.runner.slots.rows.add
    engine.runner.slots.rows.add = lambda x, y, items, stack: items.tolist() and add(x, y, items, stack)
    with pytest.warns(UserWarning, match="adapters run without CUDA graphs"):
        got, _ = run(engine, replace(ask("r", [1, 2, 3], 8), adapter="lora"))
    assert got["r", 0] == greedy(adapted(folders["lora"]), [1, 2, 3], 8)


def test_techniques_say_what_cannot_be_captured():
    not_captured = {name for name, t in registry().items() if not t.captured}
    assert {"zero_inference", "moe_offload", "pipeline", "expert_parallel"} <= not_captured
    assert not not_captured & {"multi_adapter", "paged_kv", "kv_quant", "rtn", "flash_attention", "tensor_parallel"}
