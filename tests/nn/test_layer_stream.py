"""Weights that are fetched while others compute, and the ring of memory that they pass through."""

import contextlib
import random
import threading
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.nn.memory import layer_stream
from ridgeline.nn.memory.layer_stream import (
    DeviceBuffer,
    LayerStream,
    Ring,
    Staging,
    bring,
    layer_tensors,
    piece_sizes,
    size_of,
)


class Slow:
    """A source that says when it is read."""

    def __init__(self, layer, values):
        self.values, self.started, self.reads = values, threading.Event(), 0
        self.size = size_of(layer)

    def read(self, into):
        self.started.set()
        self.reads += 1
        into[: self.size].view(torch.float32)[: self.values.numel()] = self.values


def stream(ahead, count=4):
    """Linears [2, 2] whose weights are streamed."""
    modules = [nn.Linear(2, 2, bias=False).requires_grad_(False) for _ in range(count)]
    values = [torch.arange(4.0) + i for i in range(count)]
    layers = [layer_tensors(m) for m in modules]
    sources = [Slow(layer, v) for layer, v in zip(layers, values, strict=True)]
    for layer in layers:
        for t in layer:
            t.unbind(torch.device("cpu"))
    found = LayerStream(layers, sources, torch.device("cpu"), ahead, (ahead + 1) * max(piece_sizes(sources)))
    found.follow(modules)
    return found, modules, sources, values


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_reads_run_ahead_of_their_layers(ahead):
    """While a layer computes, those of the next ``ahead`` are read and no others."""
    _, modules, sources, values = stream(ahead)
    x = torch.eye(2)
    for i, m in enumerate(modules):
        seen = []

        def watch(*_, i=i, seen=seen):
            for k in range(i + 1, min(i + 1 + ahead, len(sources))):
                assert sources[k].started.wait(30)
            seen += [s.started.is_set() for s in sources[i + 1 + ahead :]]

        m.register_forward_pre_hook(watch)
        assert torch.equal(m(x).T, values[i].view(2, 2))
        assert not any(seen)
        assert m.weight.isnan().all()  # gone, and of no use out of turn


def test_a_pass_that_was_broken_off_starts_again():
    found, modules, _, values = stream(1)
    x = torch.eye(2)
    modules[0](x)
    modules[1](x)
    for i in (0, 1, 2, 3, 0, 2):
        assert torch.equal(modules[i](x).T, values[i].view(2, 2))
    with pytest.raises(RuntimeError):
        modules[3](torch.ones(3))
    assert torch.equal(modules[0](x).T, values[0].view(2, 2))
    assert len(found._pending) == 2  # as many as there is room for


def test_pieces_of_a_ring_do_not_overlap():
    """Taken and given back in order, of sizes and at times that are drawn: each is within the ring, none overlaps
    another, and an empty ring has room for any."""
    draw = random.Random(0)
    ring, held = Ring(1000, torch.device("cpu")), deque()
    first, wraps = ring.buffer.data_ptr(), 0
    for _ in range(2000):
        if held and draw.random() < 0.5:
            ring.give()
            held.popleft()
        size = draw.randint(1, 1000 if not held else 400)
        piece = ring.piece(size)
        assert piece is not None or held
        if piece is not None:
            start = piece.data_ptr() - first
            assert len(piece) == size
            assert 0 <= start <= 1000 - size
            assert all(start + size <= a or start >= b for a, b in held)
            wraps += bool(held) and start < held[-1][0]
            held.append((start, start + size))
    assert wraps > 50


def test_modules_are_fetched_as_far_ahead_as_there_is_room():
    """Of sizes 256, 64, 64 and 128 bytes, within 320: beside the first is room for the second, and beside that for the
    other two; but for the first of the next pass only after the last, which leaves no 256 bytes in one piece."""
    modules = [nn.Linear(n, 1, bias=False).requires_grad_(False) for n in (64, 16, 16, 32)]
    values = [torch.randn(m.in_features) for m in modules]
    groups = [layer_tensors(m) for m in modules]
    sources = [Slow(group, v) for group, v in zip(groups, values, strict=True)]
    found = LayerStream(groups, sources, torch.device("cpu"), len(modules), 320)
    found.follow(modules)
    waiting = []
    for _ in range(3):
        for m, v in zip(modules, values, strict=True):
            handle = m.register_forward_pre_hook(lambda *_: waiting.append(len(found._pending)))
            x = torch.randn(m.in_features)
            assert torch.equal(m(x), F.linear(x, v[None]))
            handle.remove()
    assert waiting == 3 * [1, 2, 1, 0]


def test_one_read_for_each_use():
    _, modules, sources, _ = stream(1)
    for _ in range(5):
        for m in modules:
            m(torch.eye(2))
    assert [s.reads - 5 for s in sources[2:]] == [0, 0]  # the first two are on their way for the next pass
    assert all(s.reads <= 6 for s in sources)


def test_a_gpu_reads_the_next_weights_while_these_are_copied(monkeypatch):
    """Staging memory is read into again when its last copy is done, and no sooner; a stand-in for the stream."""
    told = []

    class Event:
        def __init__(self, name):
            self.name = name

        def synchronize(self):
            told.append(f"wait {self.name}")

    class Stream:
        copies = 0

        def record_event(self):
            Stream.copies += 1
            return Event(f"copy {Stream.copies}")

    class Source:
        size = 8

        def read(self, into):
            told.append("read")
            into.fill_(1)

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(layer_stream, "aligned", lambda size, pinned=False: torch.zeros(size, dtype=torch.uint8))
    both = [Staging(8), Staging(8)]
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(4)]
    for i, buffer in enumerate(buffers):
        bring(Source(), DeviceBuffer(buffer, both[i % 2]), torch.device("cuda"), Stream())
    assert told == ["read", "read", "wait copy 1", "read", "wait copy 2", "read"]
    assert all(b.all() for b in buffers)
