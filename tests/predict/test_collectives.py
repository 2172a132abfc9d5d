"""Collectives on catalog devices: orders, bounds, topology."""

import itertools

import pytest

from ridgeline import catalog
from ridgeline.graph import Op
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.spec.device import Cluster

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast")


def seconds(kind, size, ranks, on, stride=1, dtype="bf16"):
    op = Op("x", "communication", kind, link_bytes=size, ranks=ranks, stride=stride, axis="dp", dtype=dtype)
    return collective_time(op, catalog.cluster(on)).seconds


@pytest.mark.parametrize("on", ["8xa100-80g-sxm", "8xh100-sxm", "8xrtx4090", "4x8xh100-sxm", "8xmi300x", "8xl40s"])
def test_more_bytes_are_never_faster(on):
    ranks = catalog.cluster(on).size
    for kind in KINDS:
        times = [seconds(kind, 2.0**i, ranks, on) for i in range(8, 32)]
        assert all(b >= a for a, b in itertools.pairwise(times)), (on, kind)
    assert seconds("p2p", 1e9, 2, on) > seconds("p2p", 1e6, 2, on)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing(kind):
    assert seconds(kind, 1e9, 1, "8xa100-80g-sxm") == 0


@pytest.mark.parametrize("name", [n for n in catalog.devices() if catalog.device(n).link])
def test_no_link_carries_more_than_it_can(name):
    device = catalog.device(name)
    for ranks in (2, 4, 8):
        least = (ranks - 1) / ranks * 1e9 / device.link.bandwidth
        for kind in ("all_gather", "reduce_scatter", "alltoall"):
            assert seconds(kind, 1e9, ranks, f"8x{name}") > least
        assert seconds("all_reduce", 1e9, ranks, f"8x{name}") > least  # sums in the switch send each byte once


def test_an_all_reduce_is_a_scatter_and_a_gather():
    both = sum(seconds(k, 1e9, 8, "8xa100-80g-sxm") for k in ("reduce_scatter", "all_gather"))
    assert seconds("all_reduce", 1e9, 8, "8xa100-80g-sxm") == pytest.approx(both, rel=0.1)


def test_the_switch_sums_on_hopper_but_not_integers():
    on = "8xh100-sxm"
    assert seconds("all_reduce", 5e8, 8, on) < 0.9 * seconds("all_reduce", 5e8, 8, on, dtype="int8")
    assert seconds("all_reduce", 5e8, 2, on) == seconds("all_reduce", 5e8, 2, on, dtype="int8")


def test_published_bus_bandwidth():
    """Users of 8 A100 SXM report about 200 GB/s at large sizes (NVIDIA/nccl-tests issue 149)."""
    bus = 1.75 * 2e9 / seconds("all_reduce", 2e9, 8, "8xa100-80g-sxm")
    assert 180e9 < bus < 250e9


def test_groups_inside_and_across_nodes():
    on = "4x8xa100-80g-sxm"
    inside, across = seconds("all_reduce", 1e9, 8, on), seconds("all_reduce", 1e9, 32, on)
    assert inside == pytest.approx(seconds("all_reduce", 1e9, 8, "8xa100-80g-sxm"))
    assert across > inside
    # The same place in each of four nodes: one network card each.
    rails = seconds("all_reduce", 1e9, 4, on, stride=8)
    assert rails > across
    assert rails > 1.5 * 1e9 / catalog.device("a100-80g-sxm").network.bandwidth
    assert seconds("alltoall", 1e9, 32, on) > seconds("alltoall", 1e9, 8, on)


def over(device, **link):
    return device.model_copy(update={"link": device.link.model_copy(update=link)})


def test_cards_without_peer_access_pass_through_the_host():
    nvlink, staged = (seconds("all_reduce", 1e9, 8, f"8x{d}") for d in ("a800-80g", "rtx4090"))
    assert staged > 10 * nvlink
    assert 1.75 * 1e9 / staged < catalog.device("rtx4090").link.bandwidth / 2


@pytest.mark.parametrize("kind", [*KINDS, "p2p"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_peer_access_is_faster(kind, ranks):
    """A GeForce card has none over PCIe, which a file can say otherwise: ``p2p = true``."""
    card = catalog.device("rtx4090")
    assert not card.link.p2p
    for size in (1024, 1e6, 1e9):
        op = Op("x", "communication", kind, link_bytes=size, ranks=ranks, axis="tp", dtype="bf16")
        hosted, direct = (
            collective_time(op, Cluster(device=over(card, p2p=p2p), devices_per_node=8)).seconds
            for p2p in (False, True)
        )
        assert hosted > direct


def test_host_bridges_between_cards_slow_larger_groups():
    """Groups that span more cards share what lies between them: per byte, each is slower than the last."""

    def bus(ranks, stride=1):
        return 2 * (ranks - 1) / ranks * 1e9 / seconds("all_reduce", 1e9, ranks, "8xl40s", stride)

    assert bus(2) > 2 * bus(4) > 4 * bus(8)
    # Two cards that stand four apart cross as much as all eight.
    assert bus(2, stride=4) < bus(4)
    even = over(catalog.device("l40s"), spans=[])
    op = Op("x", "communication", "all_reduce", link_bytes=1e9, ranks=8, axis="tp", dtype="bf16")
    assert collective_time(op, Cluster(device=even, devices_per_node=8)).seconds < seconds(
        "all_reduce", 1e9, 8, "8xl40s"
    )


def test_a_tree_over_two_nodes_sends_the_buffer_once():
    """A ring of 16 sends 15/8 of the buffer through a node's cards, a tree of two nodes all of it once."""
    on, size = "2x8xh100-sxm", 8e9
    node = 8 * catalog.device("h100-sxm").network.bandwidth
    assert size / node < seconds("all_reduce", size, 16, on) < 15 / 8 * size / node
    assert seconds("all_gather", size, 16, on) > 0.9 * size / node
    four = seconds("all_reduce", size, 32, "4x8xh100-sxm")
    assert seconds("all_reduce", size, 16, on) < four < 2 * seconds("all_reduce", size, 16, on)


def test_latency_of_small_messages():
    """8 bytes to 8 KiB cost tens of microseconds, hardly depend on size, and grow with the ranks."""
    small = [seconds("all_reduce", 8192, n, "8xa100-80g-sxm") for n in (2, 4, 8)]
    assert small == sorted(small)
    assert all(8e-6 < t < 40e-6 for t in small)
    assert seconds("all_reduce", 8, 8, "8xa100-80g-sxm") > 0.8 * small[-1]
