"""Answers rows with aiconfigurator's ``cli_estimate``. Run by ``vs_predictors.py`` in the peer's own interpreter.

Reads ``{"rows": [...]}`` on standard input; writes ``{"version", "start_s", "answers"}`` as the last line of standard
output. Milliseconds become seconds here. Serving rows are mode ``agg`` with batch_size = concurrency, static batches
mode ``static``; everything else is left at the peer's defaults.
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SYSTEMS = {"h100-sxm": "h100_sxm", "a100-80g-sxm": "a100_sxm"}
NAMES = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B"}
"""Rows' model names that the peer spells differently."""


def model_path(row: dict, folder: Path) -> str:
    """The peer's name for a model it knows, or a directory with the row's configuration."""
    if "config" not in row:
        return NAMES.get(row["model"], row["model"])
    target = folder / row["model"]
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(row["config"]))
    return str(target)


def answer(row: dict, folder: Path) -> dict:
    from aiconfigurator.cli.api import cli_estimate

    start = time.perf_counter()
    try:
        found = cli_estimate(
            model_path(row, folder),
            SYSTEMS[row["device"]],
            mode="agg" if row["kind"] == "serve" else "static",
            backend_name=row["backend"],
            isl=row["prompt"],
            osl=row["output"],
            batch_size=row["batch"],
            tp_size=row["tp"],
            gemm_quant_mode="fp8" if row["precision"] == "fp8" else None,
        )
    except Exception as problem:
        return {"refused": f"{type(problem).__name__}: {problem}".split(". ")[0][:160]}
    seconds = time.perf_counter() - start
    return {"ttft_s": float(found.ttft) / 1e3, "tpot_s": float(found.tpot) / 1e3, "seconds": seconds}


def main() -> None:
    rows = json.load(sys.stdin)["rows"]
    start = time.perf_counter()
    import aiconfigurator.cli.api  # noqa: F401

    imported = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        answers = [answer(r, Path(folder)) for r in rows]
    print(json.dumps({"version": version("aiconfigurator"), "start_s": imported, "answers": answers}))


if __name__ == "__main__":
    main()
