"""Training over peers: throughput against the ideal of the living, with peers killed and added; a slow network.

    python benchmarks/swarm.py --json benchmarks/results/swarm.json

Peers are objects of one process over real sockets; each pass takes a given time (a sleep), so that machines that differ
are imitated and the measurement hardly depends on cores. The ideal is the rate of the slowest stage: its peers' rates
summed. A network of 200 Mbit/s and 100 ms is injected into the transport; the bytes of a step are put beside what the
wire's format says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.data.batches import Batch
from ridgeline.measure.environment import fingerprint, load_average
from ridgeline.serve.transfer.connection import LoopThread
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.wire import Wire, wire_bytes
from ridgeline.spec.workload import Pretrain
from ridgeline.swarm.link import Shape
from ridgeline.swarm.stage_peer import StagePeer
from ridgeline.swarm.trainer import SwarmTrainer

SPEC = ModelSpec(family="llama", vocab_size=256, hidden_size=256, num_layers=3, num_heads=4, num_kv_heads=2,
                 head_dim=64, intermediate_size=512, max_positions=256)  # fmt: skip
SECRET = b"the secret of this benchmark"
STAGES, MICROS, LENGTH = 3, 24, 64
SLOW = (0.2, 0.2, 0.4, 0.2, 0.4, 0.2, 0.2)
"""Seconds that each peer's passes take; the stages take turns."""


def experiment() -> Experiment:
    device = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
    w = Pretrain(
        seq_len=LENGTH, batch_size=MICROS, micro_batch_size=1, steps=100, optimizer="sgd", lr=0.1, warmup_steps=0
    )
    return Experiment(model=SPEC, cluster=Cluster(device=device), workload=w)


class Field:
    def __init__(self, wire: Wire, shape: Shape | None = None) -> None:
        self.e, self.wire, self.shape = experiment(), wire, shape
        self.peers: list[StagePeer] = []
        self.lines: list[str] = []
        self.thread = LoopThread("bench")
        self.thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.thread.loop).result(600)

    def add(self, stage: int, slow: float) -> StagePeer:
        join = tuple(p.address for p in self.peers[:1])

        async def start() -> StagePeer:
            peer = StagePeer(self.e, STAGES, SECRET, self.lines.append, stage, join, self.shape, 0.5, slow)
            await peer.start("127.0.0.1", 0)
            return peer

        self.peers.append(self.run(start()))
        return self.peers[-1]

    def trainer(self) -> SwarmTrainer:
        async def opened() -> SwarmTrainer:
            join = tuple(p.address for p in self.peers)
            found = SwarmTrainer(self.e, STAGES, self.wire, SECRET, join, self.lines.append, self.shape, 60.0, 0)
            await found.open()
            return found

        return self.run(opened())

    def kill(self, peer: StagePeer) -> None:
        self.peers.remove(peer)

        async def cut() -> None:
            peer.stopped = True
            for task in peer.tasks:
                task.cancel()
            await peer.links.close()
            await peer.listener.close()

        self.run(cut())

    def ideal(self) -> float:
        """Micro-batches/s of the slowest stage: each takes a forward and a backward pass, at the last stage one."""
        rates = [sum(1 / p.slow for p in self.peers if p.stage.index == s) / (1 if s == STAGES - 1 else 2)
                 for s in range(STAGES)]  # fmt: skip
        return min(rates)

    def step(self, trainer: SwarmTrainer) -> dict[str, Any]:
        ids = torch.randint(SPEC.vocab_size, (MICROS, LENGTH), generator=torch.Generator().manual_seed(trainer.step))
        sent, ideal = trainer.links.sent, self.ideal()
        done = self.run(trainer.train(Batch(ids, ids.roll(-1, 1))))
        rate = MICROS / done.seconds
        return {"seconds": done.seconds, "micro_batches_per_s": rate, "ideal_of_the_living": ideal,
                "share": rate / ideal, "peers": done.peers, "recomputed": done.recomputed,
                "bytes": trainer.links.sent - sent, "loss": done.loss}  # fmt: skip


def run(wire: Wire, shape: Shape | None, churn: bool, steps: int) -> list[dict[str, Any]]:
    field = Field(wire, shape)
    for i, slow in enumerate(SLOW):
        field.add(i % STAGES, slow)
    trainer = field.trainer()
    out = []
    for step in range(steps):
        if churn and step == 2:
            field.kill(field.peers[3])
        if churn and step == 4:
            field.add(0, 0.2)
            time.sleep(1.5)
        out.append(field.step(trainer))
    field.run(trainer.close())
    field.thread.stop()
    return out


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(1)
    slow = Shape(0.1, 25e6)
    found: dict[str, Any] = {"load_before": load_average(), "churn": run("plain", None, True, args.steps)}
    for wire in ("plain", "blockwise8"):
        found[f"200 Mbit/s, 100 ms, {wire}"] = run(wire, slow, False, 3)
    rows = MICROS * LENGTH
    # Between stages: activations there and back to the trainer, again for the backward pass, gradients both ways.
    found["bytes_expected"] = {
        w: (STAGES - 1) * 5 * wire_bytes(rows, SPEC.hidden_size, w) + 3 * rows * 8
        - wire_bytes(rows, SPEC.hidden_size, w) for w in ("plain", "blockwise8")
    }  # fmt: skip
    found |= {"environment": fingerprint(), "load_after": load_average()}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
