"""Counts what a step launches on a device and what the host waits for, by file and line, on fake tensors.

Operators that only make views or allocate launch nothing; every other one counts as one launch, of which a few
(sorting, some indexing) make more. Questions whose answers are data (``item``, ``tolist``) get plausible constants.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
from ridgeline.nn.memory.meter import tensors_in

ROOT = Path(ridgeline.__file__).parent
_HERE = Path(__file__).parent
_FREE = frozenset({
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "as_strided", "unsqueeze", "squeeze",
    "permute", "alias", "detach", "split", "split_with_sizes", "unbind", "_reshape_alias", "unfold", "diagonal",
    "lift_fresh", "view_as", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
    "empty_permuted", "set_", "resize_", "detach_", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset",
    "device", "layout", "dtype", "is_pinned", "size", "stride", "numel", "dim", "is_contiguous", "_pin_memory",
    "movedim", "chunk", "narrow", "real", "is_same_size", "lift",
})  # fmt: skip
_MAYBE = frozenset({"to", "reshape", "contiguous", "flatten", "unflatten", "type_as"})
"""Operators that only make a view where they can."""
_BY_DATA = frozenset({
    "nonzero", "masked_select", "unique", "unique_dim", "_unique", "_unique2", "bincount", "equal", "is_nonzero",
    "unique_consecutive",
})  # fmt: skip
"""Operators whose results' sizes are data: the host waits for them."""


@cache
def _within(name: str) -> str:
    """A file's name within the package; empty: it is not of it, or traces."""
    file = Path(name)
    return str(file.relative_to(ROOT)) if ROOT in file.parents and _HERE not in file.parents else ""


def place() -> str:
    """The line of the package that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _within(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def answer(t: Tensor) -> Any:
    """A number that might be in ``t``."""
    return True if t.dtype == torch.bool else 0.5 if t.is_floating_point() else 1


class Tracer(TorchDispatchMode):
    """Counts while it is entered; :meth:`reset` begins again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.muted = 0
        """Above 0: stand-ins are computing what a device has one kernel for."""
        self.recorded: Counter[str] | None = None
        """Launches that a CUDA graph records just now, during which the host cannot wait; None: none does."""
        self.total = 0
        """Launches since the beginning, which :meth:`reset` leaves."""
        self._pinned: dict[int, StorageWeakRef] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.operators: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.behind: int | None = None
        """Least number of launches that were queued behind what the host waited for: the device's work meanwhile."""
        self.wrong: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()
        """Kernels of replayed graphs, which the host does not launch."""

    def pin(self, t: Tensor) -> Tensor:
        """A tensor whose memory is taken to be pinned from now on."""
        self._pinned = {at: ref for at, ref in self._pinned.items() if not ref.expired()}
        ref = StorageWeakRef(t.untyped_storage())  # while it is held, no other storage has the address
        self._pinned[ref.cdata] = ref
        return t

    def launched(self, name: str) -> None:
        """Count a launch, unless it is captured for later."""
        if self.muted:
            return
        if self.recorded is not None:
            self.recorded[name] += 1
            return
        self.operators[name] += 1
        self.total += 1
        self.places[place()] += 1

    def waited(self, kind: str, behind: int = 0) -> None:
        """Count a wait of the host, ``behind`` which the device has that many launches left to do. Raises
        :class:`RuntimeError` while a graph is captured, as CUDA does."""
        if self.recorded is not None:
            raise RuntimeError(f"{kind} at {place()}: the host cannot wait while a CUDA graph is captured")
        if not self.muted:
            self.waits[kind, place()] += 1
            self.behind = behind if self.behind is None else min(self.behind, behind)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        given = tensors_in(args, kwargs)
        on_device = any(t.device.type == "cuda" for t in given)
        if name in ("_local_scalar_dense", "item"):
            return self._read(args[0])
        self._transfers(name, args, kwargs)
        if on_device and name in _BY_DATA:
            self.waited(name)
            return self._sized(name, func, args, kwargs)
        try:
            out = self._computed(func, given, args, kwargs)
        except Exception as e:
            self.wrong[f"{name}: {type(e).__name__}: {str(e)[:160]} at {place()}"] += 1
            raise
        made = tensors_in(out)
        if kwargs.get("pin_memory"):
            list(map(self.pin, made))
        if name in _MAYBE and made and made[0].untyped_storage()._cdata == given[0].untyped_storage()._cdata:
            return out
        if name not in _FREE and (on_device or any(t.device.type == "cuda" for t in made)):
            self.launched(name)
        return out

    @staticmethod
    def _computed(func: Any, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # a constant that the fake mode would compute for real
            for t in given:
                if isinstance(t, FakeTensor):
                    t.constant = None
            return func(*args, **kwargs)

    def _read(self, t: Tensor) -> Any:
        if t.device.type == "cuda":
            self.waited("item")
        elif not isinstance(t, FakeTensor):
            return t.detach().double().numpy().reshape(-1)[0].item() if t.is_floating_point() else int(t)
        return answer(t) if t.device.type == "cuda" or not t.is_floating_point() else 1.0

    def _transfers(self, name: str, args: Any, kwargs: Any) -> None:
        """Waits for copies between the host and the device, and for indices on the host."""
        if name in ("_to_copy", "copy_", "copy"):
            source = args[0] if name == "_to_copy" else args[1]
            target = torch.device(kwargs.get("device") or source.device) if name == "_to_copy" else args[0].device
            free = kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True)
            kinds = {source.device.type, target.type}
            if (
                isinstance(source, Tensor)
                and kinds == {"cpu", "cuda"}
                and not (
                    free and (name == "_to_copy" if target.type == "cpu" else self._from_pinned(source))
                )  # to the host: into pinned memory of its own
            ):
                self.waited("copy to the device" if target.type == "cuda" else "copy to the host")
        elif name in ("index", "index_put", "index_put_") and args[0].device.type == "cuda":
            which = [i for i in args[1] if isinstance(i, Tensor)]
            if any(i.dtype in (torch.bool, torch.uint8) for i in which):
                self.waited("index by a mask")
            if any(i.device.type == "cpu" for i in which):
                self.waited("index from the host")
        elif name == "repeat_interleave" and args[0].device.type == "cuda":
            sized = kwargs.get("output_size") or (len(args) > 1 and not isinstance(args[1], Tensor))
            if not sized:
                self.waited("repeat_interleave")

    def _from_pinned(self, t: Tensor) -> bool:
        """Whether ``t`` is in pinned memory, from where a copy to the device does not hold up the host."""
        ref = self._pinned.get(t.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def _sized(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        self.launched(name)
        if name in ("equal", "is_nonzero"):
            return True
        if name == "nonzero":
            return torch.empty(max(1, x.numel() // 4), x.dim(), dtype=torch.int64, device=x.device)
        if name == "bincount":
            size = kwargs.get("minlength") or (args[2] if len(args) > 2 else 8)
            out = torch.empty(size, dtype=torch.int64, device=x.device)
            out.counted = x.numel()  # type: ignore[attr-defined]
            return out
        if name == "masked_select":
            return x.new_empty(max(1, x.numel() // 4))
        return func(*args, **kwargs)

    def summary(self) -> dict[str, Any]:
        """What was counted, as plain data."""
        return {
            "launches": sum(self.operators.values()),
            "replayed": sum(self.replayed.values()),
            "kernels": dict(self.replayed.most_common()),
            "behind": self.behind or 0,
            "operators": dict(self.operators.most_common()),
            "places": dict(self.places.most_common()),
            "waits": [{"kind": k, "place": p, "count": n} for (k, p), n in self.waits.most_common()],
            "wrong": dict(self.wrong),
        }


TRACER = Tracer()
