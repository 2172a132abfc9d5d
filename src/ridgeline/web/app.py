"""The web app: routes over the library, and the prebuilt page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from ridgeline.spec.errors import UserError
from ridgeline.store import Store
from ridgeline.web.catalog_routes import catalog_routes
from ridgeline.web.guard import NAMES, Guard
from ridgeline.web.plan_routes import plan_routes
from ridgeline.web.playground import playground_routes
from ridgeline.web.run_routes import run_routes

STATIC = Path(str(files("ridgeline.web"))) / "static"


def create_app(
    store: Store, server: str = "", hosts: tuple[str, ...] | None = NAMES, token: str = "", static: Path = STATIC
) -> FastAPI:
    """The ASGI app. ``server``: base address of the inference server that the playground talks to. ``hosts`` and
    ``token`` as in :class:`~ridgeline.web.guard.Guard`. Raises :class:`UserError` when the page was not built."""
    if not (static / "index.html").is_file():
        raise UserError("the web page is not in this installation", "in a checkout: make web (needs Node)")
    app = FastAPI(title="Ridgeline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts, token=token)
    app.add_exception_handler(UserError, _mistake)
    app.add_exception_handler(RequestValidationError, _invalid)
    for routes in (plan_routes(), run_routes(store), catalog_routes(store), playground_routes(server)):
        app.include_router(routes, prefix="/api")
    app.mount("/", StaticFiles(directory=static, html=True))
    return app


async def _mistake(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, UserError)
    return JSONResponse({"error": {"what": error.what, "fix": error.fix}}, 422)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    where = ".".join(str(x) for x in first["loc"][1:])
    return JSONResponse({"error": {"what": f"{where}: {first['msg']}", "fix": ""}}, 422)
