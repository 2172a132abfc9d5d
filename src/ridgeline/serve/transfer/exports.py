"""The prefill server's part in the engine: keys and values of prompts leave layer by layer while the next one computes.

Everything here runs on the engine's thread. A sequence's rows of a layer are copied out of the pool as soon as the
layer has written them; the copies are sent by another thread. Prompts shorter than ``whole_below`` tokens are sent
after their pass at once, because many small frames cost more than they hide (Splitwise, arXiv:2311.18677, section 4.3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgeline.serve.request import EngineRequest, OutputEvent, TokenLogprob
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.transfer.layout import KVLayout

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine

FRAME = 8 << 20
"""Bytes of a frame, about: the first token never waits for more than one."""


@dataclass
class Parcel:
    """Keys and values of ``tokens`` tokens from ``at`` on, in some layers."""

    request: str
    layers: range
    at: int
    tokens: int
    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None = None
    """On a GPU: when the copies out of the pool are complete."""

    def to_host(self) -> dict[str, Tensor]:
        """The tensors in host memory; on a GPU copied beside the computation, in a stream of their own."""
        if self.ready is None:
            return self.tensors
        stream = torch.cuda.Stream()
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            out = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in self.tensors.items()}
            for name, t in self.tensors.items():
                out[name].copy_(t, non_blocking=True)
                t.record_stream(stream)
        stream.synchronize()
        return out


@dataclass(frozen=True)
class FirstToken:
    """What a prompt ended in."""

    request: str
    token: int
    logprob: TokenLogprob | None
    cached: int
    """Prompt tokens that were found in the prefill server's cache."""
    computed: float
    """When it was chosen, on the monotonic clock."""


Outgoing = Parcel | FirstToken | str
"""What is sent; a text says why a prompt was not computed."""


@dataclass
class Export:
    """A prompt whose keys and values are sent."""

    seq: Sequence
    upto: int
    """Tokens that are wanted."""
    sent: list[int]
    """Tokens that were sent, or are there already, by layer."""
    layerwise: bool
    send: Callable[[Outgoing], None]


class Exports:
    """Prompts that this engine computes for others."""

    def __init__(self, engine: Engine, whole_below: int) -> None:
        self.engine, self.whole_below = engine, whole_below
        self.layout = KVLayout(engine.runner)
        self.open: dict[str, Export] = {}
        self._pass: list[tuple[Export, int]] = []
        engine.runner.after_layer = self._after_layer

    def begin(self, request: EngineRequest, start: int, upto: int, send: Callable[[Outgoing], None]) -> None:
        """Compute a prompt and send its tokens ``start`` to ``upto``. Raises as :meth:`Engine.add`."""
        self.engine.add(request)
        (seq,) = self.engine.groups[request.id].sequences
        layerwise = upto - start >= self.whole_below
        self.open[request.id] = Export(seq, upto, [start] * len(self.layout.layers), layerwise, send)

    def cancel(self, request: str) -> None:
        """Stop computing a prompt: nobody wants it any more."""
        if self.open.pop(request, None) is not None:
            self.engine.abort(request)

    # ---- from within a step ------------------------------------------------------------------------------------------

    def begin_pass(self, batch: Iterable[tuple[Sequence, int]]) -> None:
        """The sequences of a pass, and how many tokens it computes of each."""
        self._pass = []
        for seq, n in batch if self.open else ():
            export = self.open.get(seq.group.request.id)
            if export is not None and export.seq is seq:
                self._pass.append((export, min(seq.n_computed + n, export.upto)))

    def _after_layer(self, layer: int) -> None:
        for export, stop in self._pass:
            if export.layerwise:
                self._send(export, range(layer, layer + 1), stop)

    def end_pass(self) -> None:
        """Send what layers could not: cached tokens of short prompts, and passes that one kernel did as a whole."""
        layers = range(len(self.layout.layers))
        for export, stop in self._pass:
            if export.layerwise or stop == export.upto:
                self._send(export, layers, stop)
        self._pass = []

    def report(self, events: Iterable[OutputEvent]) -> None:
        """Send the first tokens among a step's events; that is all that is generated here."""
        for event in events:
            export = self.open.pop(event.request, None)
            if export is None:
                continue
            if event.tokens:
                group, logprobs = export.seq.group, event.logprobs
                first = logprobs[0] if logprobs else None
                cached = max(0, group.cached_tokens)
                export.send(FirstToken(event.request, event.tokens[0], first, cached, time.monotonic()))
                if event.finish is None:
                    self.engine.finish(event.request, 0)
            else:
                export.send(event.error or "it was cancelled")

    def _send(self, export: Export, layers: range, stop: int) -> None:
        """Copy and send the tokens before ``stop`` that were not, in frames of limited size."""
        at = 0
        todo = [layer for layer in layers if export.sent[layer] < stop]
        while at < len(todo):
            first = todo[at]
            start, size = export.sent[first], self.layout.token_bytes[first]
            most = max(1, FRAME // ((stop - start) * size))
            n = 1
            while n < most and at + n < len(todo) and todo[at + n] == first + n and export.sent[first + n] == start:
                n += 1
            for begin in range(start, stop, step := max(1, FRAME // size)):
                self._copy(export, range(first, first + n), begin, min(stop, begin + step))
            at += n

    def _copy(self, export: Export, layers: range, start: int, stop: int) -> None:
        slots = self.layout.slots(export.seq.blocks, start, stop)
        tensors: dict[str, Tensor] = {}
        for layer in layers:
            tensors |= self.layout.take(layer, slots)
            export.sent[layer] = stop
        ready = None
        if self.layout.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        export.send(Parcel(export.seq.group.request.id, layers, start, stop - start, tensors, ready))
