"""Benchmarks of lm-eval (EleutherAI's evaluation harness), where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ridgeline.data.batches import END
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.spec.errors import UserError


def require_harness() -> None:
    """Raise :class:`UserError` when lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval, which is not installed", "pip install 'ridgeline[eval]'")


def harness(checkpoint: Path, tasks: list[str]) -> dict[str, dict[str, float]]:
    """Scores by task and metric. The checkpoint is loaded by transformers.

    Raises :class:`UserError` for a task that the harness does not know or cannot load.
    """
    require_harness()
    import lm_eval
    import torch
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    missing = [t for t in tasks if not (Path(t).is_file() or manager.match_tasks([t]))]
    if missing:
        raise UserError(f"lm-eval knows no task {missing[0]!r}", "see `lm-eval ls tasks`, or give a task's YAML file")
    given: dict[str, Any] = {"pretrained": str(checkpoint)}
    if not (checkpoint / "tokenizer_config.json").is_file():  # nothing says then what a text begins with
        given["prefix_token_id"] = load_tokenizer(str(checkpoint)).token_to_id(END)
    found: Any = lm_eval.simple_evaluate(
        model="hf", model_args=given, tasks=tasks, task_manager=manager, bootstrap_iters=0,
        device="cuda" if torch.cuda.is_available() else "cpu",  # its own default is cuda, whatever there is
    )  # fmt: skip
    return {
        name: {
            k.removesuffix(",none"): float(v)
            for k, v in scores.items()
            if isinstance(v, (int, float)) and k != "sample_len"
        }
        for name, scores in found["results"].items()
    }
