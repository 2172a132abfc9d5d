"""The server around the devices: its memory limits what is offloaded, its bandwidth and cores how fast that is."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.predict import predict
from ridgeline.predict.quick import quick
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
    assert host.cores in (32, 40, 48)
    assert 100e9 < host.memory_bandwidth < 500e9


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
