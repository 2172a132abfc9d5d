"""The OpenAI-compatible server: its routes, errors and gate around one service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import ridgeline
from ridgeline.serve.address import path_prefix
from ridgeline.serve.bodies import WrongBody, body_route, wrong_query
from ridgeline.serve.http import Gate, Json, Keys, error_body, refusal
from ridgeline.serve.output_stream import Failed
from ridgeline.serve.request import Busy, Invalid, NotFound
from ridgeline.serve.routes import (
    LOAD_ADAPTER,
    RESET_CACHE,
    SLEEP,
    UNLOAD_ADAPTER,
    WAKE,
    generation_routes,
    invocation_route,
    message_routes,
    model_routes,
    pooling_routes,
    response_routes,
    sleep_routes,
    state_routes,
    text_routes,
)
from ridgeline.serve.service import NoModel, Service
from ridgeline.spec.errors import UserError

log = logging.getLogger("ridgeline.serve")
MAX_BODY = 8 << 20


def create_app(service: Service, keys: Sequence[str] = (), admin_keys: Sequence[str] = (),
               max_body: int = MAX_BODY, root_path: str = "", origins: Sequence[str] = ()) -> FastAPI:  # fmt: skip
    """The server around ``service``, whose loop runs as long as the app does. ``root_path``: a prefix of all paths,
    which a proxy may have taken off; ``origins``: whose pages a browser lets ask. Raises :class:`UserError` for a path
    that is none."""
    root_path = path_prefix(root_path)
    loop = service.loop

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        loop.stop()

    app = FastAPI(title="Ridgeline", version=ridgeline.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
                  redirect_slashes=False, servers=[{"url": root_path}] if root_path else None)  # fmt: skip
    app.router.route_class = body_route(service.max_model_len)
    loop.metrics.model = service.name
    blocks = loop.engine.blocks
    tokens = blocks.count * blocks.size
    cache = {"block_size": str(blocks.size), "num_gpu_blocks": str(blocks.count), "kv_cache_size_tokens": str(tokens),
             "kv_cache_max_concurrency": f"{tokens / loop.engine.max_model_len:.2f}"}  # fmt: skip
    loop.metrics.watch(lambda: loop.stats, lambda: loop.queued, cache)
    for add in (
        generation_routes,
        response_routes,
        message_routes,
        pooling_routes,
        invocation_route,
        model_routes,
        text_routes,
        sleep_routes,
        state_routes,
    ):
        add(app, service)
    _errors(app)
    admin_paths = frozenset({LOAD_ADAPTER, UNLOAD_ADAPTER, RESET_CACHE, SLEEP, WAKE})
    app.add_middleware(Gate, keys=Keys(keys), admin=Keys(admin_keys), admin_paths=admin_paths, max_body=max_body,
                       root_path=root_path)  # fmt: skip
    if origins:  # outside the gate: a browser asks without a key whether it may ask
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"],
                           expose_headers=["x-request-id", "retry-after"])  # fmt: skip
    return app


def _errors(app: FastAPI) -> None:
    """Every error in the OpenAI API's format."""

    @app.exception_handler(UserError)
    async def wrong(request: Request, e: UserError) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        if isinstance(e, Busy):
            return refusal(503, e.what, code="overloaded", retry_after=e.retry_after)
        if isinstance(e, NoModel):
            return refusal(404, f"{e.what}: {e.fix}", "model", "model_not_found", path=path)
        about = (e.param, e.code) if isinstance(e, (Invalid, WrongBody)) else (None, None)
        status = 404 if isinstance(e, NotFound) else 400
        return refusal(status, f"{e.what}: {e.fix}" if e.fix else e.what, *about, path=path)

    @app.exception_handler(RequestValidationError)
    async def parameter(request: Request, e: RequestValidationError) -> Response:
        return await wrong(request, wrong_query(e.errors(), request.query_params))

    @app.exception_handler(Failed)
    async def failed(request: Request, e: Failed) -> Response:
        return refusal(500, str(e))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, e: HTTPException) -> Response:
        return Json(error_body(e.status_code, str(e.detail)), e.status_code, headers=e.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, e: Exception) -> Response:
        log.error("a request failed", exc_info=e)
        return refusal(500, "the server failed; its log says why")
