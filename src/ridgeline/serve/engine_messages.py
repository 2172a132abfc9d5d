"""Messages between a server and the process of its engine, over a socket that only those two have.

A message is a length, a kind and its contents. Steps come back in :mod:`ridgeline.serve.step_report`'s layout. What is
asked for goes as pickled objects, in which a mark stands for the vocabulary, which is sent once, and what a grammar was
compiled from for the grammar.
"""

from __future__ import annotations

import io
import pickle
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ridgeline.serve.grammar import Grammars, Matcher
from ridgeline.serve.request import EngineRequest, Stats
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.scheduling import Limits

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.transfer.member import MemberOptions
    from ridgeline.serve.transfer.transfers import Transfers

_HEAD = struct.Struct("<IB")


class Kind(IntEnum):
    """Kinds of messages: first the server's, then the engine's."""

    JOB = 1
    VOCABULARY = 2
    ADD = 3
    ABORT = 4
    FINISH = 5
    CALL = 6
    DRAIN = 7
    STOP = 8
    READY = 9
    REFUSED = 10
    REPORT = 11
    ANSWER = 12
    FAILED = 13
    HANDLED = 14
    CLOSING = 15


@dataclass(frozen=True)
class Job:
    """What the engine's process is to do. Its functions go by their names."""

    build: Callable[[], Engine]
    """Makes the engine; again after it slept."""
    within: Callable[[], AbstractContextManager[None]]
    """What it serves within."""
    member: MemberOptions | None
    """How it exchanges caches with other servers, where its plan does."""


@dataclass(frozen=True)
class Facts:
    """What does not change of an engine, and its statistics at its start."""

    spec: ModelSpec
    eos: frozenset[int]
    max_model_len: int
    blocks: int
    block_size: int
    limits: Limits
    ordered: bool
    """Whether its plan orders the queue."""
    adapters: bool
    """Whether it serves adapters."""
    stats: Stats
    held: dict[str, float]
    """Bytes of weights and of the pool."""
    labels: list[str]
    """Of its results."""
    role: str
    transfer_port: int
    """On which other servers fetch caches; 0: on none."""
    fingerprint: str
    """What they must have in common with it."""

    @classmethod
    def of(cls, engine: Engine, transfers: Transfers | None) -> Facts:
        """Those of ``engine``."""
        blocks = engine.blocks
        port, fingerprint = (transfers.port, transfers.fingerprint) if transfers is not None else (0, "")
        return cls(engine.spec, engine.eos, engine.max_model_len, blocks.count, blocks.size, engine.limits,
                   engine.scheduler.order is not None, engine.adapters is not None, engine.stats(), engine.held(),
                   engine.labels(), engine.role, port, fingerprint)  # fmt: skip


def framed(kind: Kind, contents: bytes) -> bytes:
    """A message."""
    return _HEAD.pack(len(contents), kind) + contents


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The messages that ``data`` completes: kind and contents."""
        self._held += data
        found, at = [], 0
        while len(self._held) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._held, at)
            if len(self._held) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            found.append((Kind(kind), bytes(self._held[at : at + size])))
            at += size
        del self._held[:at]
        return found


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, vocabulary: Vocabulary | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._vocabulary = vocabulary
        self._bytes = vocabulary.bytes if vocabulary is not None else None
        self.vocabulary = False
        """Whether there is anything that needs the vocabulary."""

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Marks of what is not sent as it is."""
        found: tuple[Any, ...] | None = None
        if type(obj) is Matcher:
            found = ("grammar", *obj.source)
        elif obj is self._bytes and obj is not None:
            found = ("bytes",)
        elif obj is self._vocabulary and obj is not None:
            found = ("vocabulary",)
        self.vocabulary = self.vocabulary or found is not None
        return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, vocabulary: Vocabulary | None, grammars: Grammars | None) -> None:
        super().__init__(file)
        self._vocabulary, self._grammars = vocabulary, grammars

    def persistent_load(self, mark: tuple[Any, ...]) -> Any:
        """What a mark stands for."""
        assert self._vocabulary is not None
        assert self._grammars is not None
        if mark[0] == "grammar":
            return self._grammars.compile(mark[1], mark[2], "grammar")
        return self._vocabulary if mark[0] == "vocabulary" else self._vocabulary.bytes


def pack_request(request: EngineRequest, vocabulary: Vocabulary | None) -> tuple[bytes, bool]:
    """A request as bytes, and whether reading them takes the ``vocabulary``. It has no tokens yet, so that its grammar
    is at its start."""
    file = io.BytesIO()
    outputs = 1 if request.embed else request.sampling.n
    pickle.dump((request.id, outputs), file)  # which is read even where the rest cannot be
    pickler = _Pickler(file, vocabulary)
    pickler.dump(replace(request, prompt=array("i", request.prompt)))
    return file.getvalue(), pickler.vocabulary


@dataclass(frozen=True)
class Unreadable:
    """A request that could not be read."""

    id: str
    outputs: int
    error: str


def unpack_request(
    message: bytes, vocabulary: Vocabulary | None, grammars: Grammars | None
) -> EngineRequest | Unreadable:
    """The request of a message."""
    file = io.BytesIO(message)
    name, outputs = pickle.load(file)
    try:
        request: EngineRequest = _Unpickler(file, vocabulary, grammars).load()
        return replace(request, prompt=list(request.prompt))
    except Exception as e:  # one faulty request must not fail the others
        return Unreadable(name, outputs, f"{type(e).__name__}: {e}")
