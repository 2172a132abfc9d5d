"""vLLM's own tests of its server against ours, with only the fixture and the models changed.

    python tests/conformance/run.py VLLM [FILE ...] [--json FILE] [--models FOLDER]

VLLM is the folder of an unpacked source release of vLLM (PyPI has them); its Python dependencies must be installed, not
vLLM itself. Nothing is fetched. ``vllm.toml`` lists the files and, for each test that fails on purpose or cannot pass
with small models, the reason. Ends with 1 if another one fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import tomllib

HERE = Path(__file__).resolve().parent
SECONDS = 1800
"""Limit for one file."""


def run(vllm: Path, file: str, models: Path) -> dict[str, str]:
    """One file of ``tests/``: what became of each of its tests."""
    source = HERE.parent.parent / "src"
    paths = [str(vllm), str(HERE), str(source), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1",
           "RIDGELINE_SOURCE": str(source), "RIDGELINE_MODELS": str(models)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "vllm_server", "-q", "--tb=line", "-o", "asyncio_mode=auto",
                   f"--junitxml={report}", f"tests/{file}"]  # fmt: skip
        try:
            subprocess.run(command, cwd=vllm, env=env, timeout=SECONDS, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return {"the file": f"took longer than {SECONDS} s"}
        if not report.exists():
            return {"the file": "could not be collected"}
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            bad = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
            what = "passed" if bad is None else "skipped" if bad.tag == "skipped" else str(bad.get("message"))[:200]
            found[str(case.get("name"))] = what
        return found


def main() -> None:
    """Run the files one after another; a table on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", type=Path, help="Keep the small models in this folder.")
    given = parser.parse_args()
    for path in (given.vllm / "tests", *(given.vllm / "tests" / file for file in given.files)):
        if not path.exists():
            parser.error(f"there is no {path}: give an unpacked source release of vLLM, and files below its tests/")
    listed = tomllib.loads((HERE / "vllm.toml").read_text(encoding="utf-8"))
    reasons: dict[str, dict[str, str]] = listed["reasons"]
    result: dict[str, object] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "files": {}}
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        models = (given.models or Path(temporary)).resolve()
        models.mkdir(parents=True, exist_ok=True)
        for file in given.files or listed["files"]:
            found = run(given.vllm.resolve(), file, models)
            failed = {name: why for name, why in found.items() if why not in ("passed", "skipped")}
            known = {n: r for n in failed for p, r in reasons.get(file, {}).items() if fnmatch.fnmatch(n, p)}
            passed = sum(why == "passed" for why in found.values())
            bad += len(failed) - len(known)
            print(f"{file}: {passed} passed, {len(known)} for a reason, {len(failed) - len(known)} failed", flush=True)
            result["files"][file] = {  # type: ignore[index]
                "passed": passed, "skipped": sum(why == "skipped" for why in found.values()), "reasons": known,
                "failed": {n: w for n, w in failed.items() if n not in known},
            }  # fmt: skip
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
