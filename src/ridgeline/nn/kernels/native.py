"""Loads the C++ kernels and calls them on tensors.

They come with the wheel, or are compiled at first use. The library uses no torch headers, so that it compiles in
seconds; it is cached under Ridgeline's home by a digest of its source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.nn.kernels import compiling
from ridgeline.paths import cache_dir

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
E8M0 = 4
"""Scales that are powers of two, as their exponents in uint8."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with one warning that gives the reason, if there is no working compiler."""
    place = compiling.shipped(_processor()) or _compiled()
    if place is None:
        return None
    try:
        loaded = ctypes.CDLL(str(place))
    except OSError as e:
        _without(f"they do not load: {e}")
        return None
    loaded.rl_cross_entropy.restype = ctypes.c_double
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.rl_lowbit_linear.argtypes = [ctypes.POINTER(Linear), pointer, whole, pointer, *(whole,) * 4]
    loaded.rl_paged_attention.argtypes = [pointer, pointer, *(ctypes.POINTER(Cache),) * 2, ctypes.POINTER(Pages),
                                          *(whole,) * 5, ctypes.POINTER(Changes), whole]  # fmt: skip
    loaded.rl_decode.argtypes = [ctypes.POINTER(Step), ctypes.POINTER(Layer), whole, whole]
    loaded.rl_sample.argtypes = [pointer, whole, whole, ctypes.POINTER(Choice), pointer, whole]
    loaded.rl_lowbit_expand.argtypes = [ctypes.POINTER(Linear), whole, whole, pointer, whole, whole]
    loaded.rl_dense_linear.argtypes = [ctypes.POINTER(Linear), pointer, pointer, *(whole,) * 3]
    loaded.rl_norm.argtypes = [ctypes.POINTER(Norm), pointer, pointer, whole, whole]
    loaded.rl_finite.argtypes = [pointer, whole, whole, pointer, whole]
    for function in (loaded.rl_lowbit_linear, loaded.rl_lowbit_expand, loaded.rl_dense_linear,
                     loaded.rl_paged_attention, loaded.rl_decode, loaded.rl_sample, loaded.rl_norm,
                     loaded.rl_finite):  # fmt: skip
        function.restype = None
    return loaded


def _compiled() -> Path | None:
    """The library for this processor, compiled if it is not there yet; None without a working compiler."""
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)
    if compiler is None:
        _without(f"there is no compiler {named!r}, which CXX names" if named else "no C++ compiler is installed")
        return None
    texts = [p.read_text(encoding="utf-8") for p in (*compiling.SOURCES, *compiling.HEADERS)]
    inputs = "\0".join([*texts, compiler, *compiling.FLAGS, *compiling.options(), _processor(), torch.__version__])
    place = cache_dir() / "kernels" / f"cpu-{hashlib.blake2b(inputs.encode(), digest_size=10).hexdigest()}.so"
    try:
        if not place.exists():
            compiling.compile_kernels(compiler, place, compiling.options())
    except (OSError, subprocess.SubprocessError) as e:
        lines = (getattr(e, "stderr", b"") or str(e).encode()).decode(errors="replace").strip().splitlines()
        _without(f"they do not compile: {next((line for line in lines if 'error' in line), lines[-1])}")
        return None
    return place


def _without(why: str) -> None:
    warnings.warn(f"fused CPU kernels are off, plain operators take their place: {why}", stacklevel=3)


def instructions() -> str:
    """The instruction set that the kernels use here, of those that a wheel has libraries for."""
    return next(iter(compiling.levels(_processor())), platform.machine())


def _processor() -> str:
    """What ``-march=native`` depends on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor() or platform.machine()


def call(name: str, *args: Tensor | float | int | None) -> float:
    """Call a kernel: tensors go as pointers, integers as 64-bit numbers, the number of threads last."""
    found = library()
    assert found is not None
    values: list[object] = []
    for a in args:
        if a is None:
            values.append(ctypes.c_void_p(None))
        elif isinstance(a, Tensor):
            values.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, (bool, int)):
            values.append(ctypes.c_int64(a))
        else:
            values.append(ctypes.c_double(a))
    result: float = getattr(found, name)(*values, ctypes.c_int64(torch.get_num_threads()))
    return result


# ---- inference: structures as in decoder.cpp ------------------------------------------------------------------------


def _fields(pointers: str, numbers: str = "", reals: str = "") -> list[tuple[str, type]]:
    return [*((n, ctypes.c_void_p) for n in pointers.split()), *((n, ctypes.c_int64) for n in numbers.split()),
            *((n, ctypes.c_double) for n in reals.split())]  # fmt: skip


class Linear(ctypes.Structure):
    """A linear layer: ``kind`` 0 dense, 4 or 8 in codes, 2 in 4-bit floating point."""

    _fields_ = [("kind", ctypes.c_int64), *_fields("weight scale zero bias", "type out width group")]


class Norm(ctypes.Structure):
    """A norm; without a weight there is none."""

    _fields_ = _fields("weight bias", "type centered", "eps")


class Cache(ctypes.Structure):
    """Keys or values: ``store`` 0 plain, 1 int8, 2 int4 (``type``: its group), 3 fp8."""

    _fields_ = _fields("rows scale least", "store type")


class Pages(ctypes.Structure):
    """Where the tokens of each sequence are in a cache."""

    _fields_ = _fields("table lengths", "blocks block slots sequence")


class Changes(ctypes.Structure):
    """What attention does to its scores: ALiBi's slopes and sinks (fp32 [heads] or null), a soft cap (0: none)."""

    _fields_ = _fields("slopes sinks", "", "cap")


class Layer(ctypes.Structure):
    """A decoder layer."""

    _fields_ = [
        *((n, Norm) for n in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((n, Linear) for n in ("q", "k", "v", "o", "gate", "up", "down", "router")),
        *_fields("experts", "chosen normalized"),
        ("keys", Cache), ("values", Cache), ("window", ctypes.c_int64),
        ("changes", Changes),
    ]  # fmt: skip


class Step(ctypes.Structure):
    """One step of all layers."""

    _fields_ = [*_fields("x cosine sine at slots"), ("pages", Pages),
                *_fields("", "rows hidden heads groups width inner act turns", "query_scale residual")]  # fmt: skip


class Choice(ctypes.Structure):
    """How a row's token is chosen; ``temperature`` 0: the likeliest, ``top_k`` 0: no limit."""

    _fields_ = [*_fields("", "", "temperature top_p min_p uniform"), ("top_k", ctypes.c_int64)]


_SMALL = 1 << 17
"""Products up to which one thread is faster than several."""


def lowbit_linear(t: Linear, x: Tensor, y: Tensor, exact: bool) -> None:
    """``y`` [M, out] = ``x`` [M, in] · Wᵀ + bias. Both are contiguous."""
    found = library()
    assert found is not None
    threads = 1 if x.shape[0] * t.out * t.width < _SMALL else torch.get_num_threads()
    found.rl_lowbit_linear(t, x.data_ptr(), TYPES[x.dtype], y.data_ptr(), TYPES[y.dtype], x.shape[0], exact, threads)


def lowbit_expand(t: Linear, start: int, stop: int, y: Tensor) -> None:
    """``y`` [stop - start, in] = rows of a weight in codes."""
    found = library()
    assert found is not None
    found.rl_lowbit_expand(t, start, stop, y.data_ptr(), TYPES[y.dtype], torch.get_num_threads())


def dense_linear(t: Linear, x: Tensor, y: Tensor) -> None:
    """``y`` [M, out] = ``x`` [M, in] (fp32) · Wᵀ + bias of a dense weight, for few rows. Both are contiguous."""
    found = library()
    assert found is not None
    found.rl_dense_linear(t, x.data_ptr(), y.data_ptr(), TYPES[y.dtype], x.shape[0], torch.get_num_threads())


def paged_attention(
    q: Tensor, keys: Cache, values: Cache, pages: Pages, groups: int, window: int, changes: Changes
) -> Tensor:
    """Attention of ``q`` [B, H, D] (fp32, contiguous, scaled) over the cache → [B, H, D]."""
    found = library()
    assert found is not None
    out = torch.empty_like(q)
    found.rl_paged_attention(q.data_ptr(), out.data_ptr(), keys, values, pages, q.shape[0], q.shape[1], groups,
                             q.shape[2], window, changes, torch.get_num_threads())  # fmt: skip
    return out


def norm(described: Norm, x: Tensor, y: Tensor) -> None:
    """``y`` = the norm of few rows ``x`` [R, size], both fp32 and contiguous."""
    found = library()
    assert found is not None
    found.rl_norm(described, x.data_ptr(), y.data_ptr(), *x.shape)


def finite(logits: Tensor) -> list[bool]:
    """Which rows of ``logits`` [R, V] (fp32, contiguous) have a finite largest one and no NaN."""
    found = library()
    assert found is not None
    rows, width = logits.shape
    good = (ctypes.c_int8 * rows)()
    found.rl_finite(logits.data_ptr(), rows, width, good, torch.get_num_threads())
    return [bool(g) for g in good]


def sample(logits: Tensor, choices: list[tuple[float, float, float, float, int]]) -> list[int]:
    """A token for each row of ``logits`` [R, V] (fp32, contiguous), by (temperature, top-p, min-p, number in [0, 1),
    top-k) of each; -1 for a row without a finite logit."""
    found = library()
    assert found is not None
    rows, width = logits.shape
    tokens, asked = (ctypes.c_int64 * rows)(), (Choice * rows)(*(Choice(*c) for c in choices))
    found.rl_sample(logits.data_ptr(), rows, width, asked, tokens, torch.get_num_threads())
    return list(tokens)


def decode(step: Step, layers: ctypes.Array[Layer]) -> None:
    """Decoder layers, in place."""
    found = library()
    assert found is not None
    found.rl_decode(step, layers, len(layers), torch.get_num_threads())
