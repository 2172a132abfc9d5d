"""Checkpoints in the machines' memory, from which a run goes on when ranks are lost (Gemini, SOSP 2023).

Each machine keeps the files of its own ranks, and those of the machine before it, in a directory of its memory: one
machine may be lost with all that it holds. A machine's copy is complete or absent, and the one before is removed only
when all machines have the new one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.gradients import holders
from ridgeline.spec.errors import UserError
from ridgeline.train.checkpoint import described, differences, files_to_load, load_tensors, save_tensors
from ridgeline.train.trainer import Trainer

METADATA = ".metadata"
"""PyTorch's file about the others, written by rank 0."""
STATE = "state.json"
AGENT = "agent"
"""Names the process that started the ranks which last began anew in a directory."""
MORE_ROOM = "give --memory-dir a larger one (a container's /dev/shm grows with --shm-size), or use more machines"
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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(folder)
        self._require_room()

    def _require_room(self) -> None:
        """For the copy from which this machine goes on, and the next one while that still is here."""
        part, loaded, whole = self._bytes()
        copy = part * min(2, self.machines)
        needed = copy + min(whole, loaded + copy - part)
        free = shutil.disk_usage(self.folder).free + sum(
            _size(f) for place in self._ours() for f in place.rglob("*") if f.is_file()
        )
        if needed > free:
            raise UserError(f"copies in memory: two copies, together {needed / 1e9:.2f} GB, do not fit into the "
                            f"{free / 1e9:.2f} GB of {self.folder}", MORE_ROOM)  # fmt: skip

    def _bytes(self) -> tuple[float, float, float]:
        """Bytes that this machine's ranks write of a copy, that they read at most, and of all ranks: weights, and two
        fp32 states of each that trains. Ranks divide what they hold alike."""
        t = self.trainer
        alike = t.world // (t.run.mesh.size("pp") if t.run.mesh else 1)
        part = loaded = whole = 0.0
        for p in t.run.root.parameters():
            x, different = local(p), t.world / holders(p, alike)
            size = x.nbytes + 8 * x.numel() * p.requires_grad
            part += size * different * self.local / t.world
            loaded += size * min(self.local, different)
            whole += size * different
        return part, loaded, whole

    # ---- a copy ------------------------------------------------------------------------------------------------------

    def save(self, losses: list[float]) -> str:
        """Copy the state after ``trainer.steps_done`` steps. Returns why that failed on a machine, as for want of room:
        the copy before then stays the newest. Empty: it did not."""
        t = self.trainer
        place = self.folder / f"step-{t.steps_done:06d}-{self.name}"
        draft = self.folder / f".{place.name}.new"
        problem = self._together(self._make, draft)
        if not problem:
            with t.run.hooks.resident(False):
                problem = self._together(save_tensors, t, draft, True)  # ranks load a few of the others' tensors
        if not problem and self.machines > 1:
            problem = self._together(self._send_to_neighbor, draft)
        if not problem:
            problem = self._together(self._describe, draft, losses)
        if problem:
            if self.first:
                shutil.rmtree(draft, ignore_errors=True)
            return problem
        if self.first:
            os.replace(draft, place)
        self._barrier()
        if self.first:
            self._remove_but(place)
        return ""

    def _together(self, work: Callable[..., None], *args: Any) -> str:
        """Do it on all ranks; returns why the first that failed did. ``work`` communicates to its end even then."""
        why = ""
        try:
            work(*args)
        except OSError as e:
            why = f"rank {self.trainer.rank}: {self.folder}: {e.strerror}"
        except CheckpointException as e:  # raised on all ranks
            why = _reason(e)
        found = [why] * self.trainer.world
        if self.group is not None:
            dist.all_gather_object(found, why, group=self.group)
        return next((reason for reason in found if reason), "")

    def _make(self, draft: Path) -> None:
        if self.first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()

    def _send_to_neighbor(self, draft: Path) -> None:
        """Send this rank's files to the next machine, and write those of the machine before."""
        t, failed = self.trainer, None
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
            if i < len(names[source]) and failed is None:
                try:
                    _write(draft / name, held)
                except OSError as e:
                    failed = e  # the others still send and receive
        if failed is not None:
            raise failed

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
        for old in self._ours():
            if old != place:
                hidden = old if old.name.startswith(".") else self.folder / f".{old.name}.old"
                if old != hidden:
                    os.replace(old, hidden)  # partly removed, it must not look like a copy
                shutil.rmtree(hidden, ignore_errors=True)

    def _ours(self) -> list[Path]:
        """What this experiment has here, complete or not."""
        found = [*self.folder.glob(".step-*"), *self.folder.glob("step-*")]
        return [place for place in found if not self._of_another(place)]

    def _of_another(self, place: Path) -> bool:
        state = _state(place)
        return state is not None and bool(differences(state["experiment"], self.trainer))

    # ---- going on ----------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Remove what earlier runs of this experiment have left: those that another process, as torchrun, has
        started than this one's parent."""
        agent = psutil.Process(os.getppid())
        name, marker = f"{agent.pid} {agent.create_time()}", self.folder / AGENT
        self._barrier()  # the others may still look at what is here
        if self.first and not (marker.is_file() and marker.read_text(encoding="utf-8") == name):
            for place in self._ours():
                shutil.rmtree(place, ignore_errors=True)
            marker.write_text(name, encoding="utf-8")
        self._barrier()

    def resume(self) -> list[float]:
        """Go on from the newest copy of which the machines together have every file; returns its losses (empty: there
        is none).

        Raises :class:`UserError` for a copy that cannot be read, or does not fit.
        """
        t = self.trainer
        everyone: list[Any] = [self._held()]
        if t.world > 1:
            everyone = [None] * t.world
            dist.all_gather_object(everyone, self._held(), group=self.group)
        held: list[dict[str, Held]] = everyone[:: self.local]
        whole = [name for name in {n for h in held for n in h} if _complete([h[name] for h in held if name in h])]
        if not whole:
            return []
        place = self.folder / max(whole, key=lambda name: (int(name.split("-")[1]), name))
        have = [h[place.name].have if place.name in h else {} for h in held]
        self._fetch(place, have, [{METADATA}] * self.machines)
        self._fetch(place, have, [files | {STATE} for files in self._wanted(place, set().union(*have))])
        state = _state(place)
        assert state is not None
        with t.run.hooks.resident(True):
            try:
                load_tensors(t, place)
            except CheckpointException as e:
                raise UserError(f"copies in memory: the copy {place} cannot be read: {_reason(e)}",
                                f"remove {place} on every machine to go on without it") from None  # fmt: skip
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
            state = _state(place)
            if state is not None and not differences(state["experiment"], self.trainer):
                found[place.name] = Held({f.name: _size(f) for f in place.iterdir()}, state["files"])
        return found

    def _wanted(self, place: Path, names: set[str]) -> list[set[str]]:
        """The files that each machine needs: what its ranks load, and what they and the machine before wrote."""
        t = self.trainer
        mine = files_to_load(t, place)
        for rank in (t.rank, (t.rank - self.local) % t.world):
            mine |= {name for name in names if name.startswith(f"__{rank}_")}
        every: list[Any] = [mine]
        if t.world > 1:
            every = [None] * t.world
            dist.all_gather_object(every, mine, group=self.group)
        return [set().union(*every[i : i + self.local]) for i in range(0, t.world, self.local)]

    def _fetch(self, place: Path, held: list[Files], wanted: list[set[str]]) -> None:
        """Have every machine get those of its wanted files that it lacks, from the first that has them."""
        mine = self.trainer.rank // self.local
        sizes = {name: size for files in held for name, size in files.items()}
        problem = self._together(self._require_space, place, sum(sizes[n] for n in wanted[mine] - held[mine].keys()))
        if problem:
            raise UserError(f"copies in memory: the copy to go on from does not fit: {problem}", MORE_ROOM)
        for name in sorted(set().union(*wanted)):  # the state, without which it is no copy, last
            source = next(m for m, files in enumerate(held) if name in files)
            for machine in (m for m, files in enumerate(held) if name in wanted[m] and name not in files):
                if self.first and mine == source:
                    dist.send(_read(place / name), machine * self.local, group=self.group)
                elif self.first and mine == machine:
                    data = torch.empty(sizes[name], dtype=torch.uint8)
                    dist.recv(data, source * self.local, group=self.group)
                    _write(place / name, data)
        self._barrier()

    def _require_space(self, place: Path, size: int) -> None:
        if self.first:
            place.mkdir(exist_ok=True)
            if size > shutil.disk_usage(self.folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait(self) -> None:
        """Until all ranks have come here: before that, no machine's copies may be removed."""
        self._barrier()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def _complete(held: list[Held]) -> bool:
    """Whether the machines together have all files of a copy."""
    have = {name: size for h in held for name, size in h.have.items()}
    return METADATA in have and all(have.get(name) == size for name, size in held[0].wanted.items())


def _require_private(folder: Path) -> None:
    """Raise :class:`UserError` where another user could write: metadata of copies are pickles, which run code."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise UserError(f"copies in memory: other users may write to {folder}, or it is not a directory of yours",
                        "remove it, or give another --memory-dir")  # fmt: skip


def _state(place: Path) -> dict[str, Any] | None:
    """What ``state.json`` says; None without one (it is the last file of a copy) or for a damaged one."""
    try:
        state = json.loads((place / STATE).read_text(encoding="utf-8"))
        return state if {"experiment", "files", "step", "losses", "states"} <= state.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _reason(failed: CheckpointException) -> str:
    """The first rank that failed, and why: the system's reason, if there is one below PyTorch's."""
    rank, (first, _) = next(iter(failed.failures.items()))
    error: BaseException | None = first
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return f"rank {rank}: {first if error is None else error.strerror}"


def _size(file: Path) -> int:
    return file.stat().st_size


def _read(file: Path) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)


def _write(file: Path, data: Tensor) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(data.numpy().tobytes())
    os.replace(part, file)
