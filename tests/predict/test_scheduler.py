"""The event simulation against a step-by-step one, and what any queue must obey."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.predict.serving.arrivals import Arrival
from ridgeline.predict.serving.discrete_events import EngineLimits, Simulation


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


def step_by_step(costs, lim, asked, clients=None):
    """The same policy, one iteration at a time, with every sequence counted by hand."""
    nan = math.nan
    first, finish, arrival = [nan] * len(asked), [nan] * len(asked), [nan] * len(asked)
    issued = 0
    due = [] if clients else [(r.arrival, i) for i, r in enumerate(asked)]
    waiting, running, now = [], [], 0.0  # running: dicts in order of admission

    def too_long(i):
        return asked[i].prompt + asked[i].output + lim.overhead_tokens > lim.cache_tokens

    def follow(at):
        nonlocal issued
        while clients and issued < len(asked) and too_long(issued):
            arrival[issued] = at
            issued += 1
        if clients and issued < len(asked):
            due.append((at, issued))
            due.sort()
            issued += 1

    for _ in range(clients or 0):
        follow(0.0)

    while True:
        while due and due[0][0] + lim.request_s <= now:
            at, i = due.pop(0)
            arrival[i] = at
            if not too_long(i):
                waiting.append({"i": i, "prompt": asked[i].prompt, "done": 0, "made": 0, "left": asked[i].output})
        decoding = [s for s in running if s["done"] == s["prompt"]]
        prefilling = [s for s in running if s["done"] < s["prompt"]]
        budget = lim.max_num_batched_tokens - (len(decoding) if lim.mixes else 0)
        chunks = []
        for s in prefilling:
            if budget > 0:
                chunks.append((s, min(budget, s["prompt"] - s["done"])))
                budget -= chunks[-1][1]
        open_prompt = any(s["done"] + q < s["prompt"] for s, q in chunks) or (prefilling and not chunks)
        while waiting and not open_prompt:
            s = waiting[0]
            started = [x for x, _ in chunks]
            everyone = decoding + started
            if lim.reserves:
                taken = sum(x["prompt"] + x["made"] + x["left"] for x in everyone)
                need = s["prompt"] + s["left"]
            else:
                taken = sum(x["prompt"] + x["made"] for x in everyone)
                need = s["prompt"] + 1
            full = taken + need + (len(everyone) + 1) * lim.overhead_tokens > lim.cache_tokens
            if full or len(everyone) >= lim.max_num_seqs:
                break
            if s["prompt"] <= budget:
                size = s["prompt"]
            elif lim.chunked and budget > 0:
                size, open_prompt = budget, True
            elif not lim.chunked and not chunks and s["prompt"] > lim.max_num_batched_tokens:
                size = s["prompt"]
            else:
                break
            chunks.append((waiting.pop(0), size))
            running.append(s)
            budget -= size
        if not chunks and not decoding:
            if not due:
                return arrival, first, finish
            now = max(now, due[0][0] + lim.request_s)
            continue
        batch = decoding if lim.mixes or not chunks else []
        if batch and not lim.reserves:
            while len(decoding) > 1:
                used = sum(x["prompt"] + x["made"] for x in running)
                if used + len(decoding) * (1 + lim.overhead_tokens) <= lim.cache_tokens:
                    break
                s = decoding.pop()
                running.remove(s)
                again = {"i": s["i"], "prompt": s["prompt"] + s["made"], "done": 0, "made": 0, "left": s["left"]}
                waiting.insert(0, again)
            batch = decoding
        cached = sum(x["prompt"] + x["made"] for x in batch)
        if chunks:
            seconds = costs.mixed([(q, s["done"]) for s, q in chunks], len(batch), cached)
        else:
            a, b = costs.decode(len(batch))
            gpu = a + b * cached
            seconds = max(gpu, costs.floor(len(batch))) + costs.between(len(batch))
        now += seconds
        for s in sorted(batch, key=lambda s: s["i"]):
            s["made"] += 1
            s["left"] -= 1
            if not s["left"]:
                finish[s["i"]] = now
                running.remove(s)
                follow(now)
        for s, q in chunks:
            s["done"] += q
            if s["done"] == s["prompt"]:
                first[s["i"]] = now if math.isnan(first[s["i"]]) else first[s["i"]]
                s["made"] += 1
                s["left"] -= 1
                if not s["left"]:
                    finish[s["i"]] = now
                    running.remove(s)
                    follow(now)


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
        "cache": st.sampled_from([100, 420, 10**6]),
        "mode": st.sampled_from(["vllm", "whole", "separate", "reserves", "eager"]),
    }
)


def limits(case):
    mode = case["mode"]
    return EngineLimits(
        max_num_seqs=case["seqs"],
        max_num_batched_tokens=case["tokens"],
        cache_tokens=case["cache"],
        chunked=mode in ("vllm", "eager"),
        mixes=mode != "separate",
        reserves=mode == "reserves",
        request_s=0.003 if mode == "reserves" else 0.0,
    )


@settings(max_examples=200, deadline=None)
@given(CASES)
def test_events_equal_steps(case):
    """Jumping over equal iterations changes no time: every request's first token and finish agree."""
    asked = requests(random.Random(case["seed"]), case["n"], case["rate"], case["prompt"], case["output"])
    if case["clients"]:
        asked = [r._replace(arrival=0.0) for r in asked]
    lim = limits(case)
    costs = Toy(0.0055 if case["mode"] == "eager" else 0.0)
    got = Simulation(costs, lim, asked, case["clients"]).run()
    arrival, first, finish = step_by_step(costs, lim, asked, case["clients"])
    for mine, theirs in ((got.arrival, arrival), (got.first, first), (got.finish, finish)):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True)


@settings(max_examples=100, deadline=None)
@given(CASES)
def test_no_request_is_lost(case):
    """Each one is answered in order of cause and effect, or was too long for the cache."""
    asked = requests(random.Random(case["seed"]), case["n"], case["rate"], case["prompt"], case["output"])
    lim = limits(case)
    sim = Simulation(Toy(), lim, asked, case["clients"])
    out = sim.run()
    for r, at, first, finish in zip(asked, out.arrival, out.first, out.finish, strict=True):
        if r.prompt + r.output + lim.overhead_tokens > lim.cache_tokens:
            assert math.isnan(finish)
        else:
            assert at < first <= finish
    assert out.rejected == sum(map(math.isnan, out.finish))
    assert (sim.cached, sim.held, len(sim.running), len(sim.waiting)) == (0, 0, 0, 0), "the cache is empty again"
    # Every token after the first came out of a decode iteration, or out of a repeated prefill.
    decoded = sum(n for _, n in out.gaps)
    wanted = sum(r.output - 1 for r, t in zip(asked, out.finish, strict=True) if not math.isnan(t))
    assert decoded == wanted - out.preemptions


def test_littles_law():
    """Mean requests in the system = arrival rate × mean time in it."""
    asked = requests(random.Random(3), 400, 20.0, 100, 60)
    out = Simulation(Toy(), EngineLimits(32, 256, 10**6), asked).run()
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
    whole = Simulation(Toy(), EngineLimits(8, 8192, 10**6, chunked=False), asked).run()
    parts = Simulation(Toy(), EngineLimits(8, 256, 10**6), asked).run()
    assert max(g for g, _ in parts.gaps) < max(g for g, _ in whole.gaps) / 5
    assert parts.first[1] > whole.first[1], "the long prompt itself pays for it"


def test_same_input_same_output():
    asked = requests(random.Random(1), 200, 30.0, 200, 50)
    runs = [Simulation(Toy(), EngineLimits(16, 128, 900), asked).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].preemptions > 0


def test_a_closed_loop_keeps_its_clients_busy():
    asked = [Arrival(0.0, 20, 10)] * 60
    out = Simulation(Toy(), EngineLimits(16, 128, 10**6), asked, concurrency=6).run()
    events = sorted([(t, 1) for t in out.arrival] + [(t, -1) for t in out.finish])
    inside = most = 0
    for _, change in events:
        inside += change
        most = max(most, inside)
    assert most == 6
