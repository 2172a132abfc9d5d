"""Memory of a pass: live results never overlap, outputs are bit-equal, and what it saves is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import ask, engine, greedy, model, run

from ridgeline.nn.memory.arena import lower_bound, padded
from ridgeline.serve.request import EngineRequest
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.serving.dynamic_memory import place_in_buffers
from ridgeline.techniques.serving.length_aware_memory import CHUNK, place_in_chunks

SPANS = st.lists(
    st.tuples(st.integers(1, 3 << 20), st.integers(0, 40), st.integers(1, 20)).map(lambda s: (s[0], s[1], s[1] + s[2])),
    max_size=30,
).map(lambda spans: [s for i, s in enumerate(spans) if s[1] not in [t[1] for t in spans[:i]]])  # an operator, a result
PLANNERS = {"length_aware_memory": place_in_chunks, "dynamic_memory": place_in_buffers}
PROMPTS = {f"r{i}": [(7 * i + 3 * j * j) % 300 for j in range(3 + 5 * i)] for i in range(6)}


@pytest.mark.parametrize("name", PLANNERS)
@given(st.lists(SPANS, min_size=1, max_size=4))
def test_live_results_never_overlap_whatever_passes_follow_each_other(name, passes):
    held = {}
    for spans in passes:
        places, wanted = PLANNERS[name](spans, held)
        assert all(wanted[r] >= size for r, size in held.items())
        held = wanted
        for i, (size, birth, death) in enumerate(spans):
            region, offset = places[i]
            assert offset + size <= held[region]
            for j in range(i):
                if birth < spans[j][2] and spans[j][1] < death and places[j][0] == region:
                    other = places[j][1]
                    assert offset + size <= other or other + spans[j][0] <= offset


def test_chunks_are_taken_again_and_made_a_fifth_larger():
    mega = 1 << 20
    places, chunks = place_in_chunks([(mega, 0, 2), (mega, 1, 3)], {})
    assert chunks == {0: CHUNK}
    assert sorted(o for _, o in places) == [0, mega]
    places, chunks = place_in_chunks([(10 * mega, 0, 1), (mega, 0, 1)], chunks)
    assert chunks[1] == pytest.approx(12 * mega, abs=64)
    assert places[1][0] == 0


def test_a_buffer_that_is_too_small_grows():
    places, buffers = place_in_buffers([(10, 0, 1), (20, 1, 3), (5, 2, 4)], {})
    assert places == [(0, 0), (0, 0), (1, 0)]
    assert buffers == {0: 20, 1: 5}


def passes(made, name, requests, **fields):
    """Events of an engine with and without it, the memory, and what each of its passes did."""
    plain = engine(made, **fields)
    plain.runner.decoder = None  # operator by operator, as in memory of a plan
    other = engine(made, name, **fields)
    return run(plain, *requests)[1], run(other, *requests)[1], other.runner.compute


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("base", ["llama-mini", "gpt2", "qwen3-0.6b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_bit_equal(name, base, dtype):
    made = model(base, dtype, num_kv_heads=4 if base == "gpt2" else 2)
    requests = [ask(k, p, 6, logprobs=2) for k, p in PROMPTS.items()]
    want, got, memory = passes(made, name, requests, max_num_batched_tokens=16)
    assert got == want
    assert memory.last.placed > 10
    assert not memory.last.diverged
    assert memory.passes > 6


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("plan", [(), ("-padding_free",), ("speculative", "-chunked_prefill"), ("rtn:bits=8",)])
def test_with_other_techniques(name, plan):
    made = model()
    requests = [ask(k, p, 6, logprobs=2) for k, p in PROMPTS.items()]
    base = [c for c in plan if not c.startswith("rtn")]
    got, _ = run(engine(made, *plan, name, max_num_batched_tokens=24), *requests)
    if base == list(plan):
        assert got == {(k, 0): greedy(made, p, 6) for k, p in PROMPTS.items()}
    else:
        assert got == run(engine(model(), *plan, max_num_batched_tokens=24), *requests)[0]


def lengths(made, name, *counts):
    """An encoder's passes over one text of each length → embeddings, and the memory."""
    eng = engine(made, name) if name else engine(made)
    out = []
    for n in counts:
        eng.add(EngineRequest("x", [1 + i % 290 for i in range(n)], embed=True))
        out += [e.embedding for e in eng.step()]
    return out, eng.runner.compute


@pytest.mark.parametrize("name", PLANNERS)
def test_two_recorded_passes_plan_every_length(name):
    made = model("bert-tiny", torch.float32, hidden_size=64, intermediate_size=256)
    counts = [12, 40, 100, 7, 40, 128, 1, 99]
    want, _ = lengths(made, None, *counts)
    got, memory = lengths(made, name, *counts)
    assert got == want
    (kind,) = memory.kinds
    assert kind.tokens == 12
    assert kind.other[0] == 40
    if name == "length_aware_memory":  # a buffer that grows makes plans anew
        assert set(memory.plans) == {100, 7, 40, 128, 1, 99}


def test_lengths_with_operators_of_their_own_are_recorded_for_themselves():
    """Operators that change with T are noticed, and from there on results are allocated."""
    from ridgeline.nn.memory.pass_memory import PassMemory

    weight = torch.randn(8, 8)

    def forward(ids, at):
        x = weight[ids[0]]
        if ids.shape[1] < 3:
            x = x.abs() * 2
        return ((x @ weight).relu() + 1) * 1

    memory = PassMemory(forward, place_in_chunks, torch.device("cpu"))
    for n in (5, 7, 2, 2, 2, 6, 2, 1, 1, 1):
        ids = torch.arange(n)[None] % 8
        with torch.inference_mode():
            assert torch.equal(memory(ids, ids[0]), forward(ids, ids[0]))
    assert [k.tokens for k in memory.kinds] == [5, 2]
    assert [k.other[0] for k in memory.kinds] == [7, 1]
    assert not memory.last.diverged
    assert memory.last.placed


@pytest.mark.parametrize("changed", ["dtype", "strides"])
def test_an_operator_on_another_dtype_or_layout_is_not_the_recorded_one(changed):
    from ridgeline.nn.memory.pass_memory import PassMemory

    weight = torch.randn(8, 8)
    table = {"dtype": weight.double(), "strides": weight.t().contiguous().t()}[changed]
    use = [weight]

    def forward(ids, at):
        return ((use[0][:, None] + use[0]) * 2).sum(0)

    memory = PassMemory(forward, place_in_chunks, torch.device("cpu"))
    ids = torch.arange(4)[None]
    with torch.inference_mode():
        for _ in range(3):
            want = forward(ids, ids[0])
            assert torch.equal(memory(ids, ids[0]), want)
        assert memory.last.placed
        assert not memory.last.diverged
        use[0] = table
        want = forward(ids, ids[0])
        got = memory(ids, ids[0])
    assert memory.last.diverged
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got, want)


def test_memory_is_near_the_bound_and_far_below_the_sum():
    made = model("bert-tiny", torch.float32, hidden_size=256, intermediate_size=1024, num_layers=6, max_positions=512)
    counts = [100, 200, 512, 64, 512, 300]
    _, memory = lengths(made, "length_aware_memory", *counts)
    plan = memory.plans[512]
    spans = [(v.nbytes, op) for op, v in plan.views.items()]
    assert plan.naive == sum(padded(s) for s, _ in spans)
    _, made_at = memory.kinds[0].at(512)
    bound = lower_bound([(torch.Size(m.size).numel() * 4, m.op, m.death) for m in made_at])
    print(f"512 tokens: sum {plan.naive >> 10} KiB, chunks {memory.nbytes >> 10}, bound {bound >> 10}")
    assert bound <= memory.nbytes <= max(1.5 * bound, bound + 2 * CHUNK)
    assert plan.naive > 4 * memory.nbytes
    assert memory.allocations == len(memory.memory)  # no chunk was made twice
    _, pool = lengths(made, "dynamic_memory", *counts)
    print(f"{len(pool.memory)} buffers of {pool.nbytes >> 10} KiB, {pool.allocations} allocations")
    assert plan.naive > 3 * pool.nbytes


def test_chunks_that_no_pass_uses_are_given_back():
    made = model("bert-tiny", torch.float32, hidden_size=256, intermediate_size=2048, max_positions=1024)
    _, memory = lengths(made, "length_aware_memory:keep=3", 8, 9, 1000, *[16] * 3)
    many = memory.nbytes
    assert many > 8 << 20
    _, memory = lengths(made, "length_aware_memory:keep=3", 8, 9, 1000, *[16] * 5)
    assert memory.nbytes < many
    assert len(memory.memory) == 1
    got, memory = lengths(made, "length_aware_memory:keep=3", 8, 9, 1000, *[16] * 5, 1000)
    assert got[2] == got[-1]
    assert memory.nbytes == many


def test_allocations_of_a_pass():
    """Results that get a place are not allocated any more."""
    made = model("llama-mini", torch.float32)
    eng = engine(made, "length_aware_memory")
    memory = eng.runner.compute
    eng.add(ask("a", list(range(40)), 6))
    eng.step()
    before = memory.last.storages
    for _ in range(3):
        eng.step()
    print(f"{memory.last.placed} of {before} allocations of a pass are places now")
    assert memory.last.placed > 0.7 * before


@pytest.mark.parametrize("name", PLANNERS)
def test_what_cannot_be_planned_is_refused(name):
    with pytest.raises(Incompatible, match="routing"):
        engine(model("mixtral-tiny"), name)
    with pytest.raises(Incompatible, match="adapters"):
        engine(model(), name, "multi_adapter")
    with pytest.raises(Incompatible, match="keep one"):
        engine(model(), *PLANNERS)
