"""How the C++ kernels are compiled: for this processor at first use, or for several kinds of processor into a wheel.

Standard library only: the build of a wheel loads this file by itself.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("cpu.cpp", "decoder.cpp", "sampler.cpp")]
HEADERS = [FOLDER / name for name in ("storage.h", "mathematics.h", "vectors.h", "lowbit.h", "dense.h", "paged.h")]
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
         "-ffp-contract=off", "-fno-tree-pre")  # fmt: skip
"""Of a compiler. Without the last, GCC copies sums that stay in registers to the stack and back (12 to 14)."""
COMPILE_SECONDS = 120
"""Timeout of the compilation in seconds (a busy machine takes ten)."""
SHIPPED = FOLDER / "compiled"
"""Where a wheel has its libraries, ``LEVEL.so``."""


class Level(NamedTuple):
    """Processors that one library is for."""

    options: tuple[str, ...]
    needs: frozenset[str]
    """What /proc/cpuinfo must list."""
    capability: str
    """What PyTorch calls as much (ATEN_CPU_CAPABILITY)."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
LEVELS = {
    "avx512-bf16": Level(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
                         _AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512"),
    "avx512-vnni": Level(("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}, "avx512"),
    "avx512": Level(("-march=x86-64-v4",), _AVX512, "avx512"),
    "avx2": Level(("-march=x86-64-v3",), _AVX2, "avx2"),
    "x86-64": Level(("-march=x86-64",), frozenset(), "default"),
} if platform.machine() in ("x86_64", "AMD64") else {platform.machine(): Level((), frozenset(), "default")}  # fmt: skip
"""What a wheel for this kind of machine contains, the best first."""


def options() -> tuple[str, ...]:
    """The compiler's options for this processor, or for as much of it as ATEN_CPU_CAPABILITY lets PyTorch use."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY", "")
    if asked in ("default", "avx2") and "x86-64" in LEVELS:
        return next(level.options for level in LEVELS.values() if level.capability == asked)
    return ("-march=native",)


def compile_kernels(compiler: str, place: Path, options: tuple[str, ...]) -> None:
    """Compile the kernels to ``place``. It is written to a temporary file and renamed: processes that compile at the
    same time replace each other's equal result, and a killed one leaves nothing that another would wait for.

    Raises :class:`subprocess.SubprocessError` or :class:`OSError` where the compiler fails.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        draft = Path(folder) / place.name
        subprocess.run([compiler, *FLAGS, *options, *map(str, SOURCES), "-o", str(draft)], check=True,
                       capture_output=True, timeout=COMPILE_SECONDS)  # fmt: skip
        os.replace(draft, place)


def levels(processor: str) -> list[str]:
    """Levels that a ``processor`` (its line of /proc/cpuinfo) has and ATEN_CPU_CAPABILITY allows, the best first."""
    has, asked = set(processor.split()), os.environ.get("ATEN_CPU_CAPABILITY", "")
    first = next((i for i, level in enumerate(LEVELS.values()) if level.capability == asked), 0)
    return [name for name in list(LEVELS)[first:] if LEVELS[name].needs <= has]


def shipped(processor: str) -> Path | None:
    """The best library of the wheel for a ``processor``; None if there is none."""
    return next((f for name in levels(processor) if (f := SHIPPED / f"{name}.so").exists()), None)
