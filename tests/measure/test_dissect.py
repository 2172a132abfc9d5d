"""The dissection adds up, knows every module, and counts the FLOPs that the graph has."""

import json

import pytest
import torch
from tests.training import experiment
from tests.world import world

from ridgeline.graph import training_graph
from ridgeline.measure.dissect import dissect_cell, flops, label
from ridgeline.predict.common import rewritten
from ridgeline.spec.result import PHASES, Result
from ridgeline.techniques.registry import check


def dissect_rank(rank, e, trace):
    return dissect_cell(e, torch.device("cpu"), rank, e.world, {"trace": trace, "profiled": 2}, lambda message: None)


def dissect(e, trace):
    run = dissect_rank(0, e, str(trace)) if e.world == 1 else world(2).run(dissect_rank, e, str(trace))[0]
    return Result.model_validate(run)


PLANS = [
    ((), 1),
    (("flash_attention",), 1),
    (("recompute",), 1),
    (("recompute:policy=selective",), 1),
    (("mixed_precision",), 1),
    (("lora", "rtn"), 1),
    (("data_parallel",), 2),
    (("zero:stage=2",), 2),
    (("zero:stage=3", "recompute"), 2),
]


@pytest.mark.parametrize(("plan", "ranks"), PLANS, ids=str)
def test_rows_add_up_and_flops_are_the_graphs(plan, ranks, corpus, tmp_path):
    e = experiment(corpus, *plan, ranks=ranks, seq_len=32, steps=3, micro_batch_size=1)
    result = dissect(e, tmp_path / "trace.json")
    rows = result.breakdown
    total = result.metrics["profiled_step_s"].value
    assert sum(r.seconds for r in rows) == pytest.approx(total, rel=1e-6)
    assert next(c for c in result.checks if c.name.startswith("rows add up")).passed
    assert all(r.seconds >= 0 for r in rows)
    loose = [r for r in rows if r.kind == "unattributed"]
    assert len(loose) == 1
    assert 0 < loose[0].seconds < total

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
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert result.peak_bytes == result.metrics["peak_bytes"].value


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
    assert flops("addmm", [[5], [3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert flops("bmm", [[2, 3, 4], [2, 4, 5]]) == 2 * 2 * 3 * 4 * 5
    assert flops("_scaled_dot_product_flash_attention_for_cpu", [[1, 2, 6, 8], [1, 2, 7, 8]]) == 4 * 2 * 6 * 7 * 8
    assert flops("add", [[3, 4], [3, 4]]) == 0
    assert label("layers.11.attention.q_proj") == "attention.q_proj"
    assert label("layers.0") == "block"
    assert label("head.out") == "head.out"
