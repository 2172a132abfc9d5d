"""The catalog: models, devices, techniques, systems."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from ridgeline import catalog
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.device import Device
from ridgeline.spec.errors import unknown
from ridgeline.spec.model import ModelSpec
from ridgeline.store import Store
from ridgeline.techniques.cards import cards
from ridgeline.techniques.registry import registry
from ridgeline.web.chips import chip_list

MOST_ABLATIONS = 50
"""Number of stored ablations, newest first, that are searched for measurements of a technique."""


def catalog_routes(store: Store) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/catalog")
    def everything() -> dict[str, Any]:
        return {
            "models": [_model(catalog.model(name)) for name in catalog.models()],
            "devices": [_device(catalog.device(name)) for name in [*catalog.devices(), *_local()]],
            "chips": chip_list(),
            "techniques": [_technique(c) for c in cards()],
            "systems": [_system(name) for name in catalog.systems()],
        }

    @routes.get("/techniques/{name}/measured")
    def measured(name: str) -> list[dict[str, Any]]:
        if name not in registry():
            raise unknown("technique", name, registry())
        runs = store.list(MOST_ABLATIONS, kind="ablation")
        found = ((run.id, store.get(run.id)) for run in runs)
        return [row for key, a in found if isinstance(a, Ablation) for row in _measured(name, key, a)]

    return routes


def _measured(name: str, key: str, a: Ablation) -> Iterator[dict[str, Any]]:
    """Plans of an ablation that have the technique where the baseline has not, with their measured speed-up."""
    if any(name == call.partition(":")[0] for o in a.outcomes if o.name == a.baseline for call in o.plan):
        return
    for o in a.outcomes:
        if o.speedup is not None and any(name == call.partition(":")[0] for call in o.plan):
            yield {
                "run": key, "ablation": a.name, "plan": o.plan, "speedup": o.speedup.value, "low": o.speedup.low,
                "high": o.speedup.high, "predicted": o.predicted_speedup, "memory_ratio": o.memory_ratio,
                "machine": a.environment.get("gpu") or a.environment.get("cpu") or "", "created": a.created,
            }  # fmt: skip


def _local() -> list[str]:
    return ["local"] if catalog.local_device_path().is_file() else []


def _model(m: ModelSpec) -> dict[str, Any]:
    return {"name": m.name, "family": m.family, "parameters": m.num_parameters, "layers": m.num_layers,
            "hidden_size": m.hidden_size, "max_positions": m.max_positions,
            "aliases": list(catalog.model_aliases(m.name))}  # fmt: skip


def _device(d: Device) -> dict[str, Any]:
    fields = ("name", "title", "kind", "vendor", "architecture", "year", "peak_flops", "memory_bytes",
              "memory_bandwidth", "watts", "price_per_hour", "source")  # fmt: skip
    links = {n: getattr(d, n) for n in ("link", "host_link", "network")}
    figures = d.model_dump(include=set(fields))
    return {**figures, **{n: x and {"name": x.name, "bandwidth": x.bandwidth} for n, x in links.items()},
            "measured": d.name in catalog.efficiency(d).fitted_on}  # fmt: skip


def _technique(c: dict[str, Any]) -> dict[str, Any]:
    cls = registry()[c["name"]]
    return {**c, "family": Path(inspect.getfile(cls)).parent.name, "example": dict(cls.card.example),
            "default_in": sorted(cls.card.default_in)}  # fmt: skip


def _system(name: str) -> dict[str, Any]:
    s = catalog.system(name)
    return {"name": s.name, "title": s.title, "paper": s.paper, "claim": s.claim, "plan": list(s.plan)}
