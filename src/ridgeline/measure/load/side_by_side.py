"""Two servers under the same load, in turns: what slows the machine or the network down for a while hits both."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ridgeline.jobs.job import Progress
from ridgeline.measure.compare import judge
from ridgeline.measure.load.drive import Drive
from ridgeline.measure.load.endpoint import Endpoint
from ridgeline.measure.load.prompts import Prompts
from ridgeline.measure.load.run_load import Settings, measure_load
from ridgeline.measure.stats import ratio_ci
from ridgeline.spec.comparison import Comparison, MetricChange
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve

Round = tuple[tuple[Result, Drive], tuple[Result, Drive]]
"""What both servers gave, in the order in which they were named."""


def measure_both(
    a: Endpoint, b: Endpoint, w: Serve, prompts: Callable[[int], Prompts], settings: Settings, rounds: int,
    progress: Progress = lambda _: None, stop: Callable[[], bool] = lambda: False,
) -> list[Round]:  # fmt: skip
    """``rounds`` times the load on both; who comes first alternates. ``prompts(i)``: those of round i, which both get.
    Ends early after an interruption, and between two loads when ``stop()`` is true."""
    done: list[Round] = []
    for i in range(rounds):
        order = (a, b) if i % 2 == 0 else (b, a)
        found: dict[int, tuple[Result, Drive]] = {}
        for endpoint in order:
            try:
                found[id(endpoint)] = measure_load(endpoint, w, prompts(i), settings, progress=progress)
            except KeyboardInterrupt:  # in the warm-up
                return done
            if found[id(endpoint)][1].interrupted or (stop() and len(found) == 1):
                return done
        done.append((found[id(a)], found[id(b)]))
        if stop():
            break
    return done


def compared(rounds: list[Round], names: tuple[str, str]) -> Comparison:
    """Medians over the rounds of both servers, and the median ratio of b to a with its 95 % interval, by rounds that
    were measured one after the other. One round has no interval."""
    first = rounds[0][0][0]
    out = Comparison(a=names[0], b=names[1], kind="measured vs measured", environment=dict(first.environment))
    for name, known in first.metrics.items():
        pairs = [(ra.metric(name), rb.metric(name)) for (ra, _), (rb, _) in rounds]
        both = [(x, y) for x, y in pairs if x is not None and y is not None]
        if not both:
            continue
        left, right = ([pair[i] for pair in both] for i in (0, 1))
        change = MetricChange(name=name, unit=known.unit, a=median(left), b=median(right))
        if min(*left, *right) > 0:
            found = ratio_ci([[y] for y in right], [[x] for x in left], paired=True)
            change.ratio = found.value
            if known.better and len(both) > 1:
                change.low, change.high = found.low, found.high
                change.verdict = judge(name, known.better, found.low, found.high)
        out.metrics.append(change)
    wrong = [r for pair in rounds for r, _ in pair if r.status != "ok"]
    out.notes += [f"{r.name} did not finish: {r.status}: {r.reason}" for r in wrong]
    return out
