"""Dissection of a generation: prefill and decode steps by module and operator, which add up to the whole of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ridgeline.jobs.job import CellOptions, DissectOptions, RankContext
from ridgeline.measure.cells.generation_cell import measured_generation
from ridgeline.measure.profiled_steps import MODULE, StepProfiler, attribute, record_breakdown
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.experiment import Experiment

STEPS = 32
"""Largest number of profiled decode steps, over all rounds: evenly spaced, so that their mean context is the mean."""


def dissect_generation(e: Experiment, options: DissectOptions, here: RankContext) -> dict[str, Any]:
    """Bare generations, then profiled ones; a measured Result (as plain data) whose breakdown is of one generation, its
    phases prefill and decode."""
    result, model, prompt = measured_generation(e, CellOptions(), here)
    here.report({"stage": "profiling"})
    profiler = StepProfiler(model, here.device, options.trace if here.rank == 0 else None)
    steps = len(result.samples) // result.metrics["e2e_s"].n - 1  # type: ignore[operator]
    chosen = evenly(steps, STEPS // options.profiled)
    for _ in range(options.profiled):
        profiled_generation(model, prompt, steps, chosen, profiler)
    rows, total = attribute(profiler.roots["prefill"], options.profiled)
    if chosen:
        share = options.profiled * len(chosen) / steps
        more, seconds = attribute(profiler.roots["decode"], share)
        rows, total = rows + more, total + seconds
    record_breakdown(result, rows, total, result.metrics["e2e_s"].value, "profiled_e2e_s", "generation")
    if len(chosen) < steps:
        result.notes.append(f"{len(chosen)} of {steps} decode steps were profiled, evenly spaced, and stand for all")
    return result.model_dump(mode="json", by_alias=True)


def evenly(steps: int, most: int) -> list[int]:
    """At most ``most`` of ``steps`` steps (one at least, if there are any), in the middle of equal stretches."""
    n = min(steps, max(1, most))
    return [int((i + 0.5) * steps / n) for i in range(n)]


@torch.inference_mode()
def profiled_generation(
    model: Transformer, prompt: Tensor, steps: int, chosen: list[int], profiler: StepProfiler
) -> None:
    """Generate greedily: a prefill and ``steps`` decode steps, of which the prefill and the ``chosen`` are profiled."""
    cache = make_cache(model, len(prompt), prompt.shape[1] + steps + 1)
    with profiler.step("prefill"):
        tokens = _next(prefill(model, prompt, cache))
    for i in range(steps):
        if i in chosen:
            with profiler.step("decode"):
                tokens = _next(decode(model, tokens, cache))
        else:
            tokens = decode(model, tokens, cache).argmax(-1)


def _next(logits: Tensor) -> Tensor:
    with record_function(f"{MODULE}sampling"):
        return logits.argmax(-1)
