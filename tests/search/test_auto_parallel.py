"""Automatic parallelization: each program against all combinations, each method against every plan of a small space,
and the plan that is found against one process."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from ridgeline import catalog
from ridgeline.graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.predict.quick import quick
from ridgeline.search import Question, search
from ridgeline.search.auto.alpa import refiner
from ridgeline.search.auto.auto_parallel import METHODS, auto_parallel
from ridgeline.search.auto.explore import SearchSpace
from ridgeline.search.auto.inter import best_cut, step_seconds
from ridgeline.search.auto.intra import Node, best_strategies, cost_of
from ridgeline.search.auto.points import Simulator, narrowed, point_of, sharder
from ridgeline.search.settle import settle
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.sharding import IN_PARTS, STRATEGIES, Sharding
from ridgeline.spec.workload import FineTune, Pretrain
from ridgeline.techniques.registry import check, techniques_of

SMALL = ModelSpec(
    name="three-layers", family="llama", vocab_size=32000, hidden_size=1024, num_layers=3, num_heads=16,
    num_kv_heads=16, head_dim=64, intermediate_size=4096, max_positions=2048,
)  # fmt: skip
PARALLEL = frozenset({"tensor_parallel", "pipeline", "data_parallel"})


def question(on="4xrtx4090", model=SMALL, only=PARALLEL, **workload):
    fields = {"seq_len": 512, "batch_size": 16, **workload}
    free = "micro_batch_size" not in workload
    return Question(model, catalog.cluster(on), Pretrain(**fields), only=only, free_micro_batch=free)


# ---- the two programs -----------------------------------------------------------------------------------------------


def random_nodes(rng, count):
    nodes = []
    for i in range(count):
        choices = tuple((s, rng.uniform(1, 10), rng.uniform(1, 10)) for s in STRATEGIES)
        nodes.append(Node(choices, joined=i % 2 == 0 and i > 0))
    return nodes


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_finds_the_best_of_all_combinations(seed):
    rng = random.Random(seed)
    nodes = random_nodes(rng, rng.randrange(2, 7))
    cut, join, room = rng.uniform(0, 4), rng.uniform(0, 4), rng.uniform(2, 7) * len(nodes)
    every = itertools.product(*(range(len(n.choices)) for n in nodes))  # at most 4^6
    fitting = [seconds for seconds, size in (cost_of(nodes, p, cut, join) for p in every) if size <= room]
    found = best_strategies(nodes, cut, join, room)
    assert (found is None) == (not fitting or math.isinf(min(fitting)))
    if found is not None:
        assert found.seconds == pytest.approx(min(fitting), rel=1e-5)


def test_without_room_there_is_no_answer():
    assert best_strategies(random_nodes(random.Random(0), 4), 1.0, 1.0, 0.5) is None


@pytest.mark.parametrize("seed", range(12))
def test_the_dynamic_program_finds_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    stages, layers, micros = rng.randrange(2, 5), rng.randrange(5, 11), rng.randrange(1, 9)
    table = {(k, a, b): rng.choice([rng.uniform(1, 5) * (b - a), math.inf] if rng.random() < 0.3
                                   else [rng.uniform(1, 5) * (b - a)])
             for k in range(stages) for a in range(layers) for b in range(a + 1, layers + 1)}  # fmt: skip
    steps = []
    for ends in itertools.combinations(range(1, layers), stages - 1):
        at = (0, *ends, layers)
        steps.append(step_seconds([table[k, at[k], at[k + 1]] for k in range(stages)], micros))
    found = best_cut(stages, layers, micros, lambda *key: table[key])
    if found is None:
        assert math.isinf(min(steps))
        return
    at = [0, *itertools.accumulate(found)]
    assert step_seconds([table[k, at[k], at[k + 1]] for k in range(stages)], micros) == pytest.approx(min(steps))


# ---- costs ----------------------------------------------------------------------------------------------------------


def test_costs_of_parts_add_up_to_the_predicted_computation():
    """On a single stage: the seconds of all parts and conversions are those of the whole graph's blocks."""
    q = narrowed(question("4xa800-80g", micro_batch_size=4))
    answer = search(q, 1)
    points = [point_of(t.experiment) for t in answer.found.fitting.values() if t.experiment.parallel == {"tp": 4}]
    point = next(p for p in points if sharder(p.preset))
    simulator = Simulator(q)
    made = refiner(point, simulator.base)
    assert made is not None
    assert set(made.tables[0].parts["mlp", False]) == set(STRATEGIES)
    plan = Sharding("batch", ("batch", "reduce", "scatter"), ("scatter", "whole", "batch"), "reduce")
    e, techniques = replace(point, sharding=plan).experiment(simulator.base)
    check(e)
    parts = [("embed", plan.embed), *(("attention", s) for s in plan.attention),
             *(("mlp", s) for s in plan.mlp), ("head", plan.head)]  # fmt: skip
    (t,) = made.tables
    per_micro = sum(t.parts[part, False][s].seconds for part, s in parts)
    # batch → whole behind the embedding's layer 0, whole → parts before layer 2, parts → whole before the head
    forms = [plan.embed in IN_PARTS, *(m in IN_PARTS for m in plan.mlp), plan.head in IN_PARTS]
    per_micro += sum(t.join if a and not b else t.cut if b and not a else 0.0 for a, b in itertools.pairwise(forms))
    found = quick(e, techniques, always=True)
    rest = made.tables[0].micros * per_micro
    once = sum(t.parts[part, False][s].once for part, s in parts)
    assert found.metrics["step_time_s"] == pytest.approx(rest + once, rel=0.03)
    held = sum(t.bytes_of((part, False), s, 1.0) for part, s in parts)
    states = sum(v for k, v in found.peak.items() if k in ("parameters", "gradients", "optimizer", "activations"))
    assert held == pytest.approx(states, rel=0.1)
    assert rewritten(training_graph(e), e, techniques).accumulation == made.tables[0].micros


# ---- whole searches -------------------------------------------------------------------------------------------------


def every_point(simulator):
    """Presets, and with them every strategy for every part and every cut: at most 10⁵."""
    settled = settle(simulator.question, simulator.base)
    space = SearchSpace(simulator, settled.techniques, settled.names)
    layers = simulator.base.model.num_layers
    pairs = [(a, m) for a in STRATEGIES for m in STRATEGIES if (a in IN_PARTS) == (m in IN_PARTS)]
    for chosen in itertools.product(*(range(len(g)) for g in space.groups)):
        preset = space.preset(chosen)
        if math.isinf(simulator.seconds(preset)):
            continue
        cuts = [None]
        stages = len(preset.cut(simulator.base))
        if stages > 1:
            cuts = [c for c in itertools.product(range(1, layers), repeat=stages) if sum(c) == layers]
        plans = [None]
        if sharder(preset.preset):
            plans = [Sharding(a, *zip(*inner, strict=True), b) for a in STRATEGIES for b in STRATEGIES
                     for inner in itertools.product(pairs, repeat=layers)]  # fmt: skip
        yield from (replace(preset, layers=c, sharding=p) for c in cuts for p in plans)


def test_methods_find_the_best_plan_of_a_small_space():
    model = SMALL.model_copy(update={"num_layers": 2})
    q = question(on="2xrtx4090", model=model, batch_size=8, micro_batch_size=4)
    simulator = Simulator(narrowed(q))
    count = sum(1 for point in every_point(simulator) if simulator.seconds(point) > 0)
    assert 1000 < count <= 100_000
    least = simulator.best[1].metrics["step_time_s"]
    for method in ("alpa", "flexflow", "greedy"):
        assert auto_parallel(q, method, workers=1, budget=250).step == pytest.approx(least, rel=1e-9), method


def test_the_found_plan_is_no_slower_than_the_presets_and_fits():
    q = question(on="4xrtx4090", model=catalog.model("gpt2"), only=frozenset(), batch_size=16, seq_len=1024)
    found = auto_parallel(q, "alpa", workers=1)
    assert found.gain >= 1
    assert found.quick.fits
    check(found.experiment)
    again = quick(found.experiment, techniques_of(found.experiment.plan))
    assert again.metrics["step_time_s"] == found.step


@pytest.mark.parametrize("method", METHODS)
def test_a_micro_batch_that_is_given_stays(method):
    found = auto_parallel(question(batch_size=8, micro_batch_size=2), method, workers=1, budget=40)
    assert found.experiment.micro_batch_size == 2


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_plan_again(method):
    q = question(batch_size=8)
    runs = [auto_parallel(q, method, workers=1, seed=3, budget=60) for _ in range(2)]
    assert runs[0].experiment.plan == runs[1].experiment.plan


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"goal": "memory"}, "fastest step"),
        ({"slo": {"step_time_s": 1.0}}, "fastest step"),
        ({"workload": FineTune(seq_len=64, batch_size=8)}, "task pretrain"),
    ],
)
def test_other_questions_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        auto_parallel(replace(question(only=frozenset()), **changes))


def test_unknown_methods_are_refused():
    with pytest.raises(UserError, match="unknown method 'alpha'"):
        auto_parallel(question(), "alpha")
