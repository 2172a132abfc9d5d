"""Which library computes an operator on a GPU: what is installed, what can, what was measured, what the user asks for.

Our own kernel is each operator's first back end (:data:`ridgeline.spec.backends.BACKENDS`); those listed here are
optional packages, imported when one is taken. A user's wish comes first, then the seconds that ``ridgeline probe``
measured on the device, then ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.spec.backends import OURS, order
from ridgeline.spec.errors import UserError

LOW = (torch.bfloat16, torch.float16)
FLOAT8, EXPERTS, DENSE, ADAPTERS = "float8", "experts", "dense", "adapters"
"""Operators that ours compute and PyTorch's operators, too (:data:`ridgeline.spec.backends.BACKENDS`)."""
WRONG = 3e-2
"""Norm of a result's error over its norm, in 16 bits, from which on it is wrong."""
NEAR_ROOF = {"attention.decode", "merged projections", "norm", "swiglu"}
"""Operators whose own kernels reach 0.8 of an H100's roof (``benchmarks/results/gpu_h100``): attention of many
sequences, not with quantized caches; of merged projections the rotation, their product being PyTorch's."""


@dataclass(frozen=True)
class Case:
    """What an operator is to compute with, as far as it decides who can."""

    device: torch.device
    dtype: torch.dtype
    """Of what it reads."""
    out: torch.dtype | None = None
    """Of what it writes; None: the same."""
    width: int = 0
    """Of a row or a head."""
    block: int = 0
    """Tokens of a page of the cache."""
    coded: bool = False
    """Whether the cache is quantized."""

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)


@dataclass(frozen=True)
class Backend:
    """A library that can compute an operator."""

    name: str
    package: str
    """On PyPI."""
    module: str
    """What is imported of it."""
    load: Callable[[], Any]
    """Imports it, and returns what computes the operator."""
    cannot: Callable[[Case], str]
    """Why it cannot compute a case; empty: it can."""

    def missing(self) -> str:
        """Why it is not at hand; empty: it is."""
        try:
            there = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the package around a module
            there = False
        return "" if there else f"{self.package} is not installed"

    def refusal(self, case: Case) -> str:
        """Why it is not taken for a case; empty: it can be."""
        if case.device.type != "cuda":
            return "it runs on GPUs"
        return self.missing() or self.cannot(case)

    @property
    def version(self) -> str:
        """Of the package."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


OPERATORS = Backend("torch", "torch", "torch", lambda: "operators", lambda case: "")
"""PyTorch's operators, which the layers themselves call in place of our kernel."""


class NormKernel(Protocol):
    """RMS norms in the dtype of their input."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of ``x`` [..., size]."""

    def add_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + update, its norm), both [..., size]."""


class GatedKernel(Protocol):
    """SwiGLU of a merged product [rows, 2·width]."""

    def forward(self, both: Tensor) -> Tensor:
        """silu(gate) · up, [rows, width]."""

    def backward(self, both: Tensor, dy: Tensor) -> None:
        """Overwrite ``both`` by its gradient."""


class LossKernel(Protocol):
    """The head's product and the loss, without logits of a whole batch."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        """Sum of the token losses of ``x`` [N, H] under ``weight`` [V, H], with gradients."""


def registry() -> dict[str, tuple[Backend, ...]]:
    """The optional back ends of each operator."""
    from ridgeline.nn.kernels import attention_libraries as attention
    from ridgeline.nn.kernels import liger

    return {
        "attention.decode": (attention.TORCH, attention.FLASH, attention.FLASH_3),
        "attention.prefill": (attention.TORCH, attention.FLASH, attention.FLASH_3, attention.FLASHINFER),
        "norm": (liger.NORM,),
        "swiglu": (liger.SWIGLU,),
        "head_loss": (liger.HEAD_LOSS,),
        FLOAT8: (OPERATORS,),
        EXPERTS: (OPERATORS,),
        DENSE: (OPERATORS,),
        ADAPTERS: (OPERATORS,),
    }


def able(operator: str, case: Case) -> list[Backend]:
    """The optional back ends that can compute a case here."""
    return [b for b in registry()[operator] if not b.refusal(case)]


@dataclass
class Kernels:
    """The choice of back ends for one engine."""

    asked: Mapping[str, str] = field(default_factory=dict)
    """By operator, by the workload."""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds, by operator and back end."""
    taken: dict[str, str] = field(default_factory=dict)
    """Which back end computes each operator of the engine, with its version: filled by :meth:`find`."""
    slow: set[str] = field(default_factory=set)
    """Operators of our own kernels that are far from the roof."""

    def find(self, operator: str, case: Case) -> Any:
        """What computes an operator, as its back end's module says; None: our own kernel. Raises :class:`UserError`
        where the workload asks for what cannot."""
        known = {b.name: b for b in registry()[operator]}
        wish = self.asked.get(operator)
        for name in [wish] if wish else order(operator, self.measured.get(operator, {})):
            if name == OURS:
                break
            why = known[name].refusal(case)
            loaded = None
            if not why:
                try:
                    loaded = known[name].load()
                except Exception as e:  # whatever a driver or another version makes of it
                    why = f"{known[name].package} {known[name].version} does not have it ({e})"
            if loaded is not None:
                self.taken[operator] = f"{name} {known[name].version}".rstrip()
                return loaded
            if wish:
                raise UserError(f"{name} cannot compute {operator}: {why}", "leave it out of the workload's kernels")
        self.own(operator, case.device, coded=case.coded)
        return None

    def ours(self, operator: str) -> bool:
        """Whether our own kernel computes an operator, as far as there is a choice."""
        return self.taken.get(operator, OURS) == OURS

    def own(self, operator: str, device: torch.device, coded: bool = False) -> None:
        """Note that our own kernel computes an operator, if it runs on a GPU. ``coded``: from a quantized cache."""
        if device.type == "cuda":
            self.taken[operator] = OURS
            if coded or operator not in NEAR_ROOF:
                self.slow.add(operator)

    def require_used(self) -> None:
        """Raise :class:`UserError` if the workload asks for a back end of an operator that the engine does not have."""
        for operator, name in self.asked.items():
            if operator not in self.taken:
                raise UserError(
                    f"kernels: {operator}={name} is asked for, and the plan has no separate {operator} operator",
                    "leave it out, or add what has it: flash_attention in a serving engine (attention), fp8 served on"
                    " Hopper (float8) or in 16 bits (dense), quantized experts (experts), multi_adapter (adapters),"
                    " fused_layers (the others)",
                )

    def notes(self) -> list[str]:
        """What results on a GPU are labeled with."""
        ours = sorted(o for o in self.slow if self.taken.get(o) == OURS)
        others = [f"{operator}: {backend}" for operator, backend in sorted(self.taken.items()) if backend != OURS]
        notes = [f"computed by other libraries: {', '.join(others)}"] if others else []
        if ours:
            notes.append(f"reference kernel, far from the GPU's roof: our own for {', '.join(ours)}")
        return notes
