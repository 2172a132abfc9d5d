"""The swap planner: the simulator against an independent replay, and the planners against each other."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.techniques.memory.swap_plan import (
    Gap,
    Problem,
    SwapChoice,
    deadlines,
    exact,
    genetic,
    greedy,
    lru,
    simulate,
)


def layered(seed: int, layers: int = 5, share: float = 0.6, speed: float = 1.0) -> Problem:
    """Forward then backward over layers of uneven tensors, as a network has them; seconds of order 1."""
    rng = np.random.default_rng(seed)
    ops = 2 * layers
    sizes = rng.integers(1, 9, layers)
    seconds = rng.uniform(0.5, 1.5, ops)
    gaps = tuple(Gap(int(sizes[i]), i, ops - 1 - i) for i in range(layers) if ops - 2 - 2 * i > 0)
    live = np.full(ops, 3)
    for i in range(layers):
        live[i : ops - i] += sizes[i]
    least = Problem(tuple(seconds), tuple(map(int, live)), gaps, 0, 1.0).least
    budget = int(least + share * (live.max() - least))
    return Problem(tuple(map(float, seconds)), tuple(map(int, live)), gaps, budget, float(speed * sizes.mean()))


@st.composite
def problems(draw):
    ops = draw(st.integers(3, 14))
    seconds = draw(st.lists(st.floats(0.1, 2.0), min_size=ops, max_size=ops))
    live = np.array(draw(st.lists(st.integers(0, 5), min_size=ops, max_size=ops)))
    gaps = []
    for _ in range(draw(st.integers(0, 5))):
        last = draw(st.integers(0, ops - 2))
        after = draw(st.integers(last + 1, ops - 1))
        gaps.append(Gap(draw(st.integers(1, 9)), last, after))
        live[last : after + 1] += gaps[-1].bytes
    budget = draw(st.integers(1, max(1, int(live.max()))))
    return Problem(tuple(seconds), tuple(map(int, live)), tuple(gaps), budget, draw(st.floats(0.5, 20.0)))


def replay(p: Problem, choice: SwapChoice) -> None:
    """Independent of the simulator's bookkeeping: bytes and presence at each operator, from the copies' times alone."""
    s = simulate(p, choice)
    for op, start in enumerate(s.starts):
        held = p.live[op]
        for i in choice.swapped:
            g = p.gaps[i]
            if g.last < op < g.next or (op == g.next and s.into[i][0] > start):
                gone = s.out[i][1] <= start + 1e-12 and not s.into[i][0] <= start
                gone = gone or (s.out[i][1] <= start + 1e-12 and choice.back[i] > op)
                held -= g.bytes if gone else 0
            if op == g.next:
                assert s.into[i][1] <= start + 1e-9, "it is used before it is back"
        if not s.overflow:
            assert held <= p.budget, (op, held, p.budget)
    for i in choice.swapped:
        assert s.out[i][1] <= s.into[i][0] + 1e-12, "it comes back before it is gone"
    for copies in (s.out, s.into):
        ends = sorted((end, end - p.gaps[i].bytes / p.bandwidth) for i, (_, end) in copies.items())
        for (earlier, _), (_, begins) in pairwise(ends):
            assert begins >= earlier - 1e-9, "two copies on one stream overlap"
    assert s.seconds >= sum(p.seconds) - 1e-9


@given(problems())
def test_the_simulator_keeps_the_budget_and_never_uses_what_is_away(p):
    for choice in (greedy(p), lru(p), genetic(p, population=4, generations=2)):
        replay(p, choice)
        s = simulate(p, choice)
        assert s.peak <= p.budget or s.overflow
        limits = deadlines(p, choice)
        # Enforced at its deadline and not before, a copy out leaves no operator above what was simulated.
        for op in range(len(p.seconds)):
            away = sum(p.gaps[i].bytes for i in choice.swapped if limits.get(i, 10**9) <= op < choice.back[i])
            assert p.live[op] - away <= max(p.budget, s.peak)


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_ilp_genetic_greedy_lru_in_this_order(seed, share):
    p = layered(seed, layers=5, share=share, speed=0.7)
    stalls = [simulate(p, c).cost[:2] for c in (genetic(p), greedy(p), lru(p))]
    bound = exact(p)
    print(f"ILP {bound:.3f}, genetic, greedy, LRU {[f'{s:.3f}' for _, s in stalls]}")
    assert all(over == 0 for over, _ in stalls)
    assert bound <= stalls[0][1] + 1e-6
    assert stalls[0][1] <= stalls[1][1] <= stalls[2][1] + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_genetic_search_finds_the_optimum_of_a_problem_that_can_be_searched_whole(seed):
    p = layered(seed, layers=5, share=0.4, speed=0.7)
    backs = [(0, *range(g.last + 2, g.next + 1)) for g in p.gaps]
    best = min(simulate(p, SwapChoice(back)).cost[:2] for back in product(*backs))
    assert simulate(p, genetic(p)).cost[:2] == pytest.approx(best, rel=1e-12)
    assert exact(p) <= best[1] + 1e-6, "the integer program bounds it from below"


def test_no_swap_where_none_is_needed_and_a_bound_where_none_helps():
    p = layered(0)
    roomy = Problem(p.seconds, p.live, p.gaps, max(p.live), p.bandwidth)
    assert not genetic(roomy).swapped
    assert exact(roomy) == 0
    tight = Problem(p.seconds, p.live, p.gaps, p.least - 1, p.bandwidth)
    assert simulate(tight, genetic(tight)).overflow >= 1
    with pytest.raises(ValueError, match="no plan"):
        exact(tight)


def test_a_plan_by_hand():
    """Three operators of one second; the tensor of 2 bytes must be away in the middle; one byte per second."""
    p = Problem((1.0, 1.0, 1.0), (2, 4, 2), (Gap(2, 0, 2),), 2, 1.0)
    s = simulate(p, SwapChoice((2,)))
    assert s.out[0] == (1.0, 3.0)
    assert s.starts == [0.0, 3.0, 6.0]
    assert (s.stall, s.peak, s.overflow) == (4.0, 2, 0)
    assert exact(p) == pytest.approx(4.0)
