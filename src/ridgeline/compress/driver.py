"""The layer-wise driver: streams a checkpoint block by block through a plan's techniques into a smaller checkpoint.

One decoder block (for a mixture: one expert, or those that a technique processes together) is in memory at a time, in
addition to the calibration windows' hidden states.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.compress.calibration import SELF, calibration_windows, load_text, own_windows
from ridgeline.compress.output import Output, config_of
from ridgeline.compress.schemes import journal_schemes
from ridgeline.compress.stream import ModelStream
from ridgeline.jobs.job import CompressOptions, Progress, RankContext
from ridgeline.nn.checkpoint.checkpoint import Reader, load_checkpoint, save_checkpoint
from ridgeline.nn.checkpoint.files import config_dtype
from ridgeline.nn.checkpoint.formats import writer
from ridgeline.nn.checkpoint.formats.compressed_tensors import CompressedTensors
from ridgeline.nn.checkpoint.formats.gguf import require_gguf, write_gguf
from ridgeline.nn.checkpoint.formats.gptq import GPTQFormat
from ridgeline.nn.checkpoint.formats.ridgeline import Ridgeline
from ridgeline.nn.checkpoint.hf_names import links, require_twin
from ridgeline.runtime.compress_build import CompressBuild, ModelJob
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Compress
from ridgeline.techniques.registry import resolve

DENSE = "dense"
"""Format in which codes are expanded before they are written."""
GGUF = "gguf"
"""Single-file format, which is converted from the checkpoint at the end."""


def compress(e: Experiment, options: CompressOptions, here: RankContext) -> dict[str, Any]:
    """Compress ``workload.checkpoint`` by the plan into the directory ``options.out``; returns the report.

    Raises :class:`UserError`.
    """
    e, techniques = resolve(e)
    started = time.perf_counter()
    w = e.workload
    assert isinstance(w, Compress)
    assert w.checkpoint is not None
    source, dtype = Path(w.checkpoint), config_dtype(Path(w.checkpoint))
    spec = ModelSpec.from_path(source)
    require_twin(spec)
    own = any(t.own_format for t in techniques)
    name = options.format or (Ridgeline.name if own else CompressedTensors.name)
    form = None if name == DENSE else writer(CompressedTensors.name if name == GGUF else name)
    if name == GGUF:
        require_gguf(spec)
    wide = dtype == torch.bfloat16 and name not in (GPTQFormat.name, GGUF)
    scale_dtype = torch.bfloat16 if wide else torch.float16  # what the format stores, or the checkpoint
    run = CompressBuild(e, spec, here.device, scale_dtype)
    for technique in techniques:
        technique.compress(run)
    if not (run.whole or run.at_site or run.before_block or run.after_block):
        raise UserError("the plan compresses nothing", "add a technique: --with gptq:bits=4,group_size=128")
    windows = torch.empty(0, w.seq_len, dtype=torch.int64)  # weights only: nothing passes through the model
    reading = time.perf_counter()
    if run.wants or run.whole or run.before_block or run.after_block:
        here.report({"stage": "calibration text"})
        windows = own_windows(w) if w.data == SELF else calibration_windows(w, load_text(w, spec.vocab_size))
    reading = time.perf_counter() - reading
    output = Output(Path(options.out), _identity(e, source, windows, options), options.resume)
    if run.whole:
        source = _whole(run, output, source, windows, here.report)
        spec = run.spec
    reader = Reader(source, spec)
    records, coverage = ModelStream(run, reader, dtype, form, windows, output, here.report).compress()
    stored, inputs = journal_schemes(output)
    quantized = set(stored)
    dense = sorted(m for m in _linear_modules(spec) if m not in quantized)
    original = Path(w.checkpoint)
    config = config_of(json.loads((original / "config.json").read_text(encoding="utf-8")), e.model, spec, dtype, form,
                       stored, dense, inputs)  # fmt: skip
    result = {
        "schema": "ridgeline.compression/1", "plan": e.plan.strings(), "source": w.checkpoint,
        "format": name, "out": options.out,
        "calibration": {"data": w.data, "samples": w.samples, "seq_len": w.seq_len, "seed": w.seed,
                        "seconds": reading},
        **_sizes(records, output, spec),
        "experts": coverage, "seconds": time.perf_counter() - started, "peak_rss_bytes": peak_rss(),
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads()},
    }  # fmt: skip
    if name == GGUF:
        output.finish(config, result, original, lambda folder: write_gguf(folder, folder / "model.gguf"))
    else:
        output.finish(config, result, original)
    return result


def _sizes(records: list[dict[str, Any]], output: Output, spec: ModelSpec) -> dict[str, Any]:
    """What the report says of the layers and of all of them together; takes ``numel`` out of the ``records``."""
    weights = {r["layer"]: r for r in records}
    numel = {name: r.pop("numel") for name, r in weights.items()}
    parts = output.journal["parts"]
    return {
        "bits_per_weight": sum(weights[n]["bits"] * k for n, k in numel.items()) / max(1, sum(numel.values())),
        "zeros": sum(weights[n]["zeros"] * k for n, k in numel.items()) / max(1, sum(numel.values())),
        "checkpoint_bytes": sum(part["bytes"] for part in parts.values()),
        "parameters": spec.num_parameters,
        "layers": list(weights.values()),
        "blocks": {name: part["said"] for name, part in parts.items() if part.get("said")},
    }


def _identity(e: Experiment, source: Path, windows: Tensor, options: CompressOptions) -> dict[str, Any]:
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in source.glob("*.safetensors"))
    text = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
    return {"plan": e.plan.strings(), "files": files, "windows": text, "format": options.format}


def _whole(run: CompressBuild, output: Output, source: Path, windows: Tensor, report: Progress) -> Path:
    """Run techniques that need the whole model at once; their result is the checkpoint for the rest."""
    place = output.partial / "whole"
    if not (place / "config.json").is_file():
        job = ModelJob(load_checkpoint(source, dtype=torch.float32), windows, report)
        for step in run.whole:
            step(job)
        save_checkpoint(job.model, place)
    run.spec = ModelSpec.from_path(place)
    return place


def _linear_modules(spec: ModelSpec) -> list[str]:
    """Names in the hub's files of all linear layers, the head's included."""
    kinds = ("_proj.weight", "_proj", "router.weight", "head.out.weight")
    found = {link.theirs.removesuffix(".weight") for link in links(spec) if link.ours.endswith(kinds)}
    return sorted(found | ({"lm_head"} if spec.tie_embeddings and spec.head == "lm" else set()))


def peak_rss() -> int:
    """Peak resident memory of this program so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the peak of the parent process
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
