"""Passes whose weights come through a ring, against schedules worked out by hand."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.predict.serving.weight_stream import _Pass, _Segment


def seconds(pieces, room, layers=4):
    """Of a pass; ``pieces``: (bytes, seconds of the fetch, seconds of computation) of one layer."""
    return _Pass(
        [_Segment("", compute=c, size=size, fetch={"disk": f}) for size, f, c in pieces * layers], room
    ).seconds()


@pytest.mark.parametrize(("fetch", "compute"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_room_for_two_overlaps_and_room_for_one_does_not(fetch, compute):
    assert seconds([(1, fetch, compute)], 2) == pytest.approx(4 * max(fetch, compute))
    assert seconds([(1, fetch, compute)], 1) == pytest.approx(4 * (fetch + compute))


def test_two_phases_wait_for_each_other():
    """With room for one of each, a layer takes max(fetch of b, a computes) + max(fetch of a, b computes): 4 + 5, though
    fetches take 5 and computation 8."""
    assert seconds([(1, 1.0, 3.0), (2, 4.0, 5.0)], 3) == pytest.approx(4 * (4 + 5))
    assert seconds([(1, 1.0, 3.0), (2, 4.0, 5.0)], 6) == pytest.approx(4 * 8)


def test_a_piece_waits_for_room_in_one_piece():
    """Of 4, 1, 1 and 2 bytes within 5, the first is fetched only after the last has computed, which leaves no 4 bytes
    in one piece; the last only after the first."""
    pieces = [(4, 4.0, 0.5), (1, 1.0, 0.5), (1, 1.0, 0.5), (2, 2.0, 0.5)]
    # 4 fetched, the second fetched beside it computing (1), the third and fourth beside the second and third
    assert seconds(pieces, 5, layers=1) == pytest.approx(4 + 1 + 3 + 0.5)
    assert seconds(pieces, 16, layers=1) == pytest.approx(8)


def test_what_else_is_on_the_disk_shares_it():
    """A cache of 2 s beside a computation of 1: the segment takes 2 alone, and with weights under way all of both."""
    cache = _Segment("", compute=1.0, beside={"disk": 2.0})
    assert _Pass([cache], 0).seconds() == pytest.approx(2)
    both = _Segment("", compute=1.0, size=1, fetch={"disk": 3.0}, beside={"disk": 2.0})
    assert _Pass([both, both], 2).seconds() == pytest.approx(2 * 5)


def test_flexgen_takes_its_two_phases_one_after_the_other():
    """Where weights of a feed-forward part take as long to come as all parts' attention, less is hidden than of whole
    layers; the step is never faster than its fetches or its computation."""
    plan = "flexgen:batches=8,weights_device=0,weights_host=100,cache_device=100,cache_host=0"
    w = {"kind": "generate", "batch_size": 8192, "prompt_len": 16, "output_len": 16}
    found = {on: predict(experiments.make("opt-6.7b", "a100", w, [on])).metrics["tpot_s"].value
             for on in (plan, plan + ",activations_device=100,activations_host=0,overlap=false",
                        plan.replace("device=0,weights_host=100", "device=100,weights_host=0"))}  # fmt: skip
    whole, serial, computed = found.values()
    host = catalog.device("a100").host_link
    layers = 32 * (4 * 4096**2 + 2 * 4096 * 16384) * 2
    fetched = layers / (0.8 * host.bandwidth)
    assert max(fetched, computed) < 0.98 * whole
    assert whole < serial
