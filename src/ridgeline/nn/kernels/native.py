"""Compiles the C++ kernels at first use and calls them on tensors.

The library uses no torch headers, so that it compiles in seconds; it is cached under Ridgeline's home by a digest of
its source, compiler and processor. It is written to a temporary file and renamed: processes that compile at the same
time replace each other's equal result, and a killed one leaves nothing that another would wait for.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.paths import cache_dir

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",
)  # fmt: skip
COMPILE_SECONDS = 120
"""Timeout of the compilation in seconds (a busy machine takes ten)."""
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with one warning that gives the reason, if there is no working compiler."""
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)
    if compiler is None:
        _without(f"there is no compiler {named!r}, which CXX names" if named else "no C++ compiler is installed")
        return None
    inputs = "\0".join([SOURCE.read_text(encoding="utf-8"), compiler, *FLAGS, _processor(), torch.__version__])
    place = cache_dir() / "kernels" / f"cpu-{hashlib.blake2b(inputs.encode(), digest_size=10).hexdigest()}.so"
    try:
        if not place.exists():
            _compile(compiler, place)
        loaded = ctypes.CDLL(str(place))
    except (OSError, subprocess.SubprocessError) as e:
        output = getattr(e, "stderr", b"") or str(e).encode()
        _without(f"they do not compile: {output.decode(errors='replace').strip().splitlines()[-1]}")
        return None
    loaded.rl_cross_entropy.restype = ctypes.c_double
    return loaded


def _compile(compiler: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        draft = Path(folder) / place.name
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(draft)], check=True, capture_output=True,
                       timeout=COMPILE_SECONDS)  # fmt: skip
        os.replace(draft, place)


def _without(why: str) -> None:
    warnings.warn(f"fused CPU kernels are off, plain operators take their place: {why}", stacklevel=3)


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
