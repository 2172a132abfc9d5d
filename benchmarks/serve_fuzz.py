"""10 000 random malformed requests: no 500, no leak of blocks, queue or memory.

    python benchmarks/serve_fuzz.py CHECKPOINT [--requests 10000] [--json benchmarks/results/serve_fuzz.json]

Without a checkpoint, a tiny model of random weights is served. Requests are those of ``tests/serve/malformed.py``, four
clients at a time; every twentieth client leaves before its answer.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serve import malformed
from tests.serve.running import running, tiny
from tests.serve.traffic import hammer

from ridgeline.measure.environment import fingerprint


def ask(netloc: str, seed: int) -> int:
    """The status of request ``seed``; 0: the client left before it came."""
    method, path, raw, headers = malformed.request(seed)
    connection = http.client.HTTPConnection(netloc, timeout=60)
    try:
        connection.request(method, path, raw, headers)
        if seed % 20 == 0:
            return 0
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "serve_fuzz.json")
    args = parser.parse_args()
    statuses: Counter[int] = Counter()
    memory: list[int] = []
    lock = threading.Lock()

    def sample(_: int) -> None:
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.checkpoint or tiny(Path(scratch) / "tiny")
        with running(folder) as server:
            netloc = urlsplit(server.url).netloc

            def send(seed: int) -> None:
                status = ask(netloc, seed)
                with lock:
                    statuses[status] += 1

            began = time.perf_counter()
            hammer(args.requests, 4, send, max(1, args.requests // 20), sample)
            seconds = time.perf_counter() - began
            server.assert_idle()
    half = memory[len(memory) // 2]
    report = {
        "requests": args.requests, "seconds": seconds, "statuses": {str(k): v for k, v in sorted(statuses.items())},
        "server_errors": sum(n for status, n in statuses.items() if status >= 500),
        "rss_bytes": memory, "growth_of_second_half": memory[-1] / half - 1, "environment": fingerprint(),
    }  # fmt: skip
    args.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in ("environment", "rss_bytes")}, indent=2))
    if report["server_errors"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
