"""Peers that lie, fall silent or send garbage: one line says so, they are refused, and no request is lost."""

import asyncio
import contextlib
import hashlib
import hmac
import random
import socket
import threading
from dataclasses import replace

import pytest
import torch
from tests.serve.transferring import SECRET, Side, pair, run, split
from tests.serving import alone, ask, model

from ridgeline.serve.transfer import client as client_module
from ridgeline.serve.transfer import connection as connection_module
from ridgeline.serve.transfer.connection import Connection, LoopThread
from ridgeline.serve.transfer.frames import HEADER, LARGEST, MAGIC, BadPeer, Kind, body_length, pack, unpack
from ridgeline.serve.transfer.imports import Prompt
from ridgeline.serve.transfer.server import described

PROMPT = list(range(3, 70))
REQUEST = ask("a", PROMPT, 6, logprobs=1)


@pytest.fixture(scope="module")
def made():
    return model()


class Liar:
    """A prefill server that knows the secret and the fingerprint, and then says what a test wants."""

    def __init__(self, fingerprint, says):
        self.fingerprint, self.says, self.asked = fingerprint, says, 0
        self.thread = LoopThread("liar")
        self.thread.start()
        start = asyncio.start_server(self.serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(start, self.thread.loop).result(5)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def serve(self, reader, writer):
        self.asked += 1
        c = Connection(reader, writer)
        try:
            await c.greet(SECRET, self.fingerprint, asks=False)
            frame = await c.receive()
            while frame.kind is not Kind.PREFILL:
                frame = await c.receive()
            await self.says(c, frame.message["id"])
            await asyncio.sleep(30)
        finally:
            c.close()


def caches(layers=2, tokens=len(PROMPT), width=8, dtype=torch.float64):
    return {f"{layer}.{i}": torch.zeros(2, tokens, width, dtype=dtype) for layer in range(layers) for i in range(2)}


def kv(name, tensors=None, **fields):
    message = {"id": name, "layers": [0, 2], "at": 0, "tokens": len(PROMPT), **fields}
    return Kind.KV, message, lambda: caches() if tensors is None else tensors


def first(name, **fields):
    return Kind.FIRST, {"id": name, "token": 5, "logprob": [5, -1.0, [[5, -1.0]]], "cached": 0, **fields}


def with_nan():
    bad = caches()
    bad["1.1"][1, 3, 2] = float("nan")
    return bad


LIES = {
    "shape": (lambda n: [kv(n, caches(width=4))], "where"),
    "dtype": (lambda n: [kv(n, caches(dtype=torch.float32))], "float64"),
    "tensors": (lambda n: [kv(n, caches(layers=1))], "were due"),
    "not finite": (lambda n: [kv(n, with_nan())], "not finite"),
    "too many tokens": (lambda n: [kv(n, caches(tokens=80), tokens=80)], "not asked for"),
    "no tokens": (lambda n: [kv(n, caches(tokens=0), tokens=0)], "not asked for"),
    "layers that are none": (lambda n: [kv(n, layers=[0, 3])], "not asked for"),
    "layers that are text": (lambda n: [kv(n, layers="ab")], "saying which"),
    "a place that is none": (lambda n: [kv(n, at=-1)], "was due"),
    "the same tokens again": (lambda n: [kv(n), kv(n)], "was due"),
    "tokens with a gap": (lambda n: [kv(n, caches(tokens=9), at=9, tokens=9)], "was due"),
    "a token that is none": (lambda n: [first(n, token=300)], "first token"),
    "a token that is text": (lambda n: [first(n, token="5")], "first token"),
    "two first tokens": (lambda n: [first(n), first(n)], "first token"),
    "a log-probability that is none": (lambda n: [first(n, logprob=[5, "x", []])], "log-probability"),
    "no log-probability": (lambda n: [first(n, logprob=None)], "log-probability"),
    "cached tokens that are none": (lambda n: [first(n, cached=1000)], "cached"),
    "a frame of the other side": (lambda n: [(Kind.PREFILL, {"id": n})], "without meaning"),
    "a frame for nobody": (lambda n: [(Kind.KV, {}, caches)], "without meaning"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies(made, lie):
    frames, says = LIES[lie]

    async def lying(c, name):
        for frame in frames(name):
            await c._write(*frame)

    refused(made, lying, says, tokens=lie != "two first tokens")


async def _again(c, name):
    """A frame that was sent already, byte by byte."""
    pieces = pack(Kind.PING, c._written, c._write_key, {}, {})
    c.writer.writelines([*pieces, *pieces])


async def _forged(c, name):
    c.writer.writelines(pack(Kind.PING, c._written, b"another key", {}, {}))


async def _large(c, name):
    c.writer.write(HEADER.pack(MAGIC, Kind.KV, c._written, LARGEST + 1))


async def _unknown(c, name):
    c.writer.writelines(pack(99, c._written, c._write_key, {}, {}))


async def _garbage(c, name):
    c.writer.write(random.Random(0).randbytes(4096))


@pytest.mark.parametrize(
    ("lying", "says"),
    [(_again, "was due"), (_forged, "tag"), (_large, "at most"), (_unknown, "unknown kind"), (_garbage, "else than")],
)
def test_a_peer_whose_frames_are_none(made, lying, says):
    refused(made, lying, says)


def refused(made, lying, says, tokens=True):
    """``lying`` has its peer refused with one line, and the request is computed here, as is the next one. ``tokens``:
    whether no token of the peer was reported before."""
    decode = Side(made, "splitwise:whole_below=1")
    decode.connect()
    liar = Liar(decode.fingerprint, lying)
    try:
        for _ in range(2):
            decode.engine.add(replace(REQUEST, prefill_at=liar.address))
            run([decode], lambda: not decode.engine.groups and not decode.engine.outputs.events)
            got = [t for e in decode.events for t in e.tokens]
            assert got == alone(made, REQUEST)[0] if tokens else len(got) == 6
            tokens = True
            decode.events.clear()
            decode.engine.reset_prefix_cache()
        assert len(decode.said) == 1
        assert "refused" in decode.said[0]
        assert says in decode.said[0]
        assert liar.asked == 1
        assert decode.count("peers_refused_total") == 1
        assert decode.count("prompts_total", result="lost") == 2
        decode.idle()
    finally:
        decode.close()
        liar.thread.stop()


def test_a_peer_that_falls_silent(made, monkeypatch):
    monkeypatch.setattr(connection_module, "SILENCE", 1.0)

    async def silent(c, name):
        await asyncio.sleep(30)

    decode = Side(made, "splitwise:whole_below=1")
    decode.connect()
    liar = Liar(decode.fingerprint, silent)
    try:
        assert split(decode, decode, liar.address, REQUEST)["a", 0] == alone(made, REQUEST)[0]
        assert "silent" in decode.said[0]
    finally:
        decode.close()
        liar.thread.stop()


@pytest.mark.parametrize("sent", [[], [first], [first, lambda n: kv(n, caches(layers=1), layers=[0, 1])]])
def test_a_peer_that_lives_and_sends_no_more(made, monkeypatch, sent):
    """Nothing, a first token alone, or a part of the cache; then signs of life."""
    monkeypatch.setattr(client_module, "PATIENCE", 0.5)
    monkeypatch.setattr(connection_module, "PING", 0.1)

    async def idle(c, name):
        for frame in sent:
            c.send(*frame(name))
        await c.pump()

    decode = Side(made, "splitwise:whole_below=1")
    decode.connect()
    liar = Liar(decode.fingerprint, idle)
    try:
        decode.engine.add(replace(REQUEST, prefill_at=liar.address))
        run([decode], lambda: not decode.engine.groups and not decode.engine.outputs.events)
        assert len([t for e in decode.events for t in e.tokens]) == 6
        assert ["sent nothing of some prompts" in line for line in decode.said] == [True]
        assert decode.count("prompts_total", result="lost") == 1
        assert decode.count("peers_refused_total") == 0
        decode.idle()
    finally:
        decode.close()
        liar.thread.stop()


def test_a_recorded_greeting_opens_nothing(made):
    """What a decode server once sent does not make another one of whoever repeats it."""
    with pair(made) as (prefill, decode, address):
        host, port = address.split(":")
        heard = []

        async def relayed():
            async def serve(reader, writer):
                heard.append(await reader.read(1 << 16))
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            decode.client.ask(at, Prompt(REQUEST, 0, 0, len(PROMPT)))
            while not heard:
                await asyncio.sleep(0.01)
            server.close()

        asyncio.run(relayed())
        with socket.create_connection((host, int(port))) as s:
            s.sendall(heard[0])
            assert s.recv(1 << 16)  # the prefill server's own greeting: the recorded one was genuine
            s.sendall(heard[0])
            run([prefill], lambda: prefill.said)
        assert "frame 0 where frame 1 was due" in prefill.said[0]
        assert not prefill.engine.stats().steps


ASKED = {
    "no prompt": ({}, {"x": 1}),
    "tokens that are none": ({"tokens": torch.tensor([5, 10**6])}, {}),
    "no tokens": ({"tokens": torch.tensor([], dtype=torch.int32)}, {}),
    "fractions": ({"tokens": torch.tensor([0.5, 1.5])}, {}),
    "more than there is": ({}, {"upto": 1000}),
    "nothing": ({}, {"start": 20, "upto": 20}),
    "a parameter of another type": ({}, {"sampling": {"temperature": "warm"}}),
    "an unknown parameter": ({}, {"sampling": {"grammar": "x"}}),
    "a temperature out of range": ({}, {"temperature": -1.0}),
    "a salt that is none": ({}, {"salt": "xyz"}),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_decode_server_that_asks_for_nonsense(made, what):
    """It is refused, or told so; another one is served meanwhile."""
    tensors, fields = ASKED[what]
    with pair(made) as (prefill, decode, address):
        host, port = address.split(":")

        async def ask_nonsense():
            c = Connection(*await asyncio.open_connection(host, int(port)))
            await c.greet(SECRET, prefill.fingerprint, asks=True)
            message = {**described(REQUEST, REQUEST.sampling), "start": 0, "upto": 20, **fields}
            if "temperature" in fields:
                message["sampling"] = {**described(REQUEST, REQUEST.sampling)["sampling"], "temperature": -1.0}
            given = tensors or ({"tokens": torch.tensor(PROMPT[:20])} if what != "no prompt" else {"x": torch.zeros(1)})
            await c._write(Kind.PREFILL, message, lambda: given)
            while True:
                try:
                    frame = await c.receive()
                except connection_module.Lost:
                    return "closed"
                if frame.kind is Kind.FAILED:
                    return frame.message["why"]
                assert frame.kind is Kind.PING

        thread = LoopThread("asks")
        thread.start()
        try:
            answer = asyncio.run_coroutine_threadsafe(ask_nonsense(), thread.loop)
            got = split(prefill, decode, address, REQUEST)["a", 0]
            run([prefill, decode], answer.done)
            assert got == alone(made, REQUEST)[0]
            assert (answer.result() == "closed") == any("refused" in line for line in prefill.said)
            assert len(prefill.said) <= 1
            prefill.idle()
        finally:
            thread.stop()


def read(header, body, tag, key):
    """A frame that should be the fourth."""
    body_length(header, 3)
    return unpack(header, body, tag, key)


def test_changed_frames_are_noticed():
    """Whatever byte is changed, added or missing: never read as a frame, nor anything but :class:`BadPeer`."""
    key, draw = b"k" * 32, random.Random(1)
    header, body, tag = pack(Kind.KV, 3, key, {"id": "a"}, {"0.0": torch.arange(8.0)})
    assert unpack(header, body, tag, key).message == {"id": "a"}
    for _ in range(300):
        parts = [bytearray(header), bytearray(body), bytearray(tag)]
        part = draw.choice(parts)
        part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
        with pytest.raises(BadPeer):
            read(*map(bytes, parts), key)


def test_bodies_that_are_no_safetensors():
    key, draw = b"k" * 32, random.Random(2)
    _, body, _ = pack(Kind.KV, 0, key, {"id": "a"}, {"0.0": torch.arange(8.0)})
    for i in range(300):
        changed = bytearray(body)
        for _ in range(1 + i % 4):
            changed[draw.randrange(min(len(changed), 120))] = draw.randrange(256)
        if i % 3 == 0:
            del changed[draw.randrange(len(changed)) :]
        header = HEADER.pack(MAGIC, Kind.KV, 0, len(changed))
        tag = hmac.new(key, header + bytes(changed), hashlib.sha256).digest()
        with contextlib.suppress(BadPeer):  # what still can be read is one
            assert unpack(header, bytes(changed), tag, key).kind is Kind.KV


def test_a_thread_ends_although_a_cancellation_is_lost():
    """As a cancellation is that comes together with what was waited for."""
    thread = LoopThread("stubborn")
    started = threading.Event()

    async def stubborn():
        started.set()
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    thread.start()
    asyncio.run_coroutine_threadsafe(stubborn(), thread.loop)
    assert started.wait(60)
    thread.stop()
    thread.stop()
    assert thread.loop.is_closed()
