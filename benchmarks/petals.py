"""Generation through peers: recovery after `kill -9`, tokens/s against disk offload in equal memory, and against RTT.

    python benchmarks/petals.py --json benchmarks/results/petals.json

Server processes with one thread each on this machine, each with a third of the layers (and spare ones for the
recovery); the network's delay is injected into the transport. Offload is `zero_inference` from disk, past the page
cache, with the layers that one server holds resident: the same memory for weights. Medians over tokens; the
configurations take turns. Predictions are from a probe of this machine with one thread, in the same run. All share this
machine's cores; the load average is in the results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ridgeline import experiments
from ridgeline.measure.environment import commit, fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.init import build
from ridgeline.nn.quant.packed_model import load_packed
from ridgeline.predict import predict
from ridgeline.runtime.build import Build
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call
from ridgeline.spec.wire import wire_bytes
from ridgeline.spec.workload import Generate
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.link import Shape
from ridgeline.swarm.session import Session, load_ends, new_tokens
from ridgeline.techniques.registry import make

SPEC = ModelSpec(family="llama", vocab_size=8192, hidden_size=1024, num_layers=24, num_heads=16, num_kv_heads=8,
                 head_dim=64, intermediate_size=2816, max_positions=1024)  # fmt: skip
LAYER_BYTES = 4 * sum(p.numel for p in SPEC.parameters() if p.name.startswith("layers.0."))
SECRET = b"the secret of this benchmark"
RTTS = (0.0, 0.02, 0.05, 0.1, 0.2)
LOOPBACK = 1e9
"""Bytes/s of this machine's own network, about: 8 KB of a token's activations take no time on it."""
PARTS = ("0-7", "8-15", "16-23")


@contextmanager
def server(path: Path, blocks: str, join: str = "") -> Any:
    """A server process → (its process, its address)."""
    words = ["swarm", "serve", str(path), "--blocks", blocks, "--balance-every", "0", "--announce-every", "1",
             "--throughput", "10", "--cache-tokens", "2048", *(["--join", join] if join else [])]  # fmt: skip
    environment = {**os.environ, "RIDGELINE_FLEET_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"}
    p = subprocess.Popen([sys.executable, "-m", "ridgeline", *words], stderr=subprocess.PIPE, text=True,
                         env=environment)  # fmt: skip
    try:
        said = iter(p.stderr)
        line = next((line for line in said if line.startswith("serves blocks")), None)
        if line is None:
            raise SystemExit(f"a server ended with code {p.wait()}")
        threading.Thread(target=lambda: list(said), daemon=True).start()
        yield p, line.split(" at ")[1].split(",")[0]
    finally:
        if p.poll() is None:
            p.terminate()
        p.wait()


def client(path: Path, address: str, wire: str = "blockwise8", rtt: float = 0.0, count: int = 3) -> Swarm:
    """A client that knows ``count`` servers."""
    found = Swarm(path, (address,), SECRET, lambda line: print(line, file=sys.stderr), wire, shape=Shape(rtt))
    while len(found.table.live()) < count:
        time.sleep(0.2)
        found.refresh()
    return found


def through_peers(path: Path, swarm: Swarm, prompt: list[int], count: int) -> tuple[list[float], list[int]]:
    """Seconds of each token, the first one's with the prompt, and the tokens."""
    ends = load_ends(path)
    times, tokens = [], []
    with Session(swarm, len(prompt) + count) as session:
        start = time.perf_counter()
        for token in new_tokens(ends, session, torch.tensor(prompt)):
            times.append(time.perf_counter() - start)
            tokens.append(token)
            if len(tokens) == count:
                break
            start = time.perf_counter()
    return times, tokens


def offloaded(path: Path, prompt: list[int], count: int, resident: int) -> tuple[list[float], list[int]]:
    """The same with the layers that do not fit read from disk."""
    device = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
    workload = Generate(prompt_len=len(prompt), output_len=count, checkpoint=str(path))
    e = Experiment(model=SPEC, cluster=Cluster(device=device), workload=workload)
    call = Call(name="zero_inference", options={"parameters": "nvme", "resident": resident})
    technique = make(call)
    e = e.model_copy(update={"plan": e.plan.model_copy(update={"calls": (call,)})})
    model = load_packed(path, torch.float32, later=technique.reads_itself(e)).requires_grad_(False)
    technique.apply(Build(e, model, torch.device("cpu")))
    times, tokens = [], []
    with torch.inference_mode():
        cache = make_cache(model, 1, len(prompt) + count, torch.float32)
        start = time.perf_counter()
        token = prefill(model, torch.tensor([prompt]), cache).argmax(-1)
        while True:
            times.append(time.perf_counter() - start)
            tokens.append(int(token))
            if len(tokens) == count:
                return times, tokens
            start = time.perf_counter()
            token = decode(model, token, cache).argmax(-1)


def foretold(path: Path, prompt: int, count: int, on: str, plan: list[str]) -> float:
    """Predicted seconds of a token on this machine's profile."""
    work = {"kind": "generate", "batch_size": 1, "prompt_len": prompt, "output_len": count}
    return predict(experiments.make(str(path), on, work, plan)).metrics["tpot_s"].value


def recovery(path: Path, prompt: list[int], at: int) -> dict[str, Any]:
    """`kill -9` of one of five servers after ``at`` tokens."""
    with ExitStack() as stack:
        started = [stack.enter_context(server(path, PARTS[0]))]
        join = started[0][1]
        started += [stack.enter_context(server(path, b, join)) for b in (*PARTS[1:], *PARTS[1:])]
        swarm = client(path, join, "plain", count=5)
        ends, times, tokens = load_ends(path), [], []
        with Session(swarm, len(prompt) + at + 20) as session:
            start = time.perf_counter()
            for token in new_tokens(ends, session, torch.tensor(prompt)):
                times.append(time.perf_counter() - start)
                tokens.append(token)
                if len(tokens) == at:
                    victim = session.servers[1]
                    next(p for p, a in started if a == victim).send_signal(signal.SIGKILL)
                if len(tokens) == at + 20:
                    break
                start = time.perf_counter()
            replays = session.replays
        swarm.close()
        swarm = client(path, join, "plain", count=4)
        prefills = [through_peers(path, swarm, (prompt + tokens)[: len(prompt) + at], 1)[0][0] for _ in range(3)]
        again = through_peers(path, swarm, prompt, at + 20)
        swarm.close()
    each = statistics.median(times[1:])
    return {
        "prompt": len(prompt), "killed_after": at, "replayed_rows": replays[0][1], "replays": len(replays),
        "same_tokens": again[1] == tokens, "token_s": each, "recovery_s": times[at] - each,
        "prefill_of_all_three_spans_s": statistics.median(prefills),
        "prefill_of_one_span_s": statistics.median(prefills) / 3,
        "from_the_start_s": sum(times[:at]),
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--json", type=Path)
    options.add_argument("--tokens", type=int, default=24)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    torch.set_num_threads(1)
    prompt = [(37 * i) % SPEC.vocab_size for i in range(64)]
    out: dict[str, Any] = {"load_before": load_average(), "rtt": [], "offload": []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RIDGELINE_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "ridgeline", "probe"], check=True, stdout=subprocess.DEVNULL)
        path = Path(folder) / "model"
        model = build(SPEC, seed=0)
        save_checkpoint(model, path)
        del model
        rates: dict[str, list[float]] = {}
        texts: dict[str, list[int]] = {}
        with ExitStack() as stack:
            first = stack.enter_context(server(path, PARTS[0]))[1]
            for blocks in PARTS[1:]:
                stack.enter_context(server(path, blocks, first))
            for _ in range(args.rounds):
                for rtt in RTTS:
                    swarm = client(path, first, rtt=rtt)
                    times, texts[f"rtt {rtt}"] = through_peers(path, swarm, prompt, args.tokens)
                    rates.setdefault(f"rtt {rtt}", []).append(statistics.median(times[1:]))
                    swarm.close()
                swarm = client(path, first, "plain")
                times, texts["plain"] = through_peers(path, swarm, prompt, args.tokens)
                rates.setdefault("plain", []).append(statistics.median(times[1:]))
                swarm.close()
                times, texts["offload"] = offloaded(path, prompt, 6, 8)
                rates.setdefault("offload", []).append(statistics.median(times[1:]))
                print({k: round(statistics.median(v), 4) for k, v in rates.items()}, file=sys.stderr)
        seconds = {k: statistics.median(v) for k, v in rates.items()}
        for rtt in RTTS:
            found = seconds[f"rtt {rtt}"]
            plan = [f"petals:servers=3,rtt={rtt},rate={LOOPBACK:g}"]
            predicted = foretold(path, len(prompt), args.tokens, "3x1xlocal", plan)
            out["rtt"].append({
                "rtt_s": rtt, "token_s": found, "tokens_per_s": 1 / found, "predicted_token_s": predicted,
                "predicted/measured": predicted / found, "against_offload": seconds["offload"] / found,
                "rounds": rates[f"rtt {rtt}"],
            })  # fmt: skip
        plan = ["zero_inference:parameters=nvme,resident=8"]
        slow = foretold(path, len(prompt), 6, "local", plan)
        out["offload"] = {"predicted_token_s": slow, "predicted/measured": slow / seconds["offload"],
                          "token_s": seconds["offload"], "tokens_per_s": 1 / seconds["offload"],
                          "read_bytes_per_s": 16 * LAYER_BYTES / seconds["offload"],
                          "resident_layers": 8, "rounds": rates["offload"],
                          "same_tokens_as_plain": texts["offload"] == texts["plain"][:6]}  # fmt: skip
        out["plain"] = {"token_s": seconds["plain"], "rounds": rates["plain"]}
        out["bytes_per_token"] = {w: 6 * wire_bytes(1, SPEC.hidden_size, w) for w in ("blockwise8", "plain")}
        out["recovery"] = [recovery(path, prompt, at) for at in (16, 64)]
    out |= {
        "model": SPEC.model_dump(exclude_defaults=True),
        "commit": commit(),
        "environment": fingerprint(),
        "load_after": load_average(),
    }
    text = json.dumps(out, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
