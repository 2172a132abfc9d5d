"""The trainer of a swarm: sends micro-batches through whatever peers there are, and takes a step when it is whole.

The ledger says which peer holds the gradients of which (stage, micro-batch). What a lost peer held is computed again,
and nothing else; so a step's gradient is that of a run without faults, up to the order of its additions.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.data.batches import IGNORE, Batch
from ridgeline.nn.model.init import DTYPES, build
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.gradients import clip_factor
from ridgeline.runtime.optimizer import learning_rate
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.wire import Wire
from ridgeline.swarm.announcements import Announcement, Table
from ridgeline.swarm.link import BAN, TROUBLE, Answer, Links, Refused, Shape
from ridgeline.swarm.policies import Router, choose_migration
from ridgeline.swarm.stage import Stage, cuts, training_identity
from ridgeline.swarm.stage_peer import fetched
from ridgeline.swarm.wire import decode_rows, encode_rows

AVOID = 3.0
"""Seconds that a peer is left alone that was lost or said no."""
ROUNDS = 3
"""Sums that may fail without a peer being lost, before one is left out."""


@dataclass(frozen=True)
class SwarmStep:
    """One optimizer step: mean loss over the batch's labeled tokens, gradient norm, seconds, and what went wrong."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    tokens: int
    peers: list[int]
    """Peers of each stage."""
    recomputed: int
    """Gradients of a stage and micro-batch that were lost and computed again."""


@dataclass
class _Micro:
    """One micro-batch [B, S]."""

    ids: Tensor
    labels: Tensor
    loss: float = math.nan


@dataclass
class _Ledger:
    """Who holds the gradients of which (stage, micro-batch), and which attempt they are of."""

    held: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    lost: int = 0

    def lose(self, peer: str) -> None:
        """What a peer held is gone."""
        gone = [key for key, (who, _) in self.held.items() if who == peer]
        self.lost += len(gone)
        for key in gone:
            del self.held[key]

    def missing(self, stages: int, micros: int) -> dict[int, set[int]]:
        """Stages that lack gradients, by micro-batch."""
        wanted = {k: {s for s in range(stages) if (s, k) not in self.held} for k in range(micros)}
        return {k: need for k, need in wanted.items() if need}

    def of(self, stage: int, peer: str) -> list[list[Any]]:
        """[micro-batch, attempt] that a peer should hold."""
        return [[k, attempt] for (s, k), (who, attempt) in sorted(self.held.items()) if s == stage and who == peer]


class SwarmTrainer:
    """Trains ``e`` over the peers of a swarm. Methods are for the event loop's thread."""

    def __init__(
        self, e: Experiment, stages: int, wire: Wire, secret: bytes, join: tuple[str, ...], say: Callable[[str], None],
        shape: Shape | None = None, patience: float = 60.0, migrate_every: int = 20,
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``patience``: seconds for an answer, and for peers of a stage without any. ``migrate_every``: steps between
        looks at whether a peer should move to the slowest stage; 0: never."""
        self.e, self.stages, self.wire, self.join, self.say = e, stages, wire, join, say
        self.patience, self.migrate_every = patience, migrate_every
        self.links = Links(secrets.token_hex(8), secret, training_identity(e, stages), shape, tls)
        self.table = Table(e.model.num_layers, 3600.0)
        self.step = 0
        self.migrations = 0
        self.routers = [Router() for _ in range(stages)]
        self._starts = [layers.start for layers in cuts(e, stages)]
        self._members: list[dict[str, Announcement]] = [{} for _ in range(stages)]
        self._out: dict[str, float] = {}
        self._ledger = _Ledger()
        self._why = ""

    async def open(self) -> None:
        """Find the peers. Raises :class:`UserError` when there are none, or when they disagree about the step."""
        deadline = time.monotonic() + self.patience
        while True:
            await self._refresh()
            live = self.table.live()
            if {a.start for a in live} >= set(self._starts):
                break
            if time.monotonic() > deadline:
                missing = [i for i, start in enumerate(self._starts) if start not in {a.start for a in live}]
                raise UserError(f"no peers for stages {missing}" + (f": {self._why}" if not live else ""),
                                "start some with `ridgeline swarm peer`; give an address and the secret")  # fmt: skip
            await asyncio.sleep(0.2)
        steps = {max(a.step for a in live if a.start == start) for start in self._starts}
        if len(steps) > 1:
            raise UserError(f"the stages are at different steps, {sorted(steps)}: a trainer ended between them",
                            "start the peers again, from a checkpoint")  # fmt: skip
        (self.step,) = steps
        await self._admit()

    async def close(self) -> None:
        """Close all connections."""
        await self.links.close()

    # ---- one step ----------------------------------------------------------------------------------------------------

    async def train(self, batch: Batch) -> SwarmStep:
        """One optimizer step on a global batch. Raises :class:`UserError` when a stage has no peers left."""
        start = time.monotonic()
        if batch.documents is not None or batch.positions is not None:
            raise UserError("a swarm trains on rows that are one document each", "set document_mask = false")
        size = self.e.training.micro_batch_size or 1
        micros = [_Micro(i, t) for i, t in zip(batch.ids.split(size), batch.labels.split(size), strict=True)]
        count = int((batch.labels != IGNORE).sum())
        self._ledger = _Ledger()
        failures = 0
        while True:
            await self._refresh()
            await self._admit()
            while missing := self._ledger.missing(self.stages, len(micros)):
                await self._pass_all(micros, missing, 1.0 / count)
            turn = secrets.token_hex(8)
            norms = await asyncio.gather(*(self._reduce(s, turn, failures >= ROUNDS) for s in range(self.stages)))
            if all(n is not None for n in norms) and not self._ledger.missing(self.stages, len(micros)):
                break
            failures += 1
        norm = math.sqrt(sum(n for n in norms if n is not None))
        peers, recomputed = [len(m) for m in self._members], self._ledger.lost
        self._ledger = _Ledger()  # nothing is lost with a peer any more
        await self._commit(turn, norm)
        loss = sum(m.loss for m in micros) / count
        done = SwarmStep(self.step, loss, norm, time.monotonic() - start, count, peers, recomputed)
        self.step += 1
        if self.migrate_every and self.step % self.migrate_every == 0:
            await self.migrate()
        return done

    async def _pass_all(self, micros: list[_Micro], missing: dict[int, set[int]], factor: float) -> None:
        """Compute what is missing, two micro-batches for each peer at the same time."""
        gate = asyncio.Semaphore(max(1, 2 * sum(len(m) for m in self._members)))

        async def one(k: int, need: set[int]) -> None:
            async with gate:
                await self._pass(k, micros[k], need, factor)

        tasks = [asyncio.create_task(one(k, need)) for k, need in missing.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass(self, k: int, micro: _Micro, need: set[int], factor: float) -> None:
        """A micro-batch forward through all stages, and back to the first that ``need``s its gradients. Stages that
        have them only pass them on."""
        batch, length = micro.ids.shape
        sizes = {"batch": batch, "length": length, "micro": k, "step": self.step, "wire": self.wire}
        shape = (batch, length, self.e.model.hidden_size)
        dtype = DTYPES[self.e.dtype]
        inputs: list[dict[str, Tensor]] = [{"ids": micro.ids.long().contiguous()}]
        for s in range(self.stages - 1):
            y = await self._ask(s, "forward", sizes, inputs[s], lambda a: decode_rows("y", a.tensors, shape, dtype))
            inputs.append(encode_rows("x", y, self.wire))
        last = self.stages - 1

        def found(a: Answer) -> tuple[float, Tensor | None]:
            loss = a.message.get("loss")
            if not isinstance(loss, float) or not math.isfinite(loss):
                raise BadPeer("it sent no loss")
            return loss, decode_rows("grad", a.tensors, shape, dtype) if last else None

        given = {**inputs[last], "labels": micro.labels.long().contiguous()}
        kept = k if last in need else None
        micro.loss, grad = await self._ask(last, "loss", {**sizes, "factor": factor}, given, found, kept)
        for s in range(last - 1, min(need) - 1, -1):
            assert grad is not None
            given = {**inputs[s], **encode_rows("grad", grad, self.wire)}

            def back(a: Answer, first: bool = s == 0) -> Tensor | None:
                return None if first else decode_rows("grad", a.tensors, shape, dtype)

            grad = await self._ask(s, "backward", sizes, given, back, k if s in need else None)

    async def _ask(
        self, s: int, op: str, message: dict[str, Any], tensors: dict[str, Tensor], read: Callable[[Answer], Any],
        keep: int | None = None,
    ) -> Any:  # fmt: skip
        """Have some peer of a stage compute, another one if it fails. ``keep``: the micro-batch whose gradients it
        keeps, which the ledger notes."""
        while True:
            peer = self.routers[s].pick()
            if peer is None:
                await self._wait_for(s)
                continue
            a = self._members[s][peer]
            own = {} if keep is None else {"attempt": secrets.token_hex(8)}
            start = time.monotonic()
            try:
                answer = await self.links.ask(a.address, op, {**message, **own, "stage": s}, tensors, self.patience)
                found = read(answer)
            except TROUBLE as e:
                self._lose(a, e)
                continue
            if peer not in self._members[s]:
                continue  # lost meanwhile: what it keeps is lost, too
            self.routers[s].done(peer, time.monotonic() - start)
            if keep is not None:
                self._ledger.held[s, keep] = peer, own["attempt"]
            return found

    # ---- sum and update ----------------------------------------------------------------------------------------------

    async def _reduce(self, s: int, turn: str, blame: bool) -> float | None:
        """Let the peers of a stage sum their gradients → the sum's squared norm; None: it failed, or some peer had
        other gradients than the ledger says. ``blame``: leave one out if nobody else is to blame."""
        members = sorted(self._members[s].items())
        peers = [[name, a.address] for name, a in members]

        async def one(name: str, a: Announcement) -> float | None:
            message = {"step": self.step, "round": turn, "peers": peers, "micros": self._ledger.of(s, name)}
            try:
                answer = await self.links.ask(a.address, "reduce", message, patience=self.patience)
                if answer.message.get("dropped"):
                    self._ledger.lose(name)
                    return None
                norm = answer.message.get("squared_norm")
                if not isinstance(norm, float) or not norm >= 0:
                    raise BadPeer("it sent no norm")
                return norm
            except Refused as e:
                self._why = str(e)
                return None
            except TROUBLE as e:
                self._lose(a, e)
                return None

        found = await asyncio.gather(*(one(name, a) for name, a in members))
        if found and all(n is not None and n == found[0] for n in found):
            return found[0]
        if blame and len(members) > 1 and all(name in self._members[s] for name, _ in members):
            self._lose(members[-1][1], Refused(f"sums of stage {s} keep failing: {self._why}"))
        return None

    async def _commit(self, turn: str, norm: float) -> None:
        """The optimizer's step at every peer. A peer that does not answer falls behind, and fetches the state later."""
        w = self.e.training
        factor = clip_factor(torch.tensor(norm), w.grad_clip) if w.grad_clip else None
        message = {"step": self.step, "round": turn, "factor": 1.0 if factor is None else float(factor),
                   "lr": learning_rate(w, self.step)}  # fmt: skip

        async def one(a: Announcement) -> bool:
            try:
                await self.links.ask(a.address, "commit", message, patience=self.patience)
                return True
            except TROUBLE as e:
                self._lose(a, e)
                return False

        for s, members in enumerate(list(map(dict, self._members))):
            if not any(await asyncio.gather(*(one(a) for a in members.values()))):
                raise self._gone(s)

    # ---- who is there ------------------------------------------------------------------------------------------------

    def _lose(self, a: Announcement, e: Exception) -> None:
        """Leave a peer out, and mark what it held as lost."""
        s = self._starts.index(a.start)
        if self._members[s].pop(a.peer, None) is None:
            return
        seconds = BAN if isinstance(e, BadPeer) else AVOID
        self._out[a.peer] = time.monotonic() + seconds
        self.routers[s].ban(a.peer)
        before = self._ledger.lost
        self._ledger.lose(a.peer)
        word = "banned" if isinstance(e, BadPeer) else "left out"
        self.say(f"peer {a.address} of stage {s} {word} for {seconds:g} s: {e}; {self._ledger.lost - before} "
                 "gradients to compute again")  # fmt: skip

    def _gone(self, s: int) -> UserError:
        return UserError(f"stage {s} has no peers left at step {self.step}, and its weights went with them",
                         "keep two peers or more for each stage")  # fmt: skip

    async def _wait_for(self, s: int) -> None:
        """Wait for a peer of a stage. Raises :class:`UserError` when none comes: there may be one that is only slow."""
        deadline = time.monotonic() + self.patience
        while not self._members[s]:
            if time.monotonic() > deadline:
                raise self._gone(s)
            await asyncio.sleep(0.1)
            await self._refresh()
            await self._admit()

    async def _refresh(self) -> None:
        """Ask some known peers, or those that were given, for announcements."""
        known = [a.address for m in self._members for a in m.values()][:3]
        await asyncio.gather(*(self._fetch_table(address) for address in dict.fromkeys([*known, *self.join])))

    async def _fetch_table(self, address: str) -> None:
        try:
            answer = await self.links.ask(address, "table", patience=5.0)
            self.table.merge(answer.message.get("table"))
        except TROUBLE as e:
            self._why = str(e)

    async def _admit(self) -> None:
        """Take peers in that are at this step; have those fetch the state that are behind."""
        now = time.monotonic()
        for a in self.table.live():
            known = any(a.peer in m for m in self._members)  # if it moved, its announcement may not say so yet
            if a.start not in self._starts or known or now < self._out.get(a.peer, 0.0):
                continue
            s = self._starts.index(a.start)
            if a.step == self.step:
                ready = a.peer not in self._out or await self._order(a, "drop", {})
            else:
                mates = list(self._members[s].values())
                ready = bool(mates) and await self._order(a, "sync", {"address": mates[0].address})
            if not ready:
                continue
            self._members[s][a.peer] = a
            self.routers[s].add(a.peer)
            if self.step:
                self.say(f"peer {a.address} joins stage {s} at step {self.step}")

    async def _order(self, a: Announcement, op: str, message: dict[str, Any]) -> bool:
        """Have a peer drop what it holds, or fetch the state of another → whether it is at this step then."""
        try:
            answer = await self.links.ask(a.address, op, message, patience=10 * self.patience)
            return answer.message.get("step") == self.step
        except TROUBLE as e:
            self._out[a.peer] = time.monotonic() + AVOID
            self.say(f"peer {a.address} could not join: {e}")
            return False

    async def migrate(self) -> None:
        """Move a peer to the slowest stage if that makes the pipeline faster."""
        rates = [{p: 1 / self.routers[s].seconds[p] for p in m} for s, m in enumerate(self._members)]
        found = choose_migration(rates)
        if found is None:
            return
        peer, target = found
        source = next(s for s, m in enumerate(self._members) if peer in m)
        a = self._members[source].pop(peer)
        self.routers[source].ban(peer)
        mate = next(iter(self._members[target].values()))
        try:
            message = {"stage": target, "address": mate.address}
            answer = await self.links.ask(a.address, "migrate", message, patience=10 * self.patience)
        except TROUBLE as e:
            self._out[peer] = time.monotonic() + AVOID
            self.say(f"peer {a.address} did not move: {e}")
            return
        if answer.message.get("step") == self.step:
            layers = cuts(self.e, self.stages)[target]
            moved = a.model_copy(update={"start": layers.start, "stop": layers.stop, "number": a.number + 1})
            self._members[target][peer] = moved
            self.routers[target].add(peer)
            self.migrations += 1
            self.say(f"peer {a.address} moved from stage {source} to the slowest, {target}")

    # ---- the result --------------------------------------------------------------------------------------------------

    async def model(self) -> Transformer:
        """The whole model as it was trained."""
        # Beside the event loop, which must not fall silent.
        whole = await asyncio.to_thread(build, self.e.model, dtype=DTYPES[self.e.dtype])
        parameters = dict(whole.named_parameters())
        for s in range(self.stages):
            stage = await asyncio.to_thread(Stage, self.e, self.stages, s)
            for a in 2 * list(self._members[s].values()):
                try:
                    stage.load(*await fetched(self.links, a.address, s))
                    break
                except TROUBLE as e:
                    self._why = str(e)
            else:
                raise UserError(f"no peer of stage {s} gives its weights: {self._why}", "run the same command again")
            with torch.no_grad():
                for name, p in stage.model.named_parameters(remove_duplicate=False):
                    parameters[name].copy_(p)
        return whole
