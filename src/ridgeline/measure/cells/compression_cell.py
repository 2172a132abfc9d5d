"""One measured compression cell: the checkpoint compressed by the plan, evaluated on held-out text, and run."""

from __future__ import annotations

import statistics
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.calibration import SELF, held_out_windows, load_text
from ridgeline.compress.driver import compress
from ridgeline.jobs.job import CellOptions, CompressOptions, RankContext
from ridgeline.measure.cells.generation_cell import generation_times
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.evaluation import ROUNDS, stored_size
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity
from ridgeline.nn.memory.meter import Meter, process_memory
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Memory, Metric, Result, Sample
from ridgeline.spec.workload import Compress
from ridgeline.techniques.registry import resolve


def compression_cell(e: Experiment, options: CellOptions, here: RankContext) -> dict[str, Any]:
    """Compress ``workload.checkpoint`` (an empty plan: leave it dense) into a temporary folder; return a measured
    Result (as plain data) with perplexity, bytes, layer error, compression time and the speed of the result."""
    e, _ = resolve(e)
    w, device, ranks = e.workload, here.device, here.ranks
    assert isinstance(w, Compress)
    if w.checkpoint is None:
        raise UserError("nothing to compress: the workload has no checkpoint",
                        "set workload.checkpoint, or measure.warm_start to train one first")  # fmt: skip
    if w.data == SELF and w.eval_data is None:
        raise UserError("text that the model writes itself is calibrated on, so perplexity needs other text",
                        "set workload.eval_data")  # fmt: skip
    text = w.eval_data if w.data == SELF else w.data
    result = Result(
        source="measured", experiment_id=e.id, name=e.name, experiment=e.canonical(),
        environment={**fingerprint(), "threads": torch.get_num_threads(), "ranks": ranks, "device": str(device)},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )  # fmt: skip
    known: dict[str, tuple[float, str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        place = Path(w.checkpoint)
        if e.plan.calls:
            place = Path(folder) / "out"
            report = compress(e, CompressOptions(out=str(place), resume=False), here)
            errors = [la["error"] for la in report["layers"] if la["error"] is not None]
            known["compress_s"] = (report["seconds"], "s", "lower")
            known["compress_peak_bytes"] = (report["peak_rss_bytes"], "bytes", "lower")
            known["zeros"] = (report["zeros"], "", "")
            if errors:
                known["layer_error"] = (statistics.fmean(errors), "", "lower")
        size = stored_size(place)
        known["checkpoint_bytes"] = (size["checkpoint_bytes"], "bytes", "lower")
        known["bits_per_weight"] = (size["bits_per_weight"], "", "lower")
        judge = w.model_copy(update={"data": text})
        windows = held_out_windows(judge, load_text(judge, e.model.vocab_size))
        judged = load_packed(place, torch.float32, device, fast=False)
        result.losses = window_losses(judged, windows, lambda n: here.report({"stage": f"held-out window {n}"}))
        del judged
        _speed(load_packed(place, device=device), w, result, known, ranks, options.repeat)
    found = perplexity(result.losses)
    result.metrics["perplexity"] = Metric(value=found.value, low=found.low, high=found.high, n=len(result.losses),
                                          better="lower", source="measured")  # fmt: skip
    for name, (value, unit, better) in known.items():
        result.metrics[name] = Metric(value=value, unit=unit, better=better, source="measured")
    return result.model_dump(mode="json", by_alias=True)


def _speed(
    model: Transformer, w: Compress, result: Result, known: dict[str, tuple[float, str, str]], ranks: int,
    repeat: int,
) -> None:  # fmt: skip
    """Time the fixed batch, and record the peak memory."""
    generator = torch.Generator().manual_seed(w.seed)
    prompt = torch.randint(model.spec.vocab_size, (w.batch_size, w.prompt_len), generator=generator)
    prompt = prompt.to(next(model.parameters()).device)
    rounds = generation_times(model, prompt, w.output_len, ROUNDS)
    first = statistics.median(run[0] for run in rounds)
    total = statistics.median(sum(run) for run in rounds)
    each = (total - first) / max(1, w.output_len - 1)
    result.samples = [Sample(step=i, seconds=t, tokens=w.batch_size * ranks, repeat=repeat)
                      for run in rounds for i, t in enumerate(run[1:] or run)]  # fmt: skip
    meter = Meter(model)
    meter.register(model.parameters(), "parameters")
    with meter:
        generation_times(model, prompt, min(2, w.output_len), 0)
    result.memory = [Memory(category=k, bytes=v) for k, v in meter.peak.categories.items()]
    known |= {
        "ttft_s": (first, "s", "lower"), "tpot_s": (each, "s", "lower"), "e2e_s": (total, "s", "lower"),
        "tokens_per_s": (w.batch_size * ranks * w.output_len / total, "tokens/s", "higher"),
        "peak_bytes": (meter.peak.total, "bytes", "lower"),
        **{f"{k}_bytes": (v, "bytes", "lower") for k, v in process_memory().items()},
    }  # fmt: skip
