"""Peers that lie, garble, stall or come without the secret: one line says so, they are kept out, nothing is lost."""

import asyncio
import random
import socket
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.peers import SECRET, SPEC, Local, checkpoint

from ridgeline.nn import generate as generate_here
from ridgeline.nn import load_checkpoint
from ridgeline.serve.transfer.connection import Lost, connected
from ridgeline.serve.transfer.frames import BadPeer
from ridgeline.spec.errors import UserError
from ridgeline.spec.wire import block_size, wire_bytes
from ridgeline.swarm import peer
from ridgeline.swarm.announcements import Announcement, Table
from ridgeline.swarm.client import Swarm
from ridgeline.swarm.link import Answer, Link, Refused
from ridgeline.swarm.server import Server
from ridgeline.swarm.session import generate, load_ends
from ridgeline.swarm.span import identity
from ridgeline.swarm.wire import decode_rows, encode_rows

PROMPT = [5, 17, 300, 2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path):
    return generate_here(load_checkpoint(path), torch.tensor([PROMPT]), 12)[0, len(PROMPT) :].tolist()


@pytest.fixture
def peers(path):
    found = Local(path)
    yield found
    found.close()


class Corrupt(Server):
    """A server that gives something else than what it computed, from the fourth step on."""

    steps = 0

    async def _step(self, owner, m, tensors):
        answer = await super()._step(owner, m, tensors)
        self.steps += 1
        return answer if self.steps < 4 else await self.wrong(answer.tensors["y"])

    async def wrong(self, y):
        raise NotImplementedError


class NaN(Corrupt):
    async def wrong(self, y):
        return Answer({}, {"y": torch.full_like(y, float("nan"))})


class WrongShape(Corrupt):
    async def wrong(self, y):
        return Answer({}, {"y": y[:, :-1].contiguous()})


class TooMuch(Corrupt):
    async def wrong(self, y):
        return Answer({}, {"y": y.repeat(100, 1)})


class Nothing(Corrupt):
    async def wrong(self, y):
        return Answer({"y": "here you are"})


class Slow(Corrupt):
    async def wrong(self, y):
        await asyncio.sleep(60)


class Confused(Corrupt):
    async def wrong(self, y):
        raise KeyError("lost my mind")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (NaN, "banned for 60 s: it sent y with values that are not finite"),
        (WrongShape, "banned for 60 s: it sent y [1, 31] of torch.float32 where [1, 32] of a floating type was due"),
        (TooMuch, "banned for 60 s: it sent y [100, 32]"),
        (Nothing, "banned for 60 s: it sent no y.codes"),
        (Slow, "avoided for 5 s: it gave no answer to 'step' for 4 s"),
        (Confused, "avoided for 5 s: it failed: KeyError"),
    ],
)
def test_a_server_that_goes_wrong_is_replaced(peers, path, expected, kind, says):
    peers.serve(range(0, 3))
    bad = peers.serve(range(3, 6), kind=kind, throughput=1000.0)
    peers.serve(range(3, 6), throughput=10.0)
    client = peers.client(patience=4.0)
    assert list(generate(load_ends(path), client, PROMPT, 12)) == expected
    assert bad.steps >= 4
    (line,) = [x for x in peers.lines if "banned" in x or "avoided" in x]
    assert says in line
    assert bad.address in line


def test_other_weights_are_never_asked(peers, path, expected, tmp_path):
    """The same architecture, trained differently: the announced hashes give it away."""
    other = checkpoint(tmp_path / "other", seed=4)
    peers.serve(range(0, 6))
    wrong = peers.serve(range(0, 6), path=other, throughput=1000.0)
    client = peers.client()
    assert list(generate(load_ends(path), client, PROMPT, 12)) == expected
    assert not wrong.worker.batches
    assert [x for x in peers.lines if "banned" in x] == [
        f"server {wrong.address} banned for 60 s: it has other weights in block 0"
    ]


def test_another_architecture_or_secret_does_not_get_in(peers, path, tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "FIRST", 0.5)
    first = peers.serve(range(0, 6))
    other = checkpoint(tmp_path / "other", intermediate_size=96)
    with pytest.raises(UserError, match=r"no peer of the swarm answers at .*another model"):
        peers.serve(range(0, 6), path=other)
    assert len(first.spans()) == 1
    assert any("another model" in line for line in peers.lines)
    with pytest.raises(UserError, match="no peer of the swarm answers"):
        Swarm(path, (first.address,), b"not the secret at all", peers.lines.append)
    assert any("tag is wrong" in line for line in peers.lines)


def ask(peers, server, *questions):
    """Ask a server over one connection → answers, or what was raised."""

    async def run():
        link = await Link.open(server.address, SECRET, identity(server.spec))
        found = []
        for op, message, tensors in questions:
            try:
                found.append(await link.ask(op, {"from": "mallory", **message}, tensors, 2.0))
            except (BadPeer, Refused, Lost) as e:
                found.append(e)
        await link.close()
        return found

    return peers.run(run())


OPEN = ("open", {"session": "s", "start": 0, "stop": 6, "most": 8}, {})


def step(at=0, rows=1, x=None, wire="plain", session="s"):
    given = torch.zeros(rows, SPEC.hidden_size) if x is None else x
    return ("step", {"session": session, "at": at, "rows": rows, "wire": wire}, {"x": given})


@pytest.mark.parametrize(
    ("questions", "says"),
    [
        ([OPEN, step(), step()], "rows from 0 of a sequence, where 1 was due"),
        ([OPEN, step(rows=9)], "9 rows behind 0 of a sequence of 8 at most"),
        ([OPEN, step(rows=5000, x=torch.zeros(1, 32))], "5000 rows, of 4096 at most"),
        ([OPEN, step(x=torch.full((1, 32), float("inf")))], "x with values that are not finite"),
        ([OPEN, step(x=torch.zeros(1, 33))], "x [1, 33]"),
        ([OPEN, step(x=torch.zeros(1, 32, dtype=torch.int64))], "x [1, 32] of torch.int64"),
        ([OPEN, step(wire="pickle")], "unknown format"),
        ([OPEN, OPEN], "opened a sequence twice"),
        ([("exec", {}, {})], "'exec'"),
        ([("open", {"session": 3}, {})], "no session"),
        ([("open", {"session": "s", "start": -1, "stop": 2, "most": 3}, {})], "-1 as start"),
        ([("table", {"table": [{"record": {}, "ttl": 1}]}, {})], "an announcement that is none"),
        ([("table", {"table": "x"}, {})], "announcements that are none"),
        (
            [("forward", {"batch": 1, "length": 1, "start": 0, "stop": 6, "wire": "plain"},
              {"x": torch.zeros(1, 1, 32), "lora.a.layers.0.nothing": torch.zeros(1, 1),
               "lora.b.layers.0.nothing": torch.zeros(1, 1)})],
            "which is not here",
        ),
    ],
)  # fmt: skip
def test_a_client_that_breaks_the_rules_is_cut_off(peers, path, expected, questions, says):
    server = peers.serve(range(0, 6))
    found = ask(peers, server, *questions)
    assert isinstance(found[-1], Lost)
    lines = [x for x in peers.lines if "refused" in x]
    assert len(lines) == 1
    assert says in lines[0]
    assert "mallory" in lines[0]
    assert isinstance(ask(peers, server, OPEN)[0], Lost), "it is banned"
    assert list(generate(load_ends(path), peers.client(), PROMPT, 12)) == expected


def test_no_is_an_answer(peers):
    server = peers.serve(range(0, 3), cache_tokens=64)
    found = ask(
        peers, server, OPEN, ("open", {"session": "a", "start": 0, "stop": 3, "most": 65}, {}),
        ("open", {"session": "b", "start": 0, "stop": 3, "most": 40}, {}),
        ("open", {"session": "c", "start": 0, "stop": 3, "most": 40}, {}), step(session="none"),
    )  # fmt: skip
    assert [isinstance(x, Refused) for x in found] == [True, True, False, True, True]
    assert "the cache has room for 16 tokens, not 40" in str(found[3])


def test_bytes_that_are_no_frames_are_dropped(peers, path, expected):
    server = peers.serve(range(0, 6))
    host, _, port = server.address.partition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 4, random.Random(0).randbytes(4000), b"RLK1" + b"\xff" * 60):
        with socket.create_connection((host, int(port))) as s:
            s.sendall(garbage)
            s.settimeout(5)
            try:
                while s.recv(100):
                    pass
            except ConnectionError:
                pass
    assert len([x for x in peers.lines if "refused" in x]) >= 1
    assert list(generate(load_ends(path), peers.client(), PROMPT, 12)) == expected


# ---- announcements and the wire, without a network ------------------------------------------------------------------


def announced(**changes):
    values = {"peer": "0" * 16, "number": 1, "address": "h:1", "start": 0, "stop": 2, "weights": ["0" * 16] * 2,
              "throughput": 1.0, **changes}  # fmt: skip
    return Announcement(**values)


def test_records_expire_by_age_whatever_clocks_say():
    """Two machines whose clocks are a day apart; a record that is told again does not live longer."""
    now = [0.0]
    a, b = Table(4, 10.0, lambda: now[0]), Table(4, 10.0, lambda: now[0] + 86400)
    a.put(announced())
    now[0] = 6.0
    b.merge(a.share())
    a.merge(b.share())
    assert len(a.live()) == len(b.live()) == 1
    now[0] = 10.5
    assert a.live() == b.live() == []
    b.merge(a.share())
    assert b.live() == []


def test_halves_of_a_split_network_go_on_and_meet_again(peers, path, expected):
    """Two servers on each side, each with all blocks; the second side joined through the first."""
    servers = [peers.serve(range(0, 6)) for _ in range(4)]
    sides = [servers[:2], servers[2:]]
    peers.run(asyncio.sleep(0.5))
    split = [True]

    def partition(server, others):
        ask = server.links.ask

        async def asked(address, *args, **more):
            if split[0] and address in {s.address for s in others}:
                raise Lost("no route to host")
            return await ask(address, *args, **more)

        server.links.ask = asked

    for side, others in (sides, sides[::-1]):
        for server in side:
            partition(server, others)

    def sees(count):
        deadline = time.monotonic() + 30
        while any(len(s.spans()) != count for s in servers):
            assert time.monotonic() < deadline, [len(s.spans()) for s in servers]
            time.sleep(0.05)

    sees(2)
    client = peers.client()
    assert list(generate(load_ends(path), client, PROMPT, len(expected))) == expected
    split[0] = False
    sees(4)


def test_the_newest_announcement_counts_and_one_can_leave():
    table = Table(4, 10.0)
    table.put(announced(number=3, start=1, stop=3))
    table.put(announced(number=2))
    assert [a.start for a in table.live()] == [1]
    table.put(announced(number=4, left=True))
    table.put(announced(number=3))
    assert table.live() == []
    table.put(announced(peer="1" * 16, stop=5, weights=["0" * 16] * 5))
    assert table.live() == [], "the model has four blocks"


@pytest.mark.parametrize(
    "change",
    [{"throughput": float("nan")}, {"throughput": -1.0}, {"stop": 0}, {"weights": []}, {"peer": "x"}, {"start": "0"},
     {"address": "nowhere"}, {"more": 1}, {"number": -1}, {"running": 1.5}],
)  # fmt: skip
def test_announcements_that_make_no_sense_are_refused(change):
    record = {**announced().model_dump(), **change}
    with pytest.raises(BadPeer):
        Table(4, 10.0).merge([{"record": record, "ttl": 5}])


@settings(deadline=None)
@given(rows=st.integers(1, 5), width=st.sampled_from([32, 96, 257, 1000]), scale=st.floats(1e-6, 1e6))
def test_rows_survive_the_wire_alone_and_together(rows, width, scale):
    x = scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    tensors = encode_rows("x", x, "blockwise8")
    assert sum(t.nbytes for t in tensors.values()) == wire_bytes(rows, width, "blockwise8")
    y = decode_rows("x", tensors, (rows, width), x.dtype)
    one = torch.cat([decode_rows("x", encode_rows("x", r[None], "blockwise8"), (1, width), x.dtype) for r in x])
    assert torch.equal(y, one)
    peaks = x.view(-1, block_size(width)).abs().amax(1, keepdim=True)
    assert bool(((x - y).view(-1, block_size(width)).abs() <= 0.04 * peaks).all())


@pytest.mark.parametrize("address", ["nohost", "host:", ":7", "host:seven"])
def test_an_address_without_host_or_port_is_said(address):
    with pytest.raises(Lost, match="an address is HOST:PORT"):
        asyncio.run(connected(address, 1.0, None))
