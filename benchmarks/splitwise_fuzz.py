"""Servers of a divided fleet killed, started, stopped for a while and corrupted at random, behind a real router.

    python benchmarks/splitwise_fuzz.py --minutes 4 --json benchmarks/results/splitwise_fuzz.json

Servers are processes (``ridgeline serve``) that are ended with SIGKILL, suspended with SIGSTOP, and some of which
send keys and values that are not finite, of other shapes, twice, or not at all. Clients ask the router all the time.
Every answer must be that of one server alone, and what was streamed before an error its beginning; a request fails
without a token only where no server was up for 30 s; no server that stays may leak a block of its cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ridgeline.data.batches import train_tokenizer
from ridgeline.jobs.launch import free_port
from ridgeline.measure.environment import commit, fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec

SPEC = ModelSpec(family="llama", vocab_size=512, hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16,
                 intermediate_size=128, max_positions=512)  # fmt: skip
SECRET = "the secret of this fuzzing"
ROLES = ("prefill", "decode", "mixed")
QUESTIONS = 60
SPOILED = ("not finite", "shape", "twice", "layers", "missing")


def serve_spoiled(kind: str, args: list[str]) -> None:
    """``ridgeline serve`` whose every fifth message of keys and values is wrong in one way."""
    from ridgeline.cli import main
    from ridgeline.serve.transfer.exports import Parcel
    from ridgeline.serve.transfer.server import PrefillServer

    rng, send = random.Random(1), PrefillServer._send

    def spoiled(self: Any, connection: Any, name: str, names: set[str], news: Any) -> None:
        if isinstance(news, Parcel) and rng.random() < 0.2:
            first = next(iter(news.tensors))
            if kind == "missing":
                return
            if kind == "twice":
                send(self, connection, name, names, news)
            elif kind == "not finite":
                news.tensors[first] = torch.full_like(news.tensors[first], float("nan"))
            elif kind == "shape":
                news.tensors[first] = news.tensors[first][..., :-1].contiguous()
            else:
                news.layers = range(40, 41)
        send(self, connection, name, names, news)

    PrefillServer._send = spoiled  # type: ignore[method-assign]
    sys.argv = ["ridgeline", "serve", *args]
    main()


class Member:
    """One address of the fleet, and the process that is there, if any."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.checkpoint, self.port = checkpoint, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{self.port}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.spoiled = ""

    def start(self, role: str, spoiled: str = "") -> None:
        """Start a server here."""
        self.spoiled = spoiled
        args = [str(self.checkpoint), "--port", str(self.port), "--kv-cache", "4MiB",
                "--with", f"splitwise:role={role},whole_below=64"]  # fmt: skip
        if spoiled:
            command = [sys.executable, __file__, "--spoiled", spoiled, "--", *args]
        else:
            command = [sys.executable, "-m", "ridgeline", "serve", *args]
        environment = {**os.environ, "RIDGELINE_FLEET_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    @property
    def up(self) -> bool:
        """Whether it answers."""
        if self.process is None or self.process.poll() is not None:
            return False
        try:
            return bool(_get(f"{self.url}/health", 1.0) is not None)
        except OSError:
            return False

    def kill(self) -> None:
        """End it without a word."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _get(url: str, seconds: float) -> bytes:
    with urllib.request.urlopen(url, timeout=seconds) as answer:
        data: bytes = answer.read()
        return data


def question(i: int) -> dict[str, Any]:
    """A request of its own, always the same for the same number."""
    rng = random.Random(i)
    sampled = {"temperature": 0.9, "seed": i} if i % 3 == 0 else {"temperature": 0.0}
    return {"model": "model", "prompt": [rng.randrange(3, 500) for _ in range(rng.choice((5, 30, 90, 250)))],
            "max_tokens": rng.randint(1, 40), "ignore_eos": True, "return_token_ids": True, **sampled}  # fmt: skip


def answer(url: str, body: dict[str, Any]) -> tuple[list[int], str]:
    """Tokens of a streamed answer, and what ended it early; empty: nothing."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    tokens: list[int] = []
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                text = line.decode().removeprefix("data: ").strip()
                if not line.startswith(b"data: ") or text == "[DONE]":
                    continue
                event = json.loads(text)
                if "error" in event:
                    return tokens, str(event["error"])
                tokens += [t for c in event["choices"] for t in c.get("token_ids") or ()]
    except urllib.error.HTTPError as e:
        return tokens, f"{e.code} {e.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as e:
        return tokens, f"{type(e).__name__}: {e}"
    return tokens, ""


class Fuzz:
    """The fleet, its clients, and what happened."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        checkpoint = folder / "model"
        model = build(SPEC, seed=1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4 if p.ndim > 1 else 1)
        save_checkpoint(model, checkpoint)
        train_tokenizer(["some text to make a tokenizer of"], SPEC.vocab_size).save(str(checkpoint / "tokenizer.json"))
        self.members = [Member(checkpoint, folder) for _ in range(5)]
        self.log = folder / "router.log"

    def begin(self) -> None:
        """Start four servers and the router, and ask a server alone."""
        for member, role in zip(self.members, ("prefill", "prefill", "decode", "decode"), strict=False):
            member.start(role)
        while not all(m.up for m in self.members[:4]):
            time.sleep(0.2)
            for m in self.members[:4]:
                if m.process is None or m.process.poll() is not None:
                    raise SystemExit(m.log.read_text())
        self.expected = [answer(self.members[0].url, question(i)) for i in range(QUESTIONS)]
        assert all(tokens and not error for tokens, error in self.expected), self.expected
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "ridgeline", "router", *(m.url for m in self.members), "--port", str(port)]
        with self.log.open("wb") as out:
            self.router = subprocess.Popen(command, stdout=out, stderr=out,
                                           env={**os.environ, "RIDGELINE_FLEET_SECRET": SECRET})  # fmt: skip
        while b"is up" not in self.log.read_bytes():
            time.sleep(0.1)

    def client(self, number: int, stop: float) -> None:
        """Ask until ``stop``."""
        rng = random.Random(number)
        while time.monotonic() < stop:
            i = rng.randrange(QUESTIONS)
            got, error = answer(self.url, question(i))
            want = self.expected[i][0]
            if got != (want[: len(got)] if error else want):
                self.wrong.append(f"question {i}: {got} instead of {want} {error}")
            self.found["whole" if not error else "cut short" if got else f"refused: {error[:120]}"] += 1

    def disturb(self) -> None:
        """One thing happens."""
        alive = [m for m in self.members if m.process is not None]
        sound = [m for m in alive if not m.spoiled and m.up]
        kind = self.rng.choice(("kill", "start", "suspend", "corrupt"))
        down = [m for m in self.members if m.process is None]
        spare = [m for m in alive if len([s for s in sound if s is not m]) >= 2]
        if kind in ("start", "corrupt") and down:
            spoiled = self.rng.choice(SPOILED) if kind == "corrupt" else ""
            role = "prefill" if spoiled else self.rng.choice(ROLES)
            self.rng.choice(down).start(role, spoiled)
            self.events[f"started, spoiled: {spoiled}" if spoiled else f"started as {role}"] += 1
        elif kind == "kill" and spare:
            self.rng.choice(spare).kill()
            self.events["killed"] += 1
        elif kind == "suspend" and spare:
            process = self.rng.choice(spare).process
            seconds = self.rng.choice((0.3, 2.0, 13.0))
            assert process is not None
            process.send_signal(signal.SIGSTOP)

            def resume() -> None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)

            threading.Timer(seconds, resume).start()
            self.events[f"suspended for {seconds:g} s"] += 1

    def leaks(self) -> dict[str, float]:
        """What the metrics of servers that are idle say is in use, if anything."""
        time.sleep(15)  # suspended ones go on, lost peers are noticed
        text = _get(f"{self.url}/metrics", 20).decode()
        values = {name: float(v) for name, _, v in (row.rpartition(" ") for row in text.splitlines() if row[:1] != "#")}
        watched = ("ridgeline_running", "ridgeline_waiting", "ridgeline_queued", "ridgeline_kv_blocks_used")
        return {name: v for name, v in values.items() if name.startswith(watched) and v}

    def end(self) -> None:
        """Stop everything."""
        self.router.kill()
        for member in self.members:
            member.kill()


def run(minutes: float, seed: int) -> dict[str, Any]:
    """The fuzzing's result."""
    with tempfile.TemporaryDirectory() as name:
        fuzz = Fuzz(Path(name), seed)
        try:
            fuzz.begin()
            stop = time.monotonic() + 60 * minutes
            clients = [threading.Thread(target=fuzz.client, args=(i, stop)) for i in range(4)]
            for c in clients:
                c.start()
            while time.monotonic() < stop:
                time.sleep(fuzz.rng.uniform(0.5, 4.0))
                fuzz.disturb()
            for c in clients:
                c.join()
            leaks = fuzz.leaks()
            lines = b"".join(m.log.read_bytes() for m in fuzz.members).decode(errors="replace").splitlines()
        finally:
            fuzz.end()
    said = Counter(kind for line in lines for kind in ("refused for", "lost:") if kind in line)
    return {"answers": dict(fuzz.found), "wrong": fuzz.wrong[:5], "leaks": leaks, "events": dict(fuzz.events),
            "peers_refused": said["refused for"], "peers_lost": said["lost:"],
            "tracebacks": sum("Traceback" in line for line in lines)}  # fmt: skip


def main() -> None:
    """Run it, or one spoiled server of it."""
    if sys.argv[1:2] == ["--spoiled"]:
        serve_spoiled(sys.argv[2], sys.argv[4:])
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=4.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    found = {"seed": args.seed, "minutes": args.minutes, **run(args.minutes, args.seed), "commit": commit(),
             "environment": fingerprint(), "load_after": load_average()}  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    refused = [kind for kind in found["answers"] if kind.startswith("refused")]
    if found["wrong"] or found["leaks"] or refused or found["tracebacks"] or not found["answers"].get("whole"):
        raise SystemExit("an invariant does not hold")


if __name__ == "__main__":
    main()
