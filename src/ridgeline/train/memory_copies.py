"""Checkpoints in the machines' memory, from which a run goes on when ranks are lost (Gemini, SOSP 2023).

Each machine keeps the files of its own ranks, and those of the machine before it, in a directory of its memory: one
machine may be lost with all that it holds. A machine's copy is complete or absent, and the one before is removed only
when all machines have the new one.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.gradients import holders
from ridgeline.spec.errors import UserError
from ridgeline.train.checkpoint import described, differences, load_tensors, save_tensors
from ridgeline.train.trainer import Trainer

METADATA = ".metadata"
"""PyTorch's file about the others, written by rank 0."""
STATE = "state.json"
Files = dict[str, int]
"""Files and their bytes."""


class Held(NamedTuple):
    """What a machine has of a copy."""

    have: Files
    wanted: Files
    """The ranks' files of the whole copy."""


class MemoryCopies:
    """The copies of one run on this machine. All ranks construct it and call its methods together."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """``folder``: the same for all ranks of a machine, and in its memory. Raises :class:`UserError` for a folder
        that cannot hold two copies."""
        self.trainer, self.folder = trainer, folder
        self.local = int(os.environ.get("LOCAL_WORLD_SIZE", trainer.world))
        self.first = trainer.rank % self.local == 0
        """Whether this is its machine's first rank."""
        self.machines = trainer.world // self.local
        # Files are sent through host memory, whatever the ranks' own backend is.
        self.group = dist.new_group(backend="gloo") if trainer.world > 1 else None
        # Machines that part and meet again may have computed the same step in two layouts.
        named: list[Any] = [uuid.uuid4().hex[:8]]
        if trainer.world > 1:
            dist.broadcast_object_list(named, src=0, group=self.group)
        self.name = named[0]
        folder.mkdir(parents=True, exist_ok=True)
        self._require_room()

    def _require_room(self) -> None:
        each = self._own_bytes() * self.local * min(2, self.machines)
        free = shutil.disk_usage(self.folder).free + sum(_size(f) for f in self.folder.rglob("*") if f.is_file())
        if 2 * each > free:
            raise UserError(
                f"elastic: two copies of {each / 1e9:.2f} GB do not fit into the {free / 1e9:.2f} GB of {self.folder}",
                "give --memory-dir a larger one (a container's /dev/shm grows with --shm-size), or use more machines",
            )

    def _own_bytes(self) -> float:
        """Bytes of this rank's part of a copy: weights, and two fp32 states of each that trains. Ranks divide what they
        hold alike."""
        t = self.trainer
        alike = t.world // (t.run.mesh.size("pp") if t.run.mesh else 1)
        each = ((local(p), holders(p, alike), p.requires_grad) for p in t.run.root.parameters())
        return sum((x.nbytes + 8 * x.numel() * trains) / ranks for x, ranks, trains in each)

    # ---- a copy ------------------------------------------------------------------------------------------------------

    def save(self, losses: list[float]) -> None:
        """Copy the state after ``trainer.steps_done`` steps."""
        t = self.trainer
        place = self.folder / f"step-{t.steps_done:06d}-{self.name}"
        draft = self.folder / f".{place.name}.new"
        if self.first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
        self._barrier()
        with t.run.hooks.resident(False):
            save_tensors(t, draft)
        if self.machines > 1:
            self._send_to_neighbor(draft)
        self._describe(draft, losses)
        self._barrier()
        if self.first:
            os.replace(draft, place)
        self._barrier()
        if self.first:
            self._remove_but(place)

    def _send_to_neighbor(self, draft: Path) -> None:
        """Send this rank's files to the next machine, and write those of the machine before."""
        t = self.trainer
        to, source = (t.rank + self.local) % t.world, (t.rank - self.local) % t.world
        mine = sorted(draft.glob(f"__{t.rank}_*"))
        names: list[Any] = [None] * t.world
        dist.all_gather_object(names, {f.name: _size(f) for f in mine}, group=self.group)
        for i in range(max(len(n) for n in names)):
            work = []
            if i < len(mine):
                work.append(dist.isend(_read(mine[i]), to, group=self.group))
            if i < len(names[source]):
                name, size = list(names[source].items())[i]
                held = torch.empty(size, dtype=torch.uint8)
                work.append(dist.irecv(held, source, group=self.group))
            for w in work:
                assert w is not None
                w.wait()
            if i < len(names[source]):
                _write(draft / name, held)

    def _describe(self, draft: Path, losses: list[float]) -> None:
        """Write the step, its losses and the names of all files on every machine."""
        t = self.trainer
        known = [{}] * t.world if t.world > 1 else [{f.name: _size(f) for f in draft.glob("__*")}]
        if t.world > 1:
            dist.all_gather_object(known, {f.name: _size(f) for f in draft.glob(f"__{t.rank}_*")}, group=self.group)
        files = {name: size for found in known for name, size in found.items()}
        sent: list[Any] = [(draft / METADATA).read_bytes() if t.rank == 0 else None]
        if self.machines > 1:
            dist.broadcast_object_list(sent, src=0, group=self.group)
        if self.first:
            (draft / METADATA).write_bytes(sent[0])
            state = json.dumps({**described(t, losses), "files": files})
            (draft / STATE).write_text(state, encoding="utf-8")

    def _remove_but(self, place: Path) -> None:
        self._remove_left()
        for old in self.folder.glob("step-*"):
            if old != place:
                os.replace(old, self.folder / f".{old.name}.old")  # partly removed, it must not look like a copy
        self._remove_left()

    def _remove_left(self) -> None:
        """Remove what is incomplete or partly removed."""
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)

    # ---- going on ----------------------------------------------------------------------------------------------------

    def resume(self) -> list[float]:
        """Go on from the newest copy of which the machines together have every file; returns its losses (empty: there
        is none)."""
        t = self.trainer
        everyone: list[Any] = [self._held()]
        if t.world > 1:
            everyone = [None] * t.world
            dist.all_gather_object(everyone, self._held(), group=self.group)
        held: list[dict[str, Held]] = everyone[:: self.local]
        whole = [name for name in {n for h in held for n in h} if _complete([h[name] for h in held if name in h])]
        if not whole:
            return []
        place = self.folder / max(whole)
        self._fetch(place, [h[place.name].have if place.name in h else {} for h in held])
        state = json.loads((place / STATE).read_text(encoding="utf-8"))
        with t.run.hooks.resident(True):
            load_tensors(t, place)
        for name, kept in t.run.hooks.states.items():
            if name in state["states"]:
                kept.load_state_dict(state["states"][name])
        t.steps_done = int(state["step"])
        self._barrier()
        if self.first:
            self._remove_but(place)
        return [float(x) for x in state["losses"]]

    def _held(self) -> dict[str, Held]:
        """This machine's part of every copy of this experiment."""
        found = {}
        for place in self.folder.glob("step-*"):
            if not (place / STATE).is_file():  # it was being fetched, this last
                continue
            state = json.loads((place / STATE).read_text(encoding="utf-8"))
            if not differences(state["experiment"], self.trainer):
                found[place.name] = Held({f.name: _size(f) for f in place.iterdir()}, state["files"])
        return found

    def _fetch(self, place: Path, held: list[Files]) -> None:
        """Have every machine get the files that it lacks, from the first that has them."""
        if self.first:
            place.mkdir(exist_ok=True)
        mine = self.trainer.rank // self.local
        for name in sorted({n for h in held for n in h}):
            source = next(m for m, files in enumerate(held) if name in files)
            for machine in (m for m, files in enumerate(held) if name not in files):
                if self.first and mine == source:
                    dist.send(_read(place / name), machine * self.local, group=self.group)
                elif self.first and mine == machine:
                    data = torch.empty(held[source][name], dtype=torch.uint8)
                    dist.recv(data, source * self.local, group=self.group)
                    _write(place / name, data)
        self._barrier()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def _complete(held: list[Held]) -> bool:
    """Whether the machines together have all files of a copy."""
    have = {name: size for h in held for name, size in h.have.items()}
    return METADATA in have and all(have.get(name) == size for name, size in held[0].wanted.items())


def _size(file: Path) -> int:
    return file.stat().st_size


def _read(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _write(file: Path, data: Tensor) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(data.numpy().tobytes())
    os.replace(part, file)
