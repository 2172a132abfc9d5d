"""Paged optimizer states: kept in host memory and copied to the device while their page is updated (arXiv:2305.14314,
section 3, where CUDA's unified memory moves the pages).

A page is the states of one part of the model: embedding, a layer, head. Its host memory is pinned where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.tiered_store import TieredStore, making
from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.host_optimizer import as_part_of, load_in_place, parts_of
from ridgeline.runtime.optimizer import MakeOptimizer
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.workload import Training


@dataclass
class _Page:
    key: str
    places: list[tuple[nn.Parameter, str]]
    """Parameter and state of each tensor in the store, in the store's order."""
    inner: torch.optim.Optimizer
    groups: list[int]
    """Which of the engine's parameter groups each of the inner optimizer's groups corresponds to."""


class PagedOptimizer(torch.optim.Optimizer):
    """Runs the workload's optimizer on one page after another; ``state`` exposes the host's tensors."""

    def __init__(self, run: TrainBuild, store: TieredStore, groups: list[dict[str, Any]], w: Training,
                 make: MakeOptimizer) -> None:  # fmt: skip
        options = make([{**g, "params": [torch.zeros(1, requires_grad=True)]} for g in groups], w).param_groups
        super().__init__([{**o, "params": g["params"]} for o, g in zip(options, groups, strict=True)], {})
        self.store = store
        self.pages: list[_Page] = []
        for part in parts_of(run.root):
            mine = {i: [p for p in g["params"] if p in set(part.trained)] for i, g in enumerate(groups)}
            mine = {i: ps for i, ps in mine.items() if ps}
            if mine:
                inner = make([{**groups[i], "params": ps} for i, ps in mine.items()], w)
                self._rest(part.name, part.trained, inner, list(mine))

    @torch.no_grad()
    def _rest(self, name: str, trained: list[nn.Parameter], inner: torch.optim.Optimizer, groups: list[int]) -> None:
        """Create a page's states with a step at learning rate 0, and move them into the store."""
        lengths = [g["lr"] for g in inner.param_groups]
        for g in inner.param_groups:
            g["lr"] = 0.0
        for p in trained:
            p.grad = torch.zeros_like(p)
        inner.step()
        for g, length in zip(inner.param_groups, lengths, strict=True):
            g["lr"] = length
        places: list[tuple[nn.Parameter, str]] = []
        for p in trained:
            p.grad = None
            for key, value in inner.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    places.append((p, key))
                elif isinstance(value, Tensor):
                    value.zero_()
            if inner.state.get(p):
                self.state[p] = dict(inner.state[p])
        page = _Page(f"{name}.paged", places, inner, groups)
        if places:
            held = self.store.put(page.key, [local(inner.state[p][key]) for p, key in places], "cpu")
            for (p, key), t in zip(places, held, strict=True):
                self.state[p][key] = inner.state[p][key] = as_part_of(t, p)
        self.pages.append(page)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy each page to the device, update its parameters, and copy it back."""
        for page in self.pages:
            for i, group in zip(page.groups, page.inner.param_groups, strict=True):
                group["lr"] = self.param_groups[i]["lr"]
            with making("optimizer"):
                here = [torch.empty_like(local(p.detach())) for p, _ in page.places]
            if here:
                self.store.get(page.key, here)()
            for (p, key), t in zip(page.places, here, strict=True):
                page.inner.state[p][key] = as_part_of(t, p)
            page.inner.step()
            if here:
                self.store.send(page.key, here)
            for p, key in page.places:
                page.inner.state[p][key] = self.state[p][key]
            del here
        self.store.sync()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states into the existing host memory."""
        load_in_place(self, state_dict)


def page_states(run: TrainBuild) -> None:
    """Make the run's optimizer keep its states in host memory."""
    store = run.store = run.store or TieredStore(run.device)
    inner = run.update.make_optimizer
    run.update.make_optimizer = lambda groups, w: PagedOptimizer(run, store, groups, w, inner)
