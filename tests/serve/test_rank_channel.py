"""Steps on their way to other ranks: the message says all of a step, the ring keeps order, and an end is noticed."""

import random
import socket
import threading
from array import array

import pytest
from tests.world import world

from ridgeline.nn.memory.kv_pool import Piece
from ridgeline.serve import rank_channel
from ridgeline.serve.rank_channel import CHUNK, CHUNKS, Broadcast, RankLost, RingReader, RingWriter
from ridgeline.serve.runner import PackedStep
from ridgeline.serve.step_graphs import Size
from ridgeline.serve.step_message import pack, unpack


def steps():
    draw = random.Random(0)
    yield PackedStep([])
    for tokens in (1, 7):
        pieces = []
        for i in range(tokens):
            spans = [(draw.randrange(1 << 40), draw.randrange(99)) for _ in range(draw.randrange(4))]
            table = array("i", [draw.randrange(1 << 30) for _ in range(draw.randrange(5))])
            pieces.append(Piece(i, i + 1, spans, bool(i % 2), draw.randrange(99), table))
        numbers = [[draw.randrange(1 << 40) for _ in range(tokens)] for _ in range(4)]
        step = PackedStep([(3, 4), (9, 1)][: tokens - 1], *numbers[:3], pieces, numbers[3] if tokens > 1 else [])
        step.graph = Size(8, 8, 0, 64) if tokens > 1 else None
        yield step


def test_a_message_says_all_of_a_step():
    for step in steps():
        assert unpack(pack(step)) == step


@pytest.fixture
def ring():
    """A writer, and the readers at the other ends."""
    pairs = [socket.socketpair() for _ in range(2)]
    writer = RingWriter([a for a, _ in pairs])
    readers = [RingReader(b) for _, b in pairs]
    yield writer, readers
    for one in readers:
        one.close()
    writer.close()


def messages():
    draw = random.Random(1)
    sizes = [1, 5, CHUNK - 8, CHUNK - 7, 2 * (CHUNK - 8), CHUNK * CHUNKS * 2 + 3, *([40] * (3 * CHUNKS))]
    return [draw.randbytes(size) for size in sizes]


def test_messages_of_any_size_arrive_in_order(ring):
    writer, readers = ring
    heard = [[], []]

    def read(one, into):
        for _ in messages():
            into.append(one.receive())

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, heard, strict=True)]
    for t in threads:
        t.start()
    for message in messages():
        writer.send(message)
    for t in threads:
        t.join(60)
    assert heard == [messages(), messages()]


def test_a_reader_that_has_gone_is_noticed(ring):
    writer, readers = ring
    readers[1].close()
    with pytest.raises(RankLost, match="rank 2 has gone"):
        writer.send(b"step")


def test_a_reader_that_stands_still_is_not_overtaken(ring, monkeypatch):
    writer, readers = ring
    for reader in writer.readers:
        reader.settimeout(0.05)
    for i in range(CHUNKS):
        writer.send(bytes([i]))
    with pytest.raises(RankLost, match="takes no messages"):
        writer.send(b"x")
    assert [readers[0].receive() for _ in range(CHUNKS)] == [bytes([i]) for i in range(CHUNKS)]


def test_a_writer_that_has_gone_is_noticed(ring):
    writer, readers = ring
    for reader in writer.readers:
        reader.close()
    with pytest.raises(RankLost, match="rank 0 has gone"):
        readers[0].receive()


def test_what_was_sent_is_read_before_the_end(ring):
    writer, readers = ring
    heard = []
    for i in range(3):
        writer.send(bytes([i]))
    closing = threading.Thread(target=writer.close)
    closing.start()
    for one in readers:
        heard.append([one.receive() for _ in range(3)])
        one.close()
    closing.join(60)
    assert heard == [[b"\0", b"\1", b"\2"]] * 2


def across(rank, far):
    """The kind of channel, and what went through it."""
    if far:  # as from another machine
        rank_channel._reaches = lambda *_: False
    channel = rank_channel.connect()
    told = messages()
    if rank == 0:
        for message in told:
            channel.send(message)
    else:
        told = [channel.receive() for _ in told]
        channel.close()
    if rank == 0:
        channel.close()
    return isinstance(channel, Broadcast), told


@pytest.mark.parametrize("far", [False, True])
def test_ranks_meet(far):
    pool = world(2)
    try:
        assert pool.run(across, far) == [(far, messages())] * 2
    finally:
        if far:
            pool.close()  # its processes are changed
