"""One measured generation cell: a prefill, then greedy decode steps, timed apart on the real model."""

from __future__ import annotations

import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.jobs.job import CellOptions, RankContext
from ridgeline.measure.device_use import DeviceUse
from ridgeline.measure.environment import fingerprint
from ridgeline.nn.memory.meter import Meter, process_memory
from ridgeline.nn.model.generate import decode, make_cache, opening, prefill
from ridgeline.nn.model.init import DTYPES, build
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.runtime.build import Build
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Memory, Metric, Result, Sample
from ridgeline.spec.workload import Generate
from ridgeline.techniques.registry import resolve
from ridgeline.techniques.technique import Technique

ROUNDS = 3
"""Times the whole generation is repeated after one warm-up."""


def generation_cell(e: Experiment, options: CellOptions, here: RankContext) -> dict[str, Any]:
    """Generate ``output_len`` tokens for the batch and return a measured Result (as plain data)."""
    result, _, _ = measured_generation(e, options, here)
    return result.model_dump(mode="json", by_alias=True)


def measured_generation(e: Experiment, options: CellOptions, here: RankContext) -> tuple[Result, Transformer, Tensor]:
    """The measured Result of generating ``output_len`` tokens for the batch, the model, and the prompt [B, S]."""
    e, techniques = resolve(e)
    w, device, ranks = e.workload, here.device, here.ranks
    assert isinstance(w, Generate)
    used = DeviceUse(here)
    run = build_generation(e, device, techniques)
    batch = e.micro_batch_size
    generator = torch.Generator().manual_seed(w.seed + here.rank)
    prompt = torch.randint(e.model.vocab_size, (batch, w.prompt_len), generator=generator).to(device)
    samples: list[Sample] = []
    firsts: list[float] = []
    total: list[float] = []
    with torch.inference_mode():
        for round_ in range(ROUNDS + 1):
            here.report({"stage": f"round {round_ + 1} of {ROUNDS + 1}"})
            times = timed_generation(run.model, prompt, w.output_len)
            if round_ == 0:
                continue  # the first round pays for allocation and warm caches
            firsts.append(times[0])
            total.append(sum(times))
            samples += [
                Sample(step=i, seconds=t, tokens=batch * ranks, repeat=options.repeat) for i, t in enumerate(times)
            ]
        usage = used.metrics()
        meter = Meter(run.model)
        meter.register(run.model.parameters(), "parameters")
        with meter:
            timed_generation(run.model, prompt, min(2, w.output_len))
    result = Result(
        source="measured",
        experiment_id=e.id,
        name=e.name,
        experiment=e.canonical(),
        environment={**fingerprint(), "threads": torch.get_num_threads(), "ranks": ranks, "device": str(device)},
        samples=samples,
        memory=[Memory(category=k, bytes=v) for k, v in meter.peak.categories.items()],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    result.metrics |= _metrics(w, firsts, total, batch * ranks, ranks, meter.peak.total)
    result.metrics |= usage
    run.note_products()
    result.notes += run.kernels.notes()
    for name, read in run.metrics.items():
        result.metrics[name] = Metric(value=read(), better="higher", source="measured")
    held = batch * ranks * w.output_len
    got = result.metrics["tokens_per_s"].value * result.metrics["e2e_s"].value
    balanced = abs(got - held) < 1e-6 * held and len(samples) == ROUNDS * w.output_len
    result.checks.append(Check(name="rate × time = tokens generated", passed=balanced, expected=held, got=got))
    return result, run.model, prompt


def _metrics(
    w: Generate, firsts: list[float], totals: list[float], sequences: int, ranks: int, peak: float
) -> dict[str, Metric]:
    """Medians over the rounds: ``firsts`` are seconds to the first token, ``totals`` to the last, of all
    ``sequences`` of the ``ranks``."""
    end, first = statistics.median(totals), statistics.median(firsts)
    rate = sequences * w.output_len / end
    known = {
        "ttft_s": (first, "s"),
        "tpot_s": ((end - first) / max(1, w.output_len - 1), "s"),
        "e2e_s": (end, "s"),
        "tokens_per_s": (rate, "tokens/s"),
        "tokens_per_s_per_device": (rate / ranks, "tokens/s"),
        "peak_bytes": (peak, "bytes"),
        **{f"{k}_bytes": (v, "bytes") for k, v in process_memory().items()},
    }
    return {
        name: Metric(
            value=value, unit=unit, n=ROUNDS, better="higher" if unit == "tokens/s" else "lower", source="measured"
        )
        for name, (value, unit) in known.items()
    }


def build_generation(e: Experiment, device: torch.device, techniques: list[Technique]) -> Build:
    """The model with the plan's techniques."""
    w, dtype = e.workload, DTYPES[e.dtype]
    assert isinstance(w, Generate)
    if w.checkpoint:
        later = tuple(prefix for t in techniques for prefix in t.reads_itself(e))
        model = load_packed(Path(w.checkpoint), dtype, device, later=later)
    else:
        model = build(e.model, device, dtype, w.seed)
    model.set_attention("naive")
    model.requires_grad_(False)
    run = Build(e, model, device)
    for technique in techniques:
        technique.apply(run)
    run.kernels.require_used()
    return run


@torch.inference_mode()
def generation_times(model: Transformer, prompt: torch.Tensor, output_len: int, rounds: int) -> list[list[float]]:
    """Seconds of the prefill of ``prompt`` [B, S] and of each further token, of every round after one warm-up."""
    return [timed_generation(model, prompt, output_len) for _ in range(rounds + 1)][1:]


def timed_generation(model: Transformer, prompt: torch.Tensor, output_len: int) -> list[float]:
    """Seconds of the prefill (with the first token) and of each further token."""

    def now() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize(prompt.device)
        return time.perf_counter()

    batch, length = prompt.shape
    cache = make_cache(model, batch, length + output_len)
    times: list[float] = []
    start = now()
    first, source = opening(model, prompt)
    tokens = prefill(model, first, cache, source).argmax(-1)
    for _ in range(output_len - 1):
        times.append(now() - start)
        start = now()
        tokens = decode(model, tokens, cache).argmax(-1)
    times.append(now() - start)
    return times
