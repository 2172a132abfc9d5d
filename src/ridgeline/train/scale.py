"""Plans of any size without their hardware: fake process groups, and parameters that are shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ridgeline.nn.model.init import DTYPES, build
from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.mesh import Mesh, forget
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import resolve
from ridgeline.train.trainer import assemble


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process as rank ``rank`` of a fake world of ``ranks``: collectives return immediately without effect.

    Raises :class:`UserError` where the process already belongs to a group, or PyTorch has no fake ones.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend
    except ImportError:
        raise UserError(
            f"PyTorch {torch.__version__} has no fake process groups", "use a PyTorch that has, such as 2.13"
        ) from None
    if dist.is_initialized():
        raise UserError("this process already belongs to a process group", "use a process of its own for a fake world")
    forget()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget()


def assemble_rank(e: Experiment, rank: int) -> TrainBuild:
    """What rank ``rank`` of the experiment builds, on the meta device: runs every technique's own ``build`` except
    those that act in the loop (on batches, on recorded steps), and allocates no memory.

    To be called in the :func:`fake_world` of the experiment's size. Raises :class:`UserError` as training would.
    """
    e, techniques = resolve(e)
    run = TrainBuild(e, build(e.model, "meta", DTYPES[e.dtype]), torch.device("meta"), rank=rank, world=e.world)
    run.model.set_attention("naive")
    if e.world > 1:
        run.mesh = Mesh.make(e, "cpu", max((t.inner() for t in techniques), default=1))
    assemble(run, [t for t in techniques if t.phase != "loop"])
    return run


def local_shapes(run: TrainBuild) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """This rank's part of every parameter that it holds: name → shape and dtype."""
    return {name: (local(p).shape, p.dtype) for name, p in run.root.named_parameters()}


def parameter_bytes(run: TrainBuild) -> int:
    """Bytes of this rank's parameters between steps; shared ones counted once."""
    return sum(local(p.detach()).nbytes for p in run.root.parameters())
