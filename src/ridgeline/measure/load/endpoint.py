"""The target of a load: an address, an API and a model, checked before any load is sent."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from ridgeline.measure.load.http_client import message_of
from ridgeline.spec.errors import UserError, nearest

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Endpoint:
    """One model of one server, behind one of its two APIs."""

    base: str
    """Up to and including ``/v1``."""
    api: Api
    model: str
    key: str = ""
    ignore_eos: bool = True
    """Ask for exactly as many tokens as wanted (``ignore_eos`` and ``min_tokens``, which OpenAI's own API lacks)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of each request's body."""

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return self.base + PATHS[self.api]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, prompt: list[int] | str, tokens: int) -> bytes:
        """A streamed, greedy request for this many tokens."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True},
                                 "temperature": 0}  # fmt: skip
        if self.api == "chat":
            body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": tokens}
        else:
            body |= {"prompt": prompt, "max_tokens": tokens}
        if self.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": tokens}
        return json.dumps({**body, **self.extra}, separators=(",", ":")).encode()


def find_endpoint(
    url: str, model: str = "", api: Api | None = None, key: str = "", ignore_eos: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Endpoint:  # fmt: skip
    """The endpoint at ``url``: a server's address, its ``/v1``, or the full path of an API. Without ``model``: the only
    one it has.

    Raises :class:`UserError` when nothing answers there, the key is refused, or the model is unknown.
    """
    base, named = _base(url)
    api = api or named or "completions"
    known = _models(base, key)
    if not model:
        if len(known) != 1:
            problem = (
                f"serves {len(known)} models: {', '.join(known[:5])}" if known else "does not say which models it has"
            )
            raise UserError(f"{base} {problem}", "name one with --model")
        model = known[0]
    elif known and model not in known:
        close = ", ".join(nearest(model, known) or known[:5])
        raise UserError(f"{base} has no model {model!r}", f"it has {close}")
    return Endpoint(base, api, model, key, ignore_eos, extra or {})


def _base(url: str) -> tuple[str, Api | None]:
    text = (url if "://" in url else f"http://{url}").rstrip("/")
    parts = urlsplit(text)
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise UserError(f"{url!r} is no address of a server", "write http://HOST:PORT")
    for api, path in sorted(PATHS.items(), key=lambda p: -len(p[1])):  # one ends with the other
        if text.endswith(path):
            return text[: -len(path)], api
    return (text if text.endswith("/v1") else f"{text}/v1"), None


def _models(base: str, key: str) -> list[str]:
    """Names of the models; none where the server has no such list."""
    request = urllib.request.Request(f"{base}/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=10) as answer:
            found = json.loads(answer.read())
            return [m["id"] for m in found["data"]]
    except urllib.error.HTTPError as e:
        if e.code in (404, 405):
            return []
        raise refused(base, e.code, message_of(e.read())) from None
    except (urllib.error.URLError, OSError) as e:
        reason = getattr(e, "reason", e)
        raise UserError(f"nothing answers at {base}: {reason}", "start the server, or check host and port") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{base}/models is no OpenAI API", "give its address, as in http://HOST:PORT/v1") from None


def refused(where: str, status: int, message: str) -> UserError:
    """The error for the user from an HTTP error."""
    fixes = {
        401: "give the server's key with --key, or in OPENAI_API_KEY",
        403: "give a key that may do this, with --key or in OPENAI_API_KEY",
        404: "check the address and --model; `--api chat` posts to /v1/chat/completions",
        400: "--input-len and --output-len bound a request's tokens, --vocab-size their ids; `--no-ignore-eos` leaves"
        " out fields that OpenAI's own API lacks",
        422: "`--no-ignore-eos` leaves out fields that OpenAI's own API lacks; --data sends text instead of token ids",
        500: "see the server's log; if it takes no token ids (llama-cpp-python), --data stdlib sends text",
        503: "the server is not ready or full: try again later",
    }
    return UserError(f"{where} answers {status}: {message or 'no reason given'}", fixes.get(status, ""))
