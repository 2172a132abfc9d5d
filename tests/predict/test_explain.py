"""The tree adds up, and the levers do what they say."""

from __future__ import annotations

import pytest

from ridgeline import catalog, experiments
from ridgeline.graph.graph import Op
from ridgeline.predict import predict
from ridgeline.predict.explain import GAIN, RESOURCE_NAMES, RESOURCES, explain, improved, tree
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.host_work import host_time
from ridgeline.spec.errors import UserError
from ridgeline.spec.result import Metric, Result, Row


def experiment(**more):
    work = {"kind": "pretrain", "seq_len": 2048, "batch_size": 16, **more}
    return experiments.make("llama2-7b", "8xa100-80g-sxm", work, ["zero:stage=3", "mixed_precision"])


def generation():
    return experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "generate", "batch_size": 4}, ["flash_attention"])


def leaves(node):
    if not node.children:
        yield node
    for child in node.children:
        yield from leaves(child)


@pytest.mark.parametrize("make", [experiment, generation])
def test_the_tree_adds_up(make):
    x = explain(make(), moves=False)
    assert x.tree.seconds == x.result.metrics[x.metric].value
    assert sum(c.seconds for c in x.tree.children) == pytest.approx(x.tree.seconds, rel=0.01)
    assert sum(leaf.seconds for leaf in leaves(x.tree)) == pytest.approx(x.tree.seconds, rel=0.01)
    assert sum(x.tree.bounds.values()) == pytest.approx(1)
    assert all(leaf.bound for leaf in leaves(x.tree))


@pytest.mark.parametrize("make", [experiment, generation])
def test_a_lever_gives_the_gain_it_promises(make):
    e = make()
    x = explain(e, moves=False)
    now = x.tree.seconds
    assert len(x.levers) == len(RESOURCES)
    assert any(v.factor for v in x.levers)
    for resource, lever in zip(RESOURCES, x.levers, strict=True):
        assert lever.resource == RESOURCE_NAMES[resource]
        factor = lever.factor or 1e6
        device = improved(e.cluster.device, resource, factor)
        changed = e.model_copy(update={"cluster": e.cluster.model_copy(update={"device": device})})
        gain = now / predict(changed).metrics[x.metric].value - 1
        if lever.factor:
            assert gain == pytest.approx(GAIN, abs=0.03)
        else:
            assert gain < GAIN + 0.02


def test_no_part_is_more_than_the_whole():
    """A kernel that computes several operators takes less than they do one by one."""
    rows = [
        Row(phase="decode", module=m, operator=m, kind="gemm", seconds=t) for m, t in (("mlp", 3e-3), ("head", 1e-3))
    ]
    r = Result(
        source="predicted", experiment_id="e", experiment={}, metrics={"tpot_s": Metric(value=2e-3)}, breakdown=rows
    )
    root = tree(r, "tpot_s")
    (decode,) = root.children
    assert (root.seconds, decode.share) == (2e-3, 1.0)
    assert [m.share for m in decode.children] == [0.75, 0.25]
    assert "4 ms" in root.note


def test_requests_of_one_token_are_not_said_to_be_too_large():
    work = {"kind": "serve", "engine": "vllm", "requests": 2, "output_len": 1}
    with pytest.raises(UserError, match="no time per further token") as e:
        explain(experiments.make("llama3.2-1b", "h100-sxm", work, []))
    assert "output_len" in e.value.fix


def test_decode_is_bound_by_memory_and_training_by_compute():
    assert explain(generation(), moves=False).tree.bound == "memory"
    training = explain(experiment(), moves=False).tree
    assert next(c for c in training.children if c.name == "backward").bound == "compute"


def test_moves_gain_what_they_say():
    e = experiment()
    x = explain(e)
    best = x.moves[0]
    assert best.gain > 0.01
    assert [m.gain for m in x.moves] == sorted((m.gain for m in x.moves), reverse=True)
    flash = next(m for m in x.moves if m.change == "flash_attention")
    plan = [*e.plan.strings(), "flash_attention"]
    again = predict(experiments.make("llama2-7b", "8xa100-80g-sxm", e.workload.model_dump(), plan))
    ratio = x.tree.seconds / again.metrics["step_time_s"].value
    assert ratio - 1 == pytest.approx(flash.gain)


@pytest.mark.parametrize("device", ["rtx4090", "rtx4090-xeon-6230", "l40s", "a6000", "h100-pcie", "a100-80g-sxm"])
def test_more_bandwidth_between_devices_is_that_of_the_whole_path(device):
    """Host bridges, sockets and host memory are parts of it; an optimizer on the host gains nothing."""
    d = catalog.device(device)
    e = experiments.make("llama2-7b", f"8x{device}", {"kind": "pretrain", "seq_len": 512, "batch_size": 8},
                         ["tensor_parallel:degree=8", "mixed_precision"])  # fmt: skip
    big = Op("all_gather", "communication", "all_gather", link_bytes=8e9, ranks=8, axis="tp")
    update = Op("adamw", "optimizer", "host_update", bytes=1e9, axis="host")
    faster = e.cluster.model_copy(update={"device": improved(d, "link", 4)})
    now, then = (collective_time(big, cluster).seconds for cluster in (e.cluster, faster))
    assert now / then == pytest.approx(4, rel=0.05)
    assert host_time(update, faster) == host_time(update, e.cluster)
    lever = next(v for v in explain(e, moves=False).levers if v.resource == "bandwidth between devices")
    assert lever.limit > 0.05


def test_what_waits_for_the_hosts_link_gains_by_a_faster_one():
    e = experiments.make("llama2-70b", "rtx4090", {"kind": "generate", "prompt_len": 64, "output_len": 4},
                         ["zero_inference"])  # fmt: skip
    x = explain(e, moves=False)
    assert x.tree.bound == "link"
    levers = {v.resource: v for v in x.levers}
    assert levers["bandwidth between devices"].factor is None
    assert levers["bandwidth to host memory and disks"].factor == pytest.approx(1 + GAIN, rel=0.05)


@pytest.mark.parametrize("device", ["rtx4090-xeon-6230", "a6000"])
def test_what_an_optimizer_on_the_host_waits_for_has_a_lever(device):
    """Most of the step is memory of the host, which no figure of the device shortens."""
    plan = ["tensor_parallel:degree=8", "mixed_precision:weights=low", "zero_infinity"]
    e = experiments.make("llama2-7b", f"8x{device}", {"kind": "finetune", "seq_len": 350, "batch_size": 8}, plan)
    x = explain(e, moves=False)
    levers = {v.resource: v.factor for v in x.levers}
    assert next(c.share for c in x.tree.children if c.name == "optimizer") > 0.5
    assert 1 < levers[RESOURCE_NAMES["server"]] < 1.3
    assert levers[RESOURCE_NAMES["memory"]] is None


def test_waiting_for_prompts_is_no_latency():
    """Faster launches do not shorten the iterations that read other requests' prompts."""
    work = {"kind": "serve", "rate": 4.0, "requests": 100}
    x = explain(experiments.make("llama2-7b", "a100-80g-sxm", work, ["continuous_batching", "paged_kv"]), moves=False)
    waiting = next(c for c in x.tree.children if c.name == "waiting")
    latency = next(v for v in x.levers if v.resource == RESOURCE_NAMES["latency"])
    assert waiting.share > 0.3
    assert waiting.bound == "waiting"
    assert x.tree.bounds.get("latency", 0.0) <= latency.limit + 0.05


@pytest.mark.parametrize("plan", ["zero_offload", "zero_offload:delayed=true", "zero_infinity"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_optimizer_on_the_host_is_not_communication(plan, accumulation):
    e = experiment(batch_size=8 * accumulation, micro_batch_size=1)
    e = experiments.make(
        "llama2-7b", "8xa100-80g-sxm", e.workload.model_dump(), ["zero:stage=3", "mixed_precision", plan]
    )
    x = explain(e, moves=False)
    node = {child.name: child.seconds for child in x.tree.children}
    assert x.result.metrics["exposed_communication_s"].value == pytest.approx(node["communication"], rel=1e-9)
    assert sum(child.seconds for child in x.tree.children) == pytest.approx(x.tree.seconds, rel=1e-9)
    updates = [row for row in x.result.breakdown if row.kind == "host_update"]
    assert updates
    for row in updates:
        assert row.phase == "optimizer"
        assert 0 <= row.exposed_seconds <= row.seconds * (1 + 1e-9)
        if "delayed" not in plan:  # the device waits for all of it
            assert row.exposed_seconds == pytest.approx(row.seconds, rel=1e-9)
    sent = sum(row.seconds for row in x.result.breakdown if row.phase == "communication")
    hidden = x.result.metrics["hidden_communication_s"].value
    assert node["communication"] + hidden == pytest.approx(sent, rel=1e-6)
