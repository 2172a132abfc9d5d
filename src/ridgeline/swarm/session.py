"""Generation through a swarm: the client embeds and picks tokens, servers compute the blocks between.

A client keeps what it sent to each hop. When a server fails, another (or several) takes its blocks, is sent all of that
in one prefill, and the sequence goes on (arXiv:2209.01188, section 3.2; 2312.08361, algorithm 1).

Shapes: n new rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.swarm.announcements import Announcement
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.link import TROUBLE
from ridgeline.swarm.span import load_blocks
from ridgeline.swarm.wire import encode_rows

CHUNK = 512
"""Rows of a prompt that are sent at once."""


@dataclass
class _Hop:
    """Blocks ``start`` to ``stop`` at one server."""

    server: Announcement
    start: int
    stop: int
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    done: int = 0
    """Rows that it has computed."""
    opened: bool = False


class Session:
    """One sequence of up to ``most`` tokens on its way through the servers."""

    def __init__(self, swarm: Swarm, most: int) -> None:
        self.swarm, self.most = swarm, most
        self.replays: list[tuple[int, int]] = []
        """(hops, rows) of each recovery."""
        self.waited = 0.0
        """Seconds from failures until their steps were over."""
        self._dtype = torch.float32
        self._hops: list[_Hop] = []
        self._history: dict[int, list[Tensor]] = {}
        """Rows that went into each hop, by its first block."""

    def step(self, x: Tensor) -> Tensor:
        """The next rows [n, H] through all blocks → [n, H]. Raises :class:`UserError` when blocks stay missing."""
        self._dtype = x.dtype
        if not self._hops:
            self._hops = self._found(0, self.swarm.spec.num_layers)
        self._history.setdefault(0, []).append(x)
        total, i, failed = sum(map(len, self._history[0])), 0, 0.0
        while i < len(self._hops):
            hop = self._hops[i]
            try:
                with self.swarm.watching(hop.server):
                    y = self._through(hop, total)
            except TROUBLE:
                failed = failed or time.monotonic()
                self._hops[i : i + 1] = new = self._found(hop.start, hop.stop)
                self.replays.append((len(new), total))
                continue
            if hop.stop == self.swarm.spec.num_layers:
                last = y
            else:
                later = self._history.setdefault(hop.stop, [])
                later.append(y[len(y) - (total - sum(map(len, later))) :])
            i += 1
        if failed:
            self.waited += time.monotonic() - failed
        return last[-len(x) :]

    def _found(self, start: int, stop: int) -> list[_Hop]:
        return [_Hop(a, h.start, h.stop) for a, h in self.swarm.route(start, stop, self.most)]

    def _through(self, hop: _Hop, total: int) -> Tensor:
        """The rows that a hop has not computed yet → what comes out of it. A new one gets the whole history."""
        swarm, session = self.swarm, {"session": hop.session}
        if not hop.opened:
            swarm.ask(hop.server.address, "open", {**session, "start": hop.start, "stop": hop.stop, "most": self.most})
            hop.opened = True
        given = self._history[hop.start]
        if len(given) > 1 and total - hop.done > len(given[-1]):
            self._history[hop.start] = given = [torch.cat(given)]
        rows = given[-1][len(given[-1]) - (total - hop.done) :]
        out = []
        for part in rows.split(CHUNK):
            message = {**session, "at": hop.done, "rows": len(part), "wire": swarm.wire}
            answer = swarm.ask(hop.server.address, "step", message, encode_rows("x", part, swarm.wire))
            out.append(swarm.rows(answer, "y", tuple(part.shape), self._dtype))
            hop.done += len(part)
        return torch.cat(out)

    @property
    def servers(self) -> list[str]:
        """Addresses of the servers on the way."""
        return [hop.server.address for hop in self._hops]

    def close(self) -> None:
        """Let the servers forget it."""
        for hop in self._hops:
            try:
                if hop.opened:
                    self.swarm.ask(hop.server.address, "close", {"session": hop.session})
            except TROUBLE:
                pass  # it has gone, and the sequence with it

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def load_ends(path: Path) -> Transformer:
    """A client's part of the model: embedding, final norm and head."""
    return load_blocks(path, ModelSpec.from_path(path), range(0), ends=True)


def new_tokens(
    ends: Transformer, session: Session, prompt: Tensor, temperature: float = 0.0, seed: int = 0
) -> Iterator[int]:
    """Tokens behind the prompt [S], one after another: greedy at temperature 0, else sampled from ``seed``."""
    assert ends.embed is not None
    assert ends.head is not None
    rng = torch.Generator().manual_seed(seed)
    at, ids = 0, prompt
    while at + len(ids) <= session.most:
        with torch.inference_mode():
            x = ends.embed(ids[None], None, None, at)[0]
            hidden = session.step(x.clone())[-1:]
            logits = ends.head(hidden if ends.norm is None else ends.norm(hidden)).float()[0]
        at += len(ids)
        if temperature > 0:
            token = int((logits / temperature).softmax(-1).multinomial(1, generator=rng))
        else:
            token = int(logits.argmax())
        yield token
        ids = torch.tensor([token])


def generate(
    ends: Transformer, swarm: Swarm, prompt: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0,
    eos: tuple[int, ...] = (),
) -> Iterator[int]:  # fmt: skip
    """Up to ``max_tokens`` tokens behind a prompt. Raises :class:`UserError` for a sequence that is too long."""
    most = len(prompt) + max_tokens
    if not prompt or most > swarm.spec.max_positions:
        raise UserError(f"{len(prompt)} prompt tokens and {max_tokens} new ones do not fit into the "
                        f"{swarm.spec.max_positions} positions of {swarm.spec.name}", "ask for fewer")  # fmt: skip
    with Session(swarm, most) as session:
        for count, token in enumerate(new_tokens(ends, session, torch.tensor(prompt), temperature, seed), 1):
            yield token
            if count == max_tokens or token in eos:
                return
