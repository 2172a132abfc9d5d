"""Checkpoints of a training run: model, optimizer and position, through PyTorch's distributed checkpoint.

A checkpoint is complete or absent: it is written beside its place and renamed. ``<dir>/step-000020`` holds the tensors,
``state.json`` in it the step and the losses so far.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ridgeline.spec.errors import UserError
from ridgeline.train.engine import Trainer


def save(trainer: Trainer, folder: Path, losses: list[float]) -> Path:
    """Write ``folder/step-N`` from all ranks; older checkpoints of the folder are removed afterwards."""
    import torch.distributed.checkpoint as dcp

    place = folder / f"step-{trainer.steps_done:06d}"
    draft = folder / f".{place.name}.new"
    if trainer.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    _barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(trainer), checkpoint_id=str(draft), no_dist=trainer.world == 1)
    _barrier()
    if trainer.rank == 0:
        state = {"step": trainer.steps_done, "losses": losses, "experiment": trainer.experiment.canonical()}
        (draft / "state.json").write_text(json.dumps(state), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        os.replace(draft, place)
        for old in checkpoints(folder):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return place


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file())


def resume(trainer: Trainer, folder: Path) -> list[float]:
    """Load the newest checkpoint of ``folder`` into the trainer; returns the losses so far (empty: none found).

    Raises :class:`UserError` when it belongs to another experiment or cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    found = checkpoints(folder)
    if not found:
        return []
    newest = found[-1]
    try:
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        other = _differences(state["experiment"], trainer.experiment.canonical())
    except (ValueError, KeyError) as e:
        raise UserError(f"{newest}/state.json is damaged: {e}", "remove that directory to go on without it") from None
    if other:
        raise UserError(
            f"{newest} belongs to another experiment (different: {', '.join(other)})",
            "give another --out, or remove the old checkpoint",
        )
    tensors = _state(trainer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=str(newest), no_dist=trainer.world == 1)
    except Exception as e:
        raise UserError(
            f"checkpoint {newest} cannot be read: {str(e).splitlines()[0]}",
            "remove that directory to go on without it",
        ) from None
    set_optimizer_state_dict(trainer.run.root, trainer.optimizer, tensors["optimizer"])
    trainer.steps_done = state["step"]
    losses: list[float] = state["losses"]
    return losses


def _state(trainer: Trainer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    root = trainer.run.root
    return {
        "model": dict(root.state_dict()),
        "optimizer": get_optimizer_state_dict(root, trainer.optimizer),
    }


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ; the number of steps may, since a run can be prolonged."""
    out: list[str] = []
    for key in sorted({*a, *b}):
        where = f"{prefix}{key}"
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            out += _differences(x, y, f"{where}.")
        elif x != y and where != "workload.steps":
            out.append(where)
    return out


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
