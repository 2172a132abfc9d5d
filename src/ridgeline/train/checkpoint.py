"""Checkpoints of a training run: model, optimizer and position, through PyTorch's distributed checkpoint.

A checkpoint is complete or absent, whenever its writer dies: it is written beside its place and renamed, ``state.json``
last; what is removed loses its name first. ``<dir>/step-000020`` holds the tensors, ``state.json`` in it the step, the
losses so far, and a checksum of every file.
"""

from __future__ import annotations

import hashlib
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
    from torch.distributed import checkpoint as dcp

    place = folder / f"step-{trainer.steps_done:06d}"
    draft = folder / f".{place.name}.new"
    if trainer.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        draft.mkdir()
    _barrier()
    with warnings.catch_warnings(), trainer.run.resident(False):
        warnings.simplefilter("ignore")
        dcp.save(  # type: ignore[attr-defined]
            _state(trainer), checkpoint_id=str(draft), no_dist=trainer.world == 1
        )
    _barrier()
    if trainer.rank == 0:
        state = {
            "step": trainer.steps_done,
            "losses": losses,
            "experiment": trainer.experiment.canonical(),
            "files": {f.name: _checksum(f) for f in sorted(draft.iterdir())},
        }
        _write(draft / "state.json", json.dumps(state))
        if place.exists():  # of an earlier run that was not resumed; until the next line the draft stands for it
            os.replace(place, folder / f".{place.name}.old")
        os.replace(draft, place)
        for old in folder.glob("step-*"):
            if old != place:
                os.replace(old, folder / f".{old.name}.old")  # half removed, it must not pass for a checkpoint
        tidy(folder)
    _barrier()
    return place


def tidy(folder: Path) -> None:
    """Put in place what a run that was killed had completed, and remove what it had not, or had begun to remove."""
    for draft in folder.glob(".step-*.new"):
        place = folder / draft.name.removeprefix(".").removesuffix(".new")
        if (draft / "state.json").is_file() and not place.exists():
            os.replace(draft, place)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    """A whole file or none, on the disk and not only in memory."""
    part = file.with_name(f".{file.name}.part")
    with part.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, file)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file())


def resume(trainer: Trainer, folder: Path) -> list[float]:
    """Load the newest checkpoint of ``folder`` into the trainer; returns the losses so far (empty: none found).

    Raises :class:`UserError` when it belongs to another experiment or cannot be read.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    if trainer.rank == 0 and folder.is_dir():
        tidy(folder)
    _barrier()
    found = checkpoints(folder)
    if not found:
        return []
    newest = found[-1]
    mend = f"remove {newest} to go on without it"
    try:
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        other = _differences(state["experiment"], json.loads(json.dumps(trainer.experiment.canonical())))
        step, losses, files = int(state["step"]), [float(x) for x in state["losses"]], dict(state["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{newest}/state.json is damaged: {type(e).__name__}: {e}", mend) from None
    if other:
        raise UserError(
            f"{newest} belongs to another experiment (different: {', '.join(other)})",
            "give another --out, or remove the old checkpoint",
        )
    for name, checksum in files.items():
        if not (newest / name).is_file():
            raise UserError(f"checkpoint {newest} is damaged: {name} is missing", mend)
        if _checksum(newest / name) != checksum:
            raise UserError(f"checkpoint {newest} is damaged: {name} is not the file that was saved", mend)
    with trainer.run.resident(True):
        tensors = _state(trainer)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(  # type: ignore[attr-defined]
                    tensors, checkpoint_id=str(newest), no_dist=trainer.world == 1
                )
        except Exception as e:
            raise UserError(f"checkpoint {newest} cannot be read: {type(e).__name__}: {e}", mend) from None
        set_optimizer_state_dict(trainer.run.root, trainer.optimizer, tensors["optimizer"])
    trainer.steps_done = step
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


def _checksum(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
