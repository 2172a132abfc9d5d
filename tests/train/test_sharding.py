"""A strategy for every part of the model (``tensor_parallel:sharding=…``), uneven stages beside it: the losses and
gradient norms of one process, with plain SGD, clipping active and rows with unequal numbers of labels."""

from __future__ import annotations

import pytest
from tests.crossings import named
from tests.train.test_layouts import DEEP, EXPERTS, compare
from tests.training import MODEL, experiment

from ridgeline.graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.sharding import STRATEGIES, Sharding
from ridgeline.techniques.registry import check, techniques_of

MIXED = ("embed=whole", "attention.0=batch", "mlp.0=scatter", "mlp.2=whole", "attention.3=scatter", "mlp.3=batch",
         "head=batch")  # fmt: skip
TIED = DEEP.model_copy(update={"tie_embeddings": True})
DEEP_EXPERTS = EXPERTS.model_copy(update={"num_layers": 4})
LEARNED = DEEP.model_copy(update={
    "position": "learned", "norm": "layernorm", "gated": False, "activation": "gelu", "mlp_bias": True,
    "qkv_bias": True, "out_bias": True,
})  # fmt: skip


def sharded(*entries, degree=2):
    return f"tensor_parallel:degree={degree},sharding=" + "+".join(entries)


def everywhere(strategy):
    return [f"{part}={strategy}" for part in ("embed", "attention", "mlp", "head")]


PLANS = {
    **{s: (2, (sharded(*everywhere(s)),), DEEP) for s in ("scatter", "batch", "whole")},
    "mixed": (2, (sharded(*MIXED),), DEEP),
    "experts": (2, (sharded(*MIXED),), DEEP_EXPERTS),
    "tied": (2, (sharded(*everywhere("batch")),), TIED),
    "learned positions and biases": (2, (sharded("embed=scatter", "attention=batch", "mlp=scatter", "head=batch"),),
                                     LEARNED),
    "uneven stages": (4, (sharded(*MIXED), "pipeline:degree=2,layers=3+1"), DEEP),
    "uneven stages, zero bubble": (4, (sharded(*MIXED), "pipeline:degree=2,layers=1+3,schedule=zero_bubble"), DEEP),
    "zero 3, recompute": (4, (sharded(*MIXED), "zero:stage=3", "recompute"), DEEP),
    "fused": (4, (sharded(*MIXED), "flash_attention", "fused_layers"), DEEP),
}  # fmt: skip


@pytest.mark.parametrize("name", named(PLANS))
def test_a_sharded_plan_trains_as_one_process(name, corpus):
    ranks, plan, model = PLANS[name]
    compare(ranks, plan, model, corpus)


def graph_of(*plan, model=DEEP):
    e = experiment("", *plan, ranks=2, model=model, batch_size=8, micro_batch_size=2)
    return rewritten(training_graph(e), e, techniques_of(e.plan))


def totals(g):
    ops = [(o, b.repeat) for b in g.blocks for o in (*b.forward, *b.backward)]
    return {
        "flops": g.flops,
        "bytes": sum(o.bytes * n for o, n in ops if not o.axis),
        "sent": sum(o.link_bytes * n for o, n in ops if o.axis),
        "saved": sum(b.saved_bytes * b.repeat for b in g.blocks),
        "held": sum(p.numel * n for p, n in g.params),
        "residual": g.residual,
    }


def test_scatter_is_predicted_as_sequence_parallel_and_reduce_as_tensor_parallel():
    """The same volumes along another dimension."""
    assert totals(graph_of(sharded(*everywhere("scatter")))) == pytest.approx(
        totals(graph_of("tensor_parallel:degree=2", "sequence_parallel")), rel=1e-12
    )
    plain, same = totals(graph_of("tensor_parallel:degree=2")), totals(graph_of(sharded(*everywhere("reduce"))))
    assert plain == pytest.approx(same, rel=1e-12)


def test_batch_is_predicted_as_data_parallelism_and_whole_as_one_process():
    """Half of the micro-batch, all of the weights."""
    e = experiment("", model=DEEP, batch_size=4, micro_batch_size=1)
    half = totals(rewritten(training_graph(e), e, []))
    batch = totals(graph_of(sharded(*everywhere("batch"))))
    assert batch.pop("sent") == 4.0  # the ranks' losses
    assert half.pop("sent") == 0.0
    assert batch == pytest.approx(half, rel=1e-12)
    e = experiment("", model=DEEP, batch_size=8, micro_batch_size=2)
    assert totals(graph_of(sharded(*everywhere("whole")))) == pytest.approx(
        totals(rewritten(training_graph(e), e, [])), rel=1e-12
    )


def test_the_stream_is_gathered_where_its_form_changes():
    g = graph_of(sharded("embed=batch", "attention.0-1=batch", "mlp.0-1=batch"))
    moved = [(b.name, o.direction) for b in g.blocks for o in (*b.forward, *b.backward) if o.name == "stream.gather"]
    assert moved == [("layers.2-2", "forward")]
    g = graph_of(sharded("attention.0-1=batch", "mlp.0-1=batch"))
    moved = [(b.name, o.direction) for b in g.blocks for o in (*b.forward, *b.backward) if o.name == "stream.gather"]
    assert moved == [("layers.0-0", "backward"), ("layers.2-2", "forward")]


def test_entries_are_read_back():
    plan = Sharding.parse(MIXED, 4)
    assert Sharding.parse(plan.entries(), 4) == plan
    for strategy in STRATEGIES:
        plan = Sharding.uniform(strategy, 4)
        assert Sharding.parse(plan.entries(), 4) == plan
        assert len(plan.entries()) == (0 if strategy == "reduce" else 4)


@pytest.mark.parametrize(
    ("plan", "settings", "says"),
    [
        ((sharded("attention=rows"),), {}, "strategy of reduce, scatter, batch, whole"),
        ((sharded("attention.3=batch"),), {}, "layers 0-1"),
        ((sharded("attention=batch"),), {}, "layer 0 need the residual stream in different forms"),
        ((sharded(*everywhere("batch")),), {"micro_batch_size": 1}, "does not divide over 2 ranks"),
        ((sharded(*everywhere("batch")), "sequence_parallel"), {}, "sequence_parallel does not combine"),
        ((sharded(*everywhere("batch")),), {"document_mask": True}, "document masks"),
    ],
)
def test_refusals(plan, settings, says):
    e = experiment("", *plan, ranks=2, model=MODEL, **{"batch_size": 8, "micro_batch_size": 2, **settings})
    with pytest.raises(Incompatible, match=says):
        check(e)


def test_a_tied_matrix_has_one_strategy():
    e = experiment("", sharded("head=batch"), ranks=2, model=TIED, batch_size=8, micro_batch_size=2)
    with pytest.raises(Incompatible, match="share one matrix"):
        check(e)
