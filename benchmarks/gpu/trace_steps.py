"""What steps of a model of 1B launch on a GPU and what the host waits for, traced without a GPU.

    python benchmarks/gpu/trace_steps.py [--only NAME] [--out benchmarks/results/gpu_trace.json --as after]

With another version of the package on ``PYTHONPATH``, the same steps of that version. Needs a CPU build of PyTorch and
a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ridgeline import catalog
from ridgeline.experiments import make
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.fake.trace import StepTrace, trace
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import default_plan

MODEL, ON = "llama3.2-1b", "h100-sxm"
LOW = ("mixed_precision", "flash_attention", "fused_layers")
TRAINED = {"training, bf16": LOW, "training, fp8": (*LOW, "fp8"),
           "training, fp8 by rows": (*LOW, "fp8:scaling=rowwise")}  # fmt: skip
MASKED = {"training, bf16, documents": (True, {}), "training, bf16, windows": (False, {"sliding_window": 128})}
"""Whether documents are separate, and changes of the model."""
SERVED = {"serving, bf16": (), "serving, fp8": ("fp8",), "serving, int4": ("rtn:bits=4,group_size=128",),
          "serving, int4 cache": ("kv_quant:dtype=int4",),
          "serving, four LoRA adapters": ("multi_adapter:adapters=4",)}  # fmt: skip
SAMPLED = {
    "top-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "prompts' log-probabilities": {"temperature": 0.0, "prompt_logprobs": 3},
}


def experiments(text: Path) -> dict[str, tuple[Experiment, dict[str, Any]]]:
    """By name, with the sampling of served requests: 8 sequences."""
    work = {"kind": "pretrain", "seq_len": 512, "batch_size": 4, "steps": 4, "data": str(text)}
    found = {n: (make(MODEL, ON, work, list(plan)), dict[str, Any]()) for n, plan in TRAINED.items()}
    for name, (separate, changes) in MASKED.items():
        spec = catalog.model(MODEL).model_copy(update=changes)
        found[name] = make(spec, ON, {**work, "document_mask": separate}, list(LOW)), {}
    serve = Serve(prompt_len=8, output_len=8, dtype="bf16", max_model_len=1024)
    cluster, spec = catalog.cluster(ON), catalog.model(MODEL)
    for name, plan in SERVED.items():
        e = Experiment(model=spec, cluster=cluster, workload=serve, plan=Plan.parse([*default_plan("serve"), *plan]))
        found[name] = e, {}
    found |= {f"serving, bf16, {name}": (found["serving, bf16"][0], settings) for name, settings in SAMPLED.items()}
    return found


def row(step: StepTrace) -> dict[str, Any]:
    """A step's counts, and the lines that the host waits at."""
    kernels = {n: count for n, count in step.operators.items() if "attention" in n or n.startswith("masked_fill")}
    waits = [f"{w.count} × {w.kind} at {w.place}" for w in step.waits]
    return {"launches": step.launches, "replayed": getattr(step, "replayed", 0), "waits": step.waited,
            "attention": kernels, "wrong": list(step.wrong), "waits_at": waits,
            "labels": list(getattr(step, "labels", ()))}  # fmt: skip


def main() -> None:
    """Trace and print; with ``--out`` also keep under ``--as``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="experiments whose name has this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as", dest="key", default="after")
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("The quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
        for name, (e, sampling) in experiments(text).items():
            if given.only not in name:
                continue
            try:
                (steps,) = trace([e], [{"temperature": 0.0, **sampling}]) if sampling else trace([e])
            except UserError as error:
                rows[name] = {"refused": error.what}
                print(f"{name}: {error.what}")
                continue
            rows[name] = {step: row(found) for step, found in steps.items()}
            for step, r in rows[name].items():
                print(f"{name}, {step}: {r['launches']} launches + {r['replayed']} replayed, {r['waits']} waits",
                      flush=True)  # fmt: skip
            if given.out is not None:
                _keep(given.out, given.key, rows)


def _keep(out: Path, key: str, rows: dict[str, Any]) -> None:
    """Add to what the file has under ``key``."""
    held = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    known = held.get(key, {}).get("rows", {})
    held[key] = {"model": MODEL, "on": ON, "environment": fingerprint(), "rows": known | rows}
    out.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
