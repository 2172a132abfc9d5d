"""The decode server's part in the engine: sequences whose prompt another server computes.

Everything here runs on the engine's thread. A request first gets its blocks; only then is the prefill server asked, so
that nothing is sent that has no place. Its keys and values are written into them as they come. If the transfer fails,
the request joins the queue like any other, with the first token if that had come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ridgeline.serve.request import EngineRequest, TokenLogprob
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.transfer.layout import KVLayout

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine


@dataclass(frozen=True)
class Prompt:
    """What a prefill server is asked for."""

    request: EngineRequest
    seed: int
    """Of the request's first output."""
    start: int
    """Tokens that are here already."""
    upto: int
    """Tokens whose keys and values are wanted: all, or all but the last, which is then computed here."""

    @property
    def first(self) -> bool:
        """Whether the first token is chosen by the prefill server."""
        return self.upto == len(self.request.prompt)


class Asks(Protocol):
    """Asks prefill servers; from the engine's thread, without waiting."""

    def ask(self, address: str, prompt: Prompt) -> None:
        """Ask for a prompt."""

    def cancel(self, address: str, request: str) -> None:
        """It is no longer wanted."""


class Imports:
    """Requests whose prompts are computed elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scheduler, self.blocks = engine, engine.scheduler, engine.blocks
        self.layout = KVLayout(engine.runner)
        self.client: Asks | None = None
        self.open: dict[str, Sequence] = {}
        """Those that were asked for."""
        self._unplaced: deque[Sequence] = deque()

    def takes(self, request: EngineRequest) -> bool:
        """Whether a request's prompt can be computed elsewhere: not where its hidden states are wanted, nor with an
        adapter, whose versions may differ."""
        r = request
        plain = not (r.embed or r.adapter or r.sampling.prompt_logprobs is not None)
        return bool(r.prefill_at) and self.client is not None and plain

    def add(self, seq: Sequence) -> None:
        """A new sequence; it is asked for as soon as there are blocks for it."""
        self.scheduler.arriving.append(seq)
        self._unplaced.append(seq)
        self.admit()

    def admit(self) -> None:
        """Drop what has ended meanwhile, and ask for the prompts that there are blocks for, in order."""
        for name, seq in list(self.open.items()):
            if seq not in self.scheduler.arriving:
                del self.open[name]
                assert self.client is not None
                self.client.cancel(seq.group.request.prefill_at, name)
        while self._unplaced:
            seq = self._unplaced[0]
            if seq in self.scheduler.arriving and not self._place(seq):
                return
            self._unplaced.popleft()

    def _place(self, seq: Sequence) -> bool:
        """Give a sequence its blocks, and ask for its prompt → whether there was room. Prompts of which all but a
        block is cached here are computed here."""
        request, blocks = seq.group.request, self.blocks
        prompt, found = len(request.prompt), blocks.match(seq)
        upto = prompt if _first_elsewhere(request) else prompt - 1
        if upto - found < blocks.size or blocks.needed(prompt) > blocks.count:
            blocks.release(seq)
            self._compute_here(seq)
            return True
        if blocks.grow(seq, prompt, prompt + request.sampling.max_tokens) is None:
            blocks.release(seq)
            return False
        seq.group.cached_tokens = found
        self.open[request.id] = seq
        assert self.client is not None
        self.client.ask(request.prefill_at, Prompt(request, seq.group.seed, found, upto))
        return True

    def _compute_here(self, seq: Sequence) -> None:
        self.scheduler.arriving.remove(seq)
        self.scheduler.add(seq)

    def _found(self, request: str) -> Sequence | None:
        """The sequence of a request that has not ended."""
        seq = self.open.get(request)
        return seq if seq in self.scheduler.arriving else None

    # ---- posted by the client ----------------------------------------------------------------------------------------

    def write(self, request: str, layers: range, at: int, tokens: int, tensors: dict[str, Tensor]) -> None:
        """Keys and values that have come; their shapes were checked."""
        if (seq := self._found(request)) is not None:
            slots = self.layout.slots(seq.blocks, at, at + tokens)
            for layer in layers:
                self.layout.put(layer, slots, tensors)

    def first(self, request: str, token: int, logprob: TokenLogprob | None, cached: int) -> None:
        """The first token has come: it is reported at once, its keys and values may still be on their way."""
        if (seq := self._found(request)) is not None:
            seq.group.cached_tokens = max(seq.group.cached_tokens, cached)
            self.engine.next_tokens.accept(seq, token, logprob)

    def complete(self, request: str, upto: int) -> None:
        """Everything has come: the sequence runs."""
        if (seq := self._found(request)) is not None:
            del self.open[request]
            self.scheduler.arriving.remove(seq)
            seq.n_computed = upto
            self.blocks.commit(seq)
            self.scheduler.join(seq)

    def recompute(self, blocks: Set[int]) -> int:
        """Compute here the prompts that hold any of ``blocks``, whose contents are not what they were taken for → how
        many."""
        held = [name for name, seq in self.open.items() if not blocks.isdisjoint(seq.blocks)]
        for name in held:
            if (seq := self._found(name)) is not None and self.client is not None:
                self.client.cancel(seq.group.request.prefill_at, name)
            self.lost(name)
        return len(held)

    def lost(self, request: str) -> None:
        """The transfer has failed: the prompt is computed here."""
        if (seq := self._found(request)) is not None:
            del self.open[request]
            self.blocks.release(seq)
            self._compute_here(seq)


def _first_elsewhere(request: EngineRequest) -> bool:
    """Whether the first token depends on nothing but the prompt, numbers and a seed: no grammar, no several outputs."""
    s = request.sampling
    return s.sequences == 1 and not s.ranked and s.grammar is None
