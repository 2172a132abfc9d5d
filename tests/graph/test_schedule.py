"""Pipeline schedules: their bubbles, what they hold, and the steady state that is not played."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.graph.schedule import actions, in_flight, run

SCHEDULES = ["gpipe", "1f1b", "zero_bubble"]


def even(schedule, ranks, micros, chunks=1, f=1.0, b=2.0, w=0.0, **options):
    n = ranks * chunks
    split = schedule == "zero_bubble"
    back, weight = (b - w, w) if split else (b, 0.0)
    share = [x / chunks for x in (f, back, weight)]
    return run(schedule, ranks, micros, *(tuple([x] * n) for x in share), chunks=chunks, **options)


def bubble(timeline, micros, f=1.0, b=2.0):
    return timeline.seconds / (micros * (f + b)) - 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_plain_schedules(schedule, ranks, micros):
    """(p - 1) / m of the ideal time: arXiv:2104.04473, section 2.2."""
    assert bubble(even(schedule, ranks, micros), micros) == pytest.approx((ranks - 1) / micros)


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 4), (4, 8), (4, 64), (8, 64)])
def test_interleaving_divides_the_bubble(ranks, micros, chunks):
    got = even("interleaved", ranks, micros, chunks)
    assert bubble(got, micros) == pytest.approx((ranks - 1) / micros / chunks)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 8), (4, 8), (4, 64), (8, 32)])
def test_zero_bubble_fills_gaps_with_weight_gradients(ranks, micros):
    """ZB-H1: (p - 1)(F + B - W) with B the whole input gradient's time (arXiv:2401.10241, table 1)."""
    got = even("zero_bubble", ranks, micros, w=1.0)
    assert got.seconds - 3 * micros == pytest.approx((ranks - 1) * (1.0 + 1.0 - 1.0))
    assert got.seconds < even("1f1b", ranks, micros).seconds


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_each_rank_holds(ranks):
    for rank in range(ranks):
        assert in_flight("gpipe", rank, ranks, 32) == 32
        for micros in (1, 2, 32):
            assert in_flight("1f1b", rank, ranks, micros) == min(micros, ranks - rank)
            # Weight gradients come `rank` micro-batches late, so that every rank holds what the first one does.
            assert in_flight("zero_bubble", rank, ranks, micros) == min(micros, ranks)
    for chunks in (2, 3):  # the first rank's 1 + (p - 1)/(p v) layers' worth: arXiv:2205.05198, section 4.2.3
        share = 1 + (ranks - 1) / (ranks * chunks)
        assert in_flight("interleaved", 0, ranks, 4 * ranks, chunks) / ranks == pytest.approx(share)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved"])
def test_every_pass_runs_once(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    for rank in range(4):
        plan = actions(schedule, rank, 4, 8, chunks)
        assert len(plan) == len(set(plan)) == 8 * chunks * (3 if schedule == "zero_bubble" else 2)
        assert {a.stage % 4 for a in plan} == {rank}


seconds = st.floats(1.0, 1.5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from([*SCHEDULES, "interleaved"]), st.integers(2, 4), st.integers(0, 20), st.data())
def test_the_steady_state_may_be_extrapolated(schedule, ranks, more, data):
    chunks = 2 if schedule == "interleaved" else 1
    micros = (3 + more) * (ranks if schedule == "interleaved" else 1) + ranks * 2
    times = [tuple(data.draw(st.lists(seconds, min_size=ranks * chunks, max_size=ranks * chunks))) for _ in range(3)]
    send = data.draw(st.floats(0.0, 0.2))
    fast = run(schedule, ranks, micros, *times, send=send, chunks=chunks)
    whole = run(schedule, ranks, micros, *times, send=send, chunks=chunks, exact=True)
    assert fast.seconds == pytest.approx(whole.seconds, rel=0.05 if chunks > 1 else 0.015)
    assert fast.busy == pytest.approx(whole.busy)
    assert whole.seconds >= max(whole.busy) - 1e-9
