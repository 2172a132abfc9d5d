"""What the server's Python takes from the engine: steps with many streams over HTTP beside the same steps without.

    python benchmarks/serve_streams.py [--streams 16,64,128] [--rounds 5] [--out benchmarks/results/serve_streams.json]

Every stream decodes the same number of tokens and gets each as an event. ``bare``: milliseconds of a step of an engine
alone in a process, with as many sequences (16 or more: the server is asked for its steps while they run); ``sync`` and
``async``: of the server, without and with asynchronous scheduling, while all streams run, with engine and HTTP in one
process; ``process``: without it, and the engine in a process of its own. ``http``, ``engine`` and ``text``: CPU
milliseconds a step of the thread of the event loop, of those that compute and schedule, and (in one process the same)
of the one that makes text. Ratios are of rounds in turns. The client reads bytes and parses nothing; it is a process
too, and takes its share of the machine's cores.
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
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serve.running import process, tiny

from ridgeline.measure.environment import fingerprint, load_average

TOKENS, WARM = 200, 0.3
TICK = 1e3 / os.sysconf("SC_CLK_TCK")
WAYS = {
    "sync": ("--no-async-scheduling", "--no-engine-process"),
    "async": ("--async-scheduling", "--no-engine-process"),
    "process": ("--no-async-scheduling", "--engine-process"),
}
MODELS = {"two layers of 32": {}, "four layers of 256": {"hidden_size": 256, "intermediate_size": 688,
          "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}}  # fmt: skip


def bare(folder: Path, streams: int) -> float:
    """Milliseconds of a decode step of the engine alone, in a process of its own."""
    made = subprocess.run([sys.executable, __file__, "--bare", f"{folder}:{streams}"], check=True, capture_output=True,
                          text=True)  # fmt: skip
    return float(made.stdout.splitlines()[-1])


def alone(folder: Path, streams: int) -> float:
    from ridgeline.measure.environment import spare_core
    from ridgeline.serve.build_engine import load_engine
    from ridgeline.serve.request import EngineRequest, Sampling

    engine = load_engine(folder)
    for i in range(streams):
        engine.add(EngineRequest(str(i), [1 + i % 99] * 4, Sampling(max_tokens=TOKENS, temperature=0.0,
                                                                    ignore_eos=True)))  # fmt: skip
    times = []
    with spare_core():
        while engine.has_work():
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[int(WARM * TOKENS) :])


def threads(pid: int) -> dict[str, float]:
    """CPU milliseconds of a server's threads so far: the event loop's, and others' by what they do."""
    children = [child.pid for child in psutil.Process(pid).children()]
    found = {"http": 0.0, "text": 0.0, "engine": 0.0}
    for one in (pid, *children):
        for task in Path(f"/proc/{one}/task").iterdir():
            fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            beside = "text" if children and one == pid else "engine"
            found["http" if task.name == str(pid) else beside] += TICK * (int(fields[11]) + int(fields[12]))
    return found


def steps(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith("ridgeline_steps_total")))


async def stream(host: str, port: int, i: int) -> None:
    body = json.dumps({"prompt": [1 + i % 99] * 4, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                       "stream": True})  # fmt: skip
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())  # fmt: skip
    while await reader.read(1 << 16):
        pass
    writer.close()


async def run(url: str, pid: int, streams: int) -> dict[str, float]:
    """Milliseconds a step, and CPU milliseconds a step of the server's threads, while all streams decode."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    first = await loop.run_in_executor(None, steps, url)
    waiting = [asyncio.ensure_future(stream(host, int(port), i)) for i in range(streams)]
    seen: list[tuple[float, float, dict[str, float]]] = []
    while not any(t.done() for t in waiting):
        now = await loop.run_in_executor(None, steps, url)
        if now - first > WARM * TOKENS:
            seen.append((time.perf_counter(), now, threads(pid)))
        await asyncio.sleep(0.01)
    await asyncio.gather(*waiting)
    (t0, n0, c0), (t1, n1, c1) = seen[0], seen[-2]
    return {"step": 1e3 * (t1 - t0) / (n1 - n0), **{k: (c1[k] - c0[k]) / (n1 - n0) for k in c0}}


def measured(folder: Path, streams: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {name: [] for name in ("bare", *WAYS)}
    for _ in range(rounds):
        found["bare"].append(bare(folder, streams))
        for name, flags in WAYS.items():
            with process(folder, *flags, "--max-num-seqs", str(streams)) as server:
                found[name].append(asyncio.run(run(server.url, server.process.pid, streams)))
    row: dict[str, Any] = {"bare": spread(found["bare"])}
    for name in WAYS:
        row[name] = {k: spread([one[k] for one in found[name]]) for k in ("step", "engine", "text", "http")}
        row[f"{name} over bare"] = spread([o["step"] / b for o, b in zip(found[name], found["bare"], strict=True)])
    for name in ("async", "process"):
        pairs = zip(found[name], found["sync"], strict=True)
        row[f"{name} over sync"] = spread([a["step"] / s["step"] for a, s in pairs])
    return row


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="16,64,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve_streams.json"))
    args = parser.parse_args()
    if args.bare:
        folder, _, streams = args.bare.rpartition(":")
        print(alone(Path(folder), int(streams)))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in MODELS.items():
            checkpoint = tiny(Path(folder) / name.replace(" ", "-"), **fields)
            for streams in map(int, args.streams.split(",")):
                row = rows[f"{name}, {streams} streams"] = measured(checkpoint, streams, args.rounds)
                print(f"{name}, {streams} streams: bare {row['bare']['median']:.2f} ms", end="")
                for way in WAYS:
                    r = row[way]
                    print(f"; {way} {r['step']['median']:.2f} (engine {r['engine']['median']:.2f}, text"
                          f" {r['text']['median']:.2f}, http {r['http']['median']:.2f})", end="")  # fmt: skip
                for ratios in ("async over sync", "process over sync"):
                    ratio = row[ratios]
                    print(f"; {ratios} {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]", end="")
                print(flush=True)
    result = {"environment": {**fingerprint(), "load": load_average()}, "unit": "milliseconds", "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
