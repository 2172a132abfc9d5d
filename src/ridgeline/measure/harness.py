"""Benchmarks of lm-eval (EleutherAI's evaluation harness), where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

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
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    missing = [t for t in tasks if not (Path(t).is_file() or manager.match_tasks([t]))]
    if missing:
        raise UserError(f"lm-eval knows no task {missing[0]!r}", "see `lm-eval ls tasks`, or give a task's YAML file")
    found: Any = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(checkpoint)}, tasks=tasks, task_manager=manager, bootstrap_iters=0
    )
    return {
        name: {k.removesuffix(",none"): float(v) for k, v in scores.items() if isinstance(v, (int, float))}
        for name, scores in found["results"].items()
    }
