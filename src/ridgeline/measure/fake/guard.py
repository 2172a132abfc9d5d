"""Builds and loads the device of ``guard.cpp``, once per PyTorch and compiler."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from ridgeline.paths import cache_dir
from ridgeline.spec.errors import UserError

SOURCE = Path(__file__).with_name("guard.cpp")
SECONDS = 300
"""Timeout of the compilation (a busy machine takes 30: PyTorch's headers are large)."""


def load() -> None:
    """Load the device, before torch is imported. Raises :class:`UserError` where that cannot be."""
    ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)


def _built() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch = Path(found.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise UserError("this PyTorch is built with CUDA, next to which a stand-in for it cannot be loaded",
                        "use an environment with a CPU build of PyTorch")  # fmt: skip
    named = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)
    if compiler is None:
        raise UserError("tracing on a fake GPU needs a C++ compiler", "install g++, or name one in CXX")
    digest = hashlib.blake2b(SOURCE.read_bytes() + f"{version('torch')} {compiler}".encode(), digest_size=8).hexdigest()
    place = cache_dir() / "kernels" / f"fake-cuda-{digest}.so"
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        draft = Path(folder) / place.name
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", *includes, str(SOURCE), "-o", str(draft),
                   f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"the stand-in for CUDA did not compile within {SECONDS} s", "run it again") from None
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise UserError(f"the stand-in for CUDA does not compile: {reason}", "use g++ 11 or later")
        os.replace(draft, place)
    return place
