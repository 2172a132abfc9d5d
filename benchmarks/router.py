"""Four servers behind the router: cached prefixes and time to the first token by policy, and a server ended by SIGKILL.

    python benchmarks/router.py --json benchmarks/results/router.json

Server processes with one thread each and `ridgeline router` on this machine. Prompts begin with one of ``--prefixes``
texts, more than one server's cache holds; requests arrive at random. The policies take turns at the same arrivals,
with prompts that no server has seen. Hit rate: cached prompt tokens over all, by the servers' own counts. Then, with as
many requests at a time as ``--clients``, the server with the most of them is killed in the middle of a run. Each answer
in flight then is compared with one server's own. All share this machine's cores; the load average is in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from ridgeline.data.batches import train_tokenizer
from ridgeline.jobs.launch import free_port
from ridgeline.measure.environment import commit, fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec

SPEC = ModelSpec(family="llama", vocab_size=512, hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=4,
                 head_dim=64, intermediate_size=704, max_positions=1024)  # fmt: skip
POLICIES = ("prefix", "least-loaded", "random")
SERVERS = 4


@contextmanager
def process(words: list[str], ready: str) -> Any:
    """A command, once its address answers at ``ready`` → the process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    p = subprocess.Popen([sys.executable, "-m", "ridgeline", *words], stderr=subprocess.DEVNULL, env=environment)
    try:
        while not _answers(ready):
            if p.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended with code {p.returncode}")
            time.sleep(0.1)
        yield p
    finally:
        p.terminate()
        p.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


class Servers:
    """The servers, each at an address that stays."""

    def __init__(self, stack: ExitStack, checkpoint: Path, cache: str) -> None:
        self.stack, self.words = stack, ["serve", str(checkpoint), "--kv-cache", cache]
        self.ports = [free_port() for _ in range(SERVERS)]
        self.processes: dict[str, Any] = {}
        self.complete()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def complete(self) -> None:
        """Start those that do not run."""
        for url, port in zip(self.urls, self.ports, strict=True):
            if url not in self.processes or self.processes[url].poll() is not None:
                started = process([*self.words, "--port", str(port)], f"{url}/health")
                self.processes[url] = self.stack.enter_context(started)

    def tokens(self) -> tuple[float, float]:
        """(prompt tokens found in a cache, prompt tokens) of all servers so far."""
        rows = [row.rpartition(" ") for url in self.urls for row in _get(f"{url}/metrics").splitlines()]
        hits, asked = (sum(float(v) for n, _, v in rows if n.startswith(f"ridgeline_{name}_total"))
                       for name in ("cached_tokens", "sought_tokens"))  # fmt: skip
        return hits, asked


@contextmanager
def router(servers: Servers, policy: str) -> Any:
    """The address of a router before all servers."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with process(["router", *servers.urls, "--port", str(port), "--policy", policy], f"{url}/health"):
        while any(m["state"] != "up" for m in json.loads(_get(f"{url}/fleet"))["members"]):
            time.sleep(0.1)
        yield url


@dataclass
class Asked:
    """One request, and what came of it."""

    prompt: list[int]
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each token came."""
    tokens: list[int] = field(default_factory=list)
    error: str = ""


async def ask(session: aiohttp.ClientSession, url: str, asked: Asked, count: int) -> None:
    """Stream an answer."""
    body = {"model": "model", "prompt": asked.prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip
    asked.began = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                asked.error = await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    asked.error = str(event["error"])
                for choice in event.get("choices", ()):
                    asked.tokens += choice.get("token_ids") or ()
                asked.times += [time.monotonic()] * (len(asked.tokens) - len(asked.times))
    except aiohttp.ClientError as e:
        asked.error = f"{type(e).__name__}: {e}"
    if not asked.error and len(asked.tokens) != count:
        asked.error = f"{len(asked.tokens)} tokens of {count}"


def requests(args: argparse.Namespace, seed: list[int], count: int) -> list[Asked]:
    """Prompts that begin with one of the prefixes, at random."""
    draw = np.random.default_rng(seed)
    prefixes = draw.integers(3, 500, (args.prefixes, args.prefix)).tolist()
    return [Asked(prefixes[int(i)] + draw.integers(3, 500, args.own).tolist())
            for i in draw.integers(0, args.prefixes, count)]  # fmt: skip


def compared(servers: Servers, policy: str, args: argparse.Namespace, turn: int) -> dict[str, Any]:
    """One policy at random arrivals."""
    every = requests(args, [turn, POLICIES.index(policy)], args.requests)
    gaps = np.random.default_rng(turn).exponential(1 / args.rate, args.requests)

    async def run() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            tasks = []
            for asked, gap in zip(every, gaps, strict=True):
                await asyncio.sleep(gap)
                tasks.append(asyncio.create_task(ask(session, url, asked, args.tokens)))
            await asyncio.gather(*tasks)

    busy, before = load_average(), servers.tokens()
    with router(servers, policy) as url:
        asyncio.run(run())
    hits, prompts = (b - a for a, b in zip(before, servers.tokens(), strict=True))
    if errors := [a.error for a in every if a.error]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    first = [a.times[0] - a.began for a in every]
    found = {"load_average": busy, "hit_rate": hits / prompts, "ttft_p50_s": float(np.percentile(first, 50)),
             "ttft_p99_s": float(np.percentile(first, 99)),
             "e2e_p50_s": statistics.median(a.times[-1] - a.began for a in every)}  # fmt: skip
    print(f"{policy}: " + "  ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
    return found


def killed(servers: Servers, args: argparse.Namespace, turn: int) -> dict[str, Any]:
    """The default policy, and the busiest server killed after a third of the requests."""
    every = requests(args, [turn, len(POLICIES)], args.requests)
    waiting, at = iter(every), 0.0

    async def client(session: aiohttp.ClientSession) -> None:
        for asked in waiting:
            await ask(session, url, asked, args.tokens)

    async def kill(session: aiohttp.ClientSession) -> tuple[float, int]:
        while sum(bool(a.began) for a in every) < args.requests // 3:
            await asyncio.sleep(0.01)
        async with session.get(f"{url}/fleet") as answer:
            busiest = max((await answer.json())["members"], key=lambda m: m["running"])
        servers.processes[busiest["url"]].kill()
        return time.monotonic(), busiest["running"]

    async def run() -> tuple[float, int]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            killing = asyncio.create_task(kill(session))
            await asyncio.gather(*(client(session) for _ in range(args.clients)))
            return await killing

    async def alone(again: list[Asked]) -> None:
        async with aiohttp.ClientSession() as session:
            for asked in again:
                await ask(session, living, asked, args.tokens)

    with router(servers, "prefix") as url:
        at, running = asyncio.run(run())
        counts = json.loads(_get(f"{url}/fleet"))
    living = next(u for u in servers.urls if servers.processes[u].poll() is None)
    flying = [a for a in every if a.began < at and (not a.times or a.times[-1] > at or a.error)]
    asyncio.run(alone(again := [Asked(a.prompt) for a in flying]))
    wrong = sum(a.tokens != b.tokens[: len(a.tokens)] for a, b in zip(flying, again, strict=True))
    first = [a.times[0] - a.began for a in every if a.times]
    found = {
        "requests": len(every), "in_flight": len(flying), "in_flight_at_the_killed_server": running,
        "without_a_token_then": sum(not a.times or a.times[0] > at for a in flying),
        "lost_without_a_token": sum(not a.tokens for a in every), "whole": sum(not a.error for a in every),
        "cut_short_after_tokens": sum(bool(a.error and a.tokens) for a in every), "wrong_tokens": wrong,
        "asked_of_another_server": counts["retries"], "ttft_p50_s": float(np.percentile(first, 50)),
        "ttft_p99_s": float(np.percentile(first, 99)),
    }  # fmt: skip
    print("killed: " + "  ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
    servers.complete()
    return found


def main() -> int:
    """Run it; exit code 1 when a request without a token is lost, or a token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second")
    parser.add_argument("--clients", type=int, default=24, help="requests at a time when a server is killed")
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of each")
    parser.add_argument("--own", type=int, default=32, help="tokens of a prompt after its prefix")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--cache", default="48MB", help="cache of each server")
    args = parser.parse_args()
    rows: dict[str, list[Any]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = Path(folder) / "model"
        save_checkpoint(build(SPEC, torch.device("cpu"), torch.float32, 0), checkpoint)
        train_tokenizer(["some text to make a tokenizer of"], SPEC.vocab_size).save(str(checkpoint / "tokenizer.json"))
        servers = Servers(stack, checkpoint, args.cache)
        for turn in range(args.rounds):
            for policy in POLICIES:
                rows[policy].append(compared(servers, policy, args, turn))
        kills = [killed(servers, args, turn) for turn in range(args.rounds)]
    medians = {name: {k: statistics.median(r[k] for r in found) for k in found[0]} for name, found in rows.items()}
    possible = (1 - args.prefixes / args.requests) * args.prefix / (args.prefix + args.own)
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    report = {"model": SPEC.model_dump(mode="json", exclude_defaults=True), "servers": SERVERS, "settings": settings,
              "possible_hit_rate": possible, "medians": medians, "rounds": rows, "kills": kills,
              "load_after": load_average(), "commit": commit(), "environment": fingerprint()}  # fmt: skip
    print(json.dumps({"possible_hit_rate": possible, "medians": medians}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(k["lost_without_a_token"] or k["wrong_tokens"] for k in kills))


if __name__ == "__main__":
    sys.exit(main())
