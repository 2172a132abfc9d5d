"""``/v1/messages``: a chat completion whose answer is a list of blocks, as Anthropic's Messages API has it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ridgeline.serve.detokenize import Delta
from ridgeline.serve.http import error_body
from ridgeline.serve.message_bodies import Counted, MessageRequest
from ridgeline.serve.output_stream import Failed, OutputStream
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.request import Busy
from ridgeline.serve.service import Service
from ridgeline.serve.tool_calls import Piece

Event = dict[str, Any]
_EMPTY: dict[str, Event] = {
    "text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}  # fmt: skip
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
           "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip


class Messages:
    """The messages of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def prepare(self, body: MessageRequest, key: bytes) -> PreparedRequest:
        """The job of a message. Raises :class:`Invalid`."""
        prepared = self.service.chat(body.completion(), key)
        prepared.id = f"msg_{secrets.token_hex(12)}"
        return prepared

    def count(self, body: Counted) -> int:
        """Tokens of the prompt. Raises :class:`Invalid`."""
        self.service.adapter(body.model)
        chat = body.chat()
        return len(self.service.chat_prompt(chat, chat.messages))

    async def whole(self, prepared: PreparedRequest, stream: OutputStream) -> dict[str, Any]:
        """The answer to a request that does not stream. Raises :class:`Failed` if the output failed."""
        writer = Writer(prepared, self._block_size)
        async for delta in stream:
            for _ in writer.read(delta):
                pass
        return writer.message()

    async def events(self, prepared: PreparedRequest, stream: OutputStream) -> AsyncGenerator[Event, None]:
        """The events of a request that streams; an error in midstream is the last one."""
        writer = Writer(prepared, self._block_size)
        yield {"type": "message_start", "message": writer.message()}
        try:
            async for delta in stream:
                for event in writer.read(delta):
                    yield event
        except (Failed, Busy) as e:
            yield error_body(503 if isinstance(e, Busy) else 500, str(e))
            return
        end = {"stop_reason": writer.reason, "stop_sequence": writer.sequence}
        yield {"type": "message_delta", "delta": end, "usage": writer.usage()}
        yield {"type": "message_stop"}

    @property
    def _block_size(self) -> int:
        return self.service.loop.engine.blocks.size


class Writer:
    """The blocks of one message, and the events by which they come to be."""

    def __init__(self, prepared: PreparedRequest, block_size: int) -> None:
        self.prepared, self._size = prepared, block_size
        self.reason: str | None = None
        """Why the answer ended."""
        self.sequence: str | None = None
        """The stop sequence that ended it."""
        self._reader = prepared.reader() if prepared.reader is not None else None
        self._blocks: list[Event] = []
        self._arguments = ""
        """Of the call that is open, as text."""
        self._open = False
        self._generated = self._cached = 0

    def read(self, delta: Delta) -> Iterator[Event]:
        """The events that follow from ``delta``. Raises :class:`Failed` if the output failed."""
        if delta.finish in ("error", "abort"):
            raise Failed(delta.error or "the server ended before the output did")
        self._generated, self._cached = delta.generated, max(self._cached, delta.cached_tokens)
        last = bool(delta.finish)
        if self._reader is not None:
            pieces = self._reader.push(delta.text, last)
        else:
            pieces = [Piece(delta.text)] if delta.text else []
        for piece in pieces:
            yield from self._piece(piece)
        if not last:
            return
        if not self._blocks:
            yield from self._begin(dict(_EMPTY["text"]))
        yield from self._close()
        called = any(block["type"] == "tool_use" for block in self._blocks)
        if delta.finish == "length":
            self.reason = "max_tokens"
        elif isinstance(delta.stop_reason, str):
            self.reason, self.sequence = "stop_sequence", delta.stop_reason
        else:
            self.reason = "tool_use" if called else "end_turn"

    def message(self) -> dict[str, Any]:
        """The message as it is now."""
        return {
            "id": self.prepared.id, "type": "message", "role": "assistant", "model": self.prepared.model,
            "content": [dict(block) for block in self._blocks], "stop_reason": self.reason,
            "stop_sequence": self.sequence, "usage": self.usage(),
        }  # fmt: skip

    def usage(self) -> dict[str, int]:
        """Tokens so far: of the prompt those found in the cache, those put into it, and the others."""
        prompt, cached = self.prepared.prompt_tokens, self._cached
        created = max(0, prompt - prompt % self._size - cached) if self.reason is not None else 0
        return {"input_tokens": prompt - cached - created, "cache_creation_input_tokens": created,
                "cache_read_input_tokens": cached, "output_tokens": self._generated}  # fmt: skip

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if piece.call is not None and piece.name:
            yield from self._close()
            yield from self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            return
        kind = "tool_use" if piece.call is not None else "thinking" if piece.reasoning else "text"
        if kind != "tool_use" and not (self._open and self._blocks[-1]["type"] == kind):
            yield from self._close()
            yield from self._begin(dict(_EMPTY[kind]))
        new = piece.arguments or piece.reasoning or piece.text
        if kind == "tool_use":
            self._arguments += new
        else:
            self._blocks[-1][kind] += new
        if new:
            name, field = _DELTAS[kind]
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": name, field: new}}

    def _begin(self, block: Event) -> Iterator[Event]:
        self._blocks.append(block)
        self._open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        self._open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _object(text: str) -> Any:
    """Arguments as an object; empty where the call was cut off or is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
