"""Parsing of request bodies: off the event loop, and only up to the first fault."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from ridgeline.serve.chat import ChatCompletion
from ridgeline.serve.fields import UNKNOWN, Body
from ridgeline.serve.openai import Completion
from ridgeline.serve.pooled_bodies import Classification, EmbeddingRequest
from ridgeline.spec.errors import UserError

B = TypeVar("B", bound=Body)


class WrongBody(UserError):
    """A body that its route does not accept."""

    def __init__(self, what: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.param, self.code = param, code


def body_route(context: int) -> type[APIRoute]:
    """Routes whose functions take ``body`` and ``request``, and answer themselves. FastAPI describes them; it would
    validate bodies on the event loop. ``context``: largest number of tokens of a prompt."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            model = get_type_hints(self.endpoint).get("body")
            if model is None:
                return super().get_route_handler()

            async def handle(request: Request) -> Response:
                kind = request.headers.get("content-type", "")
                body = await asyncio.to_thread(parse, model, await request.body(), kind, context)
                answer: Response = await self.endpoint(body=body, request=request)
                return answer

            return handle

    return BodyRoute


def parse(model: type[B], raw: bytes, kind: str, context: int) -> B:
    """The ``model`` in the bytes of a body of content type ``kind``. Raises :class:`WrongBody`."""
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise WrongBody("the body must be a JSON object, with content-type application/json")
    try:
        value = json.loads(raw)
    except RecursionError:
        raise WrongBody("the body is nested too deeply") from None
    except ValueError as e:
        raise WrongBody(f"the body is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise WrongBody("the body must be a JSON object, with content-type application/json")
    try:
        return model.model_validate(value, context={"tokens": context})
    except ValidationError as e:
        raise _wrong_body(e.errors(include_url=False, include_input=False), value) from None


def _wrong_body(errors: Sequence[Any], body: dict[str, Any]) -> WrongBody:
    """What is wrong with a body; of several things, an unknown field first."""
    e = next((e for e in errors if e["type"] == UNKNOWN), errors[0])
    path = [str(p) for p in e["loc"]]
    if e["type"] == UNKNOWN:
        path.append(e["ctx"]["name"])
        near = difflib.get_close_matches(path[-1][:200], _FIELDS - set(body), n=1) if len(path) == 1 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        return WrongBody(f"unknown field {'.'.join(path)[:200]!r}{hint}", path[0][:200])
    messages = dict.fromkeys(str(other["msg"]) for other in errors if other["loc"][:1] == e["loc"][:1])
    return WrongBody(f"{path[0]}: {'; or '.join(list(messages)[:4])}", path[0], (e.get("ctx") or {}).get("code"))


_BODIES = (Completion, ChatCompletion, EmbeddingRequest, Classification)
_FIELDS = {name for model in _BODIES for name in model.model_fields}
