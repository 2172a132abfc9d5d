"""The playground: chat with the server that was named when the web app was started."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from ridgeline.spec.errors import UserError
from ridgeline.web.events import event_stream

GAUGES = ("ridgeline_running", "ridgeline_waiting", "ridgeline_kv_blocks", "vllm:num_requests", "vllm:kv_cache_usage")
"""Lines of ``/metrics`` that show the server's load: ours, and vLLM's."""
TIMEOUT = 60.0
"""Seconds without any data from the server after which it counts as unreachable."""


class ChatRequest(BaseModel):
    """A conversation, as the OpenAI API has it."""

    model: str
    messages: list[dict[str, str]] = Field(min_length=1, max_length=200)
    max_tokens: int = Field(256, ge=1, le=32768)
    temperature: float = Field(1.0, ge=0, le=2)
    prefix_cache: bool = True
    """Whether the server may reuse what it keeps of earlier prompts; if not, a ``cache_salt`` of its own keeps the
    request apart."""


def playground_routes(server: str) -> APIRouter:
    """The routes. ``server``: base address such as ``http://127.0.0.1:8000``; empty: none was named."""
    routes = APIRouter()

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        if not server:
            raise UserError("no server was named", "start `ridgeline web --server http://127.0.0.1:8000`")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{server}{path}", data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as e:
            raise UserError(f"the server answered {e.code}: {e.read(2000).decode(errors='replace')}") from None
        except (OSError, ValueError) as e:
            raise UserError(f"no answer from {server}: {e}", "is it running? `ridgeline serve CHECKPOINT`") from None

    @routes.get("/server")
    def about() -> dict[str, Any]:
        with ask("/v1/models") as answer:
            models = [m["id"] for m in json.load(answer)["data"]]
        with ask("/metrics") as answer:
            lines = answer.read(1 << 20).decode(errors="replace").splitlines()
        batch = {x.split()[0]: float(x.split()[1]) for x in lines if x.startswith(GAUGES) and len(x.split()) == 2}
        return {"server": server, "models": models, "gauges": batch}

    @routes.post("/chat")
    async def chat(request: ChatRequest) -> StreamingResponse:
        salt = {} if request.prefix_cache else {"cache_salt": uuid.uuid4().hex}
        body = {**request.model_dump(exclude={"prefix_cache"}), **salt, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        answer = await asyncio.to_thread(ask, "/v1/chat/completions", body)
        return event_stream(_chunks(answer))

    return routes


async def _chunks(answer: Any) -> AsyncIterator[dict[str, Any]]:
    try:
        while line := await asyncio.to_thread(answer.readline):
            text = line.decode(errors="replace").strip()
            if text.startswith("data:") and text != "data: [DONE]":
                yield json.loads(text[5:])
    finally:
        answer.close()
