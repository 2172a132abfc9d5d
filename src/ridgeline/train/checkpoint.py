"""Checkpoints of a training run: model, optimizer and position, through PyTorch's distributed checkpoint.

A checkpoint is complete or absent, even if its writer is killed: it is written under a temporary name and renamed,
``state.json`` last; a checkpoint that is removed is renamed first. ``<dir>/step-000020`` holds the tensors,
``state.json`` in it the step, the losses so far, the experiment, a hash of its data, and a checksum of every file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Plan
from ridgeline.techniques.registry import techniques_of
from ridgeline.train.trainer import Trainer


class Place(NamedTuple):
    """Where a checkpoint is written, and where it is once it is complete."""

    draft: Path
    whole: Path


def save(trainer: Trainer, folder: Path, losses: list[float]) -> Path:
    """Write ``folder/step-N`` from all ranks; older checkpoints of the folder are removed afterwards.

    Raises :class:`UserError` where it cannot be written.
    """
    place = begin(trainer, folder)
    with trainer.run.hooks.resident(False), writing_to(folder):
        save_tensors(trainer, place.draft)
    _barrier()
    if trainer.rank == 0:
        with writing_to(folder):
            complete(place, described(trainer, losses))
    _barrier()
    return place.whole


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Context in which files are written below ``folder``, which is there. Raises :class:`UserError` where they cannot
    be, with the reason; any other cause of a :class:`CheckpointException` as it is."""
    try:
        yield
    except (CheckpointException, OSError) as e:
        # What is raised on one rank while tensors are written is raised on all.
        cause = next(cause for cause, _ in e.failures.values()) if isinstance(e, CheckpointException) else e
        if not isinstance(cause, OSError):
            raise cause from e
        what = f"a checkpoint cannot be written to {folder}: {cause.strerror or cause}"
        fix = "the same command goes on from the checkpoint before, if there is one"
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            what += f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB are free)"
            fix = f"make room; {fix}"
        raise UserError(what, fix) from e


def begin(trainer: Trainer, folder: Path) -> Place:
    """The place of the trainer's checkpoint in ``folder``, for all ranks; none may be written there meanwhile.

    Raises :class:`UserError` where it cannot be made.
    """
    whole = folder / f"step-{trainer.steps_done:06d}"
    place = Place(folder / f".{whole.name}.new", whole)
    if trainer.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with writing_to(folder):
            tidy(folder)
            place.draft.mkdir()
    _barrier()
    return place


def complete(place: Place, about: dict[str, Any]) -> None:
    """Make a checkpoint of the tensors that all ranks have written; by one process. ``about``: as :func:`described`
    has it."""
    draft, whole = place
    folder = whole.parent
    state = {**about, "files": {f.name: _checksum(f) for f in sorted(draft.iterdir())}}
    _write(draft / "state.json", json.dumps(state))
    if whole.exists():  # from an earlier run that was not resumed; until the next line the draft replaces it
        os.replace(whole, folder / f".{whole.name}.old")
    os.replace(draft, whole)
    for old in folder.glob("step-*"):
        if old != whole:
            os.replace(old, folder / f".{old.name}.old")  # partly removed, it must not look like a checkpoint
    tidy(folder)


def described(trainer: Trainer, losses: list[float]) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, as JSON."""
    experiment = trainer.experiment.canonical()
    experiment["workload"]["batch_size"] = trainer.experiment.batch_size
    states = {name: kept.state_dict() for name, kept in trainer.run.hooks.states.items()}
    return {"step": trainer.steps_done, "losses": losses, "experiment": experiment, "data": trainer.data_digest,
            "states": states}  # fmt: skip


def tidy(folder: Path) -> None:
    """Finish what a killed run had completed, and remove incomplete or partly removed checkpoints."""
    for draft in folder.glob(".step-*.new"):
        place = folder / draft.name.removeprefix(".").removesuffix(".new")
        if (draft / "state.json").is_file() and not place.exists():
            os.replace(draft, place)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    """Write a file completely or not at all, and flush it to disk."""
    part = file.with_name(f".{file.name}.part")
    with part.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, file)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a directory, oldest first."""
    return sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file())


def resume(trainer: Trainer, folder: Path) -> list[float]:
    """Load the newest checkpoint of ``folder`` into the trainer; returns the losses so far (empty: there is none beyond
    the step that the trainer is at).

    Raises :class:`UserError` when it belongs to another experiment or cannot be read.
    """
    if trainer.rank == 0 and folder.is_dir():
        tidy(folder)
    _barrier()
    found = checkpoints(folder)
    if not found or int(found[-1].name.partition("-")[2]) <= trainer.steps_done:
        return []
    newest = found[-1]
    fix = f"remove {newest} to continue without it"
    try:
        state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        other = differences(state["experiment"], trainer)
        step, losses, files = int(state["step"]), [float(x) for x in state["losses"]], dict(state["files"])
        states, data = dict(state.get("states", {})), state.get("data", trainer.data_digest)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{newest}/state.json is damaged: {type(e).__name__}: {e}", fix) from None
    if other:
        raise UserError(
            f"{newest} belongs to another experiment (different: {', '.join(other)})",
            "give another --out, or remove the old checkpoint",
        )
    if data != trainer.data_digest:
        raise UserError(
            f"data {trainer.workload.data!r} is not what {newest} was trained on: the text, the template or the"
            " tokenizer has changed", "restore it, or give another --out or --no-resume to begin anew",
        )  # fmt: skip
    for name, checksum in files.items():
        if not (newest / name).is_file():
            raise UserError(f"checkpoint {newest} is damaged: {name} is missing", fix)
        if _checksum(newest / name) != checksum:
            raise UserError(f"checkpoint {newest} is damaged: {name} is not the file that was saved", fix)
    with trainer.run.hooks.resident(True):
        try:
            load_tensors(trainer, newest)
        except Exception as e:
            raise UserError(f"checkpoint {newest} cannot be read: {type(e).__name__}: {e}", fix) from None
    for name, kept in trainer.run.hooks.states.items():
        if name in states:
            kept.load_state_dict(states[name])
    trainer.steps_done = step
    return losses


class _Writer(FileSystemWriter):
    """Raises the :class:`OSError` for which a file cannot be written: PyTorch's archives hide it behind their own, and
    only what was raised reaches other ranks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """As its base does."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as e:
            if isinstance(e.__context__, OSError):
                raise e.__context__ from e
            raise


def save_tensors(trainer: Trainer, folder: Path, apart: bool = False) -> None:
    """Write the tensors of model and optimizer, each rank its part; they must be resident. ``apart``: every tensor in a
    file of its own."""
    from torch.distributed import checkpoint as dcp

    tensors, _ = _state(trainer)
    writer = _Writer(str(folder), single_file_per_rank=not apart)
    _quietly(lambda: dcp.save(tensors, storage_writer=writer, no_dist=trainer.world == 1))  # type: ignore[attr-defined]


def write_later(trainer: Trainer, folder: Path, stager: AsyncStager, group: dist.ProcessGroup | None) -> Future[Any]:
    """As :func:`save_tensors`, but copy the tensors only, into ``stager``'s memory → done when they are written; on the
    first rank, all ranks' parts. ``group``: of all ranks, used for nothing else."""
    from torch.distributed import checkpoint as dcp

    with trainer.run.hooks.resident(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors, _ = _state(trainer)
        written = dcp.async_save(  # type: ignore[attr-defined]
            tensors, storage_writer=_Writer(str(folder)), process_group=group, async_stager=stager,
            no_dist=trainer.world == 1,
        )  # fmt: skip
        return cast(Future[Any], written)


def load_tensors(trainer: Trainer, folder: Path) -> None:
    """Read what :func:`save_tensors` of any layout wrote."""
    from torch.distributed import checkpoint as dcp

    tensors, optimizer = _state(trainer)
    _quietly(lambda: dcp.load(tensors, checkpoint_id=str(folder), no_dist=trainer.world == 1))  # type: ignore[attr-defined]
    set_optimizer_state_dict(trainer.run.root, trainer.optimizer, optimizer, options=_by_name())


def files_to_load(trainer: Trainer, folder: Path) -> set[str]:
    """Names of the files that :func:`load_tensors` reads on this rank; only ``.metadata`` must be there."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(str(folder)).read_metadata()
    planner = DefaultLoadPlanner()
    with trainer.run.hooks.resident(False):
        planner.set_up_planner(_state(trainer)[0], metadata, is_coordinator=trainer.rank == 0)
        read = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in read}


def read_model(place: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint, unsharded, by name; read by one process, regardless of the layout that wrote
    them."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    kept = FileSystemReader(str(place)).read_metadata().state_dict_metadata
    tensors = {
        name.removeprefix("model."): torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in kept.items()
        if name.startswith("model.") and isinstance(about, TensorStorageMetadata)
    }
    _quietly(lambda: dcp.load({"model": tensors}, checkpoint_id=str(place), no_dist=True))  # type: ignore[attr-defined]
    return {name.removeprefix("model."): t for name, t in tensors.items()}


def _quietly(run: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()


def _by_name() -> StateDictOptions:
    """Optimizer states keyed by parameter name only: parameter groups differ from layout to layout."""
    return StateDictOptions(flatten_optimizer_state_dict=True)


def _state(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint's contents, as tensors that loading writes into, and the optimizer's full state dict.

    Names are those of the whole model in one process, so that any layout can read what any other wrote. A tied head is
    the embedding, even if a pipeline stage has its own copy.
    """
    root = trainer.run.root
    optimizer = get_optimizer_state_dict(root, trainer.optimizer, options=_by_name())
    model = dict(root.state_dict())
    states = {k: v for k, v in optimizer.items() if k.startswith("state.")}
    if trainer.experiment.model.tie_embeddings:
        model, states = _tied(model), _tied(states)
    return {"model": model, "optimizer": states}, optimizer


def _tied(tensors: dict[str, Any]) -> dict[str, Any]:
    head, table = "model.head.out.weight", "model.embed.tokens.weight"
    out = {}
    for name, value in tensors.items():
        other = name.replace(head, table)
        if other == name or other not in tensors:
            out[other] = value
    return out


def _kept(plan: Plan) -> dict[str, Any]:
    """The options of a plan that affect a checkpoint, by technique."""
    found = {t.card.name: t.stored() for t in techniques_of(plan)}
    return {name: options for name, options in found.items() if options}


def differences(saved: dict[str, Any], trainer: Trainer) -> list[str]:
    """Dotted keys that differ between a checkpoint's experiment and the trainer's.

    The layout may differ: cluster, parallel techniques, micro-batches. So may the number of steps, since a run can be
    extended.
    """
    e = trainer.experiment
    mine = json.loads(json.dumps(e.canonical()))
    mine["workload"]["batch_size"] = e.batch_size
    free = ("workload.steps", "workload.micro_batch_size", "cluster", "plan")
    out = [key for key in _changed(saved, mine) if key not in free]
    if _kept(Plan.parse(saved["plan"])) != _kept(e.plan):
        out.append("plan")
    return out


def _changed(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    out: list[str] = []
    for key in sorted({*a, *b}):
        where = f"{prefix}{key}"
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            out += _changed(x, y, f"{where}.")
        elif x != y:
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
