"""A model divided over processes: rank 0 schedules and samples, the others do the same steps on their part.

Tensor-parallel ranks hold parts of every layer and sum twice in each (Megatron-LM, arXiv:1909.08053); pipeline stages
hold some of the layers and hand the rows on. Rank 0's stage has the whole embedding and head. Each step is sent as
plain numbers, through shared memory; if a rank dies, the engine stops with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from ridgeline.imports import uncollected
from ridgeline.jobs.launch import free_port, rank_environment
from ridgeline.runtime.mesh import Mesh
from ridgeline.serve.block_manager import Copy
from ridgeline.serve.rank_channel import RankLost, connect
from ridgeline.serve.runner import PackedStep, Runner
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.step_graphs import Size
from ridgeline.serve.step_message import pack, unpack
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment

WAIT = timedelta(seconds=60)
"""How long a rank waits for another within a step."""
START = timedelta(minutes=10)
"""How long a rank waits for the others to start: on a busy machine an import takes minutes."""


STOP = b"."
"""The message that there are no more steps; a step's is longer."""


class RankedRunner(Runner):
    """A runner whose model is divided. Rank 0 calls :meth:`run`, the others :meth:`follow`."""

    def __init__(self, mesh: Mesh, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stage, self.stages = mesh.at("pp"), mesh.size("pp")
        self.width = mesh.size("inner", "tp")
        """Ranks of one stage."""
        self.followers: list[subprocess.Popen[bytes]] = []
        self.channel = connect()
        self._over = threading.Event()
        """Set when there are no more steps, as the engine was closed or one has failed."""
        self._last = torch.cuda.Event() if self.device.type == "cuda" else None
        """Recorded behind what the last step has launched on a GPU."""

    def run(self, batch: list[tuple[Sequence, int]], copies: list[Copy]) -> Tensor:
        """A step on all ranks. Raises :class:`RankLost` when one does not take part."""
        step = self.describe(batch, copies)
        step.graph = super().captured(step)
        try:
            self.channel.send(pack(step))
            hidden = self.execute(step)
            if self._last is not None:
                self._last.record()
            return hidden
        except Exception as e:
            # Whatever it was, the ranks are out of sync now.
            self._over.set()
            time.sleep(0.2)
            dead = [i + 1 for i, f in enumerate(self.followers) if f.poll() is not None]
            who = f"rank {dead[0]} died" if dead else f"{type(e).__name__}: {e}"
            raise RankLost(f"a step failed on {dist.get_world_size()} ranks: {who}") from e

    def captured(self, step: PackedStep) -> Size | None:
        """What rank 0 has found: all replay the same, or launch the same."""
        return step.graph

    def follow(self) -> None:
        """Run the steps that rank 0 sends until it stops. Raises :class:`RankLost` when it has gone."""
        while (message := self.channel.receive()) != STOP:
            self.execute(unpack(message))
        self.channel.close()
        self._drop_graphs()

    def watch(self) -> None:
        """For captured steps: end this process when a rank has died in a step, as a GPU waits for ever for an
        all-reduce in a graph, of which PyTorch's watchdog does not know. And drop the graphs before the process ends:
        NCCL waits for those that have its operations."""
        assert self.graphs is not None
        weakref.finalize(self, self.graphs.graphs.clear)
        if self.followers:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.graphs.clear()
        self.graphs = None

    def _watch(self) -> None:
        well = time.monotonic()
        while not self._over.wait(1.0):
            dead = [i + 1 for i, f in enumerate(self.followers) if f.poll() is not None]
            if not dead or self._last is None or self._last.query():  # without a step, the next one fails
                well = time.monotonic()
            elif time.monotonic() - well > WAIT.total_seconds():
                print(f"rank {dead[0]} died: the engine ends", file=sys.stderr, flush=True)
                os._exit(1)

    def close(self) -> None:
        """Stop the other ranks."""
        self._over.set()
        self._drop_graphs()
        if dist.get_rank() == 0:
            with contextlib.suppress(RankLost):  # they have exited
                self.channel.send(STOP)
            self.channel.close()
            for f in self.followers:
                try:
                    f.wait(5)
                except subprocess.TimeoutExpired:
                    f.kill()

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """Through all stages, one after the other, and back to rank 0; on other ranks the result is meaningless."""
        rank = dist.get_rank()
        if self.stages == 1:
            x, update = self._through(self.embed(ids, at), at)
            return self.norm(x, update)[0] if rank == 0 else x[0]
        if self.stage == 0:
            x = self.embed(ids, at)
        else:
            weight = next(self.model.parameters())
            x = torch.empty(1, ids.shape[1], self.model.spec.hidden_size, dtype=weight.dtype, device=self.device)
            dist.recv(x, rank - self.width)
        x = self.layers(x, at)
        if self.stage < self.stages - 1:
            dist.send(x.contiguous(), rank + self.width)
        elif rank == self.width * (self.stages - 1):
            dist.send(x.contiguous(), 0)
        if rank == 0:
            dist.recv(x := torch.empty_like(x), self.width * (self.stages - 1))
        return self.norm(x)[0] if rank == 0 else x[0]


def start(e: Experiment) -> list[subprocess.Popen[bytes]]:
    """Start the other ranks of a divided engine, and meet them; returns their processes."""
    ranks = e.world
    if 0 < torch.cuda.device_count() < ranks:
        raise UserError(f"the plan divides the model over {ranks} GPUs, and this process sees"
                        f" {torch.cuda.device_count()}", "divide it over those, or hide them to compute on the CPU"
                        " (CUDA_VISIBLE_DEVICES=)")  # fmt: skip
    folder = tempfile.mkdtemp(prefix="ridgeline-ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # groups made later still meet there
    job, meet = Path(folder) / "job.json", Path(folder) / "meet"
    job.write_text(e.model_dump_json(), encoding="utf-8")
    port = free_port()
    followers = [
        subprocess.Popen([sys.executable, "-m", "ridgeline.serve.ranks", str(job), str(meet), str(rank)],
                         env=rank_environment(rank, ranks, port), stdin=subprocess.DEVNULL, start_new_session=True)
        for rank in range(1, ranks)
    ]  # fmt: skip
    join(meet, 0, ranks)
    return followers


def join(meet: Path, rank: int, ranks: int) -> torch.device:
    """Meet the other ranks of this machine at the file ``meet``; returns this rank's device."""
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    store, rank, ranks = next(rendezvous(f"file://{meet}", rank, ranks))
    store.set(f"rank {rank} is here", "")
    store.wait([f"rank {i} is here" for i in range(ranks)], START)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, timeout=WAIT, rank=rank, world_size=ranks)
    return device


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in their order; all call it at once."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def follow(make: Callable[[Experiment, torch.device], RankedRunner], path: str, meet: str, rank: str) -> None:
    """The main function of ranks other than the first."""
    e = Experiment.model_validate_json(Path(path).read_text(encoding="utf-8"))
    device = join(Path(meet), int(rank), e.world)
    try:
        make(e, device).follow()
    except Exception as e:
        # A GPU may wait for its part of a sum, and the group's end for that.
        if isinstance(e, (UserError, torch.OutOfMemoryError)):
            print(f"rank {rank}: {e}", file=sys.stderr)
        elif not isinstance(e, RankLost):  # where rank 0 has exited, it reports the reason
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    with uncollected():
        from ridgeline.serve.build_engine import make_follower

    follow(make_follower, *sys.argv[1:4])
