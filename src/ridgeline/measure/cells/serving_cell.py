"""One measured serving cell: the real server, the real client in another process, and HTTP between them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from ridgeline.jobs.job import CellOptions, Progress, RankContext
from ridgeline.measure.backends import NATIVE, engine_versions
from ridgeline.measure.device_use import DeviceUse
from ridgeline.measure.environment import cores, spare_core
from ridgeline.measure.load.run_load import Settings
from ridgeline.measure.wire import Wire
from ridgeline.nn.memory.meter import process_memory
from ridgeline.predict.serving.arrivals import requests
from ridgeline.serve.app import create_app
from ridgeline.serve.build_engine import make_engine, make_follower
from ridgeline.serve.detokenize import Vocabulary
from ridgeline.serve.engine import Engine
from ridgeline.serve.engine_loop import EngineLoop
from ridgeline.serve.metrics import Metrics
from ridgeline.serve.queue_limits import QueueLimits
from ridgeline.serve.remote_engine import ProcessLoop, RemoteEngine
from ridgeline.serve.runner import Arranged, PackedStep
from ridgeline.serve.server import Server
from ridgeline.serve.service import Service
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.result import Memory, Metric, Result, Sample, Traffic
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import resolve

NAME = "measured"
"""Model name in the client's requests."""


def serving_cell(e: Experiment, options: CellOptions, here: RankContext) -> dict[str, Any]:
    """Serve the workload's requests and return a measured Result (as plain data), with the engine's own counts in it.

    Rank 0 is server and client; the other ranks do their part of its steps, and return nothing. Raises
    :class:`UserError` when the workload's requests cannot be served.
    """
    (e, _), device = resolve(e), here.device
    used = DeviceUse(here)
    if here.rank:
        make_follower(e, device).follow()
        used.metrics()
        return {}
    if options.backend != NATIVE:
        from ridgeline.measure.backends.hf_serving import hf_serving

        result = hf_serving(e, device, here.report)
        result.environment |= engine_versions(options.backend)
    else:
        result = serve_load(e, device, here.report, used)
    result.metrics |= used.metrics()
    tokens, seconds = result.metric("output_tokens_total"), result.metric("window_s")
    if tokens and seconds:
        # A run is one sample: what ablations compare is seconds per token, and its requests are not independent.
        result.samples = [Sample(step=0, seconds=seconds, tokens=int(tokens), repeat=options.repeat)]
    rate = result.metrics.get("tokens_per_s")
    if rate is not None:
        result.metrics["tokens_per_s_per_device"] = rate.model_copy(update={"value": rate.value / e.world})
    result.environment |= {"threads": torch.get_num_threads(), "ranks": here.ranks, "device": str(device)}
    return result.model_dump(mode="json", by_alias=True)


def serve_load(e: Experiment, device: torch.device, report: Progress, used: DeviceUse | None = None) -> Result:
    """Start the server, with its engine in a process of its own as by default, and the client in another process;
    returns what the client measured. ``used`` is told what the server takes of the device.

    Raises :class:`UserError` when they cannot be served.
    """
    server, engine, sent, memory = _serve([e], device, report, used)
    (result,) = server.results
    _add(result, engine, server.ready_after, memory)
    result.traffic = [Traffic(kind=k, ranks=n, calls=v[0], bytes=v[1]) for (k, n), v in sorted(sent.items())]
    return result


def serve_loads(loads: Sequence[Experiment], device: torch.device, report: Progress) -> list[Result]:
    """What clients measure of one server, as :func:`serve_load` starts it, one after the other. The experiments differ
    only in their requests."""
    return _serve(loads, device, report)[0].results


def _serve(
    loads: Sequence[Experiment], device: torch.device, report: Progress, used: DeviceUse | None = None
) -> tuple[_Served, Engine | RemoteEngine, dict[tuple[str, int], list[float]], dict[str, int]]:
    """(the server that has ended, its engine, what rank 0 sent in a step, memory of the engine's process)."""
    e = loads[0]
    w = e.workload
    assert isinstance(w, Serve)
    start = time.perf_counter()
    report({"stage": "loading"})
    engine: Engine | RemoteEngine
    sent: dict[tuple[str, int], list[float]] = {}
    nothing_is_refused = QueueLimits(None, None, None, 600.0)
    if e.world == 1 and cores() > 1:
        engine = RemoteEngine(partial(make_engine, e, device), spare_core).wait_ready()
        loop: EngineLoop = ProcessLoop(engine, nothing_is_refused, Metrics())
        within: AbstractContextManager[None] = nullcontext()
    else:
        engine = make_engine(e, device)
        sent = _count(engine) if e.world > 1 else {}
        loop, within = EngineLoop(engine, nothing_is_refused, Metrics()), spare_core()
    server = _Served(create_app(Service(loop, _vocabulary(engine, w.checkpoint), NAME, None)), loop)
    client = threading.Thread(target=_run_clients, args=(server, loads, report), name="client", daemon=True)
    server.setup = lambda: time.perf_counter() - start
    client.start()
    with within:
        server.run()
    client.join(30)
    memory = process_memory(engine.process.pid if isinstance(engine, RemoteEngine) else "self")
    if used is not None and isinstance(engine, RemoteEngine):
        used.look()
    engine.close()
    if server.refused:
        raise UserError(*server.refused)
    if len(server.results) < len(loads):
        raise RuntimeError(loop.failure or "a client of the server ended without a result")
    return server, engine, sent, memory


def _count(engine: Engine) -> dict[tuple[str, int], list[float]]:
    """What rank 0 sends in collectives in a step of one token, known when there was one; the warm-up has some."""
    plain, sent = engine.runner.execute, {}

    def counted(step: PackedStep, arranged: Arranged | None = None) -> Tensor:
        if len(step.ids) > 1:
            return plain(step, arranged)
        with Wire() as wire:
            out = plain(step, arranged)
        sent.update({key: value for key, value in wire.counts.items() if key[0] != "p2p"})
        engine.runner.execute = plain  # type: ignore[method-assign]
        return out

    engine.runner.execute = counted  # type: ignore[method-assign]  # for one step: counting takes time
    return sent


class _Served(Server):
    """The server on a free port, for as long as its clients run."""

    def __init__(self, app: Any, loop: EngineLoop) -> None:
        super().__init__(app, loop, "127.0.0.1", 0, 0.0, self._log)
        self.address: str | None = None
        self.ready = threading.Event()
        self.results: list[Result] = []
        self.refused: list[str] = []
        self.ready_after = 0.0
        self.setup: Any = None

    def _log(self, text: str) -> None:
        if text.startswith("serving on "):
            self.address, self.ready_after = text.removeprefix("serving on "), self.setup()
            self.ready.set()


def _run_clients(server: _Served, loads: Sequence[Experiment], report: Progress) -> None:
    """Run a client for each load against the server, then end the server."""
    try:
        if not server.ready.wait(60):
            return
        for e in loads:
            job = {"url": server.address, "model": NAME, "experiment": e.model_dump(mode="json")}
            client = subprocess.Popen([sys.executable, "-m", "ridgeline.measure.load.client"], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)  # fmt: skip
            assert client.stdin
            assert client.stdout
            client.stdin.write(json.dumps(job))
            client.stdin.close()
            for line in client.stdout:
                message = json.loads(line)
                if "result" in message:
                    server.results.append(Result.model_validate(message["result"]))
                elif "refused" in message:
                    server.refused = message["refused"]
                else:
                    report(message)
            if client.wait():
                return
    finally:
        server.should_exit = True


def _vocabulary(engine: Engine | RemoteEngine, checkpoint: str | None) -> Vocabulary:
    """The checkpoint's tokenizer; without one, a word for every token, so that each is text of its own."""
    size = engine.spec.vocab_size
    if checkpoint and (Path(checkpoint) / "tokenizer.json").is_file():
        from ridgeline.data.tokenizer import load_tokenizer

        return Vocabulary(load_tokenizer(checkpoint), size)
    return Vocabulary(Tokenizer(WordLevel({str(i): i for i in range(size)}, unk_token="0")), size)


def _add(result: Result, engine: Engine | RemoteEngine, setup: float, memory: dict[str, int]) -> None:
    """Add what only the server knows, and the ``memory`` of the engine's process; without the warm-up's requests, which
    were sent one by one."""
    w, stats = Serve.model_validate(result.experiment["workload"]), engine.stats()
    arrivals, most = requests(w), engine.limits.max_num_batched_tokens
    warm = [arrivals[i % len(arrivals)] for i in range(Settings().warmup)]
    chunks = sum(-(-r.prompt // most) if engine.limits.chunked else 1 for r in warm)
    tokens = stats.generated_tokens - sum(r.output for r in warm)
    steps = stats.steps - chunks - sum(r.output - 1 for r in warm)
    found = {
        "batch_mean": (tokens / max(1, steps), "sequences", "tokens per step of the engine"),
        "preemptions": (stats.preemptions, "", "counted by the engine"),
        "setup_s": (setup, "s", "measured"),
        **{f"{k}_bytes": (v, "bytes", "measured") for k, v in memory.items()},
    }
    result.metrics |= {k: Metric(value=v, unit=u, source=s) for k, (v, u, s) in found.items()}
    record_held(result, engine)


def record_held(result: Result, engine: Engine | RemoteEngine) -> None:
    """Add the memory of an engine's weights and of its key/value pool, and who computes its operators."""
    result.notes += engine.labels()
    result.notes.append("memory: weights and key/value pool; temporaries are not metered while serving")
    result.memory = [Memory(category=k, bytes=v) for k, v in engine.held().items()]
    result.metrics["kv_cache_tokens"] = Metric(value=engine.blocks.count * engine.blocks.size, unit="tokens",
                                               better="higher", source="counted")  # fmt: skip
