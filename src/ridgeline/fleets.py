"""Fleet files: TOML to a :class:`~ridgeline.spec.fleet.FleetSpec`, and the experiment of each pool's replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from ridgeline import catalog, experiments
from ridgeline.catalog.toml import parse, validate
from ridgeline.report.files import write_atomic
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.fleet import FleetSpec, Pool
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.registry import default_plan

OF_REPLICA = ("engine", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes")
"""Fields of a pool that take the place of the workload's."""


def load(path: Path) -> FleetSpec:
    """The fleet of a file. Raises :class:`UserError` naming what is wrong in it."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", "give a TOML file with [[pools]]") from None
    return validate(FleetSpec, parse(data, str(path)), str(path))


def replicas_of(spec: FleetSpec, model: str | ModelSpec, workload: dict[str, Any]) -> dict[str, Experiment]:
    """The experiment of one replica of each pool, by the pool's name. ``workload``: fields of a serving workload."""
    return {p.name: _replica(p, model, workload) for p in spec.pools}


def _replica(p: Pool, model: str | ModelSpec, workload: dict[str, Any]) -> Experiment:
    own = {name: value for name in OF_REPLICA if (value := getattr(p, name))}
    plan = p.plan
    if plan is None:
        devices = catalog.cluster(p.on).size
        plan = [*([f"tensor_parallel:degree={devices}"] if devices > 1 else []), *default_plan("serve")]
    return experiments.make(model, p.on, {**workload, **own, "kind": "serve"}, plan, p.name, f"pool {p.name}")


def require_sizes(spec: FleetSpec) -> None:
    """Raises :class:`UserError` for a pool without a number of replicas."""
    for p in spec.pools:
        if p.replicas is None and p.autoscale is None:
            raise UserError(
                f"pool {p.name} has no number of replicas",
                "write replicas = 4, or let `ridgeline plan --fleet` find it",
            )


def write(spec: FleetSpec, path: Path) -> Path:
    """Write a file that :func:`load` reads back to the same fleet."""
    return write_atomic(path, tomli_w.dumps(spec.model_dump(exclude_defaults=True, exclude_none=True)))
