"""The Triton kernels compiled for GPUs that this machine does not have, and what the compiler made of them.

A stand-in driver names the device to Triton's own JIT, so that the kernels' host functions, called with tensors of
shapes only (device ``meta``), compile the specialization, constants, warps and grid that they get on that GPU. Nothing
is launched. Registers and spills are what ptxas reports; instructions are counted in the machine code (SASS), which
is disassembled for all kernels at once: the tool takes longer to start than to read one.

Triton must not be in its interpreter, which is chosen when it is first imported.
"""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory for one block, by compute capability (CUDA programming guide, table of technical
specifications)."""


@dataclass(frozen=True)
class Loop:
    """An innermost loop in the machine code."""

    instructions: int
    tensor: int
    """Products on tensor cores among them."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled for a device of ``capability`` (90: 9.0)."""

    kernel: str
    capability: int
    grid: tuple[int, ...]
    warps: int
    registers: int
    """Of one thread."""
    spilled: int
    """Bytes of one thread's registers that are stored to memory."""
    shared: int
    """Bytes of shared memory of one block."""
    instructions: int
    tensor: int
    """Products on tensor cores (HMMA, HGMMA, IMMA, UTCMMA and their like)."""
    warpgroup: int
    """Those of four warps at a time (wgmma) among them, which Hopper has."""
    asynchronous: int
    """Copies to shared memory that no thread waits for (cp.async, bulk copies)."""
    shared_pairs: int = 0
    """Pairs of float8 codes that are packed into words and read one by one, too: of the latter ptxas 12.8 lost some."""
    loads: dict[int, int] = field(default_factory=dict)
    """Number of loads from global memory, by their bits."""
    stores: dict[int, int] = field(default_factory=dict)
    """The same of stores to it."""
    loops: tuple[Loop, ...] = ()
    """The innermost loops, the longest first."""
    early: bool = False
    """Whether it starts before the kernel before it has ended (programmatic dependent launch)."""
    waits: int = 0
    """Where it waits for that."""
    early_accesses: int = 0
    """Accesses to global memory before the first such place."""
    seconds: float = 0.0
    """Processor time of its compilation, the assembler's included."""

    @property
    def loop(self) -> int:
        """Instructions of its longest innermost loop, one with products if there is any; of all where there is none."""
        loops = [loop for loop in self.loops if loop.tensor] or self.loops
        return loops[0].instructions if loops else self.instructions

    def row(self) -> dict[str, Any]:
        """As written to JSON."""
        names = ("kernel", "capability", "warps", "registers", "spilled", "shared", "instructions", "tensor",
                 "warpgroup", "asynchronous", "shared_pairs", "loop", "early", "waits", "early_accesses")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "grid": list(self.grid), "loads": {str(bits): n for bits, n in sorted(self.loads.items())},
            "stores": {str(bits): n for bits, n in sorted(self.stores.items())}, "seconds": round(self.seconds, 2),
        }  # fmt: skip


class Driver:
    """What Triton's JIT asks a driver. The device's number is its capability, so that each has kernels of its own."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        """The device's number."""
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where benchmarks would allocate."""
        return torch.device("meta")


class Call(NamedTuple):
    """A kernel that was called while :func:`compiling`."""

    kernel: Any
    """As Triton compiled it."""
    name: str
    capability: int
    grid: tuple[int, ...]
    seconds: float
    """Processor time of its compilation."""
    said: str
    """What the assembler said of it; empty where Triton had it from its cache."""


@contextmanager
def compiling(capability: int) -> Iterator[list[Call]]:
    """Kernels that are called inside are compiled for a device of this capability and appended to the list, which
    :func:`measured` takes."""
    if not isinstance(triton.jit(_nothing), JITFunction):
        raise RuntimeError("Triton is in its interpreter: unset TRITON_INTERPRET before it is imported")
    found: list[Call] = []
    sayings: dict[str, str] = {}
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        start, log = sum(os.times()[:4]), io.StringIO()
        with redirect_stdout(log):
            kernel = plain(self, *args, grid=grid, warmup=True, **options)
        seconds = sum(os.times()[:4]) - start
        sizes = tuple(grid(kernel.metadata) if callable(grid) else grid)
        said = sayings.setdefault(kernel.hash, log.getvalue())
        found.append(Call(kernel, self.fn.__name__, capability, sizes, seconds, said))
        return kernel

    before = driver._active
    driver.set_active(Driver(capability))
    JITFunction.run = run
    try:
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.dump_ptxas_log = True  # on standard output
            yield found
    finally:
        JITFunction.run = plain
        driver._active = before  # reset_active would look for a GPU


def _nothing() -> None:
    pass


def _tool(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run one of the tools that Triton brings."""
    place = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(place), *args], capture_output=True, text=True, check=True)


def measured(calls: list[Call]) -> list[Compiled]:
    """What the compiler made of each call's kernel; all are for the same device."""
    codes = [_code(c.kernel.asm["cubin"], c.name) for c in calls]
    if not codes:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        file.write_bytes(b"".join(codes))
        sass = _tool("nvdisasm", "--binary", _target(calls[0]).replace("sm_", "SM"), str(file)).stdout
    lines = [(int(at, 16), op, rest) for at, op, rest in _LINE.findall(sass)]
    found, start = [], 0
    for call, code in zip(calls, codes, strict=True):
        end = start + len(code)
        found.append(_measured(call, [line for line in lines if start <= line[0] < end]))
        start = end
    return found


def _target(call: Call) -> str:
    """The architecture that it is compiled for, such as ``sm_90a``."""
    target = re.search(r"\.target (sm_\w+)", call.kernel.asm["ptx"])
    assert target is not None
    return target[1]


def _code(cubin: bytes, name: str) -> bytes:
    """The instructions of a kernel: a section of the ELF file. Jumps are relative."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, number, strings = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    names = cubin[sections[strings][4] :]
    for place, _, _, _, start, length in sections:
        if names[place:].startswith(f".text.{name}\0".encode()):
            return cubin[start : start + length]
    raise RuntimeError(f"no code of {name} in its binary")


def _measured(call: Call, lines: list[tuple[int, str, str]]) -> Compiled:
    """``lines``: place, operation and the rest of its instructions."""
    kernel, ptx = call.kernel, call.kernel.asm["ptx"]
    said = call.said or _assembled(call)
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    if registers is None:
        raise RuntimeError(f"ptxas said nothing of registers: {said[:300]}")
    return Compiled(
        call.name, call.capability, call.grid, kernel.metadata.num_warps, int(registers[1]),
        int(spilled[1]) if spilled else 0, kernel.metadata.shared, seconds=call.seconds,
        shared_pairs=_shared_pairs(ptx), early=kernel.metadata.launch_pdl, **_counted(lines),
    )  # fmt: skip


def _assembled(call: Call) -> str:
    """What the assembler says of a kernel that is assembled again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(call.kernel.asm["ptx"], encoding="utf-8")
        assembler = "ptxas-blackwell" if call.capability >= 100 else "ptxas"
        return _tool(assembler, "-v", f"--gpu-name={_target(call)}", str(file), "-o", "/dev/null").stderr


_CODES = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f\w+\s+(%rs\d+)")
_PACKED = re.compile(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}")


def _shared_pairs(ptx: str) -> int:
    """Pairs of float8 codes that are packed with another pair, and read one by one as well."""
    packed = {pair for both in _PACKED.findall(ptx) for pair in both}
    others = _CODES.sub("", _PACKED.sub("", ptx))
    return sum(re.search(rf"{pair}\b", others) is not None for pair in packed & set(_CODES.findall(ptx)))


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.S)
_TENSOR = re.compile(r"HMMA|HGMMA|IMMA|IGMMA|QGMMA|QMMA|BGMMA|DMMA|UTC\w*MMA")
_WARPGROUP = re.compile(r"[HIQB]GMMA")
_WAIT = "ACQBULK"
_ACCESS = re.compile(r"LDG|STG|ATOMG|RED|LD$|LD\.|ST$|ST\.|ATOM$|ATOM\.|UTMA|UBLK")
_ASYNCHRONOUS = re.compile(r"LDGSTS|UTMALDG|UBLKCP")


def _counted(lines: list[tuple[int, str, str]]) -> dict[str, Any]:
    """Instructions of machine code, by kind."""
    lines = [line for line in lines if line[1] != "NOP"]
    backwards = []
    for at, op, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target is not None and int(target[1], 16) < at:
            backwards.append((int(target[1], 16), at))
    inner = [o for o in backwards if not any(i != o and o[0] <= i[0] and i[1] <= o[1] for i in backwards)]
    loops = []
    for first, last in inner:
        body = [op for at, op, _ in lines if first <= at <= last]
        loops.append(Loop(len(body), sum(bool(_TENSOR.match(op)) for op in body)))
    ops = [op for _, op, _ in lines]
    before = ops[: ops.index(_WAIT)] if _WAIT in ops else []
    loads: dict[int, int] = {}
    stores: dict[int, int] = {}
    for _, op, _ in lines:
        parts = op.split(".")
        if parts[0] in ("LDG", "STG"):
            moved = loads if parts[0] == "LDG" else stores
            bits = next((b for p in parts for b in (128, 64, 16, 8) if p in (str(b), f"U{b}", f"S{b}")), 32)
            moved[bits] = moved.get(bits, 0) + 1
        elif parts[0] == "LDGSTS":
            bits = next((b for p in parts for b in (128, 64) if p == str(b)), 32)
            loads[bits] = loads.get(bits, 0) + 1
    return {
        "instructions": len(lines),
        "tensor": sum(bool(_TENSOR.match(op)) for _, op, _ in lines),
        "warpgroup": sum(bool(_WARPGROUP.match(op)) for _, op, _ in lines),
        "asynchronous": sum(bool(_ASYNCHRONOUS.match(op)) for _, op, _ in lines),
        "waits": ops.count(_WAIT),
        "early_accesses": sum(bool(_ACCESS.match(op)) for op in before),
        "loads": loads,
        "stores": stores,
        "loops": tuple(sorted(loops, key=lambda loop: -loop.instructions)),
    }
