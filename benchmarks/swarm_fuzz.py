"""Peers killed, added, slowed and corrupted at random; invariants checked all the time.

    python benchmarks/swarm_fuzz.py --minutes 2 --json benchmarks/results/swarm_fuzz.json

Generation: clients ask for random prompts while servers come and go. Every sequence must be the one that the whole
model gives alone; no server that stays may leak a block of its cache. Training: steps go on while peers come and go;
every loss must be that of plain PyTorch on one machine. Peers are objects of this process that are cut off without a
word, over real sockets; activations are sent plain, so that results are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.data.batches import Batch
from ridgeline.measure.environment import commit, fingerprint, load_average
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model.generate import generate as generate_alone
from ridgeline.nn.model.init import build
from ridgeline.nn.model.loss import token_loss
from ridgeline.runtime.optimizer import learning_rate, make_optimizer, parameter_groups
from ridgeline.serve.transfer.connection import LoopThread
from ridgeline.spec.device import Cluster, Device
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Pretrain
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.peer import Peer
from ridgeline.swarm.server import Options, Server
from ridgeline.swarm.session import generate, load_ends
from ridgeline.swarm.stage_peer import StagePeer
from ridgeline.swarm.trainer import SwarmTrainer

SPEC = ModelSpec(family="llama", vocab_size=256, hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16,
                 intermediate_size=128, max_positions=256)  # fmt: skip
SECRET = b"the secret of this fuzzing"
STAGES = 3


SPOILED = ("not finite", "shape", "too much", "nothing", "late")


async def spoiled(answer: Any, kind: str) -> Any:
    """An answer whose first tensor of numbers is wrong in one way, or that comes late."""
    if kind == "late":
        await asyncio.sleep(12.0)
    for name, t in answer.tensors.items():
        if not t.is_floating_point():
            continue
        if kind == "not finite":
            answer.tensors[name] = wrong = t.clone()
            wrong.view(-1)[0] = float("nan")
        elif kind == "shape":
            answer.tensors[name] = t.flatten()[:-1].clone()
        elif kind == "too much":
            answer.tensors[name] = torch.zeros(1 << 20)
        elif kind == "nothing":
            del answer.tensors[name]
        break
    return answer


class BadServer(Server):
    spoil = 0.0
    kind = ""

    async def _step(self, owner: str, m: dict[str, Any], tensors: dict[str, Any]) -> Any:
        answer = await super()._step(owner, m, tensors)
        return await spoiled(answer, self.kind) if self.rng.random() < self.spoil else answer


class BadPeer(StagePeer):
    spoil = 0.0
    kind = ""

    async def _pass(self, op: str, m: dict[str, Any], tensors: dict[str, Any]) -> Any:
        answer = await super()._pass(op, m, tensors)
        return await spoiled(answer, self.kind) if self.rng.random() < self.spoil else answer


class Field:
    """Peers on an event loop, and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.peers: list[Peer] = []
        self.events = {"killed": 0, "added": 0, "slowed": 0, "corrupted": 0}
        self.kinds = dict.fromkeys(SPOILED, 0)
        self.thread = LoopThread("fuzz")
        self.thread.start()

    def run(self, work: Any, patience: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.thread.loop).result(patience)

    def add(self, make: Any) -> Peer:
        """Start ``make(join)``."""
        joined = tuple(p.address for p in self.peers[:3])

        async def start() -> Peer:
            peer = make(joined)
            await peer.start("127.0.0.1", 0)
            return peer

        peer = self.run(start())
        self.peers.append(peer)
        return peer

    def kill(self, peer: Peer) -> None:
        """Cut a peer off."""
        self.peers.remove(peer)
        self.events["killed"] += 1

        async def cut() -> None:
            peer.stopped = True
            for task in peer.tasks:
                task.cancel()
            await peer.links.close()
            await peer.listener.close()

        self.run(cut())

    def spare(self, covers: Any) -> list[Peer]:
        """Peers without whom everything is still covered by sound ones."""
        return [p for p in self.peers if all(
            any(q is not p and not getattr(q, "spoil", 0) and covers(q, b) for q in self.peers) for b in range(6)
        )]  # fmt: skip

    def disturb(self, make: Any, covers: Any, least: int) -> None:
        """One thing happens."""
        kind = self.rng.choice(["kill", "add", "slow", "corrupt"])
        spare = self.spare(covers)
        if kind == "add" and len(self.peers) < 10:
            self.add(make)
            self.events["added"] += 1
        elif kind == "kill" and len(self.peers) > least and spare:
            self.kill(self.rng.choice(spare))
        elif kind == "slow":
            peer = self.rng.choice(self.peers)
            self.events["slowed"] += 1
            peer.worker.call(lambda: time.sleep(self.rng.uniform(0.05, 0.5)))
        elif kind == "corrupt" and spare:
            peer = self.rng.choice(spare)
            peer.spoil, peer.kind = 0.2, self.rng.choice(SPOILED)
            self.events["corrupted"] += 1
            self.kinds[peer.kind] += 1


def generation(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Sequences of random prompts while servers come and go."""
    model = build(SPEC, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    save_checkpoint(model, folder)
    field = Field(seed)

    def make(blocks: range | int) -> Any:
        options = Options(cache_tokens=4096, throughput=100.0, announce_every=0.3, balance_every=1.0)
        return lambda join: BadServer(folder, SECRET, options, field.lines.append, blocks, join)

    for blocks in (range(0, 3), range(3, 6), range(0, 6)):
        field.add(make(blocks))
    ends = load_ends(folder)
    stop, wrong, done, failed = time.monotonic() + seconds, [], [], []

    def client(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        while time.monotonic() < stop:
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
            count = rng.randint(1, 40)
            swarm = None
            try:
                join = tuple(p.address for p in field.peers[:3])
                swarm = Swarm(folder, join, SECRET, field.lines.append, "plain", patience=10.0)
                got = list(generate(ends, swarm, prompt, count))
                expected = generate_alone(model, torch.tensor([prompt]), count)[0, len(prompt) :].tolist()
                (done if got == expected else wrong).append((prompt, got, expected))
            except UserError as e:
                failed.append(e.what)
            finally:
                if swarm is not None:
                    swarm.close()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    while time.monotonic() < stop:
        time.sleep(field.rng.uniform(0.1, 1.0))
        field.disturb(make(field.rng.randint(2, 4)), lambda p, b: p.engine.start <= b < p.engine.stop, 3)
    for t in threads:
        t.join()
    time.sleep(1.0)
    leaks = 0
    for p in field.peers:
        p.worker.call(lambda: None).result(10)
        leaks += p.engine.blocks.used + p.engine.reserved + len(p._held)
    field.thread.stop()
    return {"sequences": len(done), "wrong": len(wrong), "without_servers": failed, "leaked_blocks": leaks,
            "events": field.events, "corrupted": field.kinds,
            "bans": sum("banned" in x for x in field.lines)}  # fmt: skip


def training(seconds: float, seed: int) -> dict[str, Any]:
    """Steps while peers come and go, beside plain PyTorch."""
    device = Device(name="local", kind="cpu", peak_flops={"fp32": 1e11}, memory_bytes=8e9, memory_bandwidth=1e10)
    w = Pretrain(seq_len=16, batch_size=8, micro_batch_size=1, steps=10_000, optimizer="sgd", lr=0.02, warmup_steps=0,
                 grad_clip=1.0)  # fmt: skip
    e = Experiment(model=SPEC, cluster=Cluster(device=device), workload=w)
    field = Field(seed)

    def make(stage: int | None) -> Any:
        return lambda join: BadPeer(e, STAGES, SECRET, field.lines.append, stage, join, announce_every=0.3)

    for stage in (0, 1, 2, 0, 1, 2):
        field.add(make(stage))

    async def opened() -> SwarmTrainer:
        join = tuple(p.address for p in field.peers)
        found = SwarmTrainer(e, STAGES, "plain", SECRET, join, field.lines.append, patience=20.0, migrate_every=0)
        await found.open()
        return found

    trainer = field.run(opened())
    model = build(SPEC, seed=w.seed)
    model.set_attention("naive")
    optimizer = make_optimizer(parameter_groups(list(model.parameters()), w), w)
    rng = torch.Generator().manual_seed(seed)

    def covers(p: StagePeer, block: int) -> bool:
        """Whether a peer trains a block; not before the trainer has taken it in, when its weights may be older."""
        inside = {name for m in trainer._members for name in m}
        return p.stage.layers.start <= block < p.stage.layers.stop and p.peer in inside

    worst, norms, recomputed, stop = 0.0, 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < stop:
        ids = torch.randint(SPEC.vocab_size, (8, 16), generator=rng)
        batch = Batch(ids, ids.roll(-1, 1))
        work = asyncio.run_coroutine_threadsafe(trainer.train(batch), field.thread.loop)
        time.sleep(field.rng.uniform(0, 0.2))
        field.disturb(make(None), covers, 6)
        done = work.result(300)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(w, done.step)
        optimizer.zero_grad()
        total, count = token_loss(model(batch.ids, return_hidden=True), model.head, batch.labels)
        (total / count).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), w.grad_clip))
        optimizer.step()
        worst = max(worst, abs(done.loss - (total / count).item()))
        norms = max(norms, abs(done.grad_norm / norm - 1))
        recomputed += done.recomputed
    field.run(trainer.close())
    field.thread.stop()
    return {"steps": trainer.step, "worst_loss_difference": worst, "worst_norm_difference": norms,
            "gradients_recomputed": recomputed,
            "events": field.events, "corrupted": field.kinds,
            "bans": sum("banned" in x for x in field.lines)}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=2.0, help="for each of generation and training")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "seed": args.seed, "minutes": args.minutes,
            "generation": generation(Path(folder) / "model", 60 * args.minutes, args.seed),
            "training": training(60 * args.minutes, args.seed),
            "commit": commit(), "environment": fingerprint(), "load_after": load_average(),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    g, t = found["generation"], found["training"]
    if (
        g["wrong"]
        or g["leaked_blocks"]
        or not g["sequences"]
        or max(t["worst_loss_difference"], t["worst_norm_difference"]) > 1e-3
        or not t["steps"]
    ):
        raise SystemExit("an invariant does not hold")


if __name__ == "__main__":
    main()
