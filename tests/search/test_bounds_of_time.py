"""Bounds on the time of a step: what the search leaves out for them is no answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ridgeline import catalog
from ridgeline.predict.quick import computation, quick
from ridgeline.search import Question, search
from ridgeline.search.expand import Expansion, ranked
from ridgeline.search.found import Found, order
from ridgeline.search.nodes import bound_of, nodes
from ridgeline.search.space import beside, candidate, micro_batches, refusal, slots, splits_batch
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import FineTune

FEW = frozenset({"tensor_parallel", "expert_parallel", "pipeline", "recompute", "flash_attention", "mixed_precision",
                 "data_parallel", "zero", "zero_offload", "zero_infinity"})  # fmt: skip


def question(model, on, **work) -> Question:
    return Question(catalog.model(model), catalog.cluster(on), FineTune(**work), only=FEW, free_micro_batch=True)


def points(q: Question, every: int = 1):
    """(mesh, shape and micro-batch, the rest) of each plan that ``check`` accepts."""
    base = q.base(q.cluster)
    space = slots(q, base, q.techniques())
    every_node = list(product(space.combinations("mesh"), space.combinations("shape"), micro_batches(base, 1, True)))
    for mesh, shape, micro in every_node[::every]:
        if refusal(candidate(base, mesh + shape)):
            continue
        for stages in space.combinations("split"):
            e, techniques = candidate(base, mesh + shape + stages, micro)
            if refusal((e, techniques), whole=True):
                continue
            for placement in beside(mesh + shape, space.placements)[0]:
                point = candidate(base, mesh + shape + stages + placement, micro)
                if splits_batch(placement) == (e.gradient_ranks > 1) and not refusal(point):
                    yield candidate(base, mesh + shape, micro), point


@pytest.mark.parametrize(
    ("model", "on", "work", "every"),
    [
        # Weights cast on use count in short steps, unless they are shards that are gathered in 16 bits.
        ("gpt2-xl", "8xa100-80g", {"seq_len": 128, "batch_size": 64}, 9),
        # Sums of all experts' gradients count, unless the gradients leave the device.
        ("mixtral-8x7b", "8xh100-sxm", {"seq_len": 2048, "batch_size": 64}, 40),
    ],
)
def test_no_step_is_faster_than_its_computation(model, on, work, every):
    q = question(model, on, **work)
    bounds, judged = {}, 0
    for node, point in points(q, every):
        key = tuple(node[0].plan.strings()), node[0].micro_batch_size
        if key not in bounds:
            bounds[key] = computation(*node)
        found = quick(*point, always=True)
        judged += 1
        assert bounds[key] <= found.metrics["step_time_s"] * (1 + 1e-9), (point[0].plan.strings(), key)
    assert judged > 500
    assert len(bounds) > 10


@pytest.mark.parametrize("workers", [1, 2])
def test_of_plans_that_offload_the_best_ranked_is_found(workers):
    """No plan fits without it, and how fast one is does not follow from its computation."""
    q = question("llama2-7b", "2xrtx3090", seq_len=512, batch_size=4)
    answer = search(q, workers=workers)
    every = [ranked(q, point[0], found) for _, point in points(q) if (found := quick(*point)).fits]
    assert len(every) > 100
    assert all(any("offload" in name or "infinity" in name for name in t.names) for t in every)
    best = min(every, key=order)
    assert answer.best[0].rank == pytest.approx(best.rank)
    assert min(t.metrics["step_time_s"] for t in answer.found.fitting.values()) == pytest.approx(
        min(t.metrics["step_time_s"] for t in every)
    )


def test_a_plan_that_offloads_more_is_found_where_it_is_faster():
    """In 20 GB, gradients that each rank holds whole and activations on the host beat all states in shards."""
    more = FEW - {"tensor_parallel", "pipeline", "recompute"} | {"activation_offload"}
    q = replace(question("llama2-7b", "2xrtx3090", seq_len=512, batch_size=4), only=more, slo={"peak_bytes": 20e9})
    every = [ranked(q, point[0], found) for _, point in points(q) if (found := quick(*point)).fits]
    best = min((t for t in every if not q.misses(t.metrics)), key=order)
    assert {"zero_offload", "activation_offload"} <= best.names
    assert search(q, workers=1).best[0].calls == best.calls


def test_what_keeps_a_limit_beside_a_fixed_technique_that_moves_activations_is_found():
    """Activations that are elsewhere do not count as the device's."""
    fixed = Plan.parse(["diff_pruning", "lion", "activation_offload"])
    q = replace(question("gpt2-xl", "2xrtx3090", seq_len=512, batch_size=16), fixed=fixed)
    fastest = min(t.metrics["step_time_s"] for t in search(q, workers=1).found.fitting.values())
    limited = search(replace(q, slo={"step_time_s": 1.001 * fastest}), workers=1)
    assert limited.best
    assert limited.best[0].metrics["step_time_s"] == pytest.approx(fastest)
    assert all(t.missed or not t.quick.fits for t in limited.found.nearest)


def test_what_misses_a_limit_on_time_does_not_bound_what_keeps_it():
    """Plans whose techniques are not proven must gain more to come first, not to keep a limit."""
    fixed = Plan.parse(["bitfit", "lion", "activation_offload", "growlength"])
    q = Question(catalog.model("gpt2-xl"), catalog.cluster("rtx3090"), FineTune(seq_len=512, batch_size=8),
                 only=frozenset({"flash_attention", "mixed_precision"}), fixed=fixed)  # fmt: skip
    fastest = min(t.metrics["step_time_s"] for t in search(q, workers=1).found.fitting.values())
    q = replace(q, slo={"step_time_s": 1.001 * fastest})
    base = q.base(q.cluster)
    space = slots(q, base, q.techniques())
    shapes = [(0, mesh, shape) for mesh in space.combinations("mesh") for shape in space.combinations("shape")]
    found = Found()
    found.faster(1.01 * fastest)  # of a plan that misses it
    for node in nodes(q, [base], [space], shapes, found):
        node.bound = bound_of(q, *candidate(base, node.chosen, node.micro))
        Expansion(q, base, space, node, found).run()
    assert [t.metrics["step_time_s"] for t in found.fitting.values()] == [pytest.approx(fastest)]
