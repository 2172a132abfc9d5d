"""The simulated schedule of Ridgeline's own engine against the engine: the very same batches, whatever the plan."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crossings import crossing
from tests.predict.test_scheduler import Toy, adds_up

from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.predict.serving.schedule import Simulation
from ridgeline.spec.plan import Plan
from ridgeline.spec.scheduling import Limits, Scheduling
from ridgeline.techniques.registry import techniques_of

PLANS = [
    ["padding_free", *(p for p, on in zip(("paged_kv:block_size=8", "continuous_batching", "chunked_prefill"), mask,
                                          strict=True) if on)]
    for mask in ((a, b, c) for a in (1, 0) for b in (1, 0) for c in (1, 0))
] + [["padding_free", "paged_kv:block_size=4,prefix_sharing=false", "continuous_batching", "chunked_prefill"],
     ["padding_free", "paged_kv:block_size=8", "continuous_batching", "kv_quant:dtype=int8"],
     ["paged_kv:block_size=8", "continuous_batching", "chunked_prefill"], ["continuous_batching"], []]  # fmt: skip


def lengths(seed, n=24):
    rng = random.Random(seed)
    return [(rng.randint(1, 60), rng.randint(1, 40)) for _ in range(n)]


@pytest.fixture(scope="module")
def made():
    torch = pytest.importorskip("torch")
    from tests.serving import model

    return model(dtype=torch.float32)


def real(made, plan, asked, prefix=0, **work):
    """(tokens of each sequence, step by step; preemptions) of the real engine, all requests there at once."""
    import torch
    from tests.serving import ask, experiment

    from ridgeline.serve.build_engine import make_engine

    engine = make_engine(experiment(made.spec, plan, **work), torch.device("cpu"), made)
    engine.sampler.ends = engine.eos = frozenset()
    # No batch depends on what the layers say, which would take most of the time.
    said = torch.zeros(1, made.spec.hidden_size)
    engine.runner.run = lambda batch, _: said.expand(sum(n for _, n in batch), -1)
    steps, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        if plan.tokens:
            steps.append(list(plan.tokens.values()))
        return plan

    engine.scheduler.schedule = watched
    rng = random.Random(1)
    common = [rng.randrange(made.spec.vocab_size) for _ in range(prefix)]
    for i, (prompt, output) in enumerate(asked):
        same = common[: prompt - 1]
        ids = same + [rng.randrange(made.spec.vocab_size) for _ in range(prompt - len(same))]
        engine.add(ask(str(i), ids, output, ignore_eos=True))
    while engine.has_work():
        engine.step()
    return steps, engine.stats().preemptions, engine


def simulated(plan, blocks, longest, asked, prefix=0, **limits):
    s = Scheduling()
    for t in techniques_of(Plan.parse(plan)):
        t.scheduling(s)
    for name, value in limits.items():
        setattr(s.limits, name, value)
    sim = Simulation(Toy(), s, blocks, longest, [Arrival(0.0, *a) for a in asked], record=True,
                     prefix=prefix)  # fmt: skip
    out = sim.run()
    assert sim.pool.free == blocks
    assert out.rejected == 0
    return sim.steps, out.preemptions


@pytest.mark.parametrize(
    ("plan", "room"),
    [pytest.param(p, r, id=f"{'+'.join(p)}-{r}", marks=crossing(f"{p}{r}", 2) if len(p) > 1 else [])
     for p in PLANS for r in ("ample", "tight")],
)  # fmt: skip
def test_the_batches_are_those_of_the_real_engine(made, plan, room):
    for seed in range(3):
        asked, seqs, tokens = lengths(seed), (8, 3, 20)[seed], (48, 33, 64)[seed]
        kv_bytes = (1 << 20) if room == "ample" else 2 * 2 * 2 * 8 * 4 * (130, 100, 180)[seed]
        steps, preemptions, engine = real(made, plan, asked, max_num_seqs=seqs, max_num_batched_tokens=tokens,
                                          kv_cache_bytes=kv_bytes)  # fmt: skip
        got = simulated(plan, engine.blocks.count, engine.max_model_len, asked, max_num_seqs=seqs,
                        max_num_batched_tokens=tokens)  # fmt: skip
        assert got == (steps, preemptions)
        assert sum(map(sum, steps)) >= sum(p + o - 1 for p, o in asked)


@pytest.mark.parametrize("more", [[], ["continuous_batching"], ["paged_kv:block_size=8", "continuous_batching"]])
def test_batches_by_length_too(made, more, monkeypatch):
    """A queue that is divided by the cost of batches, which both take from one table."""
    asked = [*lengths(3), *lengths(4)]
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 200}
    costs = []
    init = Simulation.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        costs.append(self.order and self.order.shared)

    monkeypatch.setattr(Simulation, "__init__", remember)
    monkeypatch.setattr("ridgeline.serve.build_engine.measure_costs", lambda *_: lambda *at: costs[0](*at))
    plan = ["length_dp", *more]
    blocks, longest = 10**4, 128
    got = simulated(plan, blocks, longest, asked, **limits)
    steps, preemptions, engine = real(made, plan, asked, kv_cache_bytes=1 << 24, **limits)
    assert engine.max_model_len == longest
    assert got == (steps, preemptions)
    assert got != simulated(more, blocks, longest, asked, **limits)


@pytest.mark.parametrize("room", ["ample", "tight"])
@pytest.mark.parametrize("prefix", [5, 16, 40])
@pytest.mark.parametrize("chunks", [["chunked_prefill"], []], ids=["chunks", "whole"])
def test_with_a_shared_prefix_too(made, prefix, chunks, room):
    """Blocks of the beginning that all prompts share are computed once, and again when they were evicted."""
    plan = ["continuous_batching", "paged_kv:block_size=4", *chunks, "padding_free"]
    for seed in range(3):
        asked = [(p + prefix // 2, o) for p, o in lengths(seed)]
        limits = {"max_num_seqs": (8, 3, 20)[seed], "max_num_batched_tokens": (48, 33, 64)[seed]}
        kv_bytes = (1 << 20) if room == "ample" else 2 * 2 * 2 * 8 * 4 * (160, 130, 220)[seed]
        steps, preemptions, engine = real(made, plan, asked, prefix=prefix, kv_cache_bytes=kv_bytes, **limits)
        got = simulated(plan, engine.blocks.count, engine.max_model_len, asked, prefix=prefix, **limits)
        assert got == (steps, preemptions)
        computed = sum(map(sum, steps))
        alone = simulated(plan, engine.blocks.count, engine.max_model_len, asked, **limits)[0]
        if room == "ample":
            assert computed < sum(map(sum, alone))


def test_a_whole_prompt_whose_rest_fits_joins_the_running_sequences(made):
    """Of 45 tokens 40 are in the cache: the rest of two fits an iteration of 45 beside one that decodes."""
    plan = ["continuous_batching", "paged_kv:block_size=4", "padding_free"]
    asked, limits = [(45, 6)] * 3, {"max_num_seqs": 8, "max_num_batched_tokens": 45}
    steps, preemptions, engine = real(made, plan, asked, prefix=40, **limits)
    assert steps[:3] == [[45], [1, 5, 5], [1, 1, 1]]
    got = simulated(plan, engine.blocks.count, engine.max_model_len, asked, prefix=40, **limits)
    assert got == (steps, preemptions)
    s = Scheduling(limits=Limits(8, 45, chunked=False), block_size=4, share_prefixes=True)
    counted = Simulation(Toy(), s, 10**4, 128, [Arrival(0.0, *a) for a in asked], prefix=40).run()
    assert (counted.iterations, counted.prompt_iterations) == (7, 2)


def test_a_whole_prompt_whose_cached_blocks_are_taken_meanwhile_goes_alone(made):
    """It seems to fit beside a running sequence, which takes one of its blocks in that very step, and goes in the next:
    no run of decode steps hides that."""
    plan = ["continuous_batching", "paged_kv:block_size=4", "padding_free"]
    asked = [(4, 7), (17, 13), (49, 19), (3, 21), (19, 22), (25, 23), (14, 27), (4, 10), (46, 29), (7, 12), (3, 4),
             (30, 12), (30, 26), (51, 4), (28, 17), (40, 10), (20, 23), (7, 15), (30, 9), (39, 11)]  # fmt: skip
    limits = {"max_num_seqs": 20, "max_num_batched_tokens": 33}
    steps, preemptions, engine = real(made, plan, asked, prefix=5, kv_cache_bytes=25600, **limits)
    assert steps[98:100] == [[1], [33]]
    got = simulated(plan, engine.blocks.count, engine.max_model_len, asked, prefix=5, **limits)
    assert got == (steps, preemptions)


def test_sequences_are_sent_back_in_a_tight_pool_and_find_blocks_again(made):
    """What makes the comparison above one of substance."""
    asked = lengths(0)
    counts = [simulated(p, n, 128, asked, max_num_seqs=8, max_num_batched_tokens=48)
              for p, n in ((PLANS[0], 16), (PLANS[8], 32))]  # fmt: skip
    assert all(preemptions > 3 for _, preemptions in counts)


CASES = st.fixed_dictionaries({
    "asked": st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25),
    "blocks": st.integers(16, 60), "seqs": st.integers(1, 12), "budget": st.integers(8, 90),
    "continuous": st.booleans(), "chunked": st.booleans(), "reserve": st.booleans(), "share": st.booleans(),
    "mixes": st.booleans(),
    "clients": st.sampled_from([None, 1, 5]), "prefix": st.sampled_from([0, 0, 7, 20, 50]),
})  # fmt: skip


@given(CASES)
def test_stretches_change_nothing_and_everybody_is_served(case):
    asked = sorted(Arrival(*a) for a in case["asked"])

    def play(record, jumps=True):
        limits = Limits(case["seqs"], case["budget"], continuous=case["continuous"], chunked=case["chunked"],
                        reserve=case["reserve"])  # fmt: skip
        s = Scheduling(limits=limits, block_size=8, share_prefixes=case["share"])
        sim = Simulation(Toy(), s, case["blocks"], 128, asked, case["clients"], 0.001, mixes=case["mixes"],
                         record=record, prefix=case["prefix"])  # fmt: skip
        if not jumps:
            sim._lasting = lambda plan: 1
        return sim, sim.run()

    counted, out = play(record=False)
    jumped, each = play(record=True)
    single, other = play(record=True, jumps=False)
    assert jumped.steps == single.steps
    for one in (out, each):
        assert one.first == pytest.approx(other.first, nan_ok=True)
        assert one.finish == pytest.approx(other.finish, nan_ok=True)
        assert one.preemptions == other.preemptions
        adds_up(one)
    assert counted.pool.free == case["blocks"]
    fits = [r.prompt + r.output <= min(128, case["blocks"] * 8) for r in asked]
    assert out.rejected == 0
    for i, ok in enumerate(fits):
        if ok:
            assert out.arrival[i] + 0.001 <= out.first[i] <= out.finish[i]
