"""A server with the OpenAI API and known latencies that generates nothing: the reference for load generators.

    python -m ridgeline.measure.load.mock --ttft 0.1 --gap 0.02

Token ``i`` of a request is due ``ttft + i·gap`` seconds after its body has been read, whatever else the server does.
``GET /stats`` tells how well it kept to that: mean seconds to first token and mean gap, as it wrote them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

from ridgeline.measure.load.clock import run


@dataclass
class Behavior:
    """What the mock does. Times in seconds."""

    ttft: float = 0.1
    gap: float = 0.02
    per_chunk: int = 1
    """Tokens in one chunk."""
    key: str = ""
    """Required bearer token."""
    fail_every: int = 0
    """One in this many requests gets a 503."""
    cut_every: int = 0
    """One in this many responses ends early."""
    vocab: int = 0
    """Token ids from here on are refused; 0: none are."""
    model: str = "mock"


@dataclass
class Kept:
    """What the mock wrote, and when."""

    requests: int = 0
    first: float = 0.0
    answered: int = 0
    gaps: float = 0.0
    gap_count: int = 0
    prompts: list[int] = field(default_factory=list)


class MockConnection(asyncio.Protocol):
    """One client's connection, requests one after another."""

    def __init__(self, behavior: Behavior, kept: Kept) -> None:
        self.b, self.kept = behavior, kept
        self.buffer = b""
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """Stop writing."""
        if self.timer:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer as soon as head and body have arrived."""
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        method, path, _ = lines[0].split()
        self.answer(method, path, headers, rest[:size])

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        """Route one request."""
        if self.b.key and headers.get("authorization") != f"Bearer {self.b.key}":
            return self.refuse(401, "no such key", "authentication_error")
        if (method, path) == ("GET", "/v1/models"):
            return self.plain(200, {"object": "list", "data": [{"id": self.b.model, "object": "model"}]})
        if (method, path) == ("GET", "/health"):
            return self.plain(200, {})
        if (method, path) == ("GET", "/stats"):
            k = self.kept
            n, gaps = max(1, k.answered), max(1, k.gap_count)
            return self.plain(
                200,
                {"requests": k.requests, "ttft_s": k.first / n, "itl_s": k.gaps / gaps, "prompts": k.prompts[-10000:]},
            )
        if method != "POST" or path not in ("/v1/completions", "/v1/chat/completions"):
            return self.refuse(404, f"no such path {path}")
        self.generate(json.loads(body), chat=path.endswith("chat/completions"))

    def generate(self, body: dict[str, Any], chat: bool) -> None:
        """Stream an answer on schedule."""
        began = self.loop.time()
        self.kept.requests += 1
        number = self.kept.requests
        if body["model"] != self.b.model:
            return self.refuse(404, f"no model {body['model']}")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if not isinstance(prompt, str) and self.b.vocab and max(prompt) >= self.b.vocab:
            return self.refuse(400, f"token {max(prompt)} is outside the vocabulary of {self.b.vocab}")
        self.kept.prompts.append(len(prompt))
        if self.b.fail_every and number % self.b.fail_every == 0:
            return self.refuse(503, "the queue is full")
        total = body.get("max_completion_tokens" if chat else "max_tokens", 16)
        cut = total // 2 if self.b.cut_every and number % self.b.cut_every == 0 else math.inf
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if chat:
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        usage = (body.get("stream_options") or {}).get("include_usage")
        length = len(prompt) if not isinstance(prompt, str) else len(prompt.split())
        last = began

        def write(sent: int) -> None:
            nonlocal last
            now = self.loop.time()
            if sent == 0:
                self.kept.first += now - began
                self.kept.answered += 1
            else:
                self.kept.gaps += now - last
                self.kept.gap_count += 1
            last = now
            if sent >= cut:
                return self.transport.close()
            count = min(self.b.per_chunk, total - sent)
            done = sent + count >= total
            text = " w" * count
            choice = {"delta": {"content": text}} if chat else {"text": text}
            self.event({"choices": [{"index": 0, **choice, "finish_reason": "length" if done else None}]})
            if not done:
                at = began + self.b.ttft + (sent + count) * self.b.gap
                self.timer = self.loop.call_at(at, write, sent + count)
                return None
            if usage:
                self.event({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": total}})
            tail = b"data: [DONE]\n\n"
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(tail), tail))
            return None

        self.timer = self.loop.call_at(began + self.b.ttft, write, 0)

    def event(self, payload: dict[str, Any]) -> None:
        """One server-sent event in one chunk."""
        data = b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def refuse(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        """An error in the API's format."""
        self.plain(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def plain(self, status: int, payload: dict[str, Any]) -> None:
        """A JSON answer."""
        data = json.dumps(payload).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.transport.write(head.encode() + data)


async def serve(behavior: Behavior, port: int) -> None:
    """Serve until cancelled; the port that was taken goes to standard output."""
    kept = Kept()
    server = await asyncio.get_running_loop().create_server(
        lambda: MockConnection(behavior, kept), "127.0.0.1", port, backlog=1024
    )
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "at": time.time()}), flush=True)
    await server.serve_forever()


def main() -> None:
    """Command line: every field of :class:`Behavior` is an option."""
    parser = argparse.ArgumentParser(description="A server of known latency that speaks the OpenAI API.")
    parser.add_argument("--port", type=int, default=0)
    for name, default in vars(Behavior()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    port = given.pop("port")
    run(serve(Behavior(**given), port))


if __name__ == "__main__":
    main()
