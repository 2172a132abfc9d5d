"""A small model with a byte-level tokenizer, served over real sockets: by a thread of this process, or by its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from tests.compressing import LLAMA, checkpoint
from tests.forked import Fork, command, engine_apart

from ridgeline.nn.checkpoint.peft import save_lora, state_of
from ridgeline.serve.app import create_app
from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
from ridgeline.serve.checkpoint_settings import Options
from ridgeline.serve.queue_limits import QueueLimits
from ridgeline.serve.remote_engine import RemoteEngine
from ridgeline.serve.server import Server, make_service
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 256


def tiny(folder: Path, **fields) -> Path:
    """Random weights, an end token and a chat template; ``fields`` of the model, if it is to be larger."""
    folder.mkdir(exist_ok=True)
    checkpoint(folder, {**LLAMA, "max_positions": CONTEXT, **fields})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def lora(folder: Path, model, seed: int = 1) -> Path:
    """A LoRA of random weights for ``model``, as ``peft`` writes them."""
    technique = make(Call(name="lora", options={"rank": 4, "targets": ["q_proj", "down_proj"]}))
    generator, state = torch.Generator().manual_seed(seed), {}
    for at, layer in list(model.named_modules()):
        if at.rpartition(".")[2] in technique.targets:
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            for leaf, t in technique.around(plain).state().items():
                state[f"{at}.{leaf}"] = torch.randn(t.shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_lora(folder, model.spec, technique.model_dump(mode="json"), state_of(state, technique.leaves), "")
    return folder


@contextmanager
def process(folder: Path, *options: str, forked: bool = True):
    """``ridgeline serve`` in a process of its own: the process and its URL. ``forked``: from one that has imported
    PyTorch, as where the start is not what is tested."""
    words = ("serve", str(folder), "--port", "0", *options)
    with tempfile.NamedTemporaryFile("r", prefix="serve-") as log:
        if forked:
            p: Fork | subprocess.Popen = Fork(command, log.name, *words)
        else:
            p = subprocess.Popen([sys.executable, "-m", "ridgeline", *words], stderr=open(log.name, "a"))  # noqa: SIM115
        said, wait = "", threading.Event()
        try:
            while "serving on" not in said or not said.endswith("\n"):
                assert p.poll() is None, f"exit code {p.poll()}: {said}{log.read()}"
                wait.wait(0.01)
                said += log.read()
            yield SimpleNamespace(process=p, url=said[said.index("serving on") :].split()[2])
        finally:
            p.kill()
            p.wait()


class Running:
    """A server and what it is made of."""

    def __init__(self, folder: Path, keys=(), admin=(), max_body=1 << 20, limits=None, plan=(), connections=None,
                 root_path="", origins=(), options=None, tls=None, apart=False, **workload) -> None:  # fmt: skip
        """``apart``: the engine has a process of its own; a function given changes it there, in a fork."""
        build = partial(
            load_engine,
            folder,
            [*DEFAULT_PLAN, *plan],
            **{"kv_cache_bytes": 2 << 20, "max_num_batched_tokens": 64, **workload},
        )
        self.engine = (
            engine_apart(partial(apart, build)) if callable(apart)
            else RemoteEngine(build).wait_ready() if apart else build()
        )  # fmt: skip
        self.service = make_service(
            self.engine, folder, limits or QueueLimits(), name="tiny", options=options or Options()
        )
        self.loop = self.service.loop
        self.app = create_app(self.service, keys, admin, max_body, root_path, origins)
        self._said = threading.Event()
        self.server = Server(self.app, self.loop, "127.0.0.1", 0, 5.0, self._say, connections, tls)
        self.url = ""

    def _say(self, text: str) -> None:
        if text.startswith("serving on "):
            self.url = text.removeprefix("serving on ")
            self._said.set()

    def start(self) -> Running:
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        assert self._said.wait(60)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        if isinstance(self.engine, RemoteEngine):
            assert self.engine.close() or self.loop.failure

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        if isinstance(self.engine, RemoteEngine):
            self.wait(lambda: self.loop.queued == (0, 0) and not self.loop.open_streams)
            self.wait(lambda: not (s := self.loop.stats).waiting and not s.running and not s.blocks_used)
            return
        self.wait(lambda: not self.engine.has_work() and not self.loop.open_streams)
        assert not self.engine.groups
        assert self.engine.blocks.used == 0
        assert self.loop.queued == (0, 0)
        self.engine.check()

    @staticmethod
    def wait(condition, seconds=60.0) -> None:
        """Until ``condition()`` holds; the limit is for what never comes, not for what a busy machine delays."""
        poll = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if condition():
                return
            poll.wait(0.01)
        raise AssertionError("it did not come to be")


@contextmanager
def running(folder: Path, **options):
    server = Running(folder, **options).start()
    try:
        yield server
    finally:
        server.stop()
