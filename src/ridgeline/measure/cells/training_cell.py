"""One measured cell, inside its own process(es): set-up, timed steps, memory by category in one extra step."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.jobs.job import CellOptions, Progress, RankContext
from ridgeline.measure.backends import TrainingEngine, engine_versions, make_engine
from ridgeline.measure.device_use import DeviceUse
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.wire import Wire
from ridgeline.nn.memory.meter import Meter, Usage, process_memory
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Check, Memory, Metric, Result, Sample, Traffic
from ridgeline.train.trainer import StepStats, Trainer


def training_cell(e: Experiment, options: CellOptions, here: RankContext) -> dict[str, Any]:
    """Run ``workload.steps`` steps and return a measured Result (as plain data) with one sample per step.

    For other backends only the process's memory is known.
    """
    start = time.perf_counter()
    used = DeviceUse(here)
    here.report({"stage": "set-up"})
    engine = make_engine(options.backend, e, here.device, here.rank, here.ranks)
    result = timed(engine, time.perf_counter() - start, here.report, options.repeat)
    result.metrics |= used.metrics()
    result.environment |= engine_versions(options.backend)
    if options.memory and isinstance(engine, Trainer):
        record_memory(result, engine)
    return result.model_dump(mode="json", by_alias=True)


def timed(trainer: TrainingEngine, setup: float, report: Progress, repeat: int = 0) -> Result:
    """Run the engine's steps; a measured Result with one sample per step. ``setup``: seconds."""
    e, device, ranks = trainer.experiment, trainer.device, trainer.world
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start_loss = trainer.evaluate()
    samples: list[Sample] = []
    reporting = 0.0

    def watch(stats: StepStats) -> bool:
        nonlocal reporting
        done = time.perf_counter()
        samples.append(
            Sample(step=stats.step, seconds=stats.seconds, tokens=stats.tokens, loss=stats.loss,
                   repeat=repeat)
        )  # fmt: skip
        report({"step": stats.step + 1, "steps": e.training.steps, "loss": stats.loss, "seconds": stats.seconds})
        if not (isinstance(trainer, Trainer) and trainer.ahead):  # a step that runs meanwhile takes this time, too
            reporting += time.perf_counter() - done
        return False

    began = time.perf_counter()
    trainer.drive(watch)
    wall = time.perf_counter() - began - reporting
    result = Result(
        source="measured",
        experiment_id=e.id,
        name=e.name,
        experiment=e.canonical(),
        environment={**fingerprint(), "threads": torch.get_num_threads(), "ranks": ranks, "device": str(device)},
        samples=samples,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if isinstance(trainer, Trainer):
        result.notes += trainer.run.kernels.notes()
    result.metrics["setup_s"] = Metric(value=setup, unit="s", better="lower", source="measured")
    result.metrics["wall_s"] = Metric(value=wall, unit="s", better="lower", source="measured")
    result.checks.append(_steps_fill_wall(samples, wall))
    end_loss = trainer.evaluate()
    for name, loss in (("eval_loss_start", start_loss), ("eval_loss", end_loss)):
        if loss is not None:
            result.metrics[name] = Metric(value=loss, unit="nats/token", better="lower", source="one held-out batch")
    memory = process_memory()
    if device.type == "cuda":
        memory["allocated_peak"] = torch.cuda.max_memory_allocated(device)
        memory["reserved_peak"] = torch.cuda.max_memory_reserved(device)
        result.environment["gpu"] = torch.cuda.get_device_name(device)
    for key, value in memory.items():
        result.metrics[f"{key}_bytes"] = Metric(value=value, unit="bytes", better="lower", source="measured")
    return result


def record_memory(result: Result, trainer: Trainer) -> None:
    """Add what one more, metered step held and sent: memory by category on the rank that needed most, and the
    collectives of the mean rank."""
    wire = Wire()
    ranks = [(metered_step(trainer, wire), dict(wire.counts))]
    if trainer.world > 1:
        mine, ranks = ranks[0], ranks * trainer.world
        dist.all_gather_object(ranks, mine)
    usage = max((u for u, _ in ranks), key=lambda u: u.total)
    at = [u.total for u, _ in ranks].index(usage.total)
    ordered = sorted(usage.categories.items(), key=lambda i: -i[1])
    result.memory = [Memory(category=k, bytes=v, device=f"rank {at}") for k, v in ordered]
    if usage.host:
        result.metrics["host_bytes"] = Metric(value=usage.host, unit="bytes", better="lower", source="tiered store")
    result.metrics["peak_bytes"] = Metric(value=usage.total, unit="bytes", better="lower", source=usage.instant)
    if wire.unknown:
        result.notes.append(f"sent, but not counted: {', '.join(sorted(wire.unknown))}")
    for key in sorted({k for _, sent in ranks for k in sent}):
        calls, size = (sum(sent.get(key, (0.0, 0.0))[i] for _, sent in ranks) / len(ranks) for i in (0, 1))
        result.traffic.append(Traffic(kind=key[0], ranks=key[1], calls=calls, bytes=size))


def metered_step(trainer: Trainer, wire: Wire | None = None) -> Usage:
    """Live tensor bytes by category at the peak of one more step (after the timed ones: metering slows it down).

    ``wire`` counts what the step sends meanwhile.
    """
    meter = Meter(trainer.run.root)
    counted = wire or nullcontext()
    meter.register_states(trainer.optimizer)  # before the mode is on, or it would count what registering touches
    if trainer.run.store is not None:
        meter.register(trainer.run.store.tensors(), "host")
    step = trainer.steps_done
    with counted, meter:
        loss, _ = trainer.forward_backward(step)
        meter.updating = True
        norm, _ = trainer.update(step)
    with counted:
        trainer.report(loss, norm)
    return meter.peak


def _steps_fill_wall(samples: list[Sample], wall: float) -> Check:
    """The steps' times must add up to the wall time of the loop: nothing is timed twice, nothing is left out."""
    total = sum(s.seconds for s in samples)
    return Check(
        name="step times add up to wall time",
        passed=bool(wall) and abs(total - wall) / wall < 0.02,
        expected=wall,
        got=total,
        tolerance=0.02,
    )
