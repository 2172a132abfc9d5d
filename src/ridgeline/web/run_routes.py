"""Stored runs and running jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from ridgeline.jobs.live import running
from ridgeline.spec.ablation import Ablation
from ridgeline.spec.result import Result
from ridgeline.store import SORTS, Store
from ridgeline.web.events import event_stream
from ridgeline.web.plans import tree_document

EVERY = 1.0
"""Seconds between two updates of the running jobs."""


class Tags(BaseModel):
    """The tags of a run."""

    tags: list[str] = Field(max_length=20)


def run_routes(store: Store) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/runs")
    def runs(
        name: str = "",
        kind: Literal["", "result", "ablation", "study"] = "",
        source: str = "",
        tag: str = "",
        sort: str = Query("created", pattern="|".join(SORTS)),
        descending: bool = True,
        offset: int = Query(0, ge=0, lt=1 << 63),
        limit: int = Query(100, ge=1, le=500),
    ) -> dict[str, Any]:
        page = store.page(name=name, kind=kind, source=source, tag=tag, sort=sort, descending=descending,
                          offset=offset, limit=limit)  # fmt: skip
        tags = store.tags([r.id for r in page.runs])
        return {"total": page.total, "tags": store.all_tags(),
                "runs": [{**r._asdict(), "tags": tags.get(r.id, [])} for r in page.runs]}  # fmt: skip

    @routes.get("/runs/{run}")
    def one(run: str) -> dict[str, Any]:
        found = store.get(run)
        document = json.loads(found.to_json(indent=None))
        if not isinstance(found, Result):
            return {"kind": "ablation" if isinstance(found, Ablation) else "study", "document": document}
        return {"kind": "result", "document": document, "tree": tree_document(found)}

    @routes.post("/runs/{run}/tags")
    def tag(run: str, tags: Tags) -> list[str]:
        return store.set_tags(run, tags.tags)

    @routes.get("/live")
    async def live() -> StreamingResponse:
        return event_stream(_live())

    return routes


async def _live() -> AsyncIterator[dict[str, Any]]:
    while True:
        jobs = await asyncio.to_thread(lambda: [asdict(j) | {"memory_bytes": j.memory()} for j in running()])
        yield {"jobs": jobs}
        await asyncio.sleep(EVERY)
