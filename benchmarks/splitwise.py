"""Running requests under bursts of prompts: two servers that do both, against one for prompts and one for outputs.

    python benchmarks/splitwise.py --json benchmarks/results/splitwise.json

Two server processes with one core each behind `ridgeline router`, on this machine. Steady requests stream their tokens
while bursts of long prompts arrive. Of the steady ones: gaps between tokens and mean time per token; of the bursts: the
time to the first token. Then prompts one after another: bytes and exposed time of their transfers, by the servers' own
counts, beside the prediction for a link whose rate is measured with the same frames. The configurations take turns.
Cores are shared with the router and with the clients; the load average is in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from ridgeline import catalog, experiments
from ridgeline.data.batches import train_tokenizer
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.init import build
from ridgeline.predict.serving.kv_transfer import kv_transfer
from ridgeline.serve.transfer.connection import BUFFER, Connection
from ridgeline.serve.transfer.frames import Kind
from ridgeline.spec.device import Link
from ridgeline.spec.model import ModelSpec

SPEC = ModelSpec(family="llama", vocab_size=258, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
                 head_dim=64, intermediate_size=1408, max_positions=2048)  # fmt: skip
CONFIGURATIONS = {
    "mixed": [[], []],
    "mixed, 128 tokens a step": [["--max-num-batched-tokens", "128"]] * 2,
    "split": [["--role", "prefill"], ["--role", "decode"]],
    "split, at once": [
        ["--with", "splitwise:role=prefill,whole_below=100000"], ["--with", "splitwise:role=decode,whole_below=100000"]
    ],
}  # fmt: skip
"""Options of the two servers."""


@contextmanager
def process(words: list[str], core: int | None, ready: str) -> Any:
    """A command, on one core, once it has said ``ready`` → its address, the last word of that line."""
    environment = {**os.environ, "RIDGELINE_FLEET_SECRET": "a secret of the benchmark"}
    if core is not None:
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "ridgeline", *words]
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    if core is not None:
        os.sched_setaffinity(p.pid, {core})
    try:
        said = iter(p.stderr)
        line = next((line for line in said if ready in line), None)
        if line is None:
            raise SystemExit(f"{' '.join(words)} ended with code {p.wait()}")
        threading.Thread(target=lambda: list(said), daemon=True).start()
        yield line.split()[-1]
    finally:
        p.terminate()
        p.wait()


@contextmanager
def fleet(checkpoint: str, name: str) -> Any:
    """(router's address, servers' addresses) of a configuration, all up."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(process(["serve", checkpoint, "--port", "0", *options], core, "serving on"))
            for core, options in zip((cores[0], cores[-1]), CONFIGURATIONS[name], strict=True)
        ]
        words = ["router", *servers, "--port", "0", "--policy", "least-loaded"]
        url = stack.enter_context(process(words, None, "routing on"))
        while True:
            with urllib.request.urlopen(f"{url}/fleet") as answer:
                if all(m["state"] == "up" for m in json.load(answer)["members"]):
                    break
            time.sleep(0.1)
        yield url, servers


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> list[float]:
    """Seconds from the request to each of its tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True}  # fmt: skip
    start, times = time.perf_counter(), []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                times += [time.perf_counter() - start] * sum(len(c.get("token_ids") or ()) for c in choices)
    if len(times) != tokens:
        raise SystemExit(f"{len(times)} tokens came, of {tokens}")
    return times


async def load(url: str, args: argparse.Namespace, seed: int) -> dict[str, list[Any]]:
    """Steady requests, and bursts while they run."""
    draw = np.random.default_rng(seed)

    def prompt(n: int) -> list[int]:
        return [int(t) for t in draw.integers(1, 258, n)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await asyncio.gather(*(stream(session, url, prompt(40), 8) for _ in range(4)))  # warm up
        steady = [asyncio.create_task(stream(session, url, prompt(32), args.tokens)) for _ in range(args.steady)]
        bursts: list[list[float]] = []
        await asyncio.sleep(0.5)
        while not all(task.done() for task in steady):
            bursts += await asyncio.gather(*(stream(session, url, prompt(args.prompt), 2) for _ in range(args.burst)))
            await asyncio.sleep(args.pause)
        return {"steady": [await task for task in steady], "first": [times[0] for times in bursts]}


def metric(servers: list[str], name: str) -> float:
    """A metric's sum over servers."""
    total = 0.0
    for url in servers:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(name):
                    total += float(line.rpartition(" ")[2])
    return total


def measured(checkpoint: str, name: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One round of one configuration."""
    busy = load_average()
    with fleet(checkpoint, name) as (url, servers):
        found = asyncio.run(load(url, args, seed))
        gaps = np.concatenate([np.diff(times) for times in found["steady"]])
        per_token = [(times[-1] - times[0]) / (len(times) - 1) for times in found["steady"]]
        row: dict[str, Any] = {
            "load_average": busy, "gap_p50_s": float(np.percentile(gaps, 50)),
            "gap_p99_s": float(np.percentile(gaps, 99)), "gap_max_s": float(gaps.max()),
            "tpot_p50_s": statistics.median(per_token), "tpot_p99_s": float(np.percentile(per_token, 99)),
            "burst_first_token_p50_s": statistics.median(found["first"]), "bursts": len(found["first"]) // args.burst,
        }  # fmt: skip
        row["transfers"] = metric(servers, 'ridgeline_transfer_prompts_total{result="complete"}')
        row["sent_bytes"] = metric(servers, "ridgeline_transfer_sent_bytes_total")
    print(f"{name}: " + "  ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)), flush=True)
    return row


def sink(port: Any, frames: int) -> None:
    """A process that receives frames."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        c = Connection(reader, writer)
        await c.greet(b"secret", "", asks=False)
        for _ in range(frames):
            await c.receive()
        await c._write(Kind.PING, {})

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=BUFFER)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def link(sizes: tuple[int, int] = (1 << 18, 8 << 20), frames: int = 16) -> Link:
    """Loopback between two processes as frames use it: tags and safetensors included."""

    async def timed(size: int, port: int) -> float:
        data = torch.zeros(size // 4)
        c = Connection(*await asyncio.open_connection("127.0.0.1", port, limit=BUFFER))
        await c.greet(b"secret", "", asks=True)
        pump = asyncio.create_task(c.pump())
        start = time.perf_counter()
        for _ in range(frames):
            c.send(Kind.KV, {}, lambda: {"x": data}, size)
        await c.receive()
        took = time.perf_counter() - start
        pump.cancel()
        c.close()
        return took / frames

    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    p = context.Process(target=sink, args=(ports, frames), daemon=True)
    p.start()
    port = ports.get()
    small, large = (statistics.median(asyncio.run(timed(size, port)) for _ in range(5)) for size in sizes)
    p.terminate()
    bandwidth = (sizes[1] - sizes[0]) / (large - small)
    return Link(name="loopback", bandwidth=bandwidth, latency=max(0.0, small - sizes[0] / bandwidth))


def transfers(checkpoint: str, name: str, args: argparse.Namespace, wire: Link, count: int = 6) -> dict[str, Any]:
    """Prompts one after another through two servers: bytes and exposed time of each, counted and predicted."""
    catalog.allow_unprobed()
    work = {"kind": "serve", "prompt_len": args.prompt, "output_len": 2, "rate": 1.0}
    e = experiments.make(checkpoint, "local", work, [])
    draw = np.random.default_rng(0)
    names = ("received_bytes_total", "exposed_seconds_sum", "wait_seconds_sum")
    with fleet(checkpoint, name) as (url, servers):

        async def one() -> float:
            async with aiohttp.ClientSession() as session:
                prompt = [int(t) for t in draw.integers(1, 258, args.prompt)]
                return (await stream(session, url, prompt, 2))[0]

        asyncio.run(one())
        before = [metric(servers, f"ridgeline_transfer_{n}") for n in names]
        compute = statistics.median(asyncio.run(one()) for _ in range(count))
        after = [metric(servers, f"ridgeline_transfer_{n}") for n in names]
    found = kv_transfer(e, args.prompt, wire, compute, layerwise=name == "split")
    counted = [(b - a) / count for a, b in zip(before, after, strict=True)]
    return {
        "first_token_s": compute, "bytes": {"measured": counted[0], "predicted": found.nbytes},
        "exposed_s": {"measured": counted[1], "predicted": found.exposed}, "wait_s": counted[2],
        "seconds_predicted": found.seconds,
    }  # fmt: skip


def main() -> None:
    """Run all configurations in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steady", type=int, default=6, help="requests that stream")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each")
    parser.add_argument("--burst", type=int, default=3, help="prompts at a time")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between bursts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "model")
        save_checkpoint(build(SPEC, torch.device("cpu"), torch.float32, 0), checkpoint)
        train_tokenizer(["a"], 258).save(str(Path(checkpoint) / "tokenizer.json"))
        rows: dict[str, list[Any]] = {name: [] for name in CONFIGURATIONS}
        for seed in range(args.rounds):
            for name in CONFIGURATIONS:
                rows[name].append(measured(checkpoint, name, args, seed))
        wire = link()
        sent = {name: transfers(checkpoint, name, args, wire) for name in ("split", "split, at once")}
    ratios = {
        key: {name: statistics.median(a[key] / b[key] for a, b in zip(rows[name], rows["split"], strict=True))
              for name in rows if name != "split"}
        for key in ("gap_max_s", "tpot_p99_s", "tpot_p50_s", "burst_first_token_p50_s")
    }  # fmt: skip
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    loopback = {"bytes_per_s": wire.bandwidth, "latency_s": wire.latency}
    report = {"model": SPEC.model_dump(mode="json", exclude_defaults=True), "settings": settings, "rows": rows,
              "over_split": ratios, "link": loopback, "transfers": sent, "environment": fingerprint()}  # fmt: skip
    print(json.dumps({"over_split": ratios, "transfers": sent}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
