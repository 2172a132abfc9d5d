"""Selects the kernels for a tensor: compiled C++ on the CPU, Triton on CUDA, or none."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ridgeline.nn.kernels import native
from ridgeline.nn.kernels.native import TYPES


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed, and compiles for the GPU if there is one: from Ampere on (compute capability
    8.0)."""
    old = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0)
    return importlib.util.find_spec("triton") is not None and not old


@lru_cache(maxsize=8)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; for tensors without a GPU, those of an H100."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(maxsize=8)
def has_float8(device: torch.device) -> bool:
    """Whether the device converts to float8 and multiplies it (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Whether the device is of Hopper's architecture."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def observed() -> bool:
    """Whether what runs must be PyTorch's own operators: they are counted, traced, placed or differentiated in other
    ways."""
    return (
        _get_current_dispatch_mode() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or not torch._C._get_mkldnn_enabled()
    )


_library_was_last = False


def note_library() -> None:
    """Say that a library's kernel was launched, which lets none start before it is done. For all threads and devices:
    what is asked of it changes no result."""
    global _library_was_last
    _library_was_last = True


def library_was_last() -> bool:
    """Whether one was said to be launched since this was asked last."""
    global _library_was_last
    was, _library_was_last = _library_was_last, False
    return was


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels support these tensors: plain tensors on one kind of device, of a supported dtype."""
    cuda: bool | None = None
    for t in tensors:  # in a loop that ends early: it is asked several times a layer
        if t is None:
            continue
        if type(t) not in (Tensor, torch.nn.Parameter) or t.dtype not in TYPES:
            return False
        here = t.is_cuda
        if not here and not t.is_cpu:
            return False
        if cuda is None:
            cuda = here
        if cuda != here or (here and t.dtype == torch.float64):
            return False
    if cuda is None:
        return False
    return has_triton() if cuda else native.library() is not None


def on_gpu(*tensors: Tensor) -> bool:
    """Whether our kernels compute with these, of any dtype: plain tensors on a GPU, unless a compiler is to see
    PyTorch's operators, which it fuses itself."""
    plain = all(t.is_cuda and type(t) in (Tensor, torch.nn.Parameter) and t.is_contiguous() for t in tensors)
    return plain and has_triton() and not torch.compiler.is_compiling()


def call(name: str, *args: Any, **more: Any) -> Any:
    """Call a kernel on the device of its tensors; see ``cpu.cpp`` for the arguments. ``more``, which is left out where
    it is None or 0, is for a GPU's (:mod:`~ridgeline.nn.kernels.gpu`): ``columns`` of a row that a thread block holds
    at a time, for norms and softmax, all of them if 0 (a CPU's kernels walk rows in any case); and what is found or
    written beside results."""
    if next(a for a in args if isinstance(a, Tensor)).is_cuda:
        from ridgeline.nn.kernels import gpu

        given = {k: v for k, v in more.items() if not (v is None or (isinstance(v, int) and v == 0))}
        return gpu.call(name, *args, **given)
    return native.call(name, *args)
