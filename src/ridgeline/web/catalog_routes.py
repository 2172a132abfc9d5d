"""The catalog: models, devices, techniques, systems."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from ridgeline import catalog
from ridgeline.spec.device import Device
from ridgeline.spec.model import ModelSpec
from ridgeline.techniques.cards import cards
from ridgeline.techniques.registry import registry


def catalog_routes() -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/catalog")
    def everything() -> dict[str, Any]:
        return {
            "models": [_model(catalog.model(name)) for name in catalog.models()],
            "devices": [_device(catalog.device(name)) for name in [*catalog.devices(), *_local()]],
            "techniques": [_technique(c) for c in cards()],
            "systems": [_system(name) for name in catalog.systems()],
        }

    return routes


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
