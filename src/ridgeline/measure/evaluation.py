"""``ridgeline eval``: perplexity of a checkpoint on a text, bits per weight, bytes, tokens per second."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.calibration import windows_of
from ridgeline.data.batches import MAX_CHARACTERS, own_tokenizer, token_ids
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.jobs.job import EvaluateOptions, Progress, RankContext
from ridgeline.measure.cells.generation_cell import generation_times
from ridgeline.measure.environment import fingerprint
from ridgeline.measure.perplexity import window_losses
from ridgeline.measure.stats import perplexity, perplexity_ratio
from ridgeline.nn.checkpoint.files import first_missing, gguf_file
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

ROUNDS = 3
"""Times that generation is timed, after one warm-up."""


def evaluate(e: None, options: EvaluateOptions, here: RankContext) -> dict[str, Any]:
    """Evaluate ``options.checkpoint`` on ``options.text``.

    Perplexity is that of the weights as stored (and of inputs rounded as the checkpoint says), computed in fp32; speed
    is that of the kernels that a generating model gets. Raises :class:`UserError`.
    """
    path = Path(options.checkpoint)
    spec = ModelSpec.from_path(path)
    if not spec.causal:
        raise UserError(f"{path} is an encoder: it has no perplexity of running text", "evaluate a decoder")
    if spec.is_encoder_decoder:
        raise UserError(f"{path} has an encoder and a decoder: it has no perplexity of running text",
                        "evaluate a decoder")  # fmt: skip
    seq_len = min(options.seq_len, spec.max_positions)
    source = options.tokenizer or own_tokenizer(str(path))
    if source is None:
        raise UserError(f"{path} has no tokenizer.json", "give one with --tokenizer")
    ids = token_ids(options.text, MAX_CHARACTERS, load_tokenizer(source))
    if len(ids) and int(ids.max()) >= spec.vocab_size:
        raise UserError(f"{source} makes token ids up to {int(ids.max())}, the model has {spec.vocab_size}",
                        "use the model's own tokenizer")  # fmt: skip
    windows = windows_of(ids, seq_len, options.windows, options.text)
    result: dict[str, Any] = {
        "schema": "ridgeline.evaluation/1", "checkpoint": str(path), "text": options.text, "seq_len": seq_len,
        "windows": len(windows), "tokens": len(windows) * seq_len, **stored_size(path),
        "parameters": spec.num_parameters,
    }  # fmt: skip
    losses = {}
    compared = {"checkpoint": options.checkpoint} | ({"against": options.against} if options.against else {})
    for name, folder in compared.items():
        model = load_packed(Path(folder), torch.float32, here.device, fast=False)
        if model.spec.vocab_size != spec.vocab_size:
            raise UserError(f"{folder} has another vocabulary than {path}", "compare like with like")
        losses[name] = window_losses(model, windows, _progress(here.report, folder, len(windows)))
        if name == "checkpoint" and options.output_len:
            here.report({"stage": "timing generation"})
            prompt = windows[:1, : min(options.prompt_len, seq_len)].to(here.device)
            del model
            model = load_packed(path, device=here.device)
            times = generation_times(model, prompt, options.output_len, ROUNDS)
            result["decode_tokens_per_s"] = 1 / statistics.median(t for run in times for t in run[1:])
            result["ttft_s"] = statistics.median(run[0] for run in times)
        del model
    result["perplexity"] = perplexity(losses["checkpoint"])._asdict()
    result["losses"] = losses["checkpoint"]
    if "against" in losses:
        result["against"] = {"checkpoint": options.against, "perplexity": perplexity(losses["against"])._asdict(),
                             "ratio": perplexity_ratio(losses["checkpoint"], losses["against"])._asdict()}  # fmt: skip
    result["environment"] = {**fingerprint(), "threads": torch.get_num_threads()}
    return result


def _progress(report: Progress, checkpoint: str, windows: int) -> Callable[[int], None]:
    stage = f"perplexity of {Path(checkpoint).name}"
    return lambda done: report({"step": done, "steps": windows, "stage": stage})


def stored_size(path: Path) -> dict[str, float]:
    """Bytes of all tensors in a checkpoint's files (headers not counted), and bits per weight of the linear layers that
    a compression report beside them tells of (else of all parameters). A GGUF file counts whole."""
    total = 0
    if (single := gguf_file(path)) is not None:
        total = single.stat().st_size
    files = list(path.glob("*.safetensors"))
    for file in files:
        if first_missing(file) is not None:
            raise UserError(f"{file} is truncated", "save or download the checkpoint again")
        with file.open("rb") as f:
            total += file.stat().st_size - 8 - int.from_bytes(f.read(8), "little")
    known = path / "ridgeline.json"
    if known.is_file():
        bits = json.loads(known.read_text(encoding="utf-8")).get("bits_per_weight")
        if bits is not None:
            return {"checkpoint_bytes": total, "bits_per_weight": bits}
    return {"checkpoint_bytes": total, "bits_per_weight": 8 * total / ModelSpec.from_path(path).num_parameters}
