"""Fleet files: TOML to a :class:`~ridgeline.spec.fleet.FleetSpec`, and the experiment of each pool's replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from ridgeline.spec.scheduling import OWN
from ridgeline.spec.sizes import parse_size
from ridgeline.techniques.registry import default_plan

OF_REPLICA = ("engine", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "max_model_len")
"""Fields of a pool that take the place of the workload's."""

SERVER_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--max-num-seqs": ("max_num_seqs", int),
    "--max-num-batched-tokens": ("max_num_batched_tokens", int),
    "--max-model-len": ("max_model_len", int),
    "--kv-cache": ("kv_cache_bytes", parse_size),
    "--role": ("role", str),
}
"""Options of ``ridgeline serve`` that a pool has, too."""


def load(path: Path) -> FleetSpec:
    """The fleet of a file: one to predict, with ``[[pools]]``, or one of ``ridgeline fleet up``, whose ``[[servers]]``
    are pools on this machine. Raises :class:`UserError` naming what is wrong in it."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", "give a TOML file with [[pools]]") from None
    table = parse(data, str(path))
    if "servers" in table:
        table = _of_servers(table, str(path))
    return validate(FleetSpec, table, str(path))


def _of_servers(table: dict[str, Any], where: str) -> dict[str, Any]:
    """The table of a fleet to predict, of one whose servers run on this machine."""
    if "pools" in table:
        raise UserError(f"{where} has [[servers]] and [[pools]]", "keep [[servers]] to run it, [[pools]] to predict it")
    servers = table["servers"]
    if not isinstance(servers, list) or not all(isinstance(s, dict) for s in servers):
        raise UserError(f"servers in {where} is no list of tables", "write [[servers]]")
    fleet = table.get("fleet", {})
    if isinstance(fleet, dict) and fleet.get("members"):
        raise UserError(f"{where} lists members whose hardware it does not describe",
                        "describe the fleet with [[pools]] to predict it")  # fmt: skip
    policy = {"policy": fleet["policy"]} if isinstance(fleet, dict) and "policy" in fleet else {}
    pools = [_of_server(s, f"servers{i}", where) for i, s in enumerate(servers, 1)]
    split = any(p.get("role", "mixed") != "mixed" for p in pools)
    return {"fleet": policy, "pools": pools, **({"flip": {}} if split else {})}  # the router's servers help each other


def _of_server(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """The pool of one ``[[servers]]``, from those of its options that matter to a prediction."""
    off, own, found = set(), [], {}
    for option, value in _options([str(o) for o in table.get("options", [])]):
        if option == "--with" and value.startswith("-"):
            off.add(value[1:])
        elif option == "--with":
            own.append(value)
            off.add(value.partition(":")[0])
        elif option in SERVER_OPTIONS:
            field, read = SERVER_OPTIONS[option]
            try:
                found[field] = read(value)
            except ValueError:
                raise UserError(f"{where}: {option} {value!r} of {name} is no number", "correct it there") from None
    plan = [*(t for t in default_plan("serve") if t not in off), *own]
    own_keys: dict[str, Any] = {key: table[key] for key in ("replicas", "role") if key in table}
    return {"name": name, "on": "local", "replicas": 1, "engine": OWN, "plan": plan, **found, **own_keys}


def _options(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a command line with their values."""
    for option, following in zip(items, [*items[1:], "--"], strict=False):
        if option.startswith("--"):
            name, given, value = option.partition("=")
            yield name, value if given or following.startswith("--") else following


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
