"""Decode steps captured and replayed: the same tokens as launched one by one.

On a GPU by CUDA graphs. Without one by a recorder that does what they do: it runs the very same operators again on the
very same memory, and nothing of Python in between; what would have to wait for data cannot be captured.
"""

import gc
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.serving import model, run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ridgeline.nn.kernels import native
from ridgeline.nn.model.moe import Experts
from ridgeline.serve import build_engine
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.runner import Runner
from ridgeline.serve.sampler import Sampler
from ridgeline.serve.step_graphs import CudaCapture, StepGraphs
from ridgeline.spec.scheduling import Limits
from ridgeline.techniques.registry import registry

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAITS = {"item", "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}
SIZE, BLOCKS = 4, 40


class Recorder(TorchDispatchMode):
    """CUDA graphs on the CPU."""

    def __call__(self, run):
        run()
        self.calls = calls = []
        plain = torch.Tensor.tolist
        torch.Tensor.tolist = self.waits
        try:
            with self:
                out = run()
        finally:
            torch.Tensor.tolist = plain
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


def reference(q, keys, values, pages, window=0, changes=None):
    """Attention over all slots of each sequence's table, of one new token each, without looking at any number."""
    slots = (pages.table.long()[:, :, None] * pages.block + torch.arange(pages.block, device=q.device)).flatten(1)
    k, v = (t[0][:, slots].transpose(0, 1) for t in (keys, values))
    row = torch.repeat_interleave(
        torch.arange(len(pages.lengths), device=q.device),
        (pages.starts[1:] - pages.starts[:-1]).long(),
        output_size=len(q),
    )
    ends = pages.lengths.long()[row] - (pages.starts[1:].long()[row] - torch.arange(len(q), device=q.device)) + 1
    at = torch.arange(slots.shape[1], device=q.device)
    seen = at < ends[:, None]
    if window > 0:
        seen = seen & (at >= ends[:, None] - window)
    out = F.scaled_dot_product_attention(q[:, :, None], k[row], v[row], seen[:, None, None], enable_gqa=True)
    return out[:, :, 0]


@pytest.fixture
def made(monkeypatch):
    """An engine of four sequences at most, and its captured steps if it is to have them."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(Experts, "groupable", lambda *_: True)  # as on a GPU

    def make(base, graphs, **fields):
        dtype = torch.float64 if DEVICE.type == "cpu" and base != "mixtral-tiny" else torch.float32
        runner = Runner(model(base, dtype, **fields).to(DEVICE), (BLOCKS + 1) * SIZE, SIZE, 96)
        if DEVICE.type == "cpu":
            runner.layout.whole = reference
        if graphs:
            recorder = Recorder() if DEVICE.type == "cpu" else CudaCapture()
            runner.graphs = StepGraphs(runner, BLOCKS, 4, 96, recorder)
            runner.graphs.warm_up()
        return Engine(runner, Blocks(BLOCKS, SIZE, True), Sampler(frozenset()), Limits(4, 16), 96)

    return make


def test_what_a_replay_reads_stays_in_memory(made):
    """A CUDA graph holds addresses, not tensors: here the capture holds nothing at all."""
    read = []

    def capture(run):
        out = run()
        pages = runner.layout.pages
        tensors = (pages.table, pages.lengths, pages.starts, pages.work[0].items, runner.layout.slots)
        read.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        return (lambda: None), out

    runner = made("llama-mini", graphs=False).runner
    runner.graphs = StepGraphs(runner, BLOCKS, 4, 96, capture)
    runner.graphs.warm_up()
    runner.layout.pages = runner.layout.slots = None
    gc.collect()
    assert len(read) == 5 * len(runner.graphs.graphs) > 5
    assert not any(ref.expired() for ref in read)


def requests():
    draw = random.Random(1)
    for i, (length, new) in enumerate([(3, 9), (11, 4), (30, 12), (7, 2), (19, 20), (5, 7)]):
        sampling = Sampling(max_tokens=new, temperature=0.0 if i % 2 else 0.8, seed=i, top_k=20 * (i == 2))
        yield EngineRequest(f"r{i}", [draw.randrange(300) for _ in range(length)], sampling)


@pytest.mark.parametrize(("base", "fields"), [("llama-mini", {}), ("mixtral-tiny", {}),
                                              ("llama-mini", {"sliding_window": 9})])  # fmt: skip
def test_replayed_steps_give_the_same_tokens(made, base, fields):
    if base == "mixtral-tiny" and DEVICE.type == "cuda":
        pytest.skip("a GPU's grouped product takes 16 bits, in which a pad's other kernel may choose other tokens")
    want, _ = run(made(base, False, **fields), *requests())
    engine = made(base, True, **fields)
    graphs, counts = engine.runner.graphs, []
    plain = graphs.run
    graphs.run = lambda step, key: counts.append((len(step.ids), key[0])) or plain(step, key)
    got, _ = run(engine, *requests())
    assert got == want
    assert len(counts) > 10
    assert {1, 3, 4} <= {n for n, _ in counts}
    assert (3, 4) in counts  # with a pad
    engine.check()


def test_replayed_steps_take_their_tokens_from_the_step_before(made):
    """Asynchronous scheduling: the host does not know them when it launches a replay."""
    want, _ = run(made("llama-mini", False), *requests())
    engine = made("llama-mini", True)
    assert engine.go_ahead() == ""
    graphs, late = engine.runner.graphs, []
    plain = graphs.run
    graphs.run = lambda step, key: late.append((step.late, step.sources)) or plain(step, key)
    got, _ = run(engine, *requests())
    engine.close()
    assert got == want
    assert sum(bool(rows) for rows, _ in late) > 10
    assert any(rows != sources for rows, sources in late)  # others have ended, or come


def test_only_steps_of_one_token_each_are_replayed(made):
    engine = made("llama-mini", True)
    runner, find = engine.runner, engine.runner.graphs.find
    for r in requests():
        engine.add(r)
    seen = []
    runner.graphs.find = lambda step: seen.append((step, find(step))) or seen[-1][1]
    while engine.has_work():
        engine.step()
    for step, key in seen:
        assert (key is not None) == (not step.copies and len(step.ids) == len(step.pieces))
    assert {key is None for _, key in seen} == {True, False}


def test_tables_grow_in_steps():
    graphs = StepGraphs(Runner(model(), 8, 4, 96), 1, 100, 4 * 1000, Recorder())
    assert graphs.batches == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert graphs.widths == [64, 256, 1000]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is nothing that cannot be captured")
def test_what_waits_for_data_stays_as_it_was(made, monkeypatch):
    runner = made("mixtral-tiny", False).runner
    monkeypatch.setattr(Experts, "groupable", lambda *_: False)  # a loop over experts, which counts their rows
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build_engine._capture(runner, StepGraphs(runner, BLOCKS, 4, 96, Recorder()))
    assert runner.graphs is None
    assert "without CUDA graphs" in str(said[0].message)


def test_techniques_say_what_cannot_be_captured():
    not_captured = {name for name, t in registry().items() if not t.captured}
    assert {"zero_inference", "moe_offload", "multi_adapter", "tensor_parallel"} <= not_captured
    assert not not_captured & {"paged_kv", "kv_quant", "rtn", "flash_attention"}
