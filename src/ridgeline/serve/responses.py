"""``/v1/responses``: a chat completion whose answer is a list of items, and which may be continued by its id."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from ridgeline.serve.chat import CalledFunction, Message, ToolCall, is_object
from ridgeline.serve.detokenize import Delta, Entry
from ridgeline.serve.output_stream import Failed, OutputStream
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.replies import chat_logprobs
from ridgeline.serve.request import Busy, Invalid, NotFound
from ridgeline.serve.response_bodies import ResponseRequest, items_of
from ridgeline.serve.service import Service
from ridgeline.serve.tool_calls import Piece

log = logging.getLogger("ridgeline.serve")
KEPT, KEPT_TEXT = 1024, 1 << 26
"""Limits on the number of stored responses, and on the characters of these and their conversations; the oldest go
first."""

_EVENTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Items of text, and how their parts and events are named."""
Item = dict[str, Any]
Event = dict[str, Any]


@dataclass
class PreparedResponse(PreparedRequest):
    """A prepared request, and what its answer says of it."""

    body: ResponseRequest = field(kw_only=True)
    talk: list[Message] = field(kw_only=True)
    """The conversation so far, without instructions."""
    owner: bytes = field(kw_only=True)
    """Who may read it: the hash of an API key."""


@dataclass
class _Stored:
    response: dict[str, Any]
    talk: list[Message]
    events: list[Event] = field(default_factory=list)
    """Of a background response that streamed, so that a client may read them again."""
    size: int = 0

    def __post_init__(self) -> None:
        said = sum(len(str(message.plain())) for message in self.talk)
        self.size = len(json.dumps(self.response)) + len(json.dumps(self.events)) + said


@dataclass
class _Running:
    """A response that is made in the background."""

    writer: Writer
    stream: OutputStream
    events: list[Event] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when events were added, or the response has ended; replaced each time."""
    task: asyncio.Task[None] | None = None

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        found = self.writer.response()
        waits = found["status"] == "in_progress" and self.stream.scheduled is None
        return {**found, "status": "queued"} if waits else found

    def tell(self) -> None:
        """Wake the followers."""
        self.more.set()
        self.more = asyncio.Event()


class Responses:
    """The responses of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._stored: OrderedDict[tuple[bytes, str], _Stored] = OrderedDict()
        self._running: dict[tuple[bytes, str], _Running] = {}
        self._size = 0

    def prepare(self, body: ResponseRequest, key: bytes) -> PreparedResponse:
        """The job of a response. Raises :class:`Invalid`."""
        owner, before = hashlib.sha256(key).digest(), []
        if body.background and body.store is False:
            raise Invalid("background", "background can only be used when `store` is true", "leave out store")
        if body.previous_response_id is not None:
            stored = self._stored.get((owner, body.previous_response_id))
            if (owner, body.previous_response_id) in self._running:
                what = f"response {body.previous_response_id[:100]!r} is still being made"
                raise Invalid("previous_response_id", what, "retrieve it until its status is completed")
            if stored is None:
                what = f"response {body.previous_response_id[:100]!r} not found: it is not stored here (any more)"
                fix = "send the whole conversation as input"
                raise NotFound("previous_response_id", what, fix, "previous_response_not_found")
            before = stored.talk
        talk = [*before, *body.messages()]
        made = self.service.chat(body.chat(talk, self.service.max_model_len), key)
        name = f"resp_{secrets.token_hex(24)}"
        return PreparedResponse(
            name, made.model, made.jobs, reader=made.reader, reasoning=made.reasoning, channels=made.channels,
            body=body, talk=talk, owner=owner,
        )  # fmt: skip

    def get(self, name: str, key: bytes) -> dict[str, Any]:
        """A response of this key, stored or in progress. Raises :class:`NotFound`."""
        at = hashlib.sha256(key).digest(), name
        if (running := self._running.get(at)) is not None:
            return running.response()
        return self._found(at).response

    def inputs(self, name: str, key: bytes, limit: int, newest_first: bool, after: str | None) -> dict[str, Any]:
        """The items that a response was made from, up to ``limit`` of them behind the one ``after``. Raises
        :class:`NotFound`, and :class:`Invalid` for an item that is not among them."""
        at = hashlib.sha256(key).digest(), name
        running = self._running.get(at)
        talk = self._found(at).talk[:-1] if running is None else running.writer.prepared.talk
        items = items_of(talk, name)
        if newest_first:
            items.reverse()
        if after is not None:
            begin = next((i + 1 for i, item in enumerate(items) if item["id"] == after), None)
            if begin is None:
                raise Invalid("after", f"names {after[:100]!r}, which is not among the items", "leave it out")
            items = items[begin:]
        if not 1 <= limit <= 100:
            raise Invalid("limit", f"is {limit}, outside 1 to 100", "give a number inside")
        shown = items[:limit]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": shown, "has_more": len(items) > limit, **ends}

    def _found(self, at: tuple[bytes, str]) -> _Stored:
        if (stored := self._stored.get(at)) is None:
            raise NotFound("response_id", f"Response with id '{at[1][:100]}' not found.", "it may have been forgotten")
        return stored

    def delete(self, name: str, key: bytes) -> None:
        """Forget a response of this key; one in progress ends. Raises :class:`NotFound`."""
        at = hashlib.sha256(key).digest(), name
        if at in self._running:
            self._cancel(at)
        self._found(at)
        self._size -= self._stored.pop(at).size

    def begin(self, prepared: PreparedResponse, stream: OutputStream) -> dict[str, Any]:
        """Make a response in the background (on the event loop) → the response before it has begun."""
        running = self._running[prepared.owner, prepared.id] = _Running(Writer(prepared), stream)
        running.task = asyncio.create_task(self._make(running))
        return {**running.response(), "status": "queued"}

    def cancel(self, name: str, key: bytes) -> dict[str, Any]:
        """End a response that is made in the background; one that has ended stays as it is. Raises :class:`NotFound`,
        and :class:`Invalid` for another kind."""
        at = hashlib.sha256(key).digest(), name
        if at in self._running:
            self._cancel(at)
        response = self._found(at).response
        if not response["background"]:
            raise Invalid("response_id", "Cannot cancel a synchronous response.", "close its connection")
        return response

    def _cancel(self, at: tuple[bytes, str]) -> None:
        running = self._running.pop(at)
        running.writer.cancel()
        if running.task is not None:
            running.task.cancel()
        self._store(running.writer, running.events)
        running.tell()

    async def _make(self, running: _Running) -> None:
        writer = running.writer
        prepared = writer.prepared
        try:
            async for event in self._events(writer, running.stream):
                if prepared.body.stream:
                    running.events.append(event)
                    running.tell()
        except Exception:
            log.exception("a response in the background failed")
            writer.fail("the server failed; its log says why")
            if prepared.body.stream:
                running.events.append(_failed(writer, len(running.events)))
        finally:
            self.service.loop.cancel(running.stream)
            if self._running.pop((prepared.owner, prepared.id), None) is not None:
                self._store(writer, running.events)
            running.tell()

    def follow(self, name: str, key: bytes, after: int = -1) -> AsyncGenerator[Event, None]:
        """The events of a background response that streams, from the one after number ``after`` on. Raises
        :class:`NotFound`, and :class:`Invalid` for a response that does not stream."""
        at = hashlib.sha256(key).digest(), name
        running = self._running.get(at)
        events = self._found(at).events if running is None else running.events
        if not events and (running is None or not running.writer.prepared.body.stream):
            raise Invalid("stream", "is for responses made with background and stream", "retrieve it without")

        async def listed() -> AsyncGenerator[Event, None]:
            number = max(0, after + 1)
            while True:
                while number < len(events):
                    yield events[number]
                    number += 1
                if running is None or self._running.get(at) is not running:
                    return
                await running.more.wait()

        return listed()

    async def whole(self, prepared: PreparedResponse, stream: OutputStream) -> dict[str, Any]:
        """The answer to a request that does not stream. Raises :class:`Failed` if the output failed."""
        writer = Writer(prepared)
        async for _ in self._written(writer, stream):
            pass
        if writer.error:
            raise Failed(writer.error)
        return writer.response()

    async def events(self, prepared: PreparedResponse, stream: OutputStream) -> AsyncGenerator[Event, None]:
        """The events of a request that streams; an error in midstream is a ``response.failed``."""
        async for event in self._events(Writer(prepared), stream):
            yield event

    async def _events(self, writer: Writer, stream: OutputStream) -> AsyncGenerator[Event, None]:
        number = 0
        try:
            async for event in self._written(writer, stream):
                yield {**event, "sequence_number": number}
                number += 1
        except (Failed, Busy) as e:
            writer.fail(str(e))
            yield _failed(writer, number)

    async def _written(self, writer: Writer, stream: OutputStream) -> AsyncIterator[Event]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": writer.response()}
        async for delta in stream:
            for event in writer.read(delta):
                yield event
        body = writer.prepared.body
        if not body.background and body.store is not False and writer.status != "failed":
            self._store(writer, [])
        yield {"type": f"response.{writer.status}", "response": writer.response()}

    def _store(self, writer: Writer, events: list[Event]) -> None:
        prepared = writer.prepared
        stored = _Stored(writer.response(), [*prepared.talk, writer.message()], events)
        self._stored[prepared.owner, prepared.id] = stored
        self._size += stored.size
        while len(self._stored) > KEPT or self._size > KEPT_TEXT:
            self._size -= self._stored.popitem(last=False)[1].size


def _failed(writer: Writer, number: int) -> Event:
    return {"type": "response.failed", "response": writer.response(), "sequence_number": number}


class Writer:
    """The items of one response, and the events by which they come to be."""

    def __init__(self, prepared: PreparedResponse) -> None:
        self.prepared = prepared
        self.status, self.error = "in_progress", ""
        self._reader = prepared.reader() if prepared.reader is not None else None
        self._items: list[Item] = []
        self._open = False
        """Whether the last item may still grow."""
        self._usage: tuple[int, int] | None = None
        self._tokens: list[int] = []
        self._reasoning = prepared.reasoning_count()
        self._late: list[Entry] = []

    def read(self, delta: Delta) -> Iterator[Event]:
        """The events that follow from ``delta``."""
        if delta.finish in ("error", "abort"):
            self.status, self.error = "failed", delta.error or "the server ended before the output did"
        self._usage = (delta.generated, delta.cached_tokens)
        if self.prepared.body.enable_response_messages:
            self._tokens += delta.tokens
        if self.prepared.reasoning is not None:
            self._reasoning.push(delta.tokens)
        self._late += delta.entries
        last = bool(delta.finish)
        pieces = self._reader.push(delta.text, last) if self._reader is not None else []
        if self._reader is None and (delta.text or (last and (self._late or not self._items))):
            pieces = [Piece(delta.text)]
        for piece in pieces:
            if piece.reasoning:
                yield from self._text(piece.reasoning, "reasoning")
            else:
                yield from self._text(piece.text) if piece.call is None else self._call(piece)
        if not last:
            return
        if not any(item["type"] != "reasoning" for item in self._items):
            yield from self._text("")
        yield from self._close("incomplete" if delta.finish == "length" else "completed")
        if not self.error:
            self.status = "incomplete" if delta.finish == "length" else "completed"

    def fail(self, why: str) -> None:
        """End the response with an error."""
        self.status, self.error = "failed", why

    def cancel(self) -> None:
        """End the response as it is."""
        for _ in self._close("incomplete"):
            pass
        self.status = "cancelled"

    def message(self) -> Message:
        """The answer as a message of the conversation, without a call that was cut off."""
        said = {"message": "", "reasoning": ""}
        for item in self._items:
            if item["type"] in said:
                said[item["type"]] += "".join(part["text"] for part in item["content"])
        calls = [
            ToolCall(id=item["call_id"], function=CalledFunction(name=item["name"], arguments=item["arguments"]))
            for item in self._items
            if item["type"] == "function_call" and is_object(item["arguments"])
        ]
        return Message(role="assistant", content=said["message"], reasoning_content=said["reasoning"] or None,
                       tool_calls=calls or None)  # fmt: skip

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        p, body = self.prepared, self.prepared.body
        sampling = p.jobs[0].request.sampling
        shown = {"reasoning", "text", "tool_choice", "tools"}
        given = body.model_dump(by_alias=True, exclude_none=True, include=shown)
        cut = self.status == "incomplete"
        return {
            "id": p.id, "object": "response", "created_at": p.created, "status": self.status,
            "background": bool(body.background),
            "error": {"code": "server_error", "message": self.error} if self.error else None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {}, "model": p.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "service_tier": "default", "store": body.store is not False, "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"), "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0, "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled", "usage": self._used(), "user": body.user,
            **(self._raw() if body.enable_response_messages else {}),
        }  # fmt: skip

    def _raw(self) -> dict[str, Any]:
        """The prompt and the output as the model has them."""
        job = self.prepared.jobs[0]
        return {
            f"{name}_messages": [{
                "type": "raw_message_tokens", "tokens": list(tokens),
                "message": job.vocabulary.decode(tokens, skip_special=False),
            }]
            for name, tokens in (("input", job.request.prompt), ("output", self._tokens))
        }  # fmt: skip

    def _used(self) -> dict[str, Any] | None:
        if self._usage is None or self.status == "in_progress":
            return None
        (generated, cached), prompt = self._usage, self.prepared.prompt_tokens
        return {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoning.tokens}, "total_tokens": prompt + generated,
        }  # fmt: skip

    def _at(self, part: bool = False) -> dict[str, Any]:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return {**at, "content_index": 0} if part else at

    def _added(self, item: Item) -> Event:
        self._items.append(item)
        self._open = True
        return {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": dict(item)}

    def _text(self, text: str, kind: str = "message") -> Iterator[Event]:
        """More of a message, or of the reasoning before it."""
        name = _EVENTS[kind]
        if not self._open or self._items[-1]["type"] != kind:
            yield from self._close()
            more: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
            prefix = "msg" if kind == "message" else "rs"
            yield self._added({"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "status": "in_progress", **more,
                               "content": []})  # fmt: skip
        new: list[Any] = []
        if self.prepared.body.wants_logprobs and kind == "message":
            new = chat_logprobs(self.prepared.jobs[0].vocabulary, self._late)
        self._late = []
        if not (text or new):  # an item has no part before there is something in it
            return
        if not self._items[-1]["content"]:
            part: Item = {"type": name, "text": ""}
            if kind == "message":
                part.update(annotations=[], logprobs=[])
            self._items[-1]["content"] = [part]
            yield {"type": "response.content_part.added", **self._at(True), "part": dict(part)}
        part = self._items[-1]["content"][0]
        more = {"logprobs": [*part["logprobs"], *new]} if kind == "message" else {}
        self._items[-1]["content"] = [{**part, "text": part["text"] + text, **more}]
        more = {"logprobs": new} if kind == "message" else {}
        yield {"type": f"response.{name}.delta", **self._at(True), "delta": text, **more}

    def _call(self, piece: Piece) -> Iterator[Event]:
        self._late = []  # log-probabilities are those of texts
        if piece.name:
            yield from self._close()
            yield self._added({"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", "status": "in_progress",
                               "call_id": piece.id, "name": piece.name, "arguments": ""})  # fmt: skip
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            yield {"type": "response.function_call_arguments.delta", **self._at(), "delta": piece.arguments}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if not self._open:
            return
        item, self._open = self._items[-1], False
        item["status"] = status
        if item["type"] in _EVENTS:
            for part in item["content"]:
                more: Item = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
                yield {"type": f"response.{part['type']}.done", **self._at(True), "text": part["text"], **more}
                yield {"type": "response.content_part.done", **self._at(True), "part": part}
        else:
            yield {"type": "response.function_call_arguments.done", **self._at(), "name": item["name"],
                   "arguments": item["arguments"]}  # fmt: skip
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": dict(item)}
