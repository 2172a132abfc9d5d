"""An hour of mixed traffic at 8 requests/s, as fast as it goes: memory flat, nothing held, no request broken.

    python benchmarks/serve_soak.py [CHECKPOINT] [--requests 28800] [--json benchmarks/results/serve_soak.json]

The server is ``ridgeline serve`` in a process of its own, over a pool that is too small for its clients, so that
sequences are preempted. Traffic is that of ``tests/serve/traffic.py``: prompts that share beginnings, streams, clients
that leave, several outputs, beams, stop strings, structures, chats, embeddings, adapters that come and go, malformed
requests. Without a checkpoint a tiny model of random weights is served.

Memory is the server's resident set while requests run; its slope over the last four fifths is Theil and Sen's, with a
95 % interval. Threads, open files and blocks are compared between two moments without any request: after the first
twentieth, and at the end. Exit code 1 if anything grew or broke.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from scipy.stats import theilslopes

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serve.running import lora, process, tiny
from tests.serve.traffic import Traffic, hammer

from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint

SAMPLES = 200
WARM = 0.05
"""Share of the requests before the first quiet moment."""
FLAT = 0.02
"""Growth of the resident set over the last four fifths, as a share of it, that counts as flat."""
THREADS = 2 + min(32, (os.cpu_count() or 1) + 4)
"""The server's, the engine's, and those of asyncio's pool, which come as they are needed."""
GAUGES = ("waiting", "running", "queued_requests", "queued_tokens", "kv_blocks", "kv_blocks_used")
COUNTERS = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "requests_disconnected", "steps")


class Watch:
    """The server's process and its own numbers."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.process = url, psutil.Process(pid)

    def metrics(self) -> dict[str, float]:
        """What ``/metrics`` says."""
        with urllib.request.urlopen(f"{self.url}/metrics") as reply:
            lines = [line.rpartition(" ") for line in reply.read().decode().splitlines() if line.startswith("ridge")]
        found = {name.removeprefix("ridgeline_").removesuffix("_total"): float(value) for name, _, value in lines}
        return {name: found[name] for name in (*GAUGES, *COUNTERS)}

    def sample(self, requests: int) -> dict[str, float]:
        """Now."""
        return {"requests": requests, "rss_bytes": self.process.memory_info().rss, **self.metrics()}

    def quiet(self, requests: int) -> dict[str, float]:
        """The same once nothing runs and connections are closed, with threads and open files."""
        busy = [name for name in GAUGES if name != "kv_blocks"]
        for _ in range(600):
            now = self.metrics()
            if not any(now[name] for name in busy) and len(self.process.net_connections()) <= 1:
                break
            time.sleep(0.1)
        return {**self.sample(requests), "threads": self.process.num_threads(), "open_files": self.process.num_fds()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=8 * 3600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kv-cache", default="160KB", help="memory of the key/value pool")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "serve_soak.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.checkpoint or tiny(Path(scratch) / "tiny")
        model = load_checkpoint(folder)
        adapters = [lora(Path(scratch) / f"lora{seed}", model, seed) for seed in range(3)]
        options = ["--kv-cache", args.kv_cache, "--admin-key", "soak", "--max-num-seqs", "16"]
        with process(folder, *options, "--max-num-batched-tokens", "128") as server:
            report = soak(server, Traffic(server.url, adapters, "soak"), args.requests, args.clients)
    args.json.write_text(json.dumps({**report, "environment": fingerprint()}, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "samples"}, indent=1))
    return 1 if report["failures"] else 0


def soak(server: Any, traffic: Traffic, requests: int, clients: int) -> dict[str, Any]:
    """The report of one run."""
    watch, samples, warm = Watch(server.url, server.process.pid), [], int(WARM * requests)
    with Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task, lock = bar.add_task("requests", total=requests), threading.Lock()

        def send(number: int) -> None:
            traffic.send(number)
            with lock:
                bar.advance(task)

        began = time.perf_counter()
        hammer(warm, clients, send)
        first = watch.quiet(warm)
        hammer(requests - warm, clients, lambda i: send(warm + i), max(1, requests // SAMPLES),
               lambda i: samples.append(watch.sample(warm + i)))  # fmt: skip
        seconds = time.perf_counter() - began
    watch.quiet(requests)
    traffic.unload_all()
    last = watch.quiet(requests)
    late = [s for s in samples if s["requests"] >= requests / 5]
    slope, _, low, high = theilslopes([s["rss_bytes"] for s in late], [s["requests"] / 1000 for s in late])
    growth = slope * (late[-1]["requests"] - late[0]["requests"]) / 1000 / late[0]["rss_bytes"]
    errors = sum(n for status, n in traffic.statuses.items() if status >= 500)
    failures = {
        "requests broke": errors > 0,
        "memory grows": growth > FLAT and low > 0,
        "blocks are held": last["kv_blocks_used"] > 0,
        "requests are left": any(last[name] for name in ("waiting", "running", "queued_requests", "queued_tokens")),
        "threads are left": last["threads"] > max(first["threads"], THREADS),
        "files are open": last["open_files"] > first["open_files"],
        "nothing was preempted": last["preemptions"] == 0,
        "the server complained": len(server.lines) > 2,
    }
    return {
        "requests": requests, "seconds": seconds, "clients": clients, "load_average": load_average(),
        "statuses": {str(status): n for status, n in sorted(traffic.statuses.items())},
        "kinds": dict(sorted(traffic.kinds.items())),
        "server_errors": errors, "rss_slope_bytes_per_1000_requests": {"slope": slope, "low": low, "high": high},
        "rss_growth_of_last_four_fifths": growth, "after_warm_up": first, "at_the_end": last,
        "most_blocks_used": max(s["kv_blocks_used"] for s in samples),
        "failures": [what for what, so in failures.items() if so],
        "said": server.lines[2:40], "samples": [[s["requests"], s["rss_bytes"], s["kv_blocks_used"]] for s in samples],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
