"""ZeRO stages 1 and 2 with 16-bit weights: these are replicated, and each rank updates its rows of every parameter.

Gradients of one part of the model (embedding, a layer, head) are summed in fp32 by one reduce-scatter that overlaps
with the rest of the backward pass; after the update one all-gather per part distributes its new rows (arXiv:1910.02054,
section 5). Between steps the modules hold this rank's rows as ``DTensor`` s that share the memory of the full weights,
so that norms, optimizers, offload and checkpoints see the same state as under stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ridgeline.nn.parallel.collectives import all_gather, local, placed, reduce_scatter
from ridgeline.runtime.host_optimizer import part_name
from ridgeline.runtime.train_build import TrainBuild


def keep_wide(module: FSDPModule) -> None:
    """Make ``fully_shard`` keep gradients that it summed in fp32 in that dtype, for 16-bit parameters (whose
    ``grad_dtype`` is fp32): by default it rounds them to the parameters' dtype."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    settle = group._init_mp_dtypes

    def widely() -> None:
        settle()
        group._orig_dtype = torch.float32

    group._init_mp_dtypes = widely  # type: ignore[method-assign]


@contextmanager
def integers_too() -> Iterator[None]:
    """Within it ``fully_shard`` shards integer codes too. PyTorch 2.11's makes each shard a parameter that is trained,
    which integers can't be, before it looks whether the whole one is."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    module.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    try:
        yield
    finally:
        module.nn = nn


class Among(NamedTuple):
    """The ranks over which a parameter's update is divided."""

    mesh: DeviceMesh
    """One mesh axis of ranks that share one copy, or (copies, ranks that share one)."""
    experts: bool = False

    @property
    def shards(self) -> ProcessGroup:
        """Number of ranks that share one copy."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def copies(self) -> ProcessGroup | None:
        """Ranks that update the same rows; None: only this rank."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 else None


@dataclass
class Unit:
    """Parameters whose gradients and new rows are communicated together."""

    among: Among
    whole: list[nn.Parameter] = field(default_factory=list)
    own: list[nn.Parameter] = field(default_factory=list)
    """This rank's rows of each parameter, sharing its memory."""
    waiting: int = 0
    """Parameters whose gradient of this micro-batch is not yet available."""
    sent: Tensor | None = None
    summed: Tensor | None = None
    work: Any = None


class ShardedUpdate:
    """Divides gradients (stage 2) and updates of the run's trained parameters over the ranks of ``among(name)``.

    In stage 1 full gradients stay in memory, are summed over the ranks once per step, and this rank's rows of the sum
    are written back into them. In a pipeline the reduction follows the last micro-batch.
    """

    def __init__(self, run: TrainBuild, stage: int, among: Callable[[str], Among | None]) -> None:
        self.run, self.stage = run, stage
        self.units: list[Unit] = []
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.pipelined = run.chunks[0] is not run.root
        self.armed = False
        """Whether reductions start within the current backward pass."""
        self.left: list[Unit] = []
        self.pending: Unit | None = None
        self._of: dict[nn.Parameter, Unit] = {}
        self._divide(among)

    def start(self) -> None:
        """Attach to the run: from now on its modules hold this rank's rows between steps."""
        run = self.run
        run.execute, run.score = self._around(run.execute), self._around(run.score)
        run.sync = self.sync
        run.hooks.resident = self._resident(run.hooks.resident)
        run.hooks.after_update.append(self._end)
        run.gradients.keep = self.stage == 1
        self._use(own=True)

    def _divide(self, among: Callable[[str], Among | None]) -> None:
        run, units = self.run, dict[tuple[str, bool], Unit]()
        pairs: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in run.root.named_parameters():
            ranks = among(name) if p.requires_grad else None
            if ranks is None:
                continue
            unit = units.setdefault((part_name(name), ranks.experts), Unit(ranks))
            own = pairs[p] = self._own(p, ranks)
            unit.whole.append(p)
            unit.own.append(own)
            self._of[p] = unit
            p.register_post_accumulate_grad_hook(self._ready)
            wide = run.update.masters.pop(p)
            run.update.masters[own] = _rows(wide, ranks.shards).clone()
        self.units = list(units.values())[::-1]  # in the order in which backward reaches them
        for module in run.root.modules():
            for leaf, p in module.named_parameters(recurse=False):
                if p in pairs:
                    self.places.append((module, leaf, p, pairs[p]))

    def _own(self, p: nn.Parameter, ranks: Among) -> nn.Parameter:
        part = _rows(local(p.detach()), ranks.shards)
        mesh, cut = ranks.mesh, 1
        inner: tuple[Placement, ...] = ()
        if isinstance(p, DTensor):
            mesh, inner = DeviceMesh._concatenate([mesh, p.device_mesh]), p.placements
            for i, placement in enumerate(inner):  # its first dimension is already divided: rows are within parts
                cut *= p.device_mesh.size(i) if placement == Shard(0) else 1
        rows: Placement = Shard(0) if cut == 1 else _StridedShard(0, split_factor=cut)
        placements = [*[Replicate()] * (ranks.mesh.ndim - 1), rows, *inner]
        divided = DTensor.from_local(part, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
        own = nn.Parameter(divided)
        own.grad_dtype = torch.float32
        return own

    # ---- whole while computing, this rank's rows between steps ----

    def _use(self, own: bool) -> None:
        for module, leaf, whole, rows in self.places:
            module._parameters[leaf] = rows if own else whole

    def _around(self, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def whole(*args: Any) -> Tensor:
            self._use(own=False)
            try:
                return work(*args)
            finally:
                self._use(own=True)

        return whole

    def _resident(self, inner: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextmanager
        def resident(changed: bool) -> Iterator[None]:
            with inner(changed):
                yield
            if changed:
                self.share()

        return resident

    # ---- gradients ----

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Context of a micro-batch, or in a pipeline of all: due gradients are reduced during backward, and are
        complete at its end."""
        due = last or self.pipelined or self.stage == 2
        self.armed = due and not self.pipelined
        for unit in self.units:
            unit.waiting = len(unit.whole)
        self.left = list(self.units)
        yield
        self.armed = False
        while due and self.left:
            self._send()
        if due:
            self._settle()

    def _ready(self, p: Tensor) -> None:
        if not self.armed:
            return
        self._of[p].waiting -= 1  # type: ignore[index]
        while self.left and not self.left[0].waiting:  # the same order on all ranks
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        unit = self.left.pop(0)
        self._settle()
        group = unit.among.shards
        grads = [torch.zeros_like(local(p.detach()), dtype=torch.float32) if p.grad is None else local(p.grad)
                 for p in unit.whole]  # fmt: skip
        unit.sent = torch.cat([_by_rank(g, group.size()) for g in grads], 1)
        del grads
        if self.stage == 2:
            for p in unit.whole:
                p.grad = None
        unit.summed = unit.sent.new_empty(unit.sent.shape[1])
        unit.work = reduce_scatter(unit.summed, unit.sent.view(-1), group=group, async_op=True)
        self.pending = unit

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for pending reductions, and assign the results to the parameters that the optimizer sees."""
        unit, self.pending = self.pending, None
        if unit is None:
            return
        assert unit.summed is not None
        unit.work.wait()
        if unit.among.copies is not None:
            dist.all_reduce(unit.summed, group=unit.among.copies)
        start = 0
        for whole, own in zip(unit.whole, unit.own, strict=True):
            part = local(own.detach())
            self._add(whole, own, unit.summed[start : start + part.numel()].view_as(part), unit.among.shards)
            start += _width(whole, unit.among.shards)
        unit.sent = unit.summed = unit.work = None

    def _add(self, whole: nn.Parameter, own: nn.Parameter, part: Tensor, group: ProcessGroup) -> None:
        if self.stage == 1:
            if whole.grad is None:
                whole.grad = placed(torch.zeros_like(local(whole.detach()), dtype=torch.float32), whole)
            rows = _rows(local(whole.grad), group).copy_(part)
            own.grad = placed(rows, own)
        elif own.grad is None:
            own.grad = placed(part, own)
        else:
            local(own.grad).add_(part)
        for hook in (own._post_accumulate_grad_hooks or {}).values():
            hook(own)

    # ---- after the update ----

    def _end(self) -> None:
        self.share()
        if self.stage == 1:  # full again from here: the next step accumulates into all rows
            grads = [local(p.grad) for unit in self.units for p in unit.whole if p.grad is not None]
            if grads:
                torch._foreach_zero_(grads)

    @torch.no_grad()
    def share(self) -> None:
        """All-gather the updated rows of the weights."""
        for unit in self.units:
            group = unit.among.shards
            ranks = group.size()
            widths = [_width(p, group) for p in unit.whole]
            mine = local(unit.own[0].detach()).new_zeros(sum(widths))
            for own, part in zip(unit.own, mine.split(widths), strict=True):
                rows = local(own.detach()).reshape(-1)
                part[: rows.numel()] = rows
            every = mine.new_empty(ranks * len(mine))
            all_gather(every, mine, group=group)
            for p, parts in zip(unit.whole, every.view(ranks, -1).split(widths, 1), strict=True):
                into = local(p.detach())
                into.copy_(parts.reshape(-1)[: into.numel()].view_as(into))


def _each(rows: int, group: ProcessGroup) -> int:
    """Number of rows of each rank's part; the last ranks may have fewer."""
    return -(-rows // group.size())


def _rows(t: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows, without a copy."""
    each = _each(t.shape[0], group)
    return t[each * group.rank() : each * (group.rank() + 1)]


def _width(p: Tensor, group: ProcessGroup) -> int:
    """Number of elements of each rank's part, padded."""
    part = local(p.detach())
    return _each(part.shape[0], group) * (part.numel() // part.shape[0])


def _by_rank(t: Tensor, ranks: int) -> Tensor:
    """[rows, …] → [ranks, elements of each rank's part], padded."""
    short = -t.shape[0] % ranks
    if short:
        t = torch.cat([t, t.new_zeros(short, *t.shape[1:])])
    return t.reshape(ranks, -1)
