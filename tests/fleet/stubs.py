"""A router before servers that are told what to answer."""

import asyncio
import contextlib
import json

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402

from ridgeline.fleet.members import Members  # noqa: E402
from ridgeline.fleet.policies import LeastLoaded  # noqa: E402
from ridgeline.fleet.router import Limits, Router  # noqa: E402


class Stub:
    """A server whose answers are told beforehand: ok, full, or broken before the first token, or after it."""

    def __init__(self, name, models=("m",)):
        self.name, self.models, self.mode, self.asked, self.keys = name, models, "ok", [], []
        self.more = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, port=0):
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get(
            "/metrics", lambda _: web.Response(text=f'# TYPE seen counter\nseen{{a="b"}} {len(self.asked)}\n')
        )
        app.router.add_get("/v1/models", self.list)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/packed", self.packed)
        for path, handler in self.more:
            app.router.add_get(path, handler)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self):
        await self.runner.cleanup()

    async def packed(self, _):
        response = web.json_response({"text": "x" * 999})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def health(self, _):
        return web.Response()

    async def metrics(self, _):
        return web.Response(text=f'# TYPE seen counter\nseen{{a="b"}} {len(self.asked)}\n')

    async def list(self, _):
        return web.json_response({"data": [{"id": m, "max_model_len": 512} for m in self.models]})

    async def chat(self, request):
        body = await request.json()
        self.asked.append((body, request.headers.get("Authorization")))
        self.keys.append((request.headers.getall("Authorization", []), request.headers.getall("X-Api-Key", [])))
        if self.mode == "full":
            return web.json_response({"error": {"message": "full"}}, status=429)
        await self.gate.wait()
        if not body.get("stream"):
            return web.json_response({"server": self.name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"delta": {"role": "assistant", "content": ""}}))
        if self.mode == "before":
            request.transport.abort()
            return response
        for i in range(3):
            await response.write(event({"delta": {"content": f"{self.name}{i} "}}))
            if self.mode == "after":
                await asyncio.sleep(0.05)
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response


def event(choice):
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def fleet(stubs, policy=None, **more):
    """(router, session, address) before stubs that are up."""
    for stub in stubs:
        await stub.start()
    limits = more.pop("limits", Limits(wait_s=60))
    key = more.pop("member_key", "")
    routing = Router(Members([s.url for s in stubs], key=key), policy or LeastLoaded(), limits=limits, **more)
    runner = web.AppRunner(routing.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            while any(m.state != "up" for m in routing.members.all):
                await asyncio.sleep(0.01)
            yield routing, session, url
    finally:
        await runner.cleanup()
        for stub in stubs:
            await stub.stop()


async def ask(session, url, text="hi", **more):
    """(status, text of the answer or body)."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    headers = {"Authorization": f"Bearer {body.pop('key')}"} if "key" in body else {}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        raw = await answer.text()
        if answer.content_type != "text/event-stream":
            return answer.status, json.loads(raw)
        lines = [x[6:] for x in raw.splitlines() if x.startswith("data: ") and x != "data: [DONE]"]
        return answer.status, [json.loads(x) for x in lines]


def words(events):
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if "choices" in e)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 120))
