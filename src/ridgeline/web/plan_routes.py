"""Plans: predict one, compare several, find the best."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from ridgeline.predict import predict
from ridgeline.predict.remedies import remedies
from ridgeline.search import Question, answer_tables, search
from ridgeline.search.question import parse_slo
from ridgeline.search.why import closest_miss, relaxations, why_not
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.plan import Plan
from ridgeline.web.events import event_stream
from ridgeline.web.plans import PlanRequest, answer, cluster_of, experiment_of, model_of

COMPARED = 6
PAIRS = 8
"""Techniques in the matrix of pairs at most."""


class SearchRequest(PlanRequest):
    """A planning question; ``plan`` holds what every plan must have."""

    model_config = ConfigDict(extra="forbid")

    goal: str = "throughput"
    slo: list[str] = Field(default_factory=list)
    allow: list[str] = Field(default_factory=list)


class CompareRequest(BaseModel):
    """Plans side by side."""

    plans: list[PlanRequest] = Field(min_length=1, max_length=COMPARED)


class MatrixRequest(PlanRequest):
    """Which techniques to cross on top of ``plan``."""

    techniques: list[str] = Field(min_length=1, max_length=PAIRS)
    metric: str = "tokens_per_s"


def plan_routes() -> APIRouter:
    """The routes."""
    routes = APIRouter()
    searching = threading.Semaphore(1)

    @routes.post("/plan")
    def plan(request: PlanRequest) -> dict[str, Any]:
        return answer(request)

    @routes.post("/remedies")
    def fitting(request: PlanRequest) -> list[dict[str, Any]]:
        return [r._asdict() for r in remedies(experiment_of(request))]

    @routes.post("/compare")
    def compare(request: CompareRequest) -> list[dict[str, Any]]:
        return [_outcome(p) for p in request.plans]

    @routes.post("/matrix")
    def matrix(request: MatrixRequest) -> list[list[dict[str, Any]]]:
        names = request.techniques
        return [[_cell(request, dict.fromkeys((a, b))) for b in names] for a in names]

    @routes.post("/search")
    async def find(request: SearchRequest) -> StreamingResponse:
        return event_stream(_search(question_of(request), searching))

    return routes


def question_of(request: SearchRequest) -> Question:
    """The planning question. Raises :class:`UserError` as `ridgeline plan` does."""
    cluster = cluster_of(request.on, request.device)
    trains = request.workload.get("kind", "pretrain") in ("pretrain", "finetune")
    e = experiment_of(request.model_copy(update={"plan": []}), Cluster(device=cluster.device) if trains else cluster)
    fields = {k: v for k, v in request.workload.items() if v is not None}
    return Question(
        model_of(request.model), cluster, e.workload, request.goal, parse_slo(request.slo), Plan.parse(request.plan),
        frozenset(request.allow), free_batch=e.task == "generate" and "batch_size" not in fields,
        free_micro_batch="micro_batch_size" not in fields,
    )  # fmt: skip


async def _search(question: Question, searching: threading.Semaphore) -> AsyncIterator[dict[str, Any]]:
    if not searching.acquire(blocking=False):
        yield {"error": {"what": "another search is running", "fix": "wait for it to end"}}
        return
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def say(event: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(news.put_nowait, event)

    def work() -> None:
        try:
            found = search(question, 1, lambda at, of: say({"at": at, "of": of}))
            miss, ways = (None, []) if found.best else (closest_miss(found), relaxations(found))
            say({"answer": answer_tables.as_dict(found, why_not(found), ways, miss)})
        except UserError as e:
            say({"error": {"what": e.what, "fix": e.fix}})
        except Exception as e:  # any error must reach the page
            say({"error": {"what": f"the search failed: {e}", "fix": ""}})
            raise
        finally:
            searching.release()

    threading.Thread(target=work, daemon=True).start()
    while True:
        event = await news.get()
        yield event
        if "answer" in event or "error" in event:
            return


def _outcome(request: PlanRequest) -> dict[str, Any]:
    try:
        found = answer(request)
    except UserError as e:
        return {"error": {"what": e.what, "fix": e.fix}}
    return {k: found[k] for k in ("result", "cluster", "plan", "command")}


def _cell(request: MatrixRequest, names: dict[str, None]) -> dict[str, Any]:
    """The plan with one or two more techniques, over the plan without."""
    own = {call.partition(":")[0] for call in request.plan}
    more = [name for name in names if name.partition(":")[0] not in own]
    plain = PlanRequest(**request.model_dump(include=set(PlanRequest.model_fields)))
    try:
        without = predict(experiment_of(plain))
        with_them = predict(experiment_of(plain.model_copy(update={"plan": [*plain.plan, *more]})))
    except UserError as e:
        return {"why": e.what}
    if request.metric not in without.metrics or request.metric not in with_them.metrics:
        return {"why": f"no {request.metric} in this task"}
    ratio = with_them.metrics[request.metric].value / without.metrics[request.metric].value
    return {"ratio": ratio, "fits": with_them.status == "ok"}
