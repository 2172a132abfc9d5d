"""The server process: it starts, reports its address, drains on the first signal and stops on the second."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from ridgeline.jobs.live import announced
from ridgeline.serve.address import require_free
from ridgeline.serve.call_formats import CHANNELS, FORMATS
from ridgeline.serve.checkpoint_settings import (
    Options,
    dimensions_of,
    pooling_of,
    prompts_of,
    sampling_defaults,
    writes_channels,
)
from ridgeline.serve.connections import connection_class
from ridgeline.serve.detokenize import Vocabulary
from ridgeline.serve.engine_loop import EngineLoop
from ridgeline.serve.heap import one_heap
from ridgeline.serve.metrics import Metrics
from ridgeline.serve.queue_limits import QueueLimits
from ridgeline.serve.remote_engine import ProcessLoop, RemoteEngine
from ridgeline.serve.service import Labels, Service
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.json_file import read_json

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine

_LAST_BYTES = 5
"""Seconds to send the last responses once everything has ended."""


def make_service(
    engine: Engine | RemoteEngine, checkpoint: Path, limits: QueueLimits | None = None, name: str | None = None,
    tokenizer: str | None = None, template: str | None = None, options: Options = Options(),
    vocabulary: Vocabulary | None = None,
) -> Service:  # fmt: skip
    """The engine of ``checkpoint`` with its tokenizer and chat template. ``vocabulary``: that of the tokenizer, where
    it was read before. Raises :class:`UserError`."""
    from ridgeline.data.examples import find_template, special_tokens

    options.check()
    spec = engine.spec
    vocabulary = vocabulary or read_vocabulary(checkpoint, tokenizer, spec.vocab_size)
    labels = Labels.of(read_json(checkpoint / "config.json"), spec.num_labels) if spec.head == "classify" else None
    defaults, most = sampling_defaults(checkpoint, options.generation_config, spec.vocab_size)
    channels = writes_channels(checkpoint, options)
    tool_parser = CHANNELS if channels else options.tool_parser
    limits = limits or QueueLimits()
    if isinstance(engine, RemoteEngine):
        engine.vocabulary = vocabulary
        loop: EngineLoop = ProcessLoop(engine, limits, Metrics())
    else:
        loop = EngineLoop(engine, limits, Metrics())
    return Service(
        loop,
        vocabulary,
        name or checkpoint.resolve().name,
        find_template(template, str(checkpoint)),
        special_tokens(str(checkpoint)),
        labels,
        FORMATS[tool_parser] if tool_parser else None,
        options.auto_tools or channels,
        options.reasoning_parser is not None,
        channels,
        pooling_of(checkpoint, options.pooling),
        dimensions_of(checkpoint),
        defaults,
        most,
        options.max_logprobs,
        options.force_usage,
        options.request_metrics,
        options.tokens_as_ids,
        prompts_of(checkpoint),
        read_json(checkpoint / "tokenizer_config.json").get("tokenizer_class"),
    )


def read_vocabulary(checkpoint: Path, tokenizer: str | None, size: int) -> Vocabulary:
    """The tokenizer of a checkpoint, or the one named, for a model with ``size`` tokens. Raises :class:`UserError`."""
    from ridgeline.data.tokenizer import load_tokenizer

    return Vocabulary(load_tokenizer(tokenizer or str(checkpoint)), size)


class Server(uvicorn.Server):
    """Uvicorn with a drain: the first signal lets requests finish for ``drain`` seconds, the second ends at once."""

    def __init__(
        self, app: FastAPI, loop: EngineLoop, host: str, port: int, drain: float, say: Callable[[str], None],
        connections: int | None = None, tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``connections``: how many may be open at once; None: any number. ``tls``: certificate and key."""
        cert, key = (tls.cert, tls.key) if tls else (None, None)
        authority = str(tls.ca) if tls and tls.clients else None
        self.scheme = "https" if cert else "http"
        super().__init__(
            uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, server_header=False,
                           http=connection_class(connections), ws="none", timeout_graceful_shutdown=_LAST_BYTES,
                           ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=authority,
                           ssl_cert_reqs=ssl.CERT_REQUIRED if authority else ssl.CERT_NONE)
        )  # fmt: skip
        self.loop, self.drain, self.say = loop, drain, say
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None
        loop.on_failure = self._failed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address."""
        await super().startup(sockets)
        self._running = asyncio.get_running_loop()
        for server in self.servers:
            host, port = server.sockets[0].getsockname()[:2]
            self.say(f"serving on {self.scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGTERM."""
        self._signals += 1
        if self._signals == 1:
            self.say(f"{signal.Signals(sig).name}: finishing what runs, for {self.drain:g} s at most; again: now")
            self._running.call_soon_threadsafe(self._begin_drain)
        else:
            self.should_exit = self.force_exit = True

    def _begin_drain(self) -> None:
        async def drain() -> None:
            await self.loop.drain(self.drain)
            self.should_exit = True

        self._draining = asyncio.ensure_future(drain())

    def _failed(self) -> None:
        self.say("the engine failed: the server ends")
        self._running.call_later(0.5, setattr, self, "should_exit", True)  # first send the responses that report it


def serve(
    app: FastAPI, loop: EngineLoop, host: str, port: int, drain: float, say: Callable[[str], None],
    connections: int | None = None, tls: Tls | None = None,
) -> bool:  # fmt: skip
    """Serve until stopped → whether the engine was healthy to the end. Raises :class:`UserError` for a taken port."""
    require_free(host, port)
    one_heap()
    server = Server(app, loop, host, port, drain, say, connections, tls)
    with announced("serve", f"{server.scheme}://{host}:{port}"):
        server.run()
    if not loop.stop():
        say(f"the engine hangs in a step since {loop.step_age:.0f} s: killed")
        os._exit(1)  # nothing else ends its thread
    return loop.failure is None
