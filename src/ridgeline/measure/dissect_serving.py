"""Dissection of serving: the engine's steps under a workload, without HTTP, by phase, module and operator.

A bare pass serves the workload's requests and notes before which step each came; the profiled pass replays that with
other prompts of the same lengths, so that its steps hold the same batches. Times without work are skipped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from ridgeline.jobs.job import DissectOptions, RankContext
from ridgeline.measure.cells.serving_cell import record_held
from ridgeline.measure.dissect_generation import evenly
from ridgeline.measure.environment import fingerprint, spare_core
from ridgeline.measure.profiled_steps import HOST, MODULE, PHASE, StepProfiler, attribute, record_breakdown
from ridgeline.predict.serving.arrivals import Arrival, requests
from ridgeline.serve.build_engine import make_engine, make_follower
from ridgeline.serve.engine import Engine
from ridgeline.serve.request import EngineRequest, OutputEvent, Sampling
from ridgeline.serve.scheduler import StepBatch
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Metric, Result
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import resolve

STEPS = 64
"""Steps under the profiler at most, evenly spaced."""


def dissect_serving(e: Experiment, options: DissectOptions, here: RankContext) -> dict[str, Any]:
    """Bare steps, then profiled ones; a measured Result (as plain data) whose breakdown is of the mean step.

    Rank 0 schedules; the other ranks do their part of its steps, and return nothing. Raises :class:`UserError` for a
    request that can never be served.
    """
    (e, _), device = resolve(e), here.device
    if here.rank:
        make_follower(e, device).follow()
        return {}
    w = e.workload
    assert isinstance(w, Serve)
    here.report({"stage": "loading"})
    engine, arrivals = make_engine(e, device), requests(w)
    whole = engine.runner.decoder is not None and engine.runner.layout.fused
    engine.runner.decoder = None  # whose parts could not be told apart
    engine.ahead = None  # so that a step's tokens are chosen within it
    watch, profiler = StepWatch(engine), StepProfiler(engine.model, device, options.trace)
    with spare_core():  # as in the server
        serve(watch, Load(w, arrivals[:1], engine.spec.vocab_size, 0))  # pays for allocation and warm caches
        here.report({"stage": f"{len(arrivals)} requests"})
        bare = serve(watch, Load(w, arrivals, engine.spec.vocab_size, 1))
        chosen = evenly(len(bare.seconds), STEPS)
        here.report({"stage": "profiling"})
        again = serve(watch, Load(w, arrivals, engine.spec.vocab_size, 2, bare.joined), profiler, frozenset(chosen))
        result = _result(e, here, bare)
    record_held(result, engine)
    engine.close()
    rows, total = attribute(profiler.roots[""], len(chosen))
    record_breakdown(result, rows, total, statistics.fmean(bare.seconds[i] for i in chosen), "profiled_step_s", "step")
    if whole:
        result.notes.append(
            "computed operator by operator; the server computes the layers of a decode step in one kernel"
        )
    same = (bare.phases, bare.sequences) == (again.phases, again.sequences)
    result.checks.append(Check(name="profiled steps hold the batches of the bare ones", passed=same))
    if len(chosen) < len(bare.seconds):
        result.notes.append(f"{len(chosen)} of {len(bare.seconds)} steps were profiled, evenly spaced")
    return result.model_dump(mode="json", by_alias=True)


class StepWatch:
    """Marks the parts of an engine's steps for the profiler, and tracks the current batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.phase = "decode"
        """prefill: the batch contains prompt tokens, alone or beside sequences that decode."""
        self.sequences = 0
        self._schedule, self._describe = engine.scheduler.schedule, engine.runner.describe
        self._execute, self._choose = engine.runner.execute, engine.next_tokens.choose
        engine.scheduler.schedule = self._scheduled  # type: ignore[method-assign]
        engine.runner.describe = _within(f"{HOST}batch", self._describe)  # type: ignore[method-assign]
        engine.runner.execute = self._executed  # type: ignore[method-assign,assignment]
        engine.next_tokens.choose = self._chosen  # type: ignore[method-assign,assignment]

    def step(self, load: Load, now: float) -> list[OutputEvent]:
        """Add the requests that have arrived, and run a step."""
        with record_function(f"{HOST}requests"):
            load.add(self.engine, now)
        with record_function(f"{HOST}engine"):
            return self.engine.step()

    def _scheduled(self) -> StepBatch:
        with record_function(f"{HOST}scheduler"):
            batch = self._schedule()
        reads = any(s.n_computed < len(s.group.request.prompt) for s in batch.tokens)
        self.phase, self.sequences = "prefill" if reads else "decode", len(batch.tokens)
        return batch

    def _executed(self, *args: Any) -> Tensor:
        with record_function(f"{PHASE}{self.phase}"):
            return self._execute(*args)

    def _chosen(self, *args: Any) -> None:
        with record_function(f"{PHASE}{self.phase}"), record_function(f"{MODULE}sampling"):
            self._choose(*args)


def _within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any) -> Any:
        with record_function(name):
            return function(*args)

    return marked


class Load:
    """A workload's requests: they arrive by the engine's own time, or before the steps given by ``joined``.

    ``number``: passes with different numbers send different prompts, so that none finds another's in the cache.
    """

    def __init__(
        self, w: Serve, arrivals: list[Arrival], vocabulary: int, number: int, joined: list[int] | None = None
    ) -> None:
        self.arrivals, self.joined, self.clients = arrivals, joined, w.concurrency
        rng = np.random.default_rng([w.seed, number])
        self.prompts = [rng.integers(vocabulary, size=r.prompt).tolist() for r in arrivals]
        self.number = number
        self.came = self.ended = self.steps = 0

    def next(self) -> float:
        """Arrival time of the next request, if the engine is idle until then."""
        later = self.joined is None and self.clients is None and self.came < len(self.arrivals)
        return self.arrivals[self.came].arrival if later else 0.0

    def add(self, engine: Engine, now: float) -> None:
        """Add the requests that have arrived before the next step."""
        for r, prompt in zip(self.arrivals[self.came :], self.prompts[self.came :], strict=True):
            if not self._has_come(r, now):
                break
            sampling = Sampling(max_tokens=r.output, temperature=0.0, ignore_eos=True)
            engine.add(EngineRequest(f"{self.number}-{self.came}", prompt, sampling))
            self.came += 1
        self.steps += 1

    def _has_come(self, r: Arrival, now: float) -> bool:
        if self.joined is not None:
            return self.steps >= len(self.joined) or self.came < self.joined[self.steps]
        return r.arrival <= now if self.clients is None else self.came - self.ended < self.clients


@dataclass
class Pass:
    """What the steps of one pass over a load took and held."""

    joined: list[int] = field(default_factory=list)
    """Number of requests that had arrived before each step."""
    seconds: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    tokens: int = 0
    """Generated in all."""


def serve(
    watch: StepWatch, load: Load, profiler: StepProfiler | None = None, chosen: frozenset[int] = frozenset()
) -> Pass:
    """Step until all requests are served, the ``chosen`` steps under the profiler."""
    out, now, engine = Pass(), 0.0, watch.engine
    before = engine.stats().generated_tokens
    while load.came < len(load.arrivals) or engine.has_work():
        if not engine.has_work():
            now = max(now, load.next())
        start = time.perf_counter()
        if profiler is not None and len(out.seconds) in chosen:
            with profiler.step():
                events = watch.step(load, now)
        else:
            events = watch.step(load, now)
            if profiler is None and engine.runner.device.type == "cuda":
                torch.cuda.synchronize(engine.runner.device)
        out.seconds.append(time.perf_counter() - start)
        now += out.seconds[-1]
        out.joined.append(load.came)
        out.phases.append(watch.phase)
        out.sequences.append(watch.sequences)
        load.ended += sum(event.finish is not None for event in events)
    out.tokens = engine.stats().generated_tokens - before
    return out


def _result(e: Experiment, here: RankContext, bare: Pass) -> Result:
    """The result of the bare pass."""
    busy = sum(bare.seconds)
    result = Result(
        source="measured", experiment_id=e.id, name=e.name, experiment=e.canonical(),
        environment={**fingerprint(), "threads": torch.get_num_threads(), "ranks": here.ranks,
                     "device": str(here.device)},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    steps = len(bare.seconds)
    found = {
        "step_time_s": (busy / steps, "s", "mean of bare steps"),
        "engine_tokens_per_s": (bare.tokens / busy, "tokens/s", "bare steps, without HTTP and without waiting"),
        "batch_mean": (bare.tokens / steps, "sequences", "tokens per step of the engine"),
        "steps": (steps, "", "counted"),
    }
    for phase in ("prefill", "decode"):
        took = [s for s, p in zip(bare.seconds, bare.phases, strict=True) if p == phase]
        if took:
            found[f"{phase}_steps"] = (len(took), "", "counted")
            found[f"{phase}_step_s"] = (statistics.fmean(took), "s", "mean of bare steps")
    for name, (value, unit, source) in found.items():
        better = "higher" if unit == "tokens/s" else "lower" if unit == "s" else ""
        result.metrics[name] = Metric(value=value, unit=unit, better=better, source=source)
    return result
