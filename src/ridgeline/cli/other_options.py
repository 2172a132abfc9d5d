"""What options of vLLM and of Hugging Face's trainer are called here, for who types them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# Click's, or that of Typer's own copy of it.
_NoSuchOption: type[Exception] = import_module(typer.BadParameter.__module__).NoSuchOption
_BATCH = "sequences of an optimizer step on all devices; what exceeds the micro-batches of one pass is accumulated"
_ENGINE = {
    "tensor-parallel-size": ("--with tensor_parallel:degree=N", ""),
    "pipeline-parallel-size": ("--with pipeline:degree=N", ""),
    "gpu-memory-utilization": ("--device-memory 70GiB", "an amount, not a share"),
    "quantization": ("--with rtn:bits=8", "`ridgeline techniques` lists others; quantized checkpoints need none"),
}
OTHERS: dict[str, dict[str, tuple[str, str]]] = {
    "serve": _ENGINE,
    "generate": _ENGINE,
    "train": {
        "per-device-train-batch-size": ("workload.micro_batch_size=N", ""),
        "gradient-accumulation-steps": ("workload.batch_size=N", _BATCH),
        "learning-rate": ("workload.lr=X", ""),
        "num-train-epochs": ("workload.steps=N", "optimizer steps"),
        "max-steps": ("workload.steps=N", ""),
    },
    "finetune": {
        "per-device-train-batch-size": ("--micro-batch-size N", ""),
        "gradient-accumulation-steps": ("--batch-size N", _BATCH),
        "learning-rate": ("--lr X", ""),
        "num-train-epochs": ("--steps N", "optimizer steps"),
        "max-steps": ("--steps N", ""),
    },
}
"""By command, and by the option's name with hyphens: what to write, and what to know of it."""


class Commands(TyperGroup):
    """The commands; an unknown option that has another name here is reported with it."""

    def invoke(self, ctx: Any) -> Any:
        """As its base does."""
        try:
            return super().invoke(ctx)
        except _NoSuchOption as e:
            name = e.option_name.removeprefix("--").replace("_", "-")  # type: ignore[attr-defined]
            here, more = OTHERS.get(ctx.invoked_subcommand or "", {}).get(name, ("", ""))
            if here:
                e.message += f". Here it is `{here}`" + (f" ({more})" if more else "")  # type: ignore[attr-defined]
                e.possibilities = None  # type: ignore[attr-defined]
            raise
