"""A peer that trains a stage: answers a trainer's micro-batches, sums gradients with its stage's other peers, and
fetches their state when it joins, moves or has missed a step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.serve.transfer.frames import LARGEST, BadPeer
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.experiment import Experiment
from ridgeline.swarm.link import TROUBLE, Answer, Links, Refused, Shape
from ridgeline.swarm.peer import Peer, number, text, wire_of
from ridgeline.swarm.policies import choose_stage
from ridgeline.swarm.stage import Stage, cuts, training_identity
from ridgeline.swarm.wire import decode_rows, encode_rows
from ridgeline.swarm.worker import MOST_ROWS, Worker

PIECE = LARGEST // 2
"""Bytes of a state that are sent at once."""
DROPPED = "it had other gradients, and dropped them"
STATE = 120.0
"""Seconds that a piece of it may take."""


class StagePeer(Peer):
    """One peer. Methods are for the event loop's thread; computing happens on the worker's."""

    def __init__(
        self, e: Experiment, stages: int, secret: bytes, say: Callable[[str], None], stage: int | None = None,
        join: tuple[str, ...] = (), shape: Shape | None = None, announce_every: float = 5.0, slow: float = 0.0,
        tls: Tls | None = None,
    ) -> None:  # fmt: skip
        """``stage``: None: where there is the least throughput. ``slow``: seconds to add to each pass, for trials."""
        identity = training_identity(e, stages)
        super().__init__(identity, e.model.num_layers, secret, announce_every, say, join, shape, tls)
        self.e, self.stages, self.slow = e, stages, slow
        self.worker = Worker()
        self.stage: Stage
        self._wanted = stage
        self._summed: tuple[str, Tensor] | None = None
        self._state: dict[str, Tensor] = {}
        self._state_step = -1
        self._seconds = 0.0
        self._parts: dict[tuple[str, int], asyncio.Future[Tensor]] = {}

    async def prepare(self) -> None:
        """Choose a stage, load it, and take the state of a peer that is there."""
        wanted = self._wanted
        if wanted is None:
            starts = [layers.start for layers in cuts(self.e, self.stages)]
            live = self.table.live()
            wanted = choose_stage([[a.throughput for a in live if a.start == start] for start in starts])
        await self._load(wanted)

    async def stop(self) -> None:
        """Tell the others, and end."""
        await super().stop()
        self.worker.stop()

    def record(self) -> dict[str, Any]:
        """Its announcement."""
        layers = self.stage.layers
        return {
            "start": layers.start, "stop": layers.stop, "weights": ["0" * 16] * len(layers), "step": self.stage.step,
            "throughput": 1 / self._seconds if self._seconds else 1.0,
        }  # fmt: skip

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.worker.call(function))

    async def _load(self, index: int) -> None:
        self.stage = await self._run(lambda: Stage(self.e, self.stages, index))
        layers = self.stage.layers
        mates = [a for a in self.table.live() if a.start == layers.start and a.peer != self.peer]
        if (newest := max(mates, key=lambda a: a.step, default=None)) and newest.step > 0:
            await self._fetch(newest.address)
        self.say(f"trains stage {index} (layers {layers.start} to {layers.stop}) at {self.address}, step "
                 f"{self.stage.step}")  # fmt: skip

    async def _fetch(self, address: str) -> None:
        """Take the state of another peer of the stage. Raises :class:`Refused`."""
        try:
            step, state = await fetched(self.links, address, self.stage.index)
            stage = self.stage
            await self._run(lambda: stage.load(step, state))
        except TROUBLE as e:  # not the fault of who asked for it
            raise Refused(f"the state at {address} could not be fetched: {e}") from None

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, owner: str, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        """A trainer's micro-batches (forward, backward, loss) and orders (reduce, commit, drop, sync, migrate), and
        other peers' questions (part, sum, state)."""
        if op in ("forward", "backward", "loss"):
            return await self._pass(op, m, tensors)
        if op == "state":
            return await self._give_state(m)
        if op == "part":
            return await self._give_part(m)
        if op == "sum":
            return await self._give_sum(m)
        if op == "reduce":
            return await self._reduce(m)
        if op == "commit":
            return await self._commit(m)
        if op == "drop":
            await self._run(self.stage.drop)
            return Answer({"step": self.stage.step})
        if op == "sync":
            await self._fetch(text(m, "address"))
            self.note()
            return Answer({"step": self.stage.step})
        if op == "migrate":
            await self._migrate(number(m, "stage"), text(m, "address"))
            return Answer({"step": self.stage.step})
        raise BadPeer(f"it asked for {op[:40]!r}, which nobody does")

    async def _pass(self, op: str, m: dict[str, Any], tensors: dict[str, Tensor]) -> Answer:
        stage, wire = self.stage, wire_of(m)
        step, batch, length = (number(m, name) for name in ("step", "batch", "length"))
        if number(m, "stage") != stage.index:
            raise Refused(f"it trains stage {stage.index}")
        if not 0 < batch * length <= MOST_ROWS:
            raise BadPeer(f"it sent {batch} sequences of {length} rows, of {MOST_ROWS} rows at most")
        shape, spec = (batch, length, self.e.model.hidden_size), self.e.model
        dtype = next(iter(stage.parameters)).dtype
        if stage.index:
            x = decode_rows("x", tensors, shape, dtype)
        else:
            x = tokens("ids", tensors, shape[:2], spec.vocab_size)
        start = time.monotonic()
        try:
            if op == "forward":
                y = await self._slowly(lambda: stage.forward(step, x))
                return Answer({}, encode_rows("y", y, wire))
            micro, attempt = number(m, "micro"), text(m, "attempt") if "attempt" in m else ""
            if op == "backward":
                grad = decode_rows("grad", tensors, shape, dtype)
                dx = await self._slowly(lambda: stage.backward(step, micro, attempt, x, grad))
                return Answer({}, {} if dx is None else encode_rows("grad", dx, wire))
            if not stage.last:
                raise BadPeer("it asked for the loss of a stage that is not the last")
            labels = tokens("labels", tensors, shape[:2], spec.vocab_size, least=-100)
            factor = m.get("factor")
            if not isinstance(factor, float) or not math.isfinite(factor):
                raise BadPeer("it sent no factor of the loss")
            total, dx = await self._slowly(lambda: stage.loss(step, micro, attempt, x, labels, factor))
            return Answer({"loss": total}, {} if dx is None else encode_rows("grad", dx, wire))
        finally:
            took = time.monotonic() - start
            self._seconds = took if not self._seconds else 0.8 * self._seconds + 0.2 * took

    async def _slowly(self, function: Callable[[], Any]) -> Any:
        if self.slow:
            await self._run(lambda: time.sleep(self.slow))
        return await self._run(function)

    # ---- the sum over the stage's peers: every peer adds up one part, and all fetch all parts ------------------------

    async def _reduce(self, m: dict[str, Any]) -> Answer:
        """Sum the gradients with the peers ``peers`` [name, address], in that order → the sum's squared norm.

        ``micros``: the micro-batches whose gradients this peer should hold; with others it holds it says so, having
        dropped them."""
        stage, step, turn = self.stage, number(m, "step"), text(m, "round")
        peers, micros = m.get("peers"), m.get("micros")
        if not isinstance(peers, list) or not isinstance(micros, list) or not all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(x, str) for x in p) for p in peers
        ):  # fmt: skip
            raise BadPeer("it asked for a sum without saying of what")
        stage.require(step)
        own = self._part(turn, [name for name, _ in peers].index(self.peer))
        try:
            if not await self._run(lambda: stage.holds({int(k): str(a) for k, a in micros})):
                await self._run(stage.drop)
                raise Refused(DROPPED)
            whole = await self._add_up(turn, step, peers, own)
        except Refused as e:
            if not own.done():  # others wait for it
                own.set_exception(e)
                own.exception()
            if str(e) == DROPPED:
                return Answer({"dropped": True})
            raise
        self._summed = turn, whole
        return Answer({"squared_norm": float(whole.double().square().sum())})

    async def _add_up(self, turn: str, step: int, peers: list[list[str]], own: asyncio.Future[Tensor]) -> Tensor:
        """The sum of all peers' gradients: this one adds up its part, and fetches the others'."""
        stage, count = self.stage, len(peers)
        mine = [name for name, _ in peers].index(self.peer)
        others = [(i, address) for i, (_, address) in enumerate(peers) if i != mine]
        ask = {"step": step, "part": mine, "parts": count}
        first = await self._run(lambda: stage.gradient(mine, count))
        given = await self._vectors([(address, "part", ask) for _, address in others])
        if any(len(g) != len(first) for g in given):
            raise Refused("parts of the sum differ in size")
        own.set_result(await self._run(lambda: torch.stack([*given[:mine], first, *given[mine:]]).sum(0)))
        parts = await self._vectors([(address, "sum", {"round": turn, "part": i}) for i, address in others])
        whole = torch.cat([*parts[:mine], own.result(), *parts[mine:]])
        if len(whole) != stage.numel:
            raise Refused("the parts of the sum are not whole")
        return whole

    async def _vectors(self, asks: list[tuple[str, str, dict[str, Any]]]) -> list[Tensor]:
        """Vectors that other peers have: (address, op, message). Raises :class:`Refused`."""

        async def whole(address: str, op: str, message: dict[str, Any]) -> Tensor:
            pieces: list[Tensor] = []
            count = 1
            while len(pieces) < count:
                answer = await self.links.ask(address, op, {**message, "piece": len(pieces)})
                pieces.append(_vector(answer.tensors.get("part")))
                count = number(answer.message, "pieces")
            return torch.cat(pieces)

        try:
            return list(await asyncio.gather(*(whole(*ask) for ask in asks)))
        except TROUBLE as e:  # not the fault of who asked for the sum
            raise Refused(f"a peer of the stage failed: {e}") from None

    def _part(self, turn: str, index: int) -> asyncio.Future[Tensor]:
        key = turn, index
        if key not in self._parts:
            self._parts[key] = asyncio.get_running_loop().create_future()
        return self._parts[key]

    async def _give_part(self, m: dict[str, Any]) -> Answer:
        stage, part, parts = self.stage, number(m, "part"), number(m, "parts")
        stage.require(number(m, "step"))
        if not part < parts <= 1000:
            raise BadPeer(f"it asked for part {part} of {parts}")
        return _piece(await self._run(lambda: stage.gradient(part, parts)), number(m, "piece"))

    async def _give_sum(self, m: dict[str, Any]) -> Answer:
        try:
            found = await asyncio.wait_for(asyncio.shield(self._part(text(m, "round"), number(m, "part"))), 20.0)
        except asyncio.TimeoutError:
            raise Refused("that part of the sum was not finished") from None
        return _piece(found, number(m, "piece"))

    async def _commit(self, m: dict[str, Any]) -> Answer:
        stage, step, turn = self.stage, number(m, "step"), text(m, "round")
        factor, lr = m.get("factor"), m.get("lr")
        if not all(isinstance(x, float) and math.isfinite(x) for x in (factor, lr)):
            raise BadPeer("it sent no factor or learning rate")
        if self._summed is None or self._summed[0] != turn:
            raise Refused("it has no sum of that round")
        whole = self._summed[1]
        await self._run(lambda: stage.commit(step, whole, float(factor or 0.0), float(lr or 0.0)))
        self._summed, self._parts = None, {}
        self.note()
        return Answer({"step": stage.step})

    # ---- the state ---------------------------------------------------------------------------------------------------

    async def _give_state(self, m: dict[str, Any]) -> Answer:
        """A piece of the state; that of the step that the first piece was of."""
        piece, stage = number(m, "piece"), self.stage
        if number(m, "stage") != stage.index:
            raise Refused(f"it trains stage {stage.index}")
        if piece == 0:
            self._state, self._state_step = await self._run(lambda: (divided(stage.state()), stage.step))
        elif m.get("step") != self._state_step:
            raise Refused("it no longer has the state of that step")
        pieces = packed(self._state)
        if piece >= len(pieces):
            raise BadPeer(f"it asked for piece {piece} of {len(pieces)}")
        return Answer({"step": self._state_step, "pieces": len(pieces)}, {n: self._state[n] for n in pieces[piece]})

    async def _migrate(self, index: int, address: str) -> None:
        """Train another stage, with the state of the peer at ``address``."""
        if index >= self.stages:
            raise BadPeer(f"it asked for stage {index} of {self.stages}")
        old = self.stage
        self.stage = await self._run(lambda: Stage(self.e, self.stages, index))
        try:
            await self._fetch(address)
        except Refused:
            self.stage = old
            raise
        self.say(f"moved from stage {old.index} to {index}")
        await self.announce()


async def fetched(links: Links, address: str, stage: int) -> tuple[int, dict[str, Tensor]]:
    """(step, state) of the peer of a stage at ``address``. Raises what may happen to a question."""
    first = await links.ask(address, "state", {"piece": 0, "stage": stage}, patience=STATE)
    step, pieces = number(first.message, "step"), number(first.message, "pieces")
    state = dict(first.tensors)
    for piece in range(1, pieces):
        message = {"piece": piece, "step": step, "stage": stage}
        state |= (await links.ask(address, "state", message, patience=STATE)).tensors
    return step, joined(state)


def tokens(name: str, tensors: dict[str, Tensor], shape: tuple[int, ...], most: int, least: int = 0) -> Tensor:
    """Token ids or labels of a message. Raises :class:`BadPeer`."""
    t = tensors.get(name)
    if t is None or t.dtype != torch.int64 or tuple(t.shape) != shape:
        raise BadPeer(f"it sent no {name} {list(shape)}")
    if bool(((t < least) | (t >= most)).any()):
        raise BadPeer(f"it sent {name} that are no tokens")
    return t


def _piece(vector: Tensor, piece: int) -> Answer:
    """A piece of a vector, small enough for a message. Raises :class:`BadPeer`."""
    pieces = vector.split(PIECE // 4)
    if piece >= len(pieces):
        raise BadPeer(f"it asked for piece {piece} of {len(pieces)}")
    return Answer({"pieces": len(pieces)}, {"part": pieces[piece].clone()})


def _vector(found: Tensor | None) -> Tensor:
    """A part of a gradient. Raises :class:`BadPeer`."""
    if found is None or found.dtype != torch.float32 or found.dim() != 1 or not bool(found.isfinite().all()):
        raise BadPeer("it sent no part of a gradient")
    return found


def divided(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors cut along their first dimension into slices that fit into a message: ``name@i/n``."""
    out: dict[str, Tensor] = {}
    for name, t in state.items():
        count = max(1, math.ceil(t.nbytes / PIECE))
        parts = t.tensor_split(count) if count > 1 else (t,)
        out |= {f"{name}@{i}/{count}": part.contiguous() for i, part in enumerate(parts)}
    return out


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that :func:`divided` cut. Raises :class:`BadPeer`."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, t in state.items():
        whole, _, place = name.rpartition("@")
        i, _, n = place.partition("/")
        if not (whole and i.isdecimal() and n.isdecimal() and int(i) < int(n)):
            raise BadPeer("it sent a state with strange names")
        found.setdefault(whole, {})[int(i)] = t
    try:
        return {name: torch.cat([p[i] for i in range(len(p))]) if len(p) > 1 else p[0] for name, p in found.items()}
    except (KeyError, RuntimeError):
        raise BadPeer("it sent a state with gaps") from None


def packed(state: dict[str, Tensor]) -> list[list[str]]:
    """Names of tensors by message."""
    out: list[list[str]] = [[]]
    size = 0
    for name, t in state.items():
        if out[-1] and size + t.nbytes > PIECE:
            out.append([])
            size = 0
        out[-1].append(name)
        size += t.nbytes
    return out
