"""Optimizer states and their update in host memory or on disk.

The model's parameters are grouped into parts: embedding, each layer, head. For each part the tiered store holds the
master weights, the summed gradients and the optimizer's states. Gradients leave the device as backward produces them;
the update runs part by part on the host; new weights are copied back, or stay where they are stored (ZeRO-Offload,
arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.nn.memory.tiered_store import Tier, TieredStore, mark_host, on_host
from ridgeline.nn.parallel.collectives import local, placed
from ridgeline.runtime.gradients import clear, clip_factor
from ridgeline.runtime.optimizer import make_optimizer
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.workload import Training

_LAYER = re.compile(r"(?:^|\.)(layers\.\w+)\.")
_TILE = re.compile(r"(?:^|\.)(layers\..+\.tiles\.\d+)$")


def part_name(parameter: str) -> str:
    """embed, layers.N or head: which part of the model a parameter belongs to; a tile of a linear is a part of its
    own."""
    layer = _TILE.search(parameter) or _LAYER.search(parameter)
    if layer:
        return layer[1]
    return "embed" if re.search(r"(?:^|\.)embed\.", parameter) else "head"


@dataclass
class ParameterGroup:
    """Parameters that move and are updated together."""

    name: str
    trained: list[nn.Parameter] = field(default_factory=list)
    frozen: list[nn.Parameter] = field(default_factory=list)
    waiting: set[nn.Parameter] = field(default_factory=set)
    """Trained parameters whose gradient of this micro-batch is not yet available."""
    arrived: set[nn.Parameter] = field(default_factory=set)
    """Those that received a gradient in this step."""
    norms: list[Tensor] | None = None
    """2-norms of the gradients summed so far; None: the gradients are in memory, and the norm is computed from them."""
    inner: torch.optim.Optimizer | None = None
    groups: list[int] = field(default_factory=list)
    """Which of the engine's parameter groups each of the inner optimizer's groups corresponds to."""
    masters: list[nn.Parameter] = field(default_factory=list)

    @property
    def weights(self) -> str:
        """Key of the master weights (and, if parameters are stored there, of the frozen ones after them)."""
        return f"{self.name}.weights"

    @property
    def states(self) -> str:
        """Key of the optimizer's states."""
        return f"{self.name}.states"

    def gradients(self, turn: int = 0) -> str:
        """Key of the summed gradients; a delayed update alternates between two."""
        return f"{self.name}.gradients{turn or ''}"


def parts_of(model: nn.Module) -> list[ParameterGroup]:
    """The model's parts, in forward order; shared parameters belong to the first part that uses them."""
    found: dict[str, ParameterGroup] = {}
    for name, p in model.named_parameters():
        part = found.setdefault(part_name(name), ParameterGroup(part_name(name)))
        (part.trained if p.requires_grad else part.frozen).append(p)
    return list(found.values())


def disk_bytes(parts: list[ParameterGroup], weights: Tier, states: Tier, optimizer: str, masters: bool) -> int:
    """Upper bound on the bytes that this rank writes to disk: weights, and gradients with moments (and ``masters``
    separate from the weights), rounded up to pages."""
    held = (2 if optimizer == "adamw" else 0) + masters
    total = 0
    for part in parts:
        trained = sum(local(p.detach()).nbytes for p in part.trained)
        frozen = sum(local(p.detach()).nbytes for p in part.frozen)
        updated = 4 * sum(local(p.detach()).numel() for p in part.trained)
        tensors = len(part.trained) * (2 + held) + len(part.frozen)
        total += (trained + frozen) * (weights == "disk") + updated * (1 + held) * (states == "disk")
        total += tensors * 64 + 4 * 4096
    return total


@dataclass
class HostStates:
    """Master weights, gradients and optimizer states of one rank in the tiered store, and their update.

    ``rest``: parameters have no copy on the device between uses, so that the masters are the only copy. ``delayed``:
    each update runs in a thread during the next step and is applied one step late (arXiv:2101.06840, section 5.2), so
    that the device never sees the last one.

    For 16-bit weights the run's fp32 masters are stored with the optimizer's states; gradients are received and new
    weights returned in 16 bits, and are summed and updated in fp32 (section 4.1).
    """

    run: TrainBuild
    store: TieredStore
    states: Tier = "cpu"
    weights: Tier = "cpu"
    rest: bool = False
    delayed: bool = False
    parts: list[ParameterGroup] = field(default_factory=list)
    factor: Tensor | None = None
    """Clipping factor for the gradients; None: no clipping."""
    left: Callable[[ParameterGroup], None] = lambda part: None
    """Called when a part's gradients have left the device in backward: nothing there needs its weights any more."""
    _of: dict[nn.Parameter, ParameterGroup] = field(default_factory=dict)
    _buffer: int = 0
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def __post_init__(self) -> None:
        run = self.run
        self.parts = self.parts or parts_of(run.root)
        self.late = run.gradients.keep or bool(run.gradients.after_backward)
        """Whether gradients are complete only after backward, and are copied then."""
        self.wide = dict(run.update.masters)
        """Masters of 16-bit weights, until optimizers take them."""
        self.low = run.update.weights_16bit if self.wide else None
        """The dtype of those weights; None: the masters are the weights."""
        run.update.masters.clear()
        for part in self.parts:
            held = part.trained + (part.frozen if self.rest else [])
            if held and (self.rest or not self.low):
                self.store.put(part.weights, [local(p.detach()) for p in held], self.weights)
            for p in part.trained:
                self._of[p] = part
                if not self.late:
                    p.register_post_accumulate_grad_hook(self._ready)
        run.update.make_optimizer = lambda groups, w: HostOptimizer(self, groups, w)
        run.gradients.norm, run.gradients.clip, run.gradients.clear, run.hooks.resident = (
            self.norm,
            self.clip,
            self.clear,
            self._resident(run.hooks.resident),
        )
        if self.late:
            run.gradients.after_backward.append(self._collect)
        else:
            run.sync = self._around(run.sync)

    # ---- gradients ----

    def _around(self, sync: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextmanager
        def around(last: bool) -> Iterator[None]:
            for part in self.parts:
                part.waiting = set(part.trained)
            with sync(last):
                yield
            self._collect()  # parts of which some parameters did not take part

        return around

    def _ready(self, p: Tensor) -> None:
        part = self._of[p]  # type: ignore[index]
        part.waiting.discard(p)
        if not part.waiting:
            self._leave(part)
            self.left(part)

    def _collect(self) -> None:
        for part in self.parts:
            if any(p.grad is not None for p in part.trained):
                self._leave(part)

    @torch.no_grad()
    def _leave(self, part: ParameterGroup) -> None:
        """Add the part's gradients to those in the store, and free them on the device."""
        came = [p for p in part.trained if p.grad is not None]
        grads = [local(p.grad) if p.grad is not None else torch.zeros_like(local(p)) for p in part.trained]
        if part.inner is None:
            raise RuntimeError("another technique replaced the optimizer that the host's states belong to")
        part.norms = self.store.send(part.gradients(self._buffer), grads, add=bool(part.arrived), wire=self.low)
        part.arrived.update(came)
        del grads
        if not self.run.gradients.keep:
            for p in came:
                p.grad = None

    @torch.no_grad()
    def norm(self, parameters: list[nn.Parameter], copies: dict[nn.Parameter, int], world: int) -> Tensor:
        """Like :func:`ridgeline.runtime.gradients.global_norm`, for the gradients in the store."""
        total = torch.zeros((), dtype=torch.float64)
        self.store.sync()
        for part in self.parts:
            if not part.arrived:
                continue
            norms = part.norms or torch._foreach_norm(self.store.open(part.gradients(self._buffer)))
            for p, norm in zip(part.trained, norms, strict=True):
                total += norm.double().square() / copies.get(p, 1)
        total = total.to(self.run.device)
        if world > 1:
            dist.all_reduce(total)
        return total.sqrt().float()

    def clip(self, parameters: list[nn.Parameter], norm: Tensor, limit: float, scale: float = 1.0) -> None:
        """Like :func:`ridgeline.runtime.gradients.clip`; the factor is applied together with the gradients."""
        factor = clip_factor(norm, limit, scale)
        self.factor = None if factor is None else factor.cpu()

    def clear(self, parameters: list[nn.Parameter], keep: bool) -> None:
        """Drop the gradients, on the host and on the device."""
        self.reset()
        clear(parameters, keep)

    def reset(self) -> None:
        """Discard the step's gradients."""
        for part in self.parts:
            part.arrived, part.norms = set(), None
        self.factor = None

    # ---- the update ----

    def make_inner(self, groups: list[dict[str, Any]], w: Training) -> None:
        """Create one optimizer per part over its master weights, with its states in the store."""
        for part in self.parts:
            if not part.trained:
                continue
            with on_host():
                part.masters = [nn.Parameter(t) for t in self._first_masters(part)]
                of = dict(zip(part.trained, part.masters, strict=True))
                mine = {i: [of[p] for p in g["params"] if p in of] for i, g in enumerate(groups)}
                part.inner = make_optimizer([{**groups[i], "params": m} for i, m in mine.items() if m], w)
                part.groups = [i for i, m in mine.items() if m]
                self._first_states(part)
            gradients = [torch.zeros_like(m) for m in part.masters]
            for turn in (0, 1) if self.delayed else (0,):
                self.store.put(part.gradients(turn), gradients, self.states)
            if part.weights in self.store:
                self.store.close(part.weights, changed=False)

    def _first_masters(self, part: ParameterGroup) -> list[Tensor]:
        if not self.low:
            return self.store.open(part.weights)[: len(part.trained)]
        wide = [self.wide.pop(p) for p in part.trained]
        return [t if t.is_meta else mark_host(t.cpu().clone()) for t in wide]

    def _first_states(self, part: ParameterGroup) -> None:
        """Create the optimizer's states now, as zeros, with a step at learning rate 0."""
        assert part.inner is not None
        lengths = [g["lr"] for g in part.inner.param_groups]
        for g in part.inner.param_groups:
            g["lr"] = 0.0
        for m in part.masters:
            m.grad = torch.zeros_like(m)
        part.inner.step()
        found: list[tuple[dict[str, Any], str]] = []
        for m in part.masters:
            m.grad = None
            state = part.inner.state.get(m, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    mark_host(value.zero_())
                    if value.ndim:
                        found.append((state, key))
        for g, length in zip(part.inner.param_groups, lengths, strict=True):
            g["lr"] = length
        masters = part.masters if self.low else []
        if masters or found:
            values = [*(m.detach() for m in masters), *(state[key] for state, key in found)]
            held = self.store.put(part.states, values, self.states)
            for m, t in zip(masters, held, strict=False):
                m.data = t
            for (state, key), t in zip(found, held[len(masters) :], strict=True):
                state[key] = t

    def step(self, lengths: list[float]) -> None:
        """Apply the step's gradients; ``lengths``: the learning rate of each parameter group."""
        todo = [(part, set(part.arrived)) for part in self.parts if part.arrived]
        if not self.delayed:
            self._apply(todo, self.factor, lengths, self._buffer)
            return
        self.join()
        for part in self.parts:  # what the update with the previous step's gradients produced
            if part.trained:
                self._back(part)
        work = (todo, self.factor, list(lengths), self._buffer)
        self._buffer = 1 - self._buffer
        self._thread = threading.Thread(target=self._beside, args=work, name="delayed update", daemon=True)
        self._thread.start()

    def _beside(self, *work: Any) -> None:
        try:
            self._apply(*work)
        except BaseException as e:
            self._failure = e

    def join(self) -> None:
        """Wait for the delayed update; re-raises its exception."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @torch.no_grad()
    def _apply(self, todo: list[tuple[ParameterGroup, set[nn.Parameter]]], factor: Tensor | None, lengths: list[float],
               turn: int) -> None:  # fmt: skip
        for at, (part, arrived) in enumerate(todo, 1):
            if at < len(todo):
                for key in self._keys(todo[at][0], turn):
                    self.store.prefetch(key)
            keys = self._keys(part, turn)
            with on_host():
                opened = [self.store.open(key) for key in keys]
                gradients = opened[0]
                if factor is not None:
                    torch._foreach_mul_(gradients, factor)
                for p, m, g in zip(part.trained, part.masters, gradients, strict=True):
                    m.grad = g if p in arrived else None
                assert part.inner is not None
                for i, group in zip(part.groups, part.inner.param_groups, strict=True):
                    group["lr"] = lengths[i]
                part.inner.step()
                for m in part.masters:
                    m.grad = None
                if self.rest and self.low:
                    self._copy(self.store.open(part.weights)[: len(part.masters)], part.masters)
            if not self.rest and not self.delayed:
                self._back(part)
            for key in keys:
                self.store.close(key, changed=key != keys[0])

    def _keys(self, part: ParameterGroup, turn: int) -> list[str]:
        keys = [part.gradients(turn), part.weights, part.states]
        return [k for k in keys if k in self.store]

    def _back(self, part: ParameterGroup) -> None:
        """Copy new weights to the device."""
        into = [local(p.detach()) for p in part.trained]
        if not self.low:
            self.store.get(part.weights, into)()
            return
        with on_host():
            low = [m.detach().to(self.low) for m in part.masters]
        self.store.copy("h2d", into, low)()

    # ---- checkpoints ----

    def _resident(self, inner: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextmanager
        def resident(changed: bool) -> Iterator[None]:
            """Context in which everything is in memory, to be read or overwritten: states, and parameters if they are
            stored there."""
            self.join()
            self.store.finish()
            keys = [k for part in self.parts for k in (part.weights, part.states) if k in self.store]
            for key in keys:
                self.store.open(key)
            try:
                with inner(changed):
                    yield
            finally:
                if changed and not (self.delayed or self.rest or self.low):
                    for part in self.parts:  # a delayed update's masters are ahead of the device
                        self._copy(part.masters, part.trained)
                for key in keys:
                    self.store.close(key, changed)

        return resident

    @torch.no_grad()
    def _copy(self, into: Iterable[Tensor], source: Iterable[Tensor]) -> None:
        for a, b in zip(into, source, strict=True):
            local(a.detach()).copy_(local(b.detach()))


class HostOptimizer(torch.optim.Optimizer):
    """The optimizer that the engine sees: parameter groups of the device's parameters, with states and update on the
    host."""

    def __init__(self, host: HostStates, groups: list[dict[str, Any]], w: Training) -> None:
        empty = [{**g, "params": [torch.zeros(1, requires_grad=True)]} for g in groups]
        options = make_optimizer(empty, w).param_groups
        named = [{**o, "params": g["params"]} for o, g in zip(options, groups, strict=True)]
        super().__init__(named, {})
        self.host = host
        host.make_inner(groups, w)
        for part in host.parts:
            for p, m in zip(part.trained, part.masters, strict=True):
                assert part.inner is not None
                state = {k: as_part_of(v, p) for k, v in part.inner.state.get(m, {}).items()}
                if host.delayed or host.low:
                    state["master"] = as_part_of(m.data, p)
                if state:
                    self.state[p] = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the update on the host."""
        self.host.step([g["lr"] for g in self.param_groups])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states in place, wherever they are stored."""
        load_in_place(self, state_dict)


@torch.no_grad()
def load_in_place(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Copy a state dict into an optimizer's existing state tensors, wherever they are stored."""
    order = [p for g in optimizer.param_groups for p in g["params"]]
    keys = [key for g in state_dict["param_groups"] for key in g["params"]]  # numbers or names, in the same order
    of = dict(zip(keys, order, strict=True))
    for name, theirs in state_dict["state"].items():
        mine = optimizer.state[of[name]]
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                local(mine[key]).copy_(local(value))
            else:
                mine[key] = value
    for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        mine.update({k: v for k, v in theirs.items() if k != "params"})


def as_part_of(value: Any, p: nn.Parameter) -> Any:
    """A state tensor of this rank's part of ``p``, distributed like ``p``; numbers and counters are unchanged."""
    return placed(value, p) if isinstance(value, Tensor) and value.ndim else value
