"""A load as one or several Results: one per rate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ridgeline.jobs.job import Progress
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.load.drive import Drive, drive
from ridgeline.measure.load.endpoint import Endpoint
from ridgeline.measure.load.prompts import Prompts
from ridgeline.measure.load.summary import summarize
from ridgeline.predict.serving.arrivals import requests
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Result
from ridgeline.spec.workload import Serve


@dataclass(frozen=True)
class Settings:
    """Settings of a load besides the workload."""

    warmup: int = 3
    """Requests sent one by one before those that count."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    prompts: str = "random ids"
    """The source of prompts."""
    run: int = 0
    """Number of the run, by which prompts differ from those of others."""


def measure_load(
    endpoint: Endpoint,
    w: Serve,
    prompts: Prompts,
    settings: Settings = Settings(),
    experiment: Experiment | None = None,
    progress: Progress = lambda _: None,
) -> tuple[Result, Drive]:
    """Send a workload to an endpoint. ``experiment``: whose workload it is; None: only the endpoint is known."""
    d = drive(endpoint, requests(w), prompts, w.concurrency, settings.warmup, settings.timeout, progress)
    described: dict[str, Any] = experiment.canonical() if experiment else {"model": endpoint.model, "plan": []}
    conditions = {"endpoint": endpoint.url, "shared_prefix": w.shared_prefix, "prompts": settings.prompts,
            "ignore_eos": endpoint.ignore_eos, "warmup": settings.warmup}  # fmt: skip
    if experiment is None:
        described |= {"workload": w.model_dump(), "load": conditions}
    key = json.dumps(described, sort_keys=True, separators=(",", ":"))
    result = Result(
        source="measured",
        experiment_id=experiment.id if experiment else hashlib.sha256(key.encode()).hexdigest()[:12],
        name=(experiment.name if experiment else "") or label(endpoint.model, w),
        experiment=described,
        environment={**fingerprint(), **conditions, "run": settings.run, "load_average": load_average()},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return summarize(d, w, result), d


def label(model: str, w: Serve) -> str:
    """Short name of a load: model and workload."""
    if w.concurrency is not None:
        return f"{model}, {w.concurrency} clients"
    if w.trace and w.rate is None:
        return f"{model}, {Path(w.trace).name}"
    return f"{model} at {w.rate or 1:g}/s"


def write_records(path: Path, drives: Sequence[Drive]) -> None:
    """Every request of every run as JSON lines; seconds count from the run's first intended sending."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as f:
            for i, d in enumerate(drives):
                for r in d.records:
                    f.write(json.dumps({"run": i, **r.plain(d.began)}) + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}", "choose another path for --records") from None
