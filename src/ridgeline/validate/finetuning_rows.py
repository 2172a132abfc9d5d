"""Measured fine-tuning runs: rows of training runs with a method, full, lora or qlora, and its options."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.spec.workload import FineTune
from ridgeline.validate import training_rows
from ridgeline.validate.case import Case
from ridgeline.validate.csv_table import BadCell, CsvRow

NAME = "finetuning"
REQUIRED = ("method", "device", "layers", "hidden", "heads", "seq_len", "n_devices", "micro_batch_size")
_TARGETS = {"qkv": ("q_proj", "k_proj", "v_proj")}
PLAIN_UNPACKING = 2.7
"""How much longer GPTQ's weights take to unpack, by a shift, a mask, a subtraction and a product by the scales, than by
one kernel, which moves 2.5 bytes an element. Chosen by the twelve rows of two models that it predicts, of which those
of 1.8B with up to 1024 tokens do not depend on it: their mean error is 8 % from 2.7 to 3.5. Before, it was 1.5 of 4.5
bytes, which takes as long. Were the chain limited by its bytes, some 16, it would be 6.4, and the rows 18 % off on
average: what takes the time is not known."""
_METHODS = ("full", "lora", "qlora")


def cases(row: CsvRow) -> list[Case]:
    """Predict one run. Raises :class:`BadCell` for an unreadable cell, :class:`Incompatible` for an impossible run."""
    method = row.text("method").lower().replace("-", "")
    if method not in _METHODS:
        raise BadCell(f"column 'method': {method!r} is none of {', '.join(_METHODS)}")
    run = CsvRow(row.line, {**row.cells, "micro_batch": row.cells["micro_batch_size"]}, row.assumed)
    chains = {} if row.text("precision", "") == "fp8" else training_rows.PLAIN_LLAMA  # Transformer Engine's are fused
    if row.text("weights", "") == "int4":
        chains = {**chains, "cast": PLAIN_UNPACKING}
    # Qwen's scripts train all parameters under DeepSpeed's stage 3, on a single card too.
    hooks = method == "full" and row.count("n_devices") == 1 and "hf trainer" in row.text("note", "").lower()
    found = training_rows.cases(run, FineTune, _adapters(row, method), chains, hooks)
    if "micro_batch" in row.assumed:
        row.assumed["micro_batch_size"] = row.assumed.pop("micro_batch")
    return [replace(c, group=f"{c.group} {method}", alternatives=None) for c in found]


def _adapters(row: CsvRow, method: str) -> list[str]:
    """The method as technique calls, with what the row states; 4-bit weights of any format are taken as QLoRA's."""
    if method == "full":
        return []
    weights = row.text("weights", "bf16" if method == "lora" else "nf4").lower()
    packed = method == "qlora" or weights in ("int4", "nf4")
    options = [f"rank={row.count('lora_rank')}"] if row.has("lora_rank") else []
    if row.has("lora_targets"):
        names = [t.strip() for t in row.text("lora_targets").split(",")]
        parts = [p for t in names for p in _TARGETS.get(t, (t if t.endswith(("_proj", "linear")) else f"{t}_proj",))]
        options.append(f"targets={'+'.join(parts)}")
    return [":".join(filter(None, ("qlora" if packed else "lora", ",".join(options))))]
