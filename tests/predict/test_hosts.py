"""The server around the devices: its memory limits what is offloaded, its bandwidth and cores how fast that is."""

from itertools import pairwise

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import Op
from ridgeline.predict import predict
from ridgeline.predict.operators.host_work import faster_host, host_time
from ridgeline.predict.quick import quick
from ridgeline.search import Question, search
from ridgeline.search.answer_tables import answer_tables
from ridgeline.spec.device import Host
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.registry import resolve

PLAN = ["mixed_precision:weights=low", "zero:stage=2", "zero_offload"]


def offloaded(on, model="llama2-13b", **host):
    e = experiments.make(model, on, {"kind": "pretrain", "seq_len": 350, "batch_size": 8}, PLAN)
    if not host:
        return e
    device = e.cluster.device.model_copy(update={"host": e.cluster.device.host.model_copy(update=host)})
    return e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": device})})


@pytest.mark.parametrize("name", ["a800-80g", "rtx4090-xeon-6230", "rtx3090"])
def test_servers_of_the_benchmark_paper(name):
    host = catalog.device(name).host
    assert (host.sockets, host.cores) in ((2, 32), (2, 40), (2, 48))
    assert 100e9 < host.memory_bandwidth < 500e9
    assert host.pcie_bandwidth == pytest.approx(94.5e9 if host.cores == 40 else 8 * 31.5e9, rel=1e-3)


def test_servers_of_later_devices_update_faster():
    """Optimizers on the CPU are bound by its memory, DDR4 beside an A100 and DDR5 beside an H100. The data sheets of
    the DGX name the processors."""

    def update(on):
        return sum(r.seconds for r in predict(offloaded(f"8x{on}")).breakdown if r.kind == "host_update")

    seconds = [update(name) for name in ("a100-80g-sxm", "h100-sxm", "b200")]
    rates = [409.6, 614.4, 716.8]
    for (slow, fast), (few, more) in zip(pairwise(seconds), pairwise(rates), strict=True):
        assert slow / fast == pytest.approx(more / few)
    assert update("h200-sxm") == pytest.approx(seconds[1])


def test_what_does_not_fit_in_host_memory_is_infeasible_and_says_so():
    assert predict(offloaded("8xa800-80g")).status == "ok"
    small = offloaded("8xa800-80g", memory_bytes=128e9)
    result = predict(small)
    assert result.status == "infeasible"
    assert "GiB of host memory per node, which has 119.2 GiB (2 x AMD EPYC 7402)" in result.reason
    assert not quick(*resolve(small)).fits


def test_the_update_is_bound_by_the_memory_of_the_node_or_by_its_cores():
    def update(**host):
        rows = predict(offloaded("8xa800-80g", **host)).breakdown
        return sum(r.seconds for r in rows if r.kind == "host_update")

    assert update(memory_bandwidth=204.8e9) == pytest.approx(2 * update())
    assert update(cores=4) == pytest.approx(update() * 204.8e9 / 20e9)


def test_host_memory_is_reached_over_the_processors_own_lanes():
    """96 lanes of PCIe 3.0 for eight cards with 16 of PCIe 4.0 each."""
    few, enough = "8xrtx4090-xeon-6230", "8xrtx4090"

    def copies(on):
        rows = predict(offloaded(on)).breakdown
        return sum(r.seconds for r in rows if r.kind in ("d2h", "h2d"))

    def sums(on):
        e = experiments.make("llama2-7b", on, {"kind": "pretrain", "seq_len": 350, "batch_size": 8}, ["data_parallel"])
        return sum(r.seconds for r in predict(e).breakdown if r.kind == "all_reduce")

    host, link = catalog.device("rtx4090-xeon-6230").host, catalog.device("rtx4090").link
    assert host.pcie_bandwidth < 8 * link.bandwidth
    assert copies(few) == pytest.approx(copies(enough) * 4 * link.bandwidth / host.pcie_bandwidth, rel=0.01)
    assert sums(few) > 1.3 * sums(enough)


def test_copies_share_the_links_to_the_sockets():
    """Two devices behind a switch, as in a DGX, share its link; where each has its own, they do not."""

    def copies(on, **host):
        rows = predict(offloaded(on, **host)).breakdown
        return sum(r.seconds for r in rows if r.kind in ("d2h", "h2d"))

    assert copies("8xa100-80g-sxm") == copies("8xa100-80g-sxm", uplinks=None), "four is assumed"
    assert copies("8xa100-80g-sxm") == pytest.approx(2 * copies("8xa100-80g-sxm", uplinks=8), rel=0.01)
    assert copies("8xa100-80g-sxm", uplinks=8) == copies("8xa100-80g-sxm", uplinks=16)


def test_drives_of_a_server_are_read_together():
    plan = ["mixed_precision:weights=low", "zero:stage=3", "zero_infinity:optimizer=nvme"]
    device = catalog.device("h100-sxm")

    def reads(**host):
        changed = device.model_copy(update={"host": device.host.model_copy(update=host)})
        e = experiments.make("llama2-7b", "8xh100-sxm", {"kind": "pretrain", "seq_len": 350, "batch_size": 8}, plan)
        e = e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": changed})})
        return sum(r.seconds for r in predict(e).breakdown if r.kind in ("disk_read", "disk_write"))

    assert reads() > 0
    assert reads(disks=2) == pytest.approx(4 * reads())
    assert reads(disks=None) == pytest.approx(4 * reads())
    assert reads(disk_bandwidth=6e9) == pytest.approx(reads() / 2)


@pytest.mark.parametrize("known", [None, {}, {"memory_bandwidth": 800e9}, {"cores": 8}])
@pytest.mark.parametrize("kind", ["host_update", "host_read", "host_product"])
def test_a_server_that_is_better_by_a_factor_is_faster_by_it(kind, known):
    """What is not known of it is an ordinary one's, with the lever and without."""
    host = None if known is None else Host(name="known in part", memory_bytes=1e12, **known)
    cluster, op = catalog.cluster("8xa100-80g-sxm"), Op("x", "optimizer", kind, bytes=1e9)

    def seconds(host):
        device = cluster.device.model_copy(update={"host": host})
        return host_time(op, cluster.model_copy(update={"device": device})).seconds

    assert seconds(faster_host(host, 1.0)) == seconds(host)
    assert seconds(faster_host(host, 1.05)) == pytest.approx(seconds(host) / 1.05)


def test_lanes_need_a_generation():
    with pytest.raises(ValueError, match="given together"):
        Host(name="half", memory_bytes=1e12, pcie_lanes=128)


def seconds_of(plan, device, on="8xa100-80g-sxm", **workload):
    e = experiments.make("llama2-7b", on, {"kind": "pretrain", "seq_len": 350, "batch_size": 8, **workload}, plan)
    e = e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": device})})
    return {name: m.value for name, m in predict(e).metrics.items()}


@pytest.mark.parametrize("name", ["t4", "l40s", "mi300x"])
def test_a_server_of_which_only_the_memory_is_known_changes_no_time(name):
    device = catalog.device(name)
    assert (device.host.cores, device.host.memory_bandwidth) == (None, None)
    assert device.host.source
    unknown = device.model_copy(update={"host": None})
    for plan in (PLAN, ["data_parallel", "mixed_precision"]):
        assert seconds_of(plan, device) == seconds_of(plan, unknown)
    shared = device.link.model_copy(update={"p2p": False})
    known, unknown = (d.model_copy(update={"link": shared}) for d in (device, unknown))
    assert seconds_of(PLAN, known) == seconds_of(PLAN, unknown)


WORK = [
    {"kind": "pretrain", "seq_len": 350, "batch_size": 1},
    {"kind": "generate", "batch_size": 1},
    {"kind": "serve", "rate": 1.0},
]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work["kind"])
def test_host_memory_that_is_not_known_is_said_where_it_is_needed(work):
    plan = ["mixed_precision", "zero_infinity"] if work["kind"] == "pretrain" else ["zero_inference"]
    note = "host memory is not known for a6000: "
    held = predict(experiments.make("llama2-70b", "a6000", work, plan))
    need = held.metrics["host_bytes"].value / 2**30
    assert f"{note}{need:.1f} GiB per node are needed" in held.notes
    known = predict(experiments.make("llama2-70b", "t4", work, plan))
    assert not any("host memory is not known" in n for n in known.notes)
    plain = predict(experiments.make("gpt2", "a6000", work, []))
    assert not any("host memory is not known" in n for n in plain.notes)


def test_a_plan_beyond_the_host_memory_of_a_usual_server_does_not_fit():
    e = experiments.make("llama2-70b", "t4", {"kind": "pretrain", "seq_len": 350, "batch_size": 1},
                         ["mixed_precision:weights=low", "zero_infinity"])  # fmt: skip
    result = predict(e)
    assert result.status == "infeasible"
    assert "of host memory per node, which has 384.0 GiB (g4dn.metal)" in result.reason


def test_a_planner_says_which_plans_need_host_memory_that_is_not_known():
    q = Question(catalog.model("llama2-70b"), catalog.cluster("a6000"), Pretrain(seq_len=350, batch_size=1),
                 only=frozenset({"mixed_precision", "zero_infinity"}))  # fmt: skip
    notes = answer_tables(search(q, workers=1))[0].notes
    assert any(n.startswith("plan 1: host memory is not known for a6000: ") for n in notes)
