"""Checkpoints that are written while training goes on, by PyTorch's distributed checkpoint (``async_save``).

A step waits until its tensors are copied to host memory, as large as a rank's part of the checkpoint; a thread writes
them. A checkpoint is waited for before the next one begins.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager

from ridgeline.train.checkpoint import Place, begin, complete, described, write_later, writing_to
from ridgeline.train.trainer import Trainer


class AsyncCheckpoints:
    """The checkpoints of one run. All ranks construct it and call its methods together."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        # Training's own collectives go on meanwhile, in another group.
        self._group = dist.new_group(backend="gloo") if trainer.world > 1 else None
        self._stager = _Stager(pinned=trainer.device.type == "cuda")
        if trainer.world == 1:  # PyTorch warns of it in the writing thread
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, losses: list[float]) -> None:
        """Begin to write ``folder/step-N``; it replaces older ones when it is complete. Raises what writing the last
        one raised."""
        self.wait()
        place = begin(self.trainer, self.folder)
        written = write_later(self.trainer, place.draft, self._stager, self._group)
        about = described(self.trainer, list(losses))
        self._writing = self._thread.submit(self._finish, written, place, about)

    def wait(self) -> None:
        """Return when nothing is being written. Raises what writing raised, as :func:`writing_to` does."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Free what copies take, once nothing is being written; without an error."""
        self._thread.shutdown()
        self._stager.close()

    def _finish(self, written: Future[Any], place: Place, about: dict[str, Any]) -> None:
        with writing_to(self.folder):
            written.result()  # on rank 0: all ranks' parts
            if self.trainer.rank == 0:
                complete(place, about)


class _Stager(AsyncStager):
    """Copies tensors to the same host memory each time; PyTorch 2.11's own ``DefaultStager`` copies only once."""

    should_synchronize_after_execute = False

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._copies = StateDictStager(pin_memory=pinned, share_memory=False)

    def stage(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The same, complete in host memory."""
        copied: dict[str, Any] = self._copies.stage(state_dict, non_blocking=self._pinned)
        if self._pinned:
            torch.accelerator.synchronize()
        return copied

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Free the host memory."""
        self._copies.close()
