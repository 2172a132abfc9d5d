"""How true is `ridgeline load`? Its latencies against a server of known ones, at rising rates, with general HTTP
clients and (where it is installed) guidellm beside it on the same server.

The mock server runs in a process of its own. Two truths: what the server was told (``ttft``, ``gap``), and what it says
that it kept to. Errors are of the mean, against what it was told: they hold the server's own lateness, the time on the
loopback, the client's lateness in sending and its delay in reading. CPU is the client's, in cores.

    python benchmarks/load_generator.py [--rates 50,200,500] [--seconds 8] [--guidellm PATH] [--out FILE]

``--clients ridgeline`` leaves the others out. Needs a core for the server and one for the client, both idle otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.measure.load.clock import run as run_loop
from ridgeline.measure.load.drive import drive
from ridgeline.measure.load.endpoint import find_endpoint
from ridgeline.measure.load.prompts import RandomIds
from ridgeline.measure.load.summary import gaps
from ridgeline.predict.serving.arrivals import Arrival

TTFT, GAP, TOKENS, PROMPT = 0.1, 0.02, 16, 128
Times = list[tuple[float, list[float]]]
"""Per request: when it was due, and when its chunks came."""


class Mock:
    """The server, for a ``with`` block."""

    def __enter__(self) -> Mock:
        command = [sys.executable, "-m", "ridgeline.measure.load.mock", f"--ttft={TTFT}", f"--gap={GAP}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.url = f"http://127.0.0.1:{json.loads(self.process.stdout.readline())['port']}"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def kept(self) -> dict[str, float]:
        """Mean TTFT and gap as the server wrote them."""
        found = json.load(urllib.request.urlopen(f"{self.url}/stats"))
        return {k: found[k] for k in ("ttft_s", "itl_s")}


def ours(url: str, rate: float, count: int) -> dict[str, Any]:
    """`ridgeline load`'s client, even arrivals."""
    asked = [Arrival(i / rate, PROMPT, TOKENS) for i in range(count)]
    endpoint = find_endpoint(url)
    cpu = time.process_time()
    d = drive(endpoint, asked, RandomIds())
    cpu = time.process_time() - cpu
    said = judged([(r.intended, r.chunks) for r in d.records if r.ok], cpu / (d.ended - d.began))
    lags = sorted(r.lag for r in d.records)
    itl = [g for r in d.records for g in gaps(r)]
    return said | {"lag_p50_s": statistics.median(lags), "lag_p99_s": lags[int(0.99 * len(lags))],
                   "itl_p99_s": sorted(itl)[int(0.99 * len(itl))],
                   "errors": sum(bool(r.error) for r in d.records)}  # fmt: skip


def judged(times: Times, cores: float) -> dict[str, Any]:
    """Means and their errors."""
    first = sorted(chunks[0] - due for due, chunks in times)
    ttft = statistics.fmean(first)
    gap = statistics.fmean(b - a for _, c in times for a, b in pairwise(c))
    return {"requests": len(times), "ttft_s": ttft, "ttft_p50_s": statistics.median(first),
            "ttft_p99_s": first[int(0.99 * len(first))], "itl_s": gap, "ttft_error": ttft / TTFT - 1,
            "itl_error": gap / GAP - 1, "cpu_cores": cores}  # fmt: skip


def library(name: str, url: str, rate: float, count: int) -> dict[str, Any]:
    """A general client in the same event loop, one task per request: what most load generators are made of."""
    times: Times = []
    body = {"model": "mock", "prompt": list(range(PROMPT)), "max_tokens": TOKENS, "stream": True}

    async def main() -> float:
        loop = asyncio.get_running_loop()

        def mark(line: str | bytes, chunks: list[float]) -> None:
            text = line.decode() if isinstance(line, bytes) else line
            if text.startswith("data: {") and json.loads(text[6:])["choices"]:
                chunks.append(loop.time())

        async with _session(name) as session:

            async def one(due: float) -> None:
                chunks: list[float] = []
                async with _post(name, session, f"{url}/v1/completions", body) as answer:
                    async for line in answer.content if name == "aiohttp" else answer.aiter_lines():
                        mark(line, chunks)
                times.append((due, chunks))

            await one(loop.time())
            times.clear()
            tasks: list[asyncio.Task[None]] = []
            cpu, began = time.process_time(), loop.time() + 0.1
            for i in range(count):
                due = began + i / rate
                await asyncio.sleep(max(0.0, due - loop.time()))
                tasks.append(loop.create_task(one(due)))
            await asyncio.gather(*tasks)
            return (time.process_time() - cpu) / (loop.time() - began)

    cores = run_loop(main())
    return judged(times, cores)


def _session(name: str) -> Any:
    if name == "aiohttp":
        import aiohttp

        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    import httpx2

    return httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), timeout=60, trust_env=False)


def _post(name: str, session: Any, url: str, body: dict[str, Any]) -> Any:
    return session.post(url, json=body) if name == "aiohttp" else session.stream("POST", url, json=body)


def guidellm(program: str, url: str, rate: float, seconds: float, out: Path) -> dict[str, Any]:
    """Guidellm's own means on the same server, at a constant rate."""
    from ridgeline.data.batches import train_tokenizer

    folder = out / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    text = [p.read_text() for p in sorted(Path(json.__file__).parent.glob("*.py"))]
    train_tokenizer(text, 500).save(str(folder / "tokenizer.json"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    until = f"kind=max_duration,seconds={seconds:g}"
    try:
        found = run_guidellm(program, url, "mock", folder, rate, until, PROMPT, TOKENS, out / "guidellm.json")
    except RuntimeError as e:
        return {"failed": str(e)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    def mean(name: str) -> float:
        return float(found[name]["successful"]["mean"])

    ttft, itl = mean("time_to_first_token_ms") / 1e3, mean("inter_token_latency_ms") / 1e3
    return {"ttft_s": ttft, "itl_s": itl, "tpot_s": mean("time_per_output_token_ms") / 1e3,
            "e2e_s": mean("request_latency"), "ttft_error": ttft / TTFT - 1, "itl_error": itl / GAP - 1,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}  # fmt: skip


def run_guidellm(
    program: str, url: str, model: str, tokenizer: Path, rate: float, until: str, prompt: int, tokens: int, out: Path,
    route: str = "/v1/completions",
) -> dict[str, Any]:  # fmt: skip
    """The metrics of a run of guidellm at a constant rate, ``until`` its constraint. Raises RuntimeError."""
    if not (tokenizer / "tokenizer_config.json").is_file():
        (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    command = [program, "run", "--backend", f"kind=openai_http,target={url},model={model},request_format={route}",
               "--profile", f"kind=constant,rate={rate:g}", "--constraint", until,
               "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
               "--data", f"kind=synthetic_text,prompt_tokens={prompt},output_tokens={tokens}",
               "--output", f"kind=json,path={out}", "--disable-console"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-800:])
    return dict(json.loads(out.read_text())["benchmarks"][0]["metrics"])


def main() -> None:
    parser = argparse.ArgumentParser(description="How true is `ridgeline load`?")
    parser.add_argument("--rates", default="50,200,500")
    parser.add_argument("--clients", default="ridgeline,aiohttp,httpx2")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--guidellm", help="its program, to run it beside")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/load_generator.json"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    clients = [n for n in given.clients.split(",") if find_spec(n)]
    for rate in (float(r) for r in given.rates.split(",")):
        for client in clients:
            count = int(rate * given.seconds)
            with Mock() as server:
                run = ours if client == "ridgeline" else lambda *a, n=client: library(n, *a)
                row = {"client": client, "rate": rate, **run(server.url, rate, count), "server": server.kept()}
            rows.append(row | {"load_average": load_average()})
            print(json.dumps(rows[-1]), flush=True)
        if given.guidellm:
            with Mock() as server:
                said = guidellm(given.guidellm, server.url, rate, given.seconds, given.out.parent / "guidellm")
                rows.append({"client": "guidellm", "rate": rate, **said, "server": server.kept()})
            print(json.dumps(rows[-1]), flush=True)
    truth = {"ttft_s": TTFT, "gap_s": GAP, "tokens": TOKENS, "prompt": PROMPT}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"truth": truth, "rows": rows, "environment": {**fingerprint(), "nice": os.nice(0)}}, indent=2)
        + "\n"
    )


if __name__ == "__main__":
    main()
