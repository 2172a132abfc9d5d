"""The tests that depend on the processor, as other processors would run them.

    python tests/cpus.py [--sample] [--only NAME ...] [--json FILE]

Each row sets what PyTorch and oneDNN may use of this CPU, or takes something else away: the C++ compiler, the second
thread, an idle machine. ``--sample`` runs the rows and tests that differ most, in two minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS: dict[str, dict[str, str]] = {
    "as it is": {},
    "ATen AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATen without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "oneDNN AVX-512 VNNI": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "both AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no C++ compiler": {"CXX": "there-is-none"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "hash seed 1": {"PYTHONHASHSEED": "1"},
    "hash seed 2": {"PYTHONHASHSEED": "2"},
    "both cores busy": {},
}
"""Environment variables of each row."""
SAMPLE = ("both AVX2", "no C++ compiler")
FILES = [
    "tests/nn/test_arena.py", "tests/nn/test_codec.py", "tests/nn/test_decoder.py", "tests/nn/test_fp8.py",
    "tests/nn/test_functions.py", "tests/serve/test_sampler.py",
    "tests/nn/test_kernels.py", "tests/nn/test_kv_codes.py", "tests/nn/test_nf4.py", "tests/nn/test_packed_linear.py",
    "tests/nn/test_packed_model.py", "tests/nn/test_qft.py", "tests/nn/test_sparse.py", "tests/nn/test_transformer.py",
    "tests/compress/test_rows.py", "tests/compress/test_sweep.py", "tests/compress/test_inputs.py",
    "tests/serve/test_pairs.py", "tests/serve/test_pass_memory.py", "tests/serve/test_engine.py",
    "tests/serve/test_batching.py", "tests/train/test_optimizers.py", "tests/train/test_precision.py",
    "tests/train/test_quantized.py", "tests/train/test_fp8_sum.py", "tests/techniques/test_parity.py",
    "tests/measure/test_meter.py", "tests/measure/test_probe.py", "tests/predict/test_precision_memory.py",
]  # fmt: skip
SAMPLE_FILES = [
    "tests/nn/test_kernels.py", "tests/nn/test_decoder.py", "tests/nn/test_packed_linear.py",
    "tests/serve/test_pairs.py", "tests/serve/test_pass_memory.py", "tests/train/test_precision.py",
]  # fmt: skip


def _spin() -> None:
    while True:
        pass


@contextmanager
def load(processes: int):
    """So many processes that compute for as long as this is open."""
    running = [mp.Process(target=_spin, daemon=True) for _ in range(processes)]
    for p in running:
        p.start()
    try:
        yield
    finally:
        for p in running:
            p.kill()


def run(name: str, files: list[str]) -> dict[str, object]:
    """One row: what pytest counted, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-rfE", *files]
    start = time.monotonic()
    with load(2 if name == "both cores busy" else 0):
        done = subprocess.run(command, cwd=ROOT, env=os.environ | ROWS[name], capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-500:]
    count = {k: int(n) for n, k in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        failed = [last]
    return {"row": name, "set": ROWS[name], **count, "failed_tests": failed, "seconds": time.monotonic() - start}


def main() -> None:
    """Run the rows, print a table, and end with 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.only or (SAMPLE if options.sample else list(ROWS))
    rows = []
    for name in names:
        rows.append(row := run(name, SAMPLE_FILES if options.sample else FILES))
        counts = "  ".join(f"{row.get(k, 0)} {k}" for k in ("passed", "failed", "error", "skipped"))
        print(f"{name:24}{counts}  {row['seconds']:.0f} s", *row["failed_tests"], sep="\n  ", flush=True)  # type: ignore[misc]
    if options.json:
        cpu = next((x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines()
                    if x.startswith("model name")), platform.processor())  # fmt: skip
        options.json.write_text(json.dumps({"cpu": cpu, "python": platform.python_version(), "rows": rows}, indent=1))
    sys.exit(any(row["failed_tests"] for row in rows))


if __name__ == "__main__":
    main()
