"""The routes of the OpenAI-compatible server, in groups; each function adds one group to the app."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ridgeline.serve import pooled_replies, replies
from ridgeline.serve.chat import ChatBatch, ChatCompletion, Tokenize
from ridgeline.serve.cohere import Embed, EmbedRequest
from ridgeline.serve.engine_loop import EngineLoop
from ridgeline.serve.fields import Body
from ridgeline.serve.http import ClientDisconnected, EventStream, Json, Passed, bearer, refusal, unless_gone
from ridgeline.serve.message_bodies import Counted, MessageRequest
from ridgeline.serve.messages import Messages
from ridgeline.serve.openai import Completion, Detokenize, LoadAdapter, UnloadAdapter
from ridgeline.serve.output_stream import OutputStream
from ridgeline.serve.pooled_bodies import Classification, EmbeddingRequest, PoolingRequest
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.reading import Reading
from ridgeline.serve.request import Invalid, Vector
from ridgeline.serve.response_bodies import ResponseRequest
from ridgeline.serve.responses import Responses
from ridgeline.serve.scoring import PAIRS, RerankRequest, ScoreRequest
from ridgeline.serve.service import Service
from ridgeline.serve.transfer.handover import FIELD, hand_over
from ridgeline.serve.transfer.secret import HEADER

T = TypeVar("T")
P = TypeVar("P", bound=PreparedRequest)
Reply = Callable[[P, OutputStream], Any]
"""Builds the response from the engine's output: complete, or as a stream."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RESET_CACHE = "/reset_prefix_cache"
SLEEP, WAKE = "/sleep", "/wake_up"
_ERROR = {"content": {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {
    "error": {"type": "object", "required": ["message", "type", "param", "code"]}}}}}}  # fmt: skip
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, **_ERROR}
    for status, what in {
        400: "The request is wrong", 401: "No valid key", 403: "Not allowed", 404: "No such model",
        413: "Too large", 500: "The server failed", 503: "The server is busy",
    }.items()
}  # fmt: skip

_GENERATED: dict[int | str, dict[str, Any]] = {
    **_REFUSALS,
    200: {
        "description": "Whole, or with `stream` as events",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
}


async def submitted(
    loop: EngineLoop, request: Request, prepare: Callable[[T, bytes], P], body: T
) -> tuple[P, OutputStream]:
    """Prepare off the event loop, and submit. Errors name the fields of ``body``."""
    with _named_as_in(body):
        prepared = await asyncio.to_thread(prepare, body, bearer(request.scope))
        if loop.member is not None:
            loop.member.assign(prepared.jobs, request.headers.get(HEADER))
        if (handed := getattr(body, FIELD, None)) is not None:
            host = (request.scope.get("server") or ("127.0.0.1",))[0]
            prepared.handed_over = hand_over(handed, loop.member, prepared.jobs, host)
        return prepared, await loop.submit(prepared.jobs)


@contextlib.contextmanager
def _named_as_in(body: Any) -> Iterator[None]:
    """Errors name the fields of ``body`` that the engine's come from."""
    try:
        yield
    except Invalid as e:
        if isinstance(body, Body) and (param := body.renamed(e.param)) != e.param:
            raise Invalid(param, e.what.removeprefix(f"{e.param}: "), e.fix, e.code) from None
        raise


async def answer(
    loop: EngineLoop, request: Request, prepare: Callable[[T, bytes], P], body: T,
    finish: Reply[P], stream: Reply[P] | None = None, typed: bool = False,
) -> Response:  # fmt: skip
    """Prepare, submit, respond completely or as a stream; aborted when the client disconnects."""

    async def all_of_it() -> Response:
        prepared, found = await submitted(loop, request, prepare, body)
        try:
            return Json(await finish(prepared, found))
        finally:
            loop.cancel(found)

    async def pieces(prepared: P, found: OutputStream, write: Any) -> Any:
        try:
            async for piece in write(prepared, found):
                yield piece
        finally:
            loop.cancel(found)

    try:
        if stream is None:
            return await unless_gone(request.receive, all_of_it())
        prepared, found = await unless_gone(request.receive, submitted(loop, request, prepare, body))
        return EventStream(pieces(prepared, found, stream), typed)
    except ClientDisconnected:
        return Response(status_code=499)


async def read(
    loop: EngineLoop, request: Request, prepare: Callable[[T, bytes], PreparedRequest], body: T,
    write: Callable[[PreparedRequest, list[Vector]], Response],
) -> Response:  # fmt: skip
    """Prepare off the event loop, pool all prompts, respond; aborted when the client disconnects."""

    async def work() -> Response:
        with _named_as_in(body):
            prepared = await asyncio.to_thread(prepare, body, bearer(request.scope))
            found = await loop.vectors(prepared.jobs)
        return await asyncio.to_thread(write, prepared, found)

    try:
        return await unless_gone(request.receive, work())
    except ClientDisconnected:
        return Response(status_code=499)


def generation_routes(app: FastAPI, service: Service) -> None:
    """Completions and chat."""

    @app.post("/v1/completions", responses=_GENERATED)
    async def completions(body: Completion, request: Request) -> Response:
        """Continue prompts."""
        return await answer(
            service.loop, request, service.completion, body, lambda a, s: replies.whole(a, s, chat=False),
            (lambda a, s: replies.chunks(a, s, body, False, service.force_usage)) if body.stream else None,
        )  # fmt: skip

    @app.post("/v1/chat/completions", responses=_GENERATED)
    async def chat(body: ChatCompletion, request: Request) -> Response:
        """Answer a conversation."""
        return await answer(
            service.loop, request, service.chat, body, lambda a, s: replies.whole(a, s, chat=True),
            (lambda a, s: replies.chunks(a, s, body, True, service.force_usage)) if body.stream else None,
        )  # fmt: skip

    @app.post("/v1/chat/completions/batch", responses=_REFUSALS)
    async def chats(body: ChatBatch, request: Request) -> Response:
        """Answer several conversations, each with a choice."""
        return await answer(service.loop, request, service.chats, body, lambda a, s: replies.whole(a, s, chat=True))


def pooling_routes(app: FastAPI, service: Service) -> None:
    """Embeddings, classes, and how similar texts are."""
    loop, reading = service.loop, Reading(service)
    known = Embed(reading)

    @app.post("/v1/embeddings", responses=_REFUSALS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts."""
        return await read(loop, request, reading.embedding, body, lambda a, v: pooled_replies.embeddings(a, v, body))

    @app.post("/v2/embed", responses=_REFUSALS)
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """Vectors of texts, as Cohere's API has it."""
        return await read(loop, request, known.prepare, body, lambda a, v: known.answer(a, v, body))

    @app.post("/classify", responses=_REFUSALS)
    async def classify(body: Classification, request: Request) -> Response:
        """Classes of texts, of a model for sequence classification."""
        return await read(
            loop, request, reading.classification, body, lambda a, v: pooled_replies.classes(a, v, body, service)
        )

    @app.post("/pooling", responses=_REFUSALS)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Embeddings, or probabilities of classes."""
        return await read(loop, request, reading.pooled, body, lambda a, v: pooled_replies.pooled(a, v, body, service))

    @app.post("/score", responses=_REFUSALS)
    @app.post("/v1/score", responses=_REFUSALS)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Similarity of pairs of texts."""
        return await read(loop, request, reading.scored, body, lambda a, v: pooled_replies.scores(a, v, body, service))

    @app.post("/rerank", responses=_REFUSALS)
    @app.post("/v1/rerank", responses=_REFUSALS)
    @app.post("/v2/rerank", responses=_REFUSALS)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by their similarity to a query."""
        return await read(loop, request, reading.scored, body, lambda a, v: pooled_replies.ranks(a, v, body, service))


def message_routes(app: FastAPI, service: Service) -> None:
    """Anthropic's Messages API."""
    known = Messages(service)

    @app.post("/v1/messages", responses=_GENERATED)
    async def message(body: MessageRequest, request: Request) -> Response:
        """Answer a conversation with a list of blocks."""
        stream = known.events if body.stream else None
        return await answer(service.loop, request, known.prepare, body, known.whole, stream, typed=True)

    @app.post("/v1/messages/count_tokens", responses=_REFUSALS)
    async def count_tokens(body: Counted, request: Request) -> Response:
        """Tokens of a prompt."""
        return Json({"input_tokens": await asyncio.to_thread(known.count, body)})


def response_routes(app: FastAPI, service: Service) -> None:
    """Responses, which may be continued by their id."""
    known = Responses(service)

    @app.post("/v1/responses", responses=_GENERATED)
    async def respond(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation with a list of items."""
        if not body.background:
            stream = known.events if body.stream else None
            return await answer(service.loop, request, known.prepare, body, known.whole, stream, typed=True)
        prepared, found = await submitted(service.loop, request, known.prepare, body)
        queued = known.begin(prepared, found)
        if body.stream:
            return EventStream(known.follow(prepared.id, bearer(request.scope)), typed=True)
        return Json(queued)

    @app.get("/v1/responses/{name}", responses=_GENERATED)
    async def response(name: str, request: Request, stream: bool = False, starting_after: int = -1) -> Response:
        """A response that is stored, or made in the background; with ``stream`` its events."""
        key = bearer(request.scope)
        if stream:
            return EventStream(known.follow(name, key, starting_after), typed=True)
        return Json(known.get(name, key))

    @app.get("/v1/responses/{name}/input_items", responses=_REFUSALS)
    async def inputs(
        name: str, request: Request, limit: int = 20, order: Literal["asc", "desc"] = "desc", after: str | None = None
    ) -> Response:
        """What a response was made from."""
        return Json(known.inputs(name, bearer(request.scope), limit, order == "desc", after))

    @app.delete("/v1/responses/{name}", responses=_REFUSALS)
    async def forget(name: str, request: Request) -> Response:
        """Forget a response."""
        known.delete(name, bearer(request.scope))
        return Json({"id": name, "object": "response", "deleted": True})

    @app.post("/v1/responses/{name}/cancel", responses=_REFUSALS)
    async def cancel(name: str, request: Request) -> Response:
        """End a response that is made in the background."""
        return Json(known.cancel(name, bearer(request.scope)))


def invocation_route(app: FastAPI, service: Service) -> None:
    """SageMaker's one route for whatever the model does, told apart by the fields of the body."""

    @app.post("/invocations", responses=_REFUSALS, include_in_schema=False)
    async def invocations(request: Request) -> Response:
        """What the route for such a body answers."""
        raw = await request.body()
        try:
            body = await asyncio.to_thread(json.loads, raw)
        except (ValueError, RecursionError):
            body = None
        path = _route_for(body if isinstance(body, dict) else {}, service)
        if path is None:
            return refusal(400, "the body is no request of a known kind: give prompt, messages, input, or documents")
        return Passed(app.router, path, raw)


def _route_for(body: dict[str, Any], service: Service) -> str | None:
    """The path of the route that takes such a body."""
    if "query" in body:
        return "/rerank"
    if any(set(pair) <= set(body) for pair in PAIRS):
        return "/score"
    reads = "/classify" if service.labels is not None else "/v1/embeddings"
    if "input" in body:
        return reads
    if "messages" in body:
        return "/v1/chat/completions" if service.loop.engine.spec.causal else reads
    return "/v1/completions" if "prompt" in body else None


def model_routes(app: FastAPI, service: Service) -> None:
    """The served models: the base model and its adapters."""

    @app.get("/v1/models", responses=_REFUSALS)
    async def models() -> Response:
        """The served models: the base model and its adapters."""
        return Json({"object": "list", "data": service.models()})

    @app.get("/v1/models/{name:path}", responses=_REFUSALS)
    async def model(name: str) -> Response:
        """One model."""
        service.adapter(name)
        return Json(next(m for m in service.models() if m["id"] == name))

    @app.post(LOAD_ADAPTER, responses=_REFUSALS)
    async def load_adapter(body: LoadAdapter, request: Request) -> Response:
        """Serve an adapter from a folder of the server, under a name."""
        await service.load(body.lora_name, body.lora_path, body.load_inplace)
        return Json({"status": "success", "loaded": body.lora_name})

    @app.post(UNLOAD_ADAPTER, responses=_REFUSALS)
    async def unload_adapter(body: UnloadAdapter, request: Request) -> Response:
        """Unload an adapter."""
        await service.unload(body.lora_name)
        return Json({"status": "success", "unloaded": body.lora_name})


def text_routes(app: FastAPI, service: Service) -> None:
    """The tokenizer."""

    @app.post("/tokenize", responses=_REFUSALS)
    async def tokenize(body: Tokenize, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service.adapter(body.model)
        tokens = await asyncio.to_thread(service.tokens, body)
        texts = service.vocabulary.entries(tokens) if body.return_token_strs else None
        return Json({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len,
                     "token_strs": texts})  # fmt: skip

    @app.post("/detokenize", responses=_REFUSALS)
    async def detokenize(body: Detokenize, request: Request) -> Response:
        """The text of token ids."""
        service.adapter(body.model)
        service.known(body.tokens, "tokens")
        text = await asyncio.to_thread(service.vocabulary.decode, body.tokens, skip_special=False)
        return Json({"prompt": text})

    @app.get("/tokenizer_info", responses=_REFUSALS)
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template, for clients without the tokenizer's files."""
        return Json(service.tokenizer_info())


def sleep_routes(app: FastAPI, service: Service) -> None:
    """Giving memory back for a while."""
    loop = service.loop

    @app.post(SLEEP, responses=_REFUSALS)
    async def sleep(request: Request) -> Response:
        """Free weights and cache; requests get a 503 until ``/wake_up``. Levels 1 and 2 are the same here."""
        query = request.query_params
        level = query.get("level", "1")
        if level not in ("1", "2"):
            raise Invalid("level", f"is {level!r}", "give 1 or 2")
        if unknown := next((name for name in query if name != "level"), None):
            raise Invalid(unknown, "is not known", "leave it out")
        await loop.sleep()
        return Json({"status": "sleeping", "level": int(level)})

    @app.post(WAKE, responses=_REFUSALS)
    async def wake(request: Request) -> Response:
        """Load the weights again, and the adapters."""
        if unknown := next(iter(request.query_params), None):
            raise Invalid(unknown, "is not known", "leave it out: all of it is loaded again")
        await service.wake()
        return Json({"status": "awake"})

    @app.get("/is_sleeping", responses=_REFUSALS)
    async def is_sleeping() -> Response:
        """Whether weights and cache are freed."""
        return Json({"is_sleeping": loop.asleep})


def state_routes(app: FastAPI, service: Service) -> None:
    """Health and metrics."""
    loop, metrics = service.loop, service.loop.metrics

    @app.get("/health", responses=_REFUSALS)
    async def health() -> Response:
        """Whether the engine works."""
        if not loop.alive:
            why = "failed" if loop.failure else f"has been in one step for {loop.step_age:.0f} s"
            return refusal(503, f"the engine {why}")
        return Json({"status": "ok"})

    @app.get("/ready", responses=_REFUSALS)
    async def ready() -> Response:
        """Whether new requests are accepted."""
        return Json({"status": "ready"}) if loop.ready else refusal(503, "not taking requests", retry_after=5.0)

    @app.get("/ping", responses=_REFUSALS)
    @app.post("/ping", responses=_REFUSALS, include_in_schema=False)
    async def ping() -> Response:
        """As ``/health``, for SageMaker."""
        return await health()

    @app.get("/version", responses=_REFUSALS)
    async def version() -> Response:
        """Ridgeline's version."""
        return Json({"version": app.version})

    @app.get("/fleet-member", responses=_REFUSALS)
    async def member() -> Response:
        """For a fleet's router: the role, and where prompts are sent from."""
        if loop.member is None:
            return refusal(404, "this server sends and receives no caches of prompts")
        return Json(loop.member.description())

    @app.get("/load", responses=_REFUSALS)
    async def load() -> Response:
        """Requests that are waiting or running."""
        return Json({"server_load": loop.open_streams})

    @app.post(RESET_CACHE, responses=_REFUSALS)
    async def reset() -> Response:
        """Forget all cached prompts, as before a measurement."""
        return Json({"freed_blocks": await loop.ask(lambda engine: engine.reset_prefix_cache())})

    @app.get("/metrics", responses=_REFUSALS, response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """For Prometheus."""
        text = metrics.text() + await loop.engine_metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
