"""Parsing of request bodies: off the event loop, and only up to the first fault."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
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


def wrong_query(errors: Sequence[Any], query: Mapping[str, str]) -> WrongBody:
    """What is wrong with the parameters of a request: of its path, its query or its headers."""
    others = {e["loc"][1]: None for e in errors if e["loc"][0] != "query" and len(e["loc"]) > 1}
    return _wrong_body([{**e, "loc": e["loc"][1:]} for e in errors], {**query, **others})


def _wrong_body(errors: Sequence[Any], body: dict[str, Any]) -> WrongBody:
    """What is wrong with a body; of several things, an unknown field first, and then what is nested deepest: of the
    forms that a field may have, that is the one which was meant."""
    e = next((e for e in errors if e["type"] == UNKNOWN), errors[0])
    if e["type"] == UNKNOWN:
        path = [*_path(e["loc"], body, False), e["ctx"]["name"]]
        near = difflib.get_close_matches(path[-1][:200], _FIELDS - set(body), n=1) if len(path) == 1 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        if path[-1] in _GUIDED:
            hint = f": give structured_outputs.{str(path[-1]).removeprefix('guided_')}"
        return WrongBody(f"unknown field {_written(path)!r}{hint}", _written(path))
    alike = [other for other in errors if other["loc"][:1] == e["loc"][:1]]
    paths = [_path(other["loc"], body, other["type"] == "missing") for other in alike]
    most = max(map(len, paths))
    deepest = [(path, other) for path, other in zip(paths, alike, strict=True) if len(path) == most]
    found: dict[str, list[Any]] = {}
    for path, other in _meant(deepest):
        found.setdefault(_written(path), []).append(other)
    param, first = next(iter(found.items()))
    code = next((c for c in ((other.get("ctx") or {}).get("code") for other in first) if c), None)
    return WrongBody("; ".join(f"{at}: {_said(of)}" for at, of in list(found.items())[:4]), param, code)


def _meant(faults: list[tuple[list[str | int], Any]]) -> list[tuple[list[str | int], Any]]:
    """Of an object that is of one of several kinds, the faults of the kind that its ``type`` names; where it names none
    of them, only that."""
    told = [(path, e) for path, e in faults if path[-1:] == ["type"] and e["type"] == "literal_error"]
    others = {e["loc"][:-1] for _, e in told}
    return [(path, e) for path, e in faults if e["loc"][:-1] not in others] or told


def _said(errors: Sequence[Any]) -> str:
    """What is wrong with one field: where a value has one of its kinds, nothing of the others."""
    meant = [e for e in errors if not e["type"].endswith("_type")] or errors
    texts = ("Input should be an object" if e["type"] in _OBJECTS else str(e["msg"]) for e in meant)
    return "; or ".join(list(dict.fromkeys(texts))[:4])


def _path(loc: Sequence[str | int], value: Any, missing: bool) -> list[str | int]:
    """The keys and places of a fault as they are in ``value``: pydantic's ``loc`` has the names of its own types
    between them. ``missing``: the last one is not there."""
    path: list[str | int] = []
    for i, at in enumerate(loc):
        if (isinstance(value, dict) and at in value) or (isinstance(value, list) and isinstance(at, int)):
            path.append(at)
            value = value[at]  # type: ignore[index]
        elif missing and i == len(loc) - 1:
            path.append(at)
    return path


def _written(path: Sequence[str | int]) -> str:
    """``messages[0].content``, as the OpenAI API names fields."""
    return "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in path).removeprefix(".")[:200]


_OBJECTS = ("model_type", "model_attributes_type", "dict_type")
"""Errors that name a class, or Python's word for an object."""


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's names until 0.12 of what is in ``structured_outputs`` since."""
_BODIES = (Completion, ChatCompletion, EmbeddingRequest, Classification)
_FIELDS = {name for model in _BODIES for name in model.model_fields}
