"""What any queue must obey, and what each mechanism of a schedule is for."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.predict.serving.schedule import Simulation
from ridgeline.spec.scheduling import Limits, Scheduling


class Toy:
    """Iteration costs in closed form, so that both simulations ask for the same numbers."""

    def __init__(self, host=0.0):
        self.host = host

    def decode(self, n):
        return 0.004 + 0.0003 * n, 1e-6

    def between(self, n):
        return 0.001 + 1e-5 * n

    def floor(self, n):
        return self.host * (1 + 0.01 * n)

    def mixed(self, prompts, n, cached, pads=0):
        new = sum(q for q, _ in prompts)
        a, b = self.decode(n) if n else (0.004, 0.0)
        behind = sum(1e-7 * q * before for q, before in prompts)
        return a + b * cached + 2e-4 * new + behind + self.between(n + len(prompts))


def requests(rng, n, rate, prompt, output):
    now, out = 0.0, []
    for _ in range(n):
        now += rng.expovariate(rate)
        out.append(Arrival(now, rng.randint(1, prompt), rng.randint(1, output)))
    return out


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "n": st.integers(1, 40),
        "rate": st.sampled_from([0.5, 5.0, 50.0]),
        "prompt": st.sampled_from([1, 30, 300]),
        "output": st.sampled_from([1, 12, 80]),
        "clients": st.sampled_from([None, None, 1, 5]),
        "seqs": st.sampled_from([1, 3, 64]),
        "tokens": st.sampled_from([16, 64, 512]),
        "blocks": st.sampled_from([7, 27, 10**5]),
        "mode": st.sampled_from(["chunked", "whole", "separate", "reserves"]),
    }
)


def engine(asked, blocks=10**5, clients=None, mixes=True, request_s=0.0, host=0.0, **limits):
    """A simulation with everything that engines of today do, but for ``limits``."""
    s = Scheduling(limits=Limits(**limits))
    return Simulation(Toy(host), s, blocks, 10**6, asked, clients, request_s, mixes=mixes)


@given(CASES)
def test_no_request_is_lost(case):
    """Each one is answered in order of cause and effect, or was too long for the cache."""
    asked = requests(random.Random(case["seed"]), case["n"], case["rate"], case["prompt"], case["output"])
    mode, longest = case["mode"], min(400, 16 * case["blocks"])
    s = Scheduling(limits=Limits(case["seqs"], case["tokens"], chunked=mode == "chunked", reserve=mode == "reserves"))
    sim = Simulation(Toy(0.0055 if mode == "reserves" else 0.0), s, case["blocks"], longest, asked, case["clients"],
                     mixes=mode != "separate")  # fmt: skip
    out = sim.run()
    for r, at, first, finish in zip(asked, out.arrival, out.first, out.finish, strict=True):
        if r.prompt + r.output > longest:
            assert math.isnan(finish)
        else:
            assert at < first <= finish
    assert out.rejected == sum(map(math.isnan, out.finish))
    assert (sim.pool.free, len(sim.running), len(sim.waiting)) == (case["blocks"], 0, 0), "the cache is empty again"
    assert (sim.cached, sum(sim.places), sim.ends, sim.late) == (0, 0, [], [])


def test_littles_law():
    """Mean requests in the system = arrival rate × mean time in it."""
    asked = requests(random.Random(3), 400, 20.0, 100, 60)
    out = engine(asked, max_num_seqs=32, max_num_batched_tokens=256).run()
    events = sorted([(t, 1) for t in out.arrival] + [(t, -1) for t in out.finish])
    area, inside, last = 0.0, 0, 0.0
    for t, change in events:
        area += inside * (t - last)
        inside, last = inside + change, t
    span = max(out.finish)
    time_in = sum(f - a for a, f in zip(out.arrival, out.finish, strict=True)) / len(asked)
    assert area / span == pytest.approx(len(asked) / span * time_in, rel=1e-9)


def test_chunks_bound_the_gap_between_tokens():
    """With a small token budget a long prompt cannot hold up the others (Sarathi-Serve, arXiv:2403.02310)."""
    asked = [Arrival(0.0, 10, 200), Arrival(0.1, 4000, 10)]
    whole = engine(asked, max_num_seqs=8, max_num_batched_tokens=8192, chunked=False).run()
    parts = engine(asked, max_num_seqs=8, max_num_batched_tokens=256).run()
    assert max(g for g, _ in parts.gaps) < max(g for g, _ in whole.gaps) / 5
    assert parts.first[1] > whole.first[1], "the long prompt itself pays for it"


def test_same_input_same_output():
    asked = requests(random.Random(1), 200, 30.0, 200, 50)
    runs = [engine(asked, blocks=56, max_num_seqs=16, max_num_batched_tokens=128).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].preemptions > 0


def test_a_closed_loop_keeps_its_clients_busy():
    asked = [Arrival(0.0, 20, 10)] * 60
    out = engine(asked, clients=6, max_num_seqs=16, max_num_batched_tokens=128).run()
    events = sorted([(t, 1) for t in out.arrival] + [(t, -1) for t in out.finish])
    inside = most = 0
    for _, change in events:
        inside += change
        most = max(most, inside)
    assert most == 6


def throughput(sim):
    out = sim.run()
    return sum(out.output) / max(out.finish), out


def together(lengths):
    return [Arrival(0.0, p, o) for p, o in lengths]


def admitted(sim):
    """The simulation when its first iteration is composed."""
    sim.costs.mixed = lambda *_: (_ for _ in ()).throw(InterruptedError)
    with pytest.raises(InterruptedError):
        sim.run()
    return sim


VARIED = together([(20 + 7 * i % 90, 5 + 31 * i % 80) for i in range(64)])
EQUAL = together([(64, 32)] * 64)


def test_continuous_batches_gain_where_lengths_differ():
    """Orca: a batch that runs until its longest ends leaves places empty; equal lengths that come together leave
    none."""
    for asked, gains in ((VARIED, True), (EQUAL, False)):
        fixed, free = (throughput(engine(asked, max_num_seqs=16, continuous=c))[0] for c in (False, True))
        assert free > 1.1 * fixed if gains else free == pytest.approx(fixed)


def test_blocks_admit_at_least_as_many_as_whole_lengths():
    """PagedAttention: blocks that come as a sequence grow leave room that whole lengths take from the start."""
    for blocks in (40, 80, 200):
        reserved, paged = (engine(VARIED, blocks=blocks, max_num_seqs=64, reserve=r) for r in (True, False))
        assert len(admitted(paged).running) >= len(admitted(reserved).running)


@pytest.mark.parametrize(("length", "wasted"), [(64, 0), (65, 15)])
def test_what_the_last_block_wastes(length, wasted):
    """16 tokens a block: a multiple of them wastes nothing, one token more all but one of the next block."""
    sim = engine(together([(length, 2)] * 4), blocks=100, max_num_batched_tokens=4096)
    assert 16 * (100 - admitted(sim).pool.free) - 4 * length == 4 * wasted


def test_pads_are_the_rows_that_lengths_differ_by():
    """Padding-free batches compute the tokens; padded ones as many rows for each as the longest has."""
    seen = []

    class Counting(Toy):
        def mixed(self, prompts, n, cached, pads=0):
            seen.append((sum(q for q, _ in prompts), pads))
            return super().mixed(prompts, n, cached, pads)

    lengths = [(10, 1), (50, 1), (100, 1)]
    for padded, pads in ((False, 0), (True, 90 + 50)):
        s = Scheduling(limits=Limits(8, 4096, padded=padded))
        Simulation(Counting(), s, 100, 1000, together(lengths)).run()
        assert seen.pop() == (160, pads)
        assert not seen


def test_prompts_that_go_first_hold_up_decoding():
    asked = [Arrival(0.0, 10, 50), Arrival(0.05, 2000, 5)]
    mixed, apart = (engine(asked, chunked=False, mixes=m, max_num_batched_tokens=4096).run() for m in (True, False))
    assert len(apart.gaps) < len(mixed.gaps) + 1
    assert sum(n for _, n in apart.gaps) == sum(n for _, n in mixed.gaps) == 49 + 4
    assert apart.finish[0] > mixed.finish[0], "its tokens wait while the prompt of the other is read"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_a_whole_prompt_does_not_wait_until_all_others_end(padded, record):
    """One as long as an iteration's budget, which no sequence beside it leaves: it goes in a step of its own."""
    s = Scheduling(limits=Limits(max_num_batched_tokens=64, chunked=False, padded=padded))
    asked = [Arrival(0.0, 8, 200), Arrival(0.01, 64, 4)]
    out = Simulation(Toy(), s, 10**4, 10**6, asked, record=record).run()
    assert out.first[1] < 0.1 < out.finish[0]


def adds_up(out):
    """Each output has one token fewer in gaps than in all, and its gaps fill the time from its first to its last."""
    behind = sum(finish - first for first, finish in zip(out.first, out.finish, strict=True))
    assert sum(count for _, count in out.gaps) == sum(out.output) - len(out.output)
    assert sum(gap * count for gap, count in out.gaps) == pytest.approx(behind)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_gaps_add_up_to_the_time_behind_first_tokens(mixes, record):
    """Also those in which sequences that decode wait for prompts in steps of their own, one after the other."""
    s = Scheduling(limits=Limits(max_num_batched_tokens=64, chunked=False))
    asked = [Arrival(0.003 * i, 64, 11) for i in range(8)]
    adds_up(Simulation(Toy(), s, 10**4, 10**6, asked, mixes=mixes, record=record).run())


@pytest.mark.parametrize("prompt", [1, 65])
@pytest.mark.parametrize("record", [False, True])
def test_the_last_token_of_a_prompt_is_behind_no_other(prompt, record):
    """A piece of one token, whose output is the first: nobody has waited for it since another."""
    s = Scheduling(limits=Limits(max_num_batched_tokens=64))
    out = Simulation(Toy(), s, 10**4, 10**6, [Arrival(0.0, prompt, 3)], record=record).run()
    adds_up(out)
    assert sum(count for _, count in out.gaps) == 2


@pytest.mark.parametrize("record", [False, True])
def test_a_preempted_sequence_waits_for_its_next_token(record):
    """All the time in the queue and for being computed again, not only for the step in which it comes."""
    s = Scheduling(limits=Limits(max_num_batched_tokens=64), block_size=16)
    out = Simulation(Toy(), s, 6, 96, [Arrival(0.0, 30, 60), Arrival(0.0, 30, 60)], record=record).run()
    assert out.preemptions
    adds_up(out)
    assert max(gap for gap, _ in out.gaps) > out.finish[0] - out.first[0] - 0.3
