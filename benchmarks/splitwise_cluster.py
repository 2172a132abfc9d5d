"""Clusters of mixed and of split pools (Splitwise, arXiv:2311.18677): equal power, equal cost, equal throughput.

    python benchmarks/splitwise_cluster.py --conv AzureLLMInferenceTrace_conv.csv \\
        --code AzureLLMInferenceTrace_code.csv --json benchmarks/results/splitwise_cluster.json

Requests come as a Poisson process, with prompts and outputs drawn from a trace, as in SplitwiseSim. A fleet keeps the
paper's limits when the slowdown of its requests, against the same request alone on a DGX A100, is at most 2, 3 and 6
for TTFT at the median, p90 and p99, and 1.25, 1.5 and 5 for TPOT and for the whole request. Machines cost and draw what
the paper says: prices per GPU-hour and power as in SplitwiseSim's notebooks. Prompts run whole and before tokens, as in
the paper's time; ``--chunked``: in pieces of a batch's 2048 tokens, beside tokens.

``--perf-model``: SplitwiseSim's data/perf_model.csv (MIT). With it iterations take what SplitwiseSim says, which leaves
the schedulers alone to compare; without it, what Ridgeline predicts.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline import catalog, fleets
from ridgeline.measure.environment import fingerprint
from ridgeline.predict.fleet.members import PoolModel
from ridgeline.predict.fleet.predict_fleet import model_of
from ridgeline.predict.fleet.simulation import FleetOutcome, FleetSimulation
from ridgeline.predict.serving.arrivals import Arrival, read_trace
from ridgeline.predict.serving.discrete_events import Costs
from ridgeline.predict.serving.simulate import percentile
from ridgeline.search.fleet_size import Search
from ridgeline.spec.fleet import FleetSpec
from ridgeline.techniques.registry import default_plan

SLO = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
"""Largest slowdowns at p50, p90 and p99 (Splitwise, table VI)."""
Price = Callable[[PoolModel], float]
POSITIONS = 16384
"""Of the model, so that every request of the traces counts."""
A = {"on": "8xa100-80g-sxm", "price_per_hour": 8 * 2.21, "watts": 8 * 400.0}
H = {"on": "8xh100-sxm", "price_per_hour": 8 * 4.76, "watts": 8 * 700.0}
CAPPED = {**H, "watts": 0.7 * 8 * 700.0, "power_cap": 0.5}
"""GPUs at half of their power: the machine draws 30 % less."""
DESIGNS: dict[str, tuple[dict[str, Any], ...]] = {
    "Baseline-A100": (A,), "Baseline-H100": (H,), "Splitwise-AA": (A, A), "Splitwise-HH": (H, H),
    "Splitwise-HA": (H, A), "Splitwise-HHcap": (H, CAPPED),
}  # fmt: skip
PUBLISHED = {
    "iso-power": {"Baseline-A100": (70,), "Baseline-H100": (40,), "Splitwise-AA": (45, 25), "Splitwise-HH": (25, 15),
                  "Splitwise-HA": (25, 26), "Splitwise-HHcap": (25, 21)},
    "iso-cost": {"Baseline-A100": (86,), "Baseline-H100": (40,), "Splitwise-AA": (51, 35), "Splitwise-HH": (25, 15),
                 "Splitwise-HA": (30, 21), "Splitwise-HHcap": (30, 10)},
    "iso-throughput": {"Baseline-A100": (113,), "Baseline-H100": (51,), "Splitwise-AA": (54, 10),
                       "Splitwise-HH": (23, 10), "Splitwise-HA": (23, 16), "Splitwise-HHcap": (23, 10)},
}  # fmt: skip
"""Machines for prompts and for tokens: conversation at equal power and cost, and code at 130 requests/s (SplitwiseSim,
scripts/run_throughput_isopower.sh, run_throughput_isocost.sh, run_throughput.sh)."""


class Measured:
    """Iteration times of SplitwiseSim: medians of its measurements over the tokens of a batch, linear in between and
    beyond; with prompts and tokens together 1.1 times those of prompts of as many tokens.

    It looks up the time of a token by the number of sequences, among measurements by their cached tokens, so that it
    hardly depends on the batch."""

    def __init__(self, file: Path, model: str, hardware: str) -> None:
        found: dict[str, dict[int, list[float]]] = {"prompt_time": defaultdict(list), "token_time": defaultdict(list)}
        with file.open(encoding="utf-8") as f:
            for row in csv.DictReader(f):
                if (row["model"], row["hardware"], row["tensor_parallel"]) == (model, hardware, "8"):
                    size = int(row["prompt_size"]) * int(row["batch_size"])
                    for name, table in found.items():
                        table[size].append(float(row[name]) / 1e3)
        self.prompt, self.token = (
            sorted((x, statistics.median(ys)) for x, ys in table.items()) for table in found.values()
        )

    def decode(self, n: int) -> tuple[float, float]:
        """As :class:`~ridgeline.predict.serving.discrete_events.Costs`."""
        return _line(self.token, n), 0.0

    def between(self, n: int) -> float:
        """Nothing."""
        return 0.0

    def floor(self, n: int) -> float:
        """Nothing."""
        return 0.0

    def mixed(self, prompts: list[tuple[int, int]], n: int, cached: int, pads: int = 0) -> float:
        """As :class:`~ridgeline.predict.serving.discrete_events.Costs`."""
        new = sum(q for q, _ in prompts)
        if not new:
            a, b = self.decode(n)
            return a + b * cached
        return _line(self.prompt, new + n) * (1.1 if n else 1.0)


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    i = min(max(1, bisect_right(points, (x, math.inf))), len(points) - 1)
    (a, fa), (b, fb) = points[i - 1], points[i]
    return fa + (fb - fa) * (x - a) / (b - a)


class Study:
    """Fleets of one model on one kind of request."""

    def __init__(self, args: argparse.Namespace, trace: Path) -> None:
        self.sizes, self.args = read_trace(trace), args
        spec = catalog.model(args.model)
        self.model = spec.model_copy(update={"max_positions": max(POSITIONS, spec.max_positions)})
        self.workload: dict[str, Any] = {"kind": "serve", "engine": args.engine}
        self.known: dict[str, list[PoolModel]] = {}
        self.alone = self.models("Baseline-A100")[0]
        self.slowest: dict[tuple[int, int], tuple[float, float, float]] = {}
        self.simulated = 0

    def fleet(self, design: str, counts: Sequence[int]) -> FleetSpec:
        """A design with so many machines for prompts and for tokens."""
        machines = DESIGNS[design]
        roles = ("prefill", "decode") if len(machines) == 2 else ("mixed",)
        plan = ["tensor_parallel:degree=8", *default_plan("serve")]
        if not self.args.chunked:
            plan.remove("chunked_prefill")
        common = {"plan": plan, "max_num_batched_tokens": 2048, "max_num_seqs": 512}
        pools = [{"name": role, "role": role, "replicas": n, **common, **m}
                 for role, n, m in zip(roles, counts, machines, strict=True)]  # fmt: skip
        tables: dict[str, Any] = {"fleet": {"policy": "shortest-queue"}, "pools": pools}
        return FleetSpec.model_validate({**tables, "flip": {}} if len(machines) == 2 else tables)

    def models(self, design: str) -> list[PoolModel]:
        """One replica of each pool of a design."""
        if design not in self.known:
            spec = self.fleet(design, [1] * len(DESIGNS[design]))
            made = fleets.replicas_of(spec, self.model, self.workload)
            found = [model_of(p, spec, made[p.name], self.sizes) for p in spec.pools]
            self.known[design] = [self._measured(m) for m in found] if self.args.perf_model else found
        return self.known[design]

    def _measured(self, m: PoolModel) -> PoolModel:
        name = "bloom-176b" if self.args.model == "bloom" else self.args.model
        hardware = "a100-80gb" if "a100" in m.pool.on else "h100-80gb" + ("-pcap" if m.pool.power_cap < 1 else "")
        costs: Costs = Measured(self.args.perf_model, name, hardware)
        scheduling = replace(m.made.scheduling, limits=replace(m.made.scheduling.limits, reserve=True))
        return m._replace(costs=costs, made=m.made._replace(scheduling=scheduling), request_s=0.0, admission_s=0.0)

    def arrivals(self, rate: float) -> list[Arrival]:
        """A Poisson process with lengths drawn from the trace."""
        rng, now, out = random.Random(1), 0.0, []
        while (now := now + rng.expovariate(rate)) < self.args.seconds:
            out.append(Arrival(now, rng.choice(self.sizes).prompt, rng.choice(self.sizes).output))
        return out

    def missed(self, design: str, counts: Sequence[int], rate: float) -> list[str]:
        """The limits that a fleet breaks at a rate."""
        spec, arrivals = self.fleet(design, counts), self.arrivals(rate)
        models = [m._replace(pool=p) for m, p in zip(self.models(design), spec.pools, strict=True)]
        self.simulated += 1
        sim = FleetSimulation(spec, models, arrivals)
        for share in (0.25, 0.5, 0.75, 1.0):
            now = share * self.args.seconds
            if self._late(sim.run(now), arrivals, now) > 0.01 * len(arrivals):
                return ["ttft p99"]
        longest = max(self.sizes, key=lambda r: r.output)
        return self._broken(sim.run(self.args.seconds + SLO["e2e"][2] * self._unloaded(longest)[2]), arrivals)

    def _late(self, o: FleetOutcome, arrivals: Sequence[Arrival], now: float) -> int:
        """Requests without a first token that are over the limit of p99 already."""
        return sum(math.isnan(o.requests.first[i]) and now - r.arrival > SLO["ttft"][2] * self._unloaded(r)[0]
                   for i, r in enumerate(arrivals))  # fmt: skip

    def _broken(self, o: FleetOutcome, arrivals: Sequence[Arrival]) -> list[str]:
        slow: dict[str, list[float]] = {name: [] for name in SLO}
        for i, r in enumerate(arrivals):
            ttft, tpot, e2e = self._unloaded(r)
            sent, first, end = o.requests.arrival[i], o.requests.first[i], o.requests.finish[i]
            first, end = (math.inf if math.isnan(t) else t for t in (first, end))  # not answered yet
            slow["ttft"].append((first - sent) / ttft)
            slow["e2e"].append((end - sent) / e2e)
            if r.output > 1 and first < math.inf:
                slow["tpot"].append((end - first) / (r.output - 1) / tpot)
        found = []
        for name, values in slow.items():
            values.sort()
            for q, limit in zip((0.5, 0.9, 0.99), SLO[name], strict=True):
                if percentile(values, q) > limit:
                    found.append(f"{name} p{q * 100:.0f}: {percentile(values, q):.2f}")
        return found

    def _unloaded(self, r: Arrival) -> tuple[float, float, float]:
        """TTFT, TPOT and end-to-end seconds of a request alone on a DGX A100."""
        key = r.prompt, r.output
        if key not in self.slowest:
            costs = self.alone.costs
            ttft = self.alone.request_s + self.alone.admission_s + costs.mixed([(r.prompt, 0)], 0, 0)
            tpot = costs.mixed([], 1, r.prompt + r.output // 2)
            self.slowest[key] = ttft, tpot, ttft + (r.output - 1) * tpot
        return self.slowest[key]

    def throughput(self, design: str, counts: Sequence[int], start: float) -> float:
        """The highest rate, within 2 %, at which a fleet keeps the limits; requests per second."""
        low, high = 0.0, start
        while not self.missed(design, counts, high):
            low, high = high, 1.5 * high
        while high - low > 0.02 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.missed(design, counts, middle) else (middle, high)
        return low

    def best_split(
        self, design: str, budget: float, price: Callable[[PoolModel], float]
    ) -> tuple[tuple[int, ...], float]:
        """The machines of a design within a budget that keep the limits at the highest rate, and the rate."""
        prices = [price(m) for m in self.models(design)]
        most = int(budget / prices[0] + 1e-9)
        if len(prices) == 1:
            return (most,), self.throughput(design, (most,), self.args.start)
        best: tuple[tuple[int, ...], float] = ((), 0.0)
        step = max(1, most // 12)
        tried = set(range(step, most, step))
        waiting = sorted(tried, key=lambda n: abs(n - most / 2))
        while waiting:
            for n in waiting:
                counts = n, int((budget - n * prices[0]) / prices[1] + 1e-9)
                least = max(1.02 * best[1], 1.0)
                if counts[1] and not self.missed(design, counts, least):
                    best = counts, self.throughput(design, counts, least)
            step //= 2
            near = {best[0][0] + step, best[0][0] - step} if best[0] and step else set()
            waiting = [n for n in near - tried if 0 < n < most]
            tried |= near
        return best

    def size(self, design: str, rate: float, price: Price) -> tuple[int, ...] | None:
        """The machines that a design needs at a rate, at the least price."""
        models = self.models(design)
        prices = [price(m) for m in models]
        return Search(len(models), lambda c: sum(n * x for n, x in zip(c, prices, strict=True)),
                      lambda c: self.missed(design, c, rate), 256).cheapest()  # fmt: skip


def _watts(m: PoolModel) -> float:
    return m.watts


def _dollars(m: PoolModel) -> float:
    return m.price_per_hour


def totals(study: Study, design: str, counts: Sequence[int]) -> dict[str, float]:
    """Dollars per hour and kilowatts of a fleet."""
    models = study.models(design)
    return {"dollars_per_hour": sum(n * m.price_per_hour for n, m in zip(counts, models, strict=True)),
            "kilowatts": sum(n * m.watts for n, m in zip(counts, models, strict=True)) / 1e3}  # fmt: skip


def main() -> int:
    """Run the benchmark."""
    args = _arguments()
    conv, code = Study(args, args.conv), Study(args, args.code)
    rows: list[dict[str, Any]] = []
    for case, price in (("iso-power", _watts), ("iso-cost", _dollars)):
        budget = 40 * price(conv.models("Baseline-H100")[0])
        for design, theirs in PUBLISHED[case].items():
            began = time.perf_counter()
            own, most = conv.best_split(design, budget, price)
            row = {"case": case, "trace": "conversation", "design": design, "machines": own, "requests_per_s": most,
                   **totals(conv, design, own), "published": theirs,
                   "published_requests_per_s": conv.throughput(design, theirs, args.start),
                   "seconds": time.perf_counter() - began}  # fmt: skip
            rows.append(row)
            _write(args, rows)
            print(f"{case}: {design} {own}: {most:.1f} requests/s, {row['kilowatts']:.0f} kW,"
                  f" {row['dollars_per_hour']:.0f} $/h; {theirs}: {row['published_requests_per_s']:.1f}"
                  f" ({row['seconds']:.0f} s)", flush=True)  # fmt: skip
    for goal in args.goals:
        for design, theirs in PUBLISHED["iso-throughput"].items():
            began = time.perf_counter()
            found = code.size(design, args.code_rate, _dollars if goal == "cost" else _watts)
            row = {"case": f"iso-throughput, least {goal}", "trace": "code", "design": design, "machines": found,
                   "published": theirs, "requests_per_s": args.code_rate,
                   **(totals(code, design, found) if found else {}),
                   "seconds": time.perf_counter() - began}  # fmt: skip
            rows.append(row)
            _write(args, rows)
            print(f"{row['case']} at {args.code_rate:g}/s: {design} {found}, published {theirs}"
                  f" ({row['seconds']:.0f} s)", flush=True)  # fmt: skip
    return 0


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    costs = "SplitwiseSim's measurements" if args.perf_model else "predicted"
    report = {"model": args.model, "engine": args.engine, "trace_s": args.seconds, "slo": SLO, "costs": costs,
              "prompts": "in pieces beside tokens" if args.chunked else "whole and first",
              "rows": rows, "environment": fingerprint()}  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conv", type=Path, required=True, help="trace of conversations")
    parser.add_argument("--code", type=Path, required=True, help="trace of code completion")
    parser.add_argument("--model", default="bloom")
    parser.add_argument("--engine", default="vllm-2023")
    parser.add_argument("--perf-model", type=Path, help="SplitwiseSim's data/perf_model.csv")
    parser.add_argument("--chunked", action="store_true", help="prompts in pieces beside tokens, not whole and first")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals")
    parser.add_argument("--start", type=float, default=60.0, help="first rate of the search for the highest")
    parser.add_argument("--code-rate", type=float, default=130.0, help="requests/s of code to size fleets for")
    parser.add_argument("--goals", nargs="*", choices=("cost", "power"), default=["cost"], help="to size fleets for")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
