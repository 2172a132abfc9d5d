"""The predictor's parts on cases small enough to do by hand."""

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph import Block, Graph, Op, Param, Saved, optimizer_ops, training_graph
from ridgeline.graph.graph import changed
from ridgeline.predict.common import rewritten
from ridgeline.predict.operators.collective_time import collective_time, path
from ridgeline.predict.operators.kernel import op_time, roof_seconds
from ridgeline.predict.predict import predict
from ridgeline.predict.step.peak_memory import training_peak
from ridgeline.predict.step.streams import shared_cores, simulate
from ridgeline.spec.device import Cluster, Device, Link, Rate
from ridgeline.spec.efficiency import CollectiveConstants, Efficiency
from ridgeline.techniques.registry import check

GIGA = 1e9


def device(bandwidth=100 * GIGA, latency=0.0, network=None, kind="gpu"):
    """An ideal machine: nothing but its datasheet."""
    return Device(
        name="box", kind=kind, peak_flops={"fp32": 1e12}, memory_bytes=1e12, memory_bandwidth=1e12, launch_latency=0.0,
        link=Link(name="wire", bandwidth=bandwidth, latency=latency), network=network, efficiency=Efficiency(),
    )  # fmt: skip


def cluster(ranks=4, nodes=1, **options):
    return Cluster(device=device(**options), devices_per_node=ranks, nodes=nodes)


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("kind", "rounds"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_ring(ranks, kind, rounds):
    """rounds · (n-1)/n · B / bandwidth in rounds · (n-1) hops: Thakur et al. 2005."""
    op = Op(kind, "communication", kind, link_bytes=8 * GIGA, ranks=ranks, axis="dp")
    got = collective_time(op, cluster(ranks, latency=1e-3)).seconds
    # An ordinary link's 2 us are part of the constants: a slower one adds the rest to every hop.
    by_hand = rounds * (ranks - 1) / ranks * 8 * GIGA / (100 * GIGA) + rounds * (ranks - 1) * (1e-3 - 2e-6)
    assert got == pytest.approx(by_hand)


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_a_ring_passes_on_all_of_it(kind):
    """Every rank but the last sends the whole buffer on: B / bandwidth in n-1 hops."""
    op = Op(kind, "communication", kind, link_bytes=8 * GIGA, ranks=4, axis="dp")
    assert collective_time(op, cluster(4, latency=1e-3)).seconds == pytest.approx(0.08 + 3 * (1e-3 - 2e-6))


def test_backward_gathers_before_it_reduces():
    """In backward a layer's parameters are there when the layer in front of it is done, unless they are gathered
    late."""
    workload = {"kind": "pretrain", "seq_len": 2048, "micro_batch_size": 4, "batch_size": 32}

    def exposed(plan):
        e = experiments.make("llama2-7b", "8xa100", workload, ["mixed_precision", plan])
        return predict(e).metrics["exposed_communication_s"].value

    early, late = exposed("zero:stage=3"), exposed("zero:stage=3,backward_prefetch=post")
    assert early < 0.5 * late


def test_stages_may_wait_for_transfers():
    """One transfer more for every pass between stages; the first rank, which ends last, has two a micro-batch."""
    workload = {"kind": "pretrain", "seq_len": 2048, "batch_size": 32, "micro_batch_size": 1}

    def step(options):
        e = experiments.make("llama2-7b", "4xa100", workload, ["mixed_precision", f"pipeline:degree=4{options}"])
        r = predict(e)
        send = next(row for row in r.breakdown if row.operator == "send")
        return r.metrics["step_time_s"].value, send.seconds / send.count

    (beside, each), (waiting, _) = step(""), step(",overlap=false")
    assert beside + 32 * 2 * each == pytest.approx(waiting, rel=0.02)


def test_one_network_card():
    wire = Link(name="net", bandwidth=5 * GIGA, latency=0.0)
    op = Op("x", "communication", "all_gather", link_bytes=8 * GIGA, ranks=8, axis="dp")
    all_cards, one = (collective_time(changed(op, rails=n), cluster(4, 2, network=wire)).seconds for n in (0, 1))
    assert all_cards == pytest.approx(7 / 8 * 8 / 20)
    assert one == pytest.approx(4 * all_cards)


def test_whole_tensors_belong_to_ranks():
    """Each of a rank's tensors is reduced to it and broadcast from it; the more ranks, the more of them."""
    workload = {"kind": "pretrain", "seq_len": 128, "micro_batch_size": 1}
    plan = ["mixed_precision:weights=low", "zero:stage=1,gathered=tensor"]
    size = 2 * catalog.model("llama2-7b").num_parameters  # in 16 bits

    def sent(on):
        e = experiments.make("llama2-7b", on, workload, plan)
        return {r.operator: r for r in predict(e).breakdown if r.operator in ("reduce", "broadcast")}

    few, many = sent("8xa100"), sent("64x8xa100")
    assert few["broadcast"].link_bytes == many["broadcast"].link_bytes == pytest.approx(size)
    assert few["reduce"].link_bytes == many["reduce"].link_bytes == pytest.approx(2 * size)
    assert few["broadcast"].count == 34
    assert many["broadcast"].count == many["reduce"].count == 32 * 9 + 3


def test_16_bit_gradients_are_added_to_their_sums():
    """10 bytes for every weight, once per micro-batch."""
    workload = {"kind": "pretrain", "seq_len": 128, "batch_size": 4, "micro_batch_size": 1}
    r = predict(experiments.make("llama2-7b", "a100", workload, ["mixed_precision:weights=low"]))
    weights = sum(p.numel for p in catalog.model("llama2-7b").parameters() if len(p.shape) > 1)
    assert sum(row.bytes for row in r.breakdown if row.kind == "accumulate") == pytest.approx(4 * 10 * weights)


def test_one_rank_sends_nothing():
    op = Op("all_reduce", "communication", "all_reduce", link_bytes=GIGA, ranks=1, axis="dp")
    assert collective_time(op, cluster(1)).seconds == 0


def test_a_ring_over_nodes_runs_at_its_slowest_link():
    wire = Link(name="net", bandwidth=5 * GIGA, latency=1e-5)
    inside, across = cluster(4, network=wire), cluster(4, 2, network=wire)
    ideal = CollectiveConstants()

    def route(c, ranks, stride=1):
        p = path(ideal, c.device, c.nodes, c.devices_per_node, ranks, stride)
        return p.local, p.nodes, p.bandwidth

    assert route(inside, 4) == (4, 1, 100 * GIGA)
    assert route(across, 4) == (4, 1, 100 * GIGA)  # a ring that stays inside a node
    assert route(across, 8) == (4, 2, 4 * 5 * GIGA)  # one card per device
    assert route(across, 2, stride=4) == (1, 2, 5 * GIGA)  # the same place in each node
    assert route(across, 4, stride=2) == (2, 2, 2 * 5 * GIGA)
    assert path(ideal, across.device, across.nodes, across.devices_per_node, 8).across == 1e-5
    assert route(cluster(4, 2), 8)[2] < 100 * GIGA  # no network given: an ordinary one


def test_a_measured_collective_wins():
    op = Op("all_reduce", "communication", "all_reduce", link_bytes=GIGA, ranks=2, axis="dp")
    rates = {"all_reduce.fp32": Rate(latency=0.5, byte_rate=2 * GIGA)}
    measured = Cluster(device=device().model_copy(update={"rates": rates}), devices_per_node=2)
    assert collective_time(op, measured).seconds == 1.0


# ---- operators ------------------------------------------------------------------------------------------------------


def test_operator_is_bound_by_the_slower_of_arithmetic_and_memory():
    box = device()
    heavy = Op("x", "mlp", "gemm", flops=1e12, bytes=1.0, shape=(12800, 12800, 3052))
    light = Op("x", "mlp", "norm", flops=0.0, bytes=1e12)
    assert op_time(heavy, box).bound == "compute"
    assert op_time(heavy, box).seconds >= roof_seconds(heavy, box) * 0.99
    assert op_time(light, box).bound == "memory"
    assert op_time(light, box).seconds == roof_seconds(light, box) == 1.0


def test_a_measured_rate_wins_the_more_specific_first():
    op = Op("x", "mlp", "gemm", "backward", flops=1e9, bytes=0.0)
    rates = {"gemm.fp32": Rate(flop_rate=1e9), "gemm.backward.fp32": Rate(flop_rate=2e9, latency=0.25)}
    box = device().model_copy(update={"rates": rates})
    assert op_time(op, box).seconds == 0.75
    assert op_time(Op("x", "mlp", "gemm", flops=1e9), box).seconds == 1.0


def test_ranks_share_a_cpu():
    box = device(kind="cpu").model_copy(update={"sm_count": 8, "rates": {"gemm.fp32": Rate(flop_rate=4e9)}})
    half = box.shared_by(2)
    assert (half.memory_bandwidth, half.memory_bytes, half.sm_count) == (0.5e12, 0.5e12, 4)
    assert half.rates["gemm.fp32"].flop_rate == 2e9
    assert device().shared_by(2) == device()  # every rank has a GPU of its own


# ---- memory ---------------------------------------------------------------------------------------------------------


def by_hand(accumulation=1, saved=(100.0, 200.0), workspace=(7.0, 50.0), backward=(30.0, 60.0)):
    """An embedding of 10 elements and two layers of 20, in fp32 under AdamW."""

    def block(i, name, repeat, numel):
        kept = {"x": Saved(saved[i], frozenset({"y"}))}
        return Block(name, repeat, [Param("w", numel)], [], [], kept, workspace[i], backward[i])

    return Graph([block(0, "embed", 1, 10), block(1, "layers", 2, 20)], accumulation=accumulation, buffers=5.0)


def test_peak_by_hand():
    peak = training_peak(by_hand())
    assert peak.instant == "backward of layers"  # the first layer to go backward, before any gradient
    assert peak.categories == {
        "parameters": 200.0, "optimizer": 400.0, "activations": 500.0, "temporaries": 60.0, "buffers": 5.0,
    }  # fmt: skip
    assert peak.total == 1165.0


def test_peak_with_accumulated_gradients():
    peak = training_peak(by_hand(accumulation=2))
    assert peak.categories["gradients"] == 200.0
    assert peak.total == 1365.0


def test_peak_in_forward():
    peak = training_peak(by_hand(workspace=(7.0, 500.0)))
    assert peak.instant == "forward of layers"
    assert peak.categories["activations"] == 500.0 + 500.0, "what it keeps, and the operator at work"
    assert "temporaries" not in peak.categories


def test_peak_when_gradients_outweigh_activations():
    peak = training_peak(by_hand(saved=(1.0, 1.0), workspace=(0.0, 0.0), backward=(0.0, 0.0)))
    assert peak.categories == {"parameters": 200.0, "gradients": 200.0, "optimizer": 400.0, "buffers": 5.0}


def test_frozen_parameters_have_no_gradient_and_no_state():
    g = by_hand(accumulation=2)
    g.blocks[1].params[0].trainable = False
    peak = training_peak(g)
    assert (peak.categories["gradients"], peak.categories["optimizer"]) == (40.0, 80.0)
    assert peak.categories["parameters"] == 200.0


def test_recomputed_activations_exist_one_layer_at_a_time():
    g = by_hand(backward=(0.0, 0.0), workspace=(0.0, 0.0))
    g.blocks[1].saved = {"input": Saved(10.0, frozenset({"recompute"}))}
    g.blocks[1].recomputed = 200.0
    peak = training_peak(g)
    # The second layer's gradient, the rebuilt first one, its input, and what the embedding kept.
    got = [peak.categories[k] for k in ("gradients", "temporaries", "activations")]
    assert got == [80.0, 200.0, 110.0]


# ---- the timeline ---------------------------------------------------------------------------------------------------


def chain(layers=3, gather=0.0, reduce=0.0):
    """Layers of 1 s forward and 2 s backward, with collectives of the given seconds on two ranks."""

    def collective(name, kind, duration):
        size = duration * 100 * GIGA * 2  # (n-1)/n = 1/2 of it travels
        return [Op(name, "communication", kind, link_bytes=size, ranks=2, axis="dp")] if duration else []

    forward = [Op("f", "mlp", "norm", bytes=1e12)]
    backward = [Op("b", "mlp", "norm", "backward", bytes=2e12)]
    block = Block("layers", layers, [], forward, backward, {})
    block.gather_forward = collective("g", "all_gather", gather)
    block.gather_backward = collective("g", "all_gather", gather)
    block.reduce = collective("r", "reduce_scatter", reduce)
    return Graph([block])


@pytest.mark.parametrize(
    ("gather", "reduce", "seconds", "exposed"),
    [
        (0.0, 0.0, 9.0, 0.0),
        (0.5, 0.0, 9.0 + 2 * 0.5, 2 * 0.5),  # the first gather of each direction has nothing to hide behind
        (0.0, 1.5, 9.0 + 1.5, 1.5),  # only the last reduction
        (0.0, 4.0, 3.0 + 2.0 + 3 * 4.0, 8.0),  # reductions longer than a layer's backward queue up
    ],
)
def test_overlap_by_hand(gather, reduce, seconds, exposed):
    update = [Op("sgd", "optimizer", "optimizer", "update")]
    step = simulate(chain(gather=gather, reduce=reduce), cluster(2), update)
    assert step.seconds == pytest.approx(seconds)
    assert step.exposed == pytest.approx(exposed)


def test_nothing_overlaps_on_a_cpu():
    g = chain(gather=0.5, reduce=1.5)
    for b in g.blocks:  # a CPU reaches another share of its bandwidth
        b.forward = [Op("f", "mlp", "norm", bytes=0.70e12)]
        b.backward = [Op("b", "mlp", "norm", "backward", bytes=2 * 0.70e12)]
    step = simulate(g, cluster(2, kind="cpu"), [])
    assert step.seconds == pytest.approx(9 + 6 * 0.5 + 3 * 1.5)
    assert step.exposed == pytest.approx(6 * 0.5 + 3 * 1.5)


def on_links(bandwidth, plan):
    e = experiments.make("llama2-7b", "8xa100", {"kind": "pretrain", "seq_len": 512, "batch_size": 8}, [plan])
    link = Link(name="wire", bandwidth=bandwidth, latency=0.0)
    free = catalog.efficiency(e.cluster.device).model_copy(update={"collective": CollectiveConstants()})
    box = e.cluster.device.model_copy(update={"link": link, "efficiency": free})
    r = predict(e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": box})}))
    sent = sum(row.seconds for row in r.breakdown if row.phase == "communication")
    return r.metrics["step_time_s"].value, sum(row.seconds for row in r.breakdown) - sent, sent


@pytest.mark.parametrize("plan", ["data_parallel", "zero:stage=2", "zero:stage=3"])
def test_free_and_priceless_links(plan):
    step, compute, _ = on_links(1e30, plan)
    assert step == pytest.approx(compute)
    step, compute, sent = on_links(1e6, plan)
    assert sent < step < sent + compute
    assert step == pytest.approx(sent, rel=1e-3)


def test_a_stage_updates_its_own_parameters():
    """An average rank of four stages moves a quarter of what one rank alone does."""

    def moved(cluster, *plan):
        e = experiments.make("llama-mini", cluster, {"kind": "pretrain", "seq_len": 64, "batch_size": 8}, list(plan))
        g = rewritten(training_graph(e), e, check(e))
        return {op.name: op.bytes for op in optimizer_ops(g)}

    whole, part = moved("a100"), moved("4xa100", "pipeline:degree=4")
    assert whole
    assert part == {name: pytest.approx(size / 4) for name, size in whole.items()}


def test_cores_that_ranks_share_work_for_those_that_do_not_wait():
    """Four stages of 2 s take turns: on four cores 8 s; on two, where each alone is twice as fast, 4 s."""
    assert shared_cores([2.0] * 4, 8.0, 2.0) == 0.5
    assert shared_cores([7.0, 8.0, 8.0, 7.0], 10.0, 2.0) == 0.75, "both cores are busy all the time"
    assert shared_cores([2.0] * 4, 8.0, 1.0) == 1.0
    two_cores = Device(
        name="d", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=1e9, memory_bandwidth=1e10, sm_count=2
    )
    assert [two_cores.shared_by(n).per_core for n in (1, 2, 4)] == [1.0, 1.0, 2.0]
