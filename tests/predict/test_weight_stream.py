"""Passes whose weights come through a ring, against schedules worked out by hand."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.predict.serving.weight_stream import _Pass, _Segment
from ridgeline.spec.device import Cluster, Device, Rate


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


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_cpu_copies_into_a_ring_at_the_rate_of_its_size(prefetch):
    """A ring of layers of Llama 3.2 1B, 243 MB each, is larger than 64 MiB, one of llama-mini smaller than 16."""
    rates = {
        "copy_ring16": Rate(byte_rate=4e9),
        "copy_ring64": Rate(byte_rate=3e9),
        "copy_ring256": Rate(byte_rate=2e9),
    }
    bare = Device(name="cpu", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=64e9, memory_bandwidth=1e10)
    for model, rate in (("llama-mini", 4e9), ("llama-3.2-1b", 2e9)):
        w = {"kind": "generate", "batch_size": 1, "prompt_len": 16, "output_len": 16}
        plan, took = [f"zero_inference:prefetch={prefetch}"], []
        for device in (bare, bare.model_copy(update={"rates": rates})):
            cluster = Cluster(device=device)
            took.append(predict(experiments.make(model, cluster, w, plan)).metrics["tpot_s"].value)
        m = catalog.model(model)
        held = sum(p.numel for i in range(m.num_layers) for p in m.block_parameters(i)) * 4
        assert took[0] - took[1] == pytest.approx(held * (2 / 1e10 - 1 / rate), rel=0.02)
