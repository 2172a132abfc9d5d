"""Sizing fleets: against trying every size; the found fleet keeps limits that a smaller one breaks."""

import itertools
import random

import pytest

from ridgeline import fleets
from ridgeline.predict.fleet.predict_fleet import predict_fleet
from ridgeline.search.fleet_size import Search, size_fleet
from ridgeline.spec.errors import UserError
from ridgeline.spec.fleet import FleetSpec

WORK = {"kind": "serve", "rate": 20.0, "requests": 300, "prompt_len": 800, "output_len": 80, "length_cv": 0.5}
POOLS = [
    {"name": "prompt", "role": "prefill", "on": "h100-sxm"},
    {"name": "token", "role": "decode", "on": "a100-80g-sxm"},
]


def test_the_search_finds_what_trying_everything_finds():
    rng = random.Random(3)
    for _ in range(60):
        n = rng.choice([1, 2, 3])
        needs = [[rng.uniform(0.2, 1.0) for _ in range(n)] for _ in range(2)]
        least = [rng.randint(1, 5) for _ in range(n)]
        prices = [rng.uniform(1, 3) for _ in range(n)]

        def missed(c, least=least, needs=needs):
            short = any(a < b for a, b in zip(c, least, strict=True))
            return ["few"] if short or any(sum(x * y for x, y in zip(c, w, strict=True)) < 5 for w in needs) else []

        def price(c, prices=prices):
            return sum(x * y for x, y in zip(c, prices, strict=True))

        found = Search(n, price, missed, 32).cheapest()
        best = min(price(c) for c in itertools.product(range(1, 27), repeat=n) if not missed(c))
        assert not missed(found)
        assert price(found) == pytest.approx(best)
    assert Search(1, price, lambda c: ["never"], 8).cheapest() is None


@pytest.mark.parametrize("goal", ["cost", "power"])
def test_one_replica_less_breaks_a_limit(goal):
    spec = FleetSpec.model_validate({"fleet": {"policy": "shortest-queue"}, "pools": POOLS})
    experiments = fleets.replicas_of(spec, "llama2-7b", WORK)
    slo = {"ttft_p99_s": 0.4, "tpot_p99_s": 0.025}
    sized = size_fleet(spec, experiments, slo, goal)
    assert not sized.missed
    counts = {p.name: p.replicas for p in sized.spec.pools}
    assert counts["token"] > 1
    for name, n in counts.items():
        if n > 1:
            fewer = predict_fleet(spec.sized({**counts, name: n - 1}), experiments).metrics
            assert any(fewer[metric].value > limit for metric, limit in slo.items())
    assert all(sized.result.metrics[metric].value <= limit for metric, limit in slo.items())


def test_a_limit_that_no_number_keeps_is_named():
    spec = FleetSpec.model_validate({"pools": [{"name": "all", "on": "a100-80g-sxm"}]})
    experiments = fleets.replicas_of(spec, "llama2-7b", {**WORK, "requests": 50})
    sized = size_fleet(spec, experiments, {"tpot_p50_s": 1e-4}, "cost", most=4)
    assert "tpot_p50_s" in sized.missed[0]
    with pytest.raises(UserError, match="did you mean"):
        size_fleet(spec, experiments, {"tpot_p50": 1.0}, "cost", most=4)
    with pytest.raises(UserError, match="limits"):
        size_fleet(spec, experiments, {}, "cost")
    with pytest.raises(UserError, match="every pool"):
        size_fleet(spec.sized({"all": 2}), experiments, {"ttft_s": 1.0}, "cost")
