"""The tests that need packages which ``dev`` leaves out.

    python tests/peers.py [FILE ...] [--json FILE]

Ends with 1 where a test failed, or where a whole file was skipped because its package is missing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

from ridgeline.measure.environment import fingerprint

ROOT = Path(__file__).parent.parent
PEERS = ("bitsandbytes", "deepspeed", "lm-eval", "ray", "accelerate", "peft", "kubernetes-validate", "liger-kernel",
         "torchao")  # fmt: skip
FILES = [
    "tests/nn/test_codec.py", "tests/nn/test_nf4.py", "tests/nn/test_liger.py", "tests/nn/test_torchao.py",
    "tests/serve/test_lm_eval.py", "tests/measure/test_backends.py", "tests/measure/test_compression.py",
    "tests/train/test_ray.py", "tests/fleet/test_manifests.py",
]  # fmt: skip


def run(file: str) -> dict[str, object]:
    """One file: its passed tests' number, and the failed and skipped ones with their reasons."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-rs", f"--junitxml={report}", file]
        status = subprocess.run(command, cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = {c.get("name"): x.get("message") for c in cases for x in c if x.tag in ("failure", "error")}
    skipped = {c.get("name"): x.get("message") for c in cases for x in c if x.tag == "skipped"}
    count = {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed), "skipped": len(skipped)}
    return {**count, "failed_tests": failed, "skipped_tests": skipped, "exit_status": status}


def main() -> None:
    """Run the files one after the other (DeepSpeed and Ray start processes of their own) and write what each gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    result = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": described.stdout.strip()}
    result["environment"] = fingerprint()
    for package in PEERS:
        with suppress(PackageNotFoundError):
            result["environment"][package] = version(package)
    files = result["files"] = {}
    for file in options.files:
        files[file] = run(file)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(file["exit_status"] for file in files.values()))


if __name__ == "__main__":
    main()
