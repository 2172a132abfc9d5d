"""Placement, moves, routes and shares, beside exhaustive search and in a simulation of many servers."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.swarm.policies import (
    Hop,
    Router,
    Span,
    choose_migration,
    choose_move,
    choose_stage,
    choose_start,
    coverage,
    find_route,
)
from ridgeline.swarm.simulate import Crowd, simulate

spans_of = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.floats(1, 50), st.floats(0, 0.5)), min_size=1, max_size=5
).map(lambda found: [Span(str(i), a, min(6, a + n), t, d) for i, (a, n, t, d) in enumerate(found)])


@given(covered=st.lists(st.integers(0, 5), min_size=3, max_size=8), length=st.integers(1, 3))
def test_a_server_starts_at_the_lexicographically_worst_window(covered, length):
    windows = [(sorted(covered[i : i + length]), i) for i in range(len(covered) - length + 1)]
    assert choose_start(np.array(covered, dtype=float), length) == min(windows)[1]


def cost(spans, hops):
    known = {s.name: s for s in spans}
    return sum(known[h.name].delay + (h.stop - h.start) * known[h.name].block_seconds for h in hops)


@settings(deadline=None)
@given(spans=spans_of)
def test_a_route_is_the_cheapest_of_all(spans):
    """Against every assignment of a server to each of four blocks."""
    ways = itertools.product(*([s for s in spans if s.start <= b < s.stop] for b in range(4)))
    best = None
    for way in ways:
        entered = [s for i, s in enumerate(way) if not i or way[i - 1].name != s.name]
        price = sum(s.delay for s in entered) + sum(s.block_seconds for s in way)
        best = price if best is None else min(best, price)
    found = find_route(spans, 0, 4)
    if best is None:
        assert found is None
        return
    assert [h.start for h in found] == [0, *(h.stop for h in found[:-1])]
    assert found[-1].stop == 4
    assert all(a.name != b.name for a, b in itertools.pairwise(found))
    assert cost(spans, found) == pytest.approx(best)


def test_load_and_distance_change_the_route():
    near, far = Span("near", 0, 4, 100, 0.01), Span("far", 0, 4, 100, 0.2)
    assert find_route([near, far], 0, 4) == [Hop("near", 0, 4)]
    busy = Span("near", 0, 4, 100, 0.01, load=40)
    assert find_route([busy, far], 0, 4) == [Hop("far", 0, 4)]
    assert find_route([near, Span("half", 2, 4, 1e6, 0.0)], 0, 4) == [Hop("near", 0, 2), Hop("half", 2, 4)]
    assert find_route([Span("a", 0, 3, 1), Span("b", 4, 6, 1)], 0, 6) is None


def test_a_server_moves_only_if_that_pays_and_never_uncovers():
    rng = random.Random(0)
    crowded = [Span("a", 0, 2, 10), Span("b", 0, 2, 10), Span("c", 0, 2, 10), Span("d", 2, 4, 10)]
    assert choose_move(crowded, "a", 4, rng) == 2
    assert choose_move(crowded, "d", 4, rng) is None, "blocks 2 and 3 would be without a server"
    balanced = [*crowded[:2], Span("c", 2, 4, 10), crowded[3]]
    assert all(choose_move(balanced, n, 4, rng) is None for n in "abcd")
    slight = [Span("a", 0, 2, 11), Span("b", 0, 2, 10), Span("c", 2, 4, 10), Span("d", 2, 4, 8)]
    assert all(choose_move(slight, n, 4, rng) is None for n in "abcd")


@settings(deadline=None)
@given(spans=spans_of, seed=st.integers(0, 9))
def test_a_move_never_lowers_the_bottleneck_of_a_covered_model(spans, seed):
    for s in spans:
        before = coverage(spans, 6)
        start = choose_move(spans, s.name, 6, random.Random(seed))
        if start is not None and before.min() > 0:
            rest = coverage([x for x in spans if x is not s], 6)
            assert rest.min() > 0


def test_hundreds_of_servers_stay_balanced_under_churn():
    """With placement and moves the worst block stays near the mean, without it does not, whatever the seed."""
    crowd = Crowd(servers=120, lifetime=1200.0)
    ours = simulate(40, crowd, 900.0, balance_every=600.0)
    random_ = simulate(40, crowd, 900.0, placed=False)
    assert ours.covered == 1
    assert ours.left > 40
    assert np.median(ours.bottleneck) > 0.75, "what the rule aims at"
    assert np.median(ours.bottleneck) > 2 * np.median(random_.bottleneck)
    assert ours.tokens_per_s > 0


def test_a_small_swarm_recovers_from_holes():
    crowd = Crowd(servers=20, lifetime=1800.0)
    ours, never = (simulate(32, crowd, 3600.0, balance_every=b) for b in (120.0, 0.0))
    assert ours.covered >= never.covered
    assert ours.moved > 0


def test_micro_batches_are_dealt_by_speed():
    router = Router()
    for name, seconds in (("fast", 0.1), ("slow", 0.4)):
        router.seconds[name] = seconds
        router.add(name)
    for _ in range(100):
        name = router.pick()
        router.done(name, {"fast": 0.1, "slow": 0.4}[name])
    assert router.taken["fast"] == pytest.approx(80, abs=1)
    router.ban("fast")
    assert {router.pick() for _ in range(5)} == {"slow"}
    router.add("new")
    first = [router.pick() for _ in range(4)]
    assert first.count("new") == 2, "as fast as the others until it has been timed"
    router.ban("slow")
    router.ban("new")
    assert router.pick() is None


def test_stages_are_chosen_and_left_for_the_slowest():
    assert choose_stage([[1.0, 2.0], [2.5], [0.5, 0.5]]) == 2
    assert choose_stage([[1.0], [], [0.5]]) == 1
    rates = [{"a": 10.0, "b": 9.0}, {"c": 4.0}, {"d": 10.0, "e": 3.0}]
    assert choose_migration(rates) == ("b", 1), "the slowest stage then is as fast as can be: min(10, 13, 13)"
    assert choose_migration([{"a": 10.0}, {"b": 1.0}]) is None, "no stage is left without peers"
    assert choose_migration([{"a": 5.0, "b": 5.0}, {"c": 9.0}]) is None
