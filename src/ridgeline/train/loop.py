"""The training loop of ``ridgeline train``: steps, evaluation of progress, checkpoints, a clean stop on Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch

from ridgeline.nn.tiled import whole_weights
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import techniques
from ridgeline.train.budget import Budget
from ridgeline.train.engine import Trainer


def train(
    e: Experiment, device: torch.device, rank: int, ranks: int, options: dict[str, Any], report: Any
) -> dict[str, Any]:
    """Train to ``workload.steps``. Options: ``out`` (directory), ``save_every`` (steps), ``resume``, ``export``,
    ``device_memory`` (bytes that each rank's device may use).

    The first Ctrl-C finishes the step, saves a checkpoint and returns with ``stopped``.
    """
    from ridgeline.train.checkpoint import resume

    trainer = Trainer(e, device, rank, ranks)
    out = Path(options["out"]) if options.get("out") else None
    losses = resume(trainer, out) if out and options.get("resume") else []
    previous = signal.signal(signal.SIGINT, lambda *_: setattr(trainer, "stop_requested", True))
    try:
        return _run(trainer, out, losses, options, report)
    finally:
        signal.signal(signal.SIGINT, previous)


def _run(
    trainer: Trainer, out: Path | None, losses: list[float], options: dict[str, Any], report: Any
) -> dict[str, Any]:
    from ridgeline.train.checkpoint import checkpoints, save

    e = trainer.experiment
    report({"stage": "training", "step": trainer.steps_done, "steps": e.training.steps})
    stopped, place = False, None
    budget = Budget(trainer, options.get("device_memory"))
    while trainer.steps_done < e.training.steps and not stopped:
        with budget.step():
            stats = trainer.step()
        losses.append(stats.loss)
        stopped = stats.stop
        report({"step": trainer.steps_done, "steps": e.training.steps, "loss": stats.loss, "tokens": stats.tokens,
                "seconds": stats.seconds, "grad_norm": stats.grad_norm})  # fmt: skip
        every = options.get("save_every") or 0
        last = stopped or trainer.steps_done == e.training.steps
        if out and (last or (every and trainer.steps_done % every == 0)):
            place = save(trainer, out, losses)
    if out and not place:  # there was nothing left to do
        place = next(reversed(checkpoints(out)), None)
    if out and place and options.get("export") and not stopped:
        export(trainer, place, out / "model")
    return {"losses": losses, "step": trainer.steps_done, "stopped": stopped, "checkpoint": str(place) if place else "",
            "device_peak_bytes": budget.peak, "traffic": traffic(trainer)}  # fmt: skip


def traffic(trainer: Trainer) -> dict[str, dict[str, float]]:
    """What moved between the device, host memory and disk: bytes, moves and achieved bytes/s by direction."""
    store = trainer.run.store
    if store is None:
        return {}
    store.finish()
    moved = {name: t for name, t in store.traffic.items() if t.count}
    return {n: {"bytes": t.bytes, "count": t.count, "bandwidth": t.bandwidth} for n, t in moved.items()}


def export(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's model as a Hugging Face one, adapters merged into their base. From any layout: rank 0 reads
    it whole."""
    from ridgeline.nn.checkpoint import save_checkpoint
    from ridgeline.nn.transformer import Transformer
    from ridgeline.train.checkpoint import read_model

    if trainer.rank:
        return
    plain = plain_state(trainer.experiment, whole_weights(read_model(checkpoint)))
    with torch.device("meta"):
        model = Transformer(trainer.experiment.model)
    model.load_state_dict(plain, assign=True, strict=not trainer.experiment.model.tie_embeddings)
    model.tie()
    save_checkpoint(model, folder)
    trainer.run.batches.tokenizer.save(str(folder / "tokenizer.json"))


def plain_state(e: Experiment, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State of the model as the plan trains it → the state of the plain one: codes expanded, adapters merged."""
    for technique in techniques(e.plan):
        state = technique.plain(state)
    return state
