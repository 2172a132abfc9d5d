"""A planning question: model, cluster, workload, goal, limits on metrics, and allowed techniques."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from ridgeline.catalog import published_format
from ridgeline.predict.serving.arrivals import REQUESTS, Arrival, arrival_rate, requests
from ridgeline.predict.serving.simulate import check_decodes
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Plan
from ridgeline.spec.scheduling import OWN, engine_name
from ridgeline.spec.workload import TRAINING_TASKS, Serve, Training, Workload
from ridgeline.techniques.registry import check_apart, registry, techniques_of
from ridgeline.techniques.technique import Technique

GOALS = ("throughput", "latency", "cost", "memory")

HIGHER = frozenset({
    "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "goodput_per_s", "requests_per_s", "slo_share",
    "answered_share", "kv_cache_tokens",
})  # fmt: skip
"""Metrics of which higher is better; of all others, lower is."""

FALLS_BEHIND = 0.1
"""Share of arrivals that are not answered in their time, below which an engine is taken to keep up with them."""

BEHIND = 1e3
"""What the cost of one that does not is multiplied by: more than prices of plans differ by."""

BATCH_PER_DEVICE = 4
"""Sequences per device of a training batch that is left open."""

_TIMES = ("ttft", "tpot", "itl", "e2e")
"""What metrics of requests' times begin with."""


@dataclass(frozen=True)
class Question:
    """One planning question. Raises :class:`UserError` for unknown goals, metrics' values or techniques, and for fixed
    ones that exclude each other."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    """Training without a batch size has :data:`BATCH_PER_DEVICE` sequences per device in every layout.

    Where a serving load is left open and throughput or cost is the goal, or limited, and no time is, all requests come
    at once: at a low rate, every engine that keeps up has the same."""
    goal: str = "throughput"
    """throughput, latency, cost or memory."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Limits by metric: the most allowed, or the least for metrics of which more is better."""
    fixed: Plan = field(default_factory=Plan)
    """Techniques that every plan has, with the options given."""
    allow: frozenset[str] = frozenset()
    """Techniques to consider although they change quality: the fine-tuning method, bits, sparsity."""
    only: frozenset[str] = frozenset()
    """Consider only these techniques; empty: all."""
    forbid: frozenset[str] = frozenset()
    free_batch: bool = False
    """Whether the batch size may be chosen (generation without a given batch)."""
    free_micro_batch: bool = True

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UserError(f"unknown goal {self.goal!r}", f"goals: {', '.join(GOALS)}")
        if isinstance(self.workload, Serve):
            check_decodes(self.model)
            self._check_memory(self.workload)
        for name in (*self.allow, *self.only, *self.forbid):
            if name not in registry():
                raise unknown("technique", name, registry(), "allow/only/forbid")
        for name in sorted(self.allow):
            if name in self.forbid:
                raise UserError(f"{name} is both allowed and forbidden", "leave out --allow or --forbid")
            if self.workload.kind not in (tasks := registry()[name].card.tasks):
                raise UserError(f"{name} does not apply to task {self.workload.kind!r}",
                                f"it works in: {', '.join(sorted(tasks))}")  # fmt: skip
        if self.only and not any(self.workload.kind in registry()[name].card.tasks for name in self.only):
            raise UserError(f"no technique of --only applies to task {self.workload.kind!r}: {', '.join(self.only)}",
                            "name one that does, or leave --only out")  # fmt: skip
        for call in self.fixed.calls:
            if call.name in self.forbid:
                raise UserError(f"{call.name} is in every plan and forbidden", "leave out --with or --forbid")
        check_apart(techniques_of(self.fixed))
        w = self.workload
        asks_for_throughput = self.goal in ("throughput", "cost") or any(name in HIGHER for name in self.slo)
        waits = self.goal == "latency" or any(name.startswith(_TIMES) for name in self.slo)
        if isinstance(w, Training) and w.batch_size is None:  # rates of steps compare with one size for all layouts
            sized = w.model_copy(update={"batch_size": BATCH_PER_DEVICE * self.cluster.size})
            object.__setattr__(self, "workload", sized)
        if isinstance(w, Serve) and w.open_load and asks_for_throughput and not waits:
            burst = w.model_copy(update={"concurrency": w.requests or REQUESTS})
            object.__setattr__(self, "workload", burst)

    def _check_memory(self, w: Serve) -> None:
        """Refuse to tell plans apart by memory where the engine fills it. Ridgeline's own alone can be
        given the size of its cache."""
        asked = "goal memory" if self.goal == "memory" else "a limit on peak_bytes" if "peak_bytes" in self.slo else ""
        name = engine_name(w.engine, self.cluster.device.name)
        if asked and not (name == OWN and w.kv_cache_bytes is not None):
            whose = f"of {name} takes its share of" if name == OWN else f"of {name} takes" if name else "takes"
            raise UserError(
                f"{asked} tells no plans for serving apart: the cache {whose} what the weights leave",
                "give --goal cost for the fewest devices, or --slo kv_cache_tokens=N for room in the cache",
            )

    @property
    def training(self) -> bool:
        """Whether the task runs optimizer steps."""
        return self.workload.kind in TRAINING_TASKS

    @property
    def metric(self) -> str:
        """The metric that the goal ranks by."""
        if self.goal == "latency":
            return "step_time_s" if self.training else "e2e_s"
        return {"throughput": "tokens_per_s", "cost": "dollars_per_million_tokens", "memory": "peak_bytes"}[self.goal]

    @property
    def longest(self) -> float:
        """Seconds of a training step above which it breaks a limit; infinite without limits on its time or rate."""
        w = self.workload
        if not isinstance(w, Training):
            return math.inf
        rate = self.slo.get("tokens_per_s", 0.0)
        by_rate = w.batch_size * w.seq_len / rate if rate and w.batch_size else math.inf
        return min(self.slo.get("step_time_s", math.inf), by_rate)

    def weight(self, cluster: Cluster) -> float:
        """Weight of a second: with goal cost, a second of every device."""
        return cluster.size if self.goal == "cost" else 1.0

    def techniques(self) -> list[type[Technique]]:
        """Registered techniques that may be on or off: those of the task that keep quality, are standard practice or
        are asked for, and where nothing is trained the format in which the model is published.

        Pre-training trains every parameter: techniques after which something else trains are for fine-tuning.
        """
        asked = self.allow | self.only | {self.published}
        return [
            cls
            for name, cls in self._of_task().items()
            if (not self.only or name in self.only) and (cls.card.lossless or cls.card.standard or name in asked)
        ]

    @property
    def published(self) -> str:
        """The technique whose format the model's published weights are in, where nothing is trained; empty: none."""
        return "" if self.training else published_format(self.model.name)

    def choices(self, cls: type[Technique], e: Experiment) -> list[Technique]:
        """Settings of a technique that are worth trying on ``e``: of the published format alone, unless it is asked
        for."""
        name = cls.card.name
        return [cls()] if name == self.published and name not in self.allow | self.only else cls.choices(e)

    def left_to_the_user(self) -> list[str]:
        """Names of techniques that were not considered because they change quality and nobody asked for them."""
        known = {cls.card.name for cls in self.techniques()}
        base = self.base(self.cluster)
        return [] if self.only else [n for n, cls in self._of_task().items() if n not in known and cls.choices(base)]

    def _of_task(self) -> dict[str, type[Technique]]:
        kind = self.workload.kind
        return {
            name: cls
            for name, cls in registry().items()
            if kind in cls.card.tasks
            and not (kind == "pretrain" and cls.card.bound == "falls")
            and name not in self.forbid
            and not self.fixed.has(name)
        }

    def base(self, cluster: Cluster) -> Experiment:
        """The experiment without any technique but the fixed ones, on ``cluster``."""
        return Experiment.model_construct(model=self.model, cluster=cluster, workload=self.workload, plan=self.fixed)

    def rank(self, metrics: Mapping[str, float]) -> float:
        """The goal as a number of which less is better. Engines that keep up with the arrivals have equal throughput,
        the load's, and by its price on as many devices equal cost: when the last answer ends is chance. Those that do
        not are cheap, as they never idle, and no answer to the question: they come behind."""
        value = metrics[self.metric]
        served = metrics.get("requests_per_s")
        if served and self.offered and (self.metric == "tokens_per_s" or self.goal == "cost"):
            rate, keeps = metrics["tokens_per_s"], self.keeps_up(metrics)
            # Replicas take turns, and one of them is simulated: its requests' mean length is not that of all.
            offered = self.offered * self._output_len
            if self.goal == "cost":
                value = float(f"{value * rate / offered:.9g}") if keeps else value * BEHIND
            else:
                value = offered if keeps else min(rate, (1 - FALLS_BEHIND) * offered)
        return -value if self.metric in HIGHER else value

    @cached_property
    def offered(self) -> float | None:
        """Requests of the load per second, whatever an engine does; None: it waits for answers, or is no serving."""
        w = self.workload
        if not isinstance(w, Serve):
            return None
        if not w.trace or w.rate is not None:
            return w.offered
        found = requests(w)
        return arrival_rate(found) if found[-1].arrival > 0 else None  # all at once: no rate

    @cached_property
    def _output_len(self) -> float:
        """Mean tokens of an answer of the load."""
        w = self.workload
        assert isinstance(w, Serve)
        return fmean(r.output for r in self._arrivals) if w.trace else w.output_len

    @cached_property
    def _arrivals(self) -> list[Arrival]:
        """The requests of the load."""
        assert isinstance(self.workload, Serve)
        return requests(self.workload)

    def keeps_up(self, metrics: Mapping[str, float]) -> bool:
        """Whether an engine begins to answer requests as fast as they arrive; one whose load waits for its answers
        always does."""
        w = self.workload
        if not (isinstance(w, Serve) and self.offered and metrics.get("requests_per_s")):
            return True
        # What waits at two times differs by chance, by no more than a few of the requests' square root.
        chance = 2 / math.sqrt(max(1, len(self._arrivals)))
        return metrics.get("answered_share", 1.0) > 1 - max(FALLS_BEHIND, chance)

    def misses(self, metrics: Mapping[str, float], but: Sequence[str] = ()) -> list[str]:
        """The limits that these metrics break, in words; those of ``but`` do not count."""
        return [
            f"{name} {metrics[name]:.4g} {'below' if name in HIGHER else 'above'} the limit {limit:.4g}"
            for name, limit in self.slo.items()
            if name not in but and self._factor(name, limit, metrics) > 1
        ]

    def excess(self, metrics: Mapping[str, float]) -> float:
        """By what factor the limit that is broken worst is broken; at most 1 when all are kept."""
        return max((self._factor(name, limit, metrics) for name, limit in self.slo.items()), default=0.0)

    def _factor(self, name: str, limit: float, metrics: Mapping[str, float]) -> float:
        if name not in metrics:
            raise unknown("metric", name, metrics, "slo")
        if name in HIGHER:
            return limit / metrics[name] if metrics[name] else math.inf
        return metrics[name] / limit


def parse_slo(items: Iterable[str]) -> dict[str, float]:
    """``["ttft_s=0.5", "tpot_s=50ms"]`` → limits in SI units. Raises :class:`UserError` on malformed text."""
    out: dict[str, float] = {}
    for item in items:
        name, eq, text = item.partition("=")
        scale = 1.0
        for suffix, factor in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("GiB", 2.0**30), ("GB", 1e9)):
            if text.endswith(suffix):
                text, scale = text[: -len(suffix)], factor
                break
        try:
            value = float(text) * scale
        except ValueError:
            value = -1.0
        if not eq or not name.strip() or not 0 < value < math.inf:
            raise UserError(f"--slo {item!r} is not METRIC=LIMIT", "write e.g. --slo tpot_s=50ms or --slo ttft_s=0.5")
        out[name.strip()] = value
    return out
