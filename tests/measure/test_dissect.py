"""The dissection adds up, knows every module, and counts the FLOPs that the graph has."""

import json
from collections import Counter

import pytest
import torch
from tests.training import experiment
from tests.world import world

from ridgeline.graph import training_graph
from ridgeline.jobs.job import DissectOptions, RankContext
from ridgeline.measure.dissect import dissect_cell
from ridgeline.measure.profiled_steps import MODULE, PHASE, ProfileNode, attribute, flops, label
from ridgeline.predict.common import rewritten
from ridgeline.spec.result import PHASES, Result
from ridgeline.techniques.registry import check


def dissect_rank(rank, e, trace):
    return dissect_cell(e, DissectOptions(trace=trace, profiled=2), RankContext(torch.device("cpu"), rank, e.world))


def dissect(e, trace):
    run = dissect_rank(0, e, str(trace)) if e.world == 1 else world(2).run(dissect_rank, e, str(trace))[0]
    return Result.model_validate(run)


PLANS = [((), 1), (("flash_attention", "mixed_precision"), 1), (("lora", "rtn"), 1), (("zero:stage=3", "recompute"), 2)]
ALONE = [("flash_attention", 1), ("mixed_precision", 1), ("recompute", 1), ("recompute:policy=selective", 1),
         ("data_parallel", 2), ("zero:stage=2", 2)]  # fmt: skip
PLANS += [pytest.param((call,), ranks, marks=pytest.mark.nightly) for call, ranks in ALONE]


@pytest.mark.parametrize(("plan", "ranks"), PLANS, ids=str)
def test_rows_add_up_and_flops_are_the_graphs(plan, ranks, corpus, tmp_path):
    e = experiment(corpus, *plan, ranks=ranks, seq_len=32, steps=3, batch_size=2 * ranks, micro_batch_size=1)
    result = dissect(e, tmp_path / "trace.json")
    rows = result.breakdown
    assert next(c for c in result.checks if c.name.startswith("rows add up")).passed
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    called = Counter(event["name"] for event in trace if event.get("cat") == "cpu_op")
    seen_calls = Counter({r.operator: 0 for r in rows})
    for r in rows:
        seen_calls[r.operator] += r.count
    for name in ("mm", "bmm", "_softmax", "embedding"):
        assert seen_calls[name] == called[f"aten::{name}"], f"rows miss or repeat calls of {name}"

    graph = rewritten(training_graph(e), e, check(e))
    # The graph's first LoRA layer has a gradient of the keys that autograd leaves out: nothing below them trains.
    slack = 0.02 if "lora" in plan else 1e-9
    counted, expected = sum(r.flops for r in rows), graph.flops * e.accumulation
    if any(p.startswith("recompute") for p in plan):
        # The profiler notes the one product per block at which recomputation stops before it computes.
        assert expected <= counted < 1.05 * expected
    else:
        assert counted == pytest.approx(expected, rel=slack)

    assert {r.phase for r in rows} <= set(PHASES)
    seen = {(r.phase, r.module) for r in rows}
    linears = [f"attention.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    for module in [*linears, "attention", "mlp", "attention_norm", "mlp_norm", "norm", "head.out"]:
        assert ("forward", module) in seen, module
        assert ("backward", module) in seen, module
    assert ("forward", "embed.tokens") in seen
    assert ("forward", "loss") in seen
    assert ("optimizer", "optimizer") in seen
    assert (("communication", "communication") in seen) == (ranks == 2)
    assert result.peak_bytes == result.metrics["peak_bytes"].value


def test_rows_are_the_time_that_operators_do_not_spend_in_others():
    """Two steps by hand: a forward operator with one inside, its backward by sequence number, the optimizer, and the
    time that nobody accounts for."""

    def node(name, seconds, *children, sequence=-1):
        return ProfileNode(name, 0.0, seconds, sequence, [], [], list(children))

    def step(more):
        forward = node("aten::linear", 3.0, node("aten::mm", 2.0 + more), sequence=7)
        return node(
            f"{PHASE}step", 10.0 + more,
            node(f"{PHASE}forward+backward", 8.0 + more,
                 node(f"{MODULE}layers.0.mlp.up_proj", 4.0 + more, forward),
                 node("autograd::engine::evaluate_function: MmBackward0", 2.0, node("aten::mm", 1.5), sequence=7)),
            node(f"{PHASE}optimizer", 1.0, node("aten::mul", 0.5)),
        )  # fmt: skip

    rows, total = attribute([step(0.0), step(0.5)], 2)
    assert total == 10.25
    found = {(r.phase, r.module, r.operator): (r.seconds, r.count) for r in rows}
    assert found == {
        ("forward", "mlp.up_proj", "linear"): (0.75, 1), ("forward", "mlp.up_proj", "mm"): (2.25, 1),
        ("backward", "mlp.up_proj", "mm"): (1.5, 1), ("optimizer", "optimizer", "mul"): (0.5, 1),
        ("other", "unattributed", "unattributed"): (5.25, 1),
    }  # fmt: skip


def test_each_linears_flops_are_its_own(corpus, tmp_path):
    """Rows against arithmetic: forward 2·tokens·in·out of each of two layers, twice that in backward."""
    e = experiment(corpus, seq_len=32, steps=3)
    rows = dissect(e, tmp_path / "trace.json").breakdown
    m, tokens = e.model, 4 * 32
    for module, size in {
        "attention.q_proj": m.hidden_size * m.num_heads * m.head_dim,
        "attention.v_proj": m.hidden_size * m.num_kv_heads * m.head_dim,
        "mlp.down_proj": m.hidden_size * m.intermediate_size,
    }.items():
        forward = sum(r.flops for r in rows if (r.phase, r.module) == ("forward", module))
        backward = sum(r.flops for r in rows if (r.phase, r.module) == ("backward", module))
        assert forward == 2 * tokens * size * m.num_layers
        assert backward == 2 * forward
        assert sum(r.count for r in rows if (r.phase, r.module, r.operator) == ("forward", module, "mm")) == 2


def test_flops_of_single_operators():
    assert flops("mm", [[3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert flops("_linear_pointwise", [[2, 3, 4], [5, 4]]) == 2 * 2 * 3 * 4 * 5  # oneDNN's, of a weight [out, in]
    assert flops("addmm", [[5], [3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert flops("bmm", [[2, 3, 4], [2, 4, 5]]) == 2 * 2 * 3 * 4 * 5
    assert flops("_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 6, 8], [1, 2, 7, 8]]) == 4 * 2 * 6 * 7 * 8
    assert flops("add", [[3, 4], [3, 4]]) == 0
    assert label("layers.11.attention.q_proj") == "attention.q_proj"
    assert label("layers.0") == "block"
    assert label("head.out") == "head.out"
