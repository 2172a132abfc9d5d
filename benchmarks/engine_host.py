"""What the serving engine does beside the model: choosing tokens, and describing a step.

    python benchmarks/engine_host.py [--part NAME] [--before PATH] [--out benchmarks/results/engine_host.json]

``sampler``: milliseconds to choose the tokens of a batch, by vocabulary, rows, settings, and by how wide the logits
are: peaked as a language model's, normal with a deviation of 3 or nearly flat. ``penalty``: a repetition penalty of one
sequence. ``step``: to describe a decode step (slots, tables, lengths) by sequences and their length, with tables of
neighboring or scattered blocks. ``ranks``: from the beginning of telling another rank of a step until it has it, beside
pickling it over gloo in the same processes. ``messages``: what the engine's process spends to report a step of as many
sequences and to send it (``send``), and the server to read it (``read``), beside pickling the same. Medians and
extremes over rounds. ``--before`` runs the same on the source tree at PATH and puts its medians beside. ``--part``
measures one and keeps the others of ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "temperature": {}, "top_k": {"top_k": 40}, "top_p": {"top_p": 0.9},
    "top_p wide": {"top_p": 0.999}, "min_p": {"min_p": 0.05}, "all": {"top_k": 200, "top_p": 0.95, "min_p": 0.01},
}  # fmt: skip
SHAPES = [(32_000, 1), (32_000, 32), (128_256, 1), (128_256, 32), (128_256, 128)]
STEPS = [(16, 1024), (128, 1024), (128, 8192)]


def timed(run: Callable[[], Any], prepare: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Median, least and largest milliseconds of ``run`` on what ``prepare`` gives."""
    times = []
    for i in range(rounds + 2):
        given = prepare()
        start = time.perf_counter()
        run(given)  # type: ignore[call-arg]
        if i > 1:
            times.append(1e3 * (time.perf_counter() - start))
    return {"median": statistics.median(times), "low": min(times), "high": max(times)}


def sequences(count: int, settings: dict[str, Any], tokens: list[int] | None = None) -> list[Any]:
    from ridgeline.serve.request import EngineRequest, Sampling
    from ridgeline.serve.sequence import Sequence, SequenceGroup

    group = SequenceGroup(EngineRequest("r", [1], Sampling(**settings)), 0)
    return [Sequence(group, 0, list(tokens or [1]), rng=random.Random(i)) for i in range(count)]


def sampler(rounds: int) -> dict[str, Any]:
    from ridgeline.serve.sampler import Sampler

    found: dict[str, Any] = {}
    choose = Sampler(frozenset())
    for vocab, rows in SHAPES:
        noise = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
        rank = torch.randperm(vocab, generator=torch.Generator().manual_seed(1)) + 1.0
        peaked = noise - 2.0 * rank.log()  # a few tokens have nearly everything, as after most words of a text
        for kind, logits in (("peaked", peaked), ("broad", 3 * noise), ("flat", noise / 30)):
            for name, settings in SETTINGS.items():
                seqs = sequences(rows, settings)
                slow = kind != "peaked" and rows > 32
                taken = timed(lambda x, s=seqs: choose(x, s), logits.clone, 3 if slow else rounds)
                found[f"{vocab} x {rows}, {kind}, {name}"] = taken
    return found


def penalty(rounds: int) -> dict[str, Any]:
    from ridgeline.serve.sampler import Sampler

    tokens = [random.Random(0).randrange(128_256) for _ in range(16_384)]
    seqs = sequences(1, {"repetition_penalty": 1.1, "temperature": 0.0}, tokens)
    sample = Sampler(frozenset())
    logits = torch.randn(1, 128_256)
    return {"16384 tokens": timed(lambda x: sample.adjust(x, seqs), logits.clone, rounds)}


def step(rounds: int, size: int = 16) -> dict[str, Any]:
    from ridgeline import catalog
    from ridgeline.nn.model.init import build
    from ridgeline.serve.block_manager import Blocks
    from ridgeline.serve.runner import Runner

    found: dict[str, Any] = {}
    for count, length in STEPS:
        blocks = count * (length // size + 1)
        spec = catalog.model("llama-tiny").model_copy(update={"num_layers": 1, "max_positions": length + size})
        runner = Runner(build(spec), blocks * size, size, length + size)
        for kind in ("neighbors", "scattered"):
            table = Blocks(blocks, size, share=False)
            seqs = sequences(count, {}, [1] * length)
            for seq in seqs:
                assert table.grow(seq, length, length) is not None
                seq.n_computed = length - 1
            if kind == "scattered":
                order = list(range(blocks))
                random.Random(1).shuffle(order)
                for seq in seqs:
                    for i, b in enumerate(seq.blocks):
                        seq.blocks[i] = order[b]

            batch = [(s, 1) for s in seqs]
            found[f"{count} x {length}, {kind}"] = timed(partial(described, runner, size), lambda b=batch: b, rounds)
    return found


def ranks(rounds: int) -> dict[str, Any]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(told, (folder, 20 * rounds), 2, join=True, start_method="spawn")
        assert context is None
        return dict(json.loads(Path(folder, "found").read_text(encoding="utf-8")))


def told(rank: int, folder: str, rounds: int) -> None:
    """One of two ranks: the steps of :data:`STEPS` and one of a prompt, by either way in turns."""
    import torch.distributed as dist

    from ridgeline.nn.memory.kv_pool import Piece
    from ridgeline.serve.rank_channel import connect
    from ridgeline.serve.runner import PackedStep
    from ridgeline.serve.step_message import pack, unpack

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    channel, found = connect(), {}

    def gloo(step: PackedStep | None) -> None:
        dist.broadcast_object_list([step])

    def ring(step: PackedStep | None) -> None:
        if step is not None:
            channel.send(pack(step))
        else:
            unpack(channel.receive())

    for count, length in [*STEPS, (1, 0)]:
        numbers = list(range(count if length else 2048))
        blocks = array("i", range(length // 16 + 1))
        pieces = [Piece(i, i + 1, [], False, length, blocks) for i in range(count)]
        if not length:
            pieces = [Piece(0, 2048, [(0, 2048)], True, 2048, array("i", range(128)))]
        step = PackedStep([], numbers, numbers, numbers, pieces)
        times: dict[Any, list[float]] = {gloo: [], ring: []}
        for i in range(rounds):
            for way, taken in times.items():
                dist.barrier()
                time.sleep(0.002)  # the other rank waits for it, as for the next step
                at = time.perf_counter()
                way(step if rank == 0 else None)
                ends: list[float] = [0.0, 0.0]
                dist.all_gather_object(ends, at if rank == 0 else time.perf_counter())
                if i > 1:
                    taken.append(1e3 * (ends[1] - ends[0]))
        row = {"median": statistics.median(times[ring]), "low": min(times[ring]), "high": max(times[ring])}
        name = f"{count} x {length}" if length else "a prompt of 2048"
        found[name] = {**row, "gloo": statistics.median(times[gloo])}
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
    channel.close()
    dist.destroy_process_group()


def described(runner: Any, size: int, batch: Any) -> None:
    """What a step needs besides the model: numbers, tensors, and the tables where a kernel reads them."""
    from ridgeline.nn.memory.kv_pool import singles

    made, layout = runner.describe(batch, []), runner.layout
    layout.slots = torch.tensor(made.slots)
    torch.tensor([made.ids, made.at])
    if layout.kernel is not None:
        layout.singles = singles(made.pieces, size, runner.device)


def messages(rounds: int) -> dict[str, Any]:
    from ridgeline.serve.engine_messages import Frames, Kind, framed
    from ridgeline.serve.request import OutputEvent, Stats, TokenLogprob
    from ridgeline.serve.step_report import StepReport, pack, unpack

    ours, theirs = socket.socketpair()
    frames, found = Frames(), {}

    def send(write: Callable[[Any], bytes], report: StepReport) -> None:
        theirs.sendall(framed(Kind.REPORT, write(report)))

    def read(parse: Callable[[bytes], Any], _: Any) -> None:
        left = True
        while left:
            for _, contents in frames.feed(ours.recv(1 << 20)):
                parse(contents)
                left = False

    for count, most in ((16, None), (128, None), (128, 5)):
        events = []
        for i in range(count):
            top = tuple((1000 + i + k, -i - 0.5 * k) for k in range(most or 0))
            entries = None if most is None else [TokenLogprob(1000 + i, -i - 0.5, top)]
            events.append(OutputEvent(f"cmpl-{uuid.uuid4().hex}-0", 0, [1000 + i], entries))
        report = StepReport(events, Stats(*range(15)), 1.0, 0.01, [])
        name = f"{count} sequences" + (f", {most} log-probabilities" if most else "")
        times: dict[str, list[float]] = {side: [] for side in ("send", "read", "send pickle", "read pickle")}
        for _ in range(20 * rounds):
            for end, write, parse in (("", pack, unpack), (" pickle", pickle.dumps, pickle.loads)):
                for side, run in (("send", partial(send, write)), ("read", partial(read, parse))):
                    start = time.perf_counter()
                    run(report)
                    times[side + end].append(1e3 * (time.perf_counter() - start))
        for side in ("send", "read"):
            own = times[side]
            found[f"{name}, {side}"] = {"median": statistics.median(own), "low": min(own), "high": max(own),
                                        "pickle": statistics.median(times[f"{side} pickle"])}  # fmt: skip
    return found


PARTS = {part.__name__: part for part in (sampler, penalty, step, ranks, messages)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine_host.json"))
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for name in [args.part] if args.part else PARTS:
            if not (args.plain and name in ("ranks", "messages")):  # which have their own comparison
                found[name] = PARTS[name](args.rounds)
    if args.plain:
        print(json.dumps(found))
        return
    from ridgeline.measure.environment import fingerprint

    if args.before:
        again = [sys.executable, __file__, "--plain", "--rounds", str(args.rounds)]
        again += ["--part", args.part] if args.part else []
        env = {**os.environ, "PYTHONPATH": str(args.before / "src")}
        old = json.loads(subprocess.run(again, env=env, check=True, capture_output=True, text=True).stdout)
        for part, rows in old.items():
            for name, row in rows.items():
                found[part][name]["before"] = row["median"]
    environment = {**fingerprint(), "threads": torch.get_num_threads()}
    if args.part:
        kept = json.loads(args.out.read_text(encoding="utf-8"))
        result = {**kept, args.part: found[args.part], f"{args.part} environment": environment}
    else:
        result = {"environment": environment, "unit": "milliseconds", **found}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for part, rows in found.items():
        for name, row in rows.items():
            beside = "".join(f"  {k} {row[k]:9.3f}" for k in ("before", "gloo", "pickle") if k in row)
            print(f"{part:8} {name:36} {row['median']:9.3f} ms [{row['low']:.3f}, {row['high']:.3f}]{beside}")


if __name__ == "__main__":
    main()
