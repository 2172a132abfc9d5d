"""Metrics of every member of a swarm at one of them."""

import re
import socket
import urllib.request

import pytest
from tests.swarm.peers import Local, checkpoint

from ridgeline.jobs.launch import free_port
from ridgeline.spec.errors import UserError
from ridgeline.swarm.metrics import SwarmMetrics


@pytest.fixture
def peers(tmp_path):
    found = Local(checkpoint(tmp_path / "model"))
    yield found
    found.close()


def test_one_peer_shows_all(peers):
    first = peers.serve(range(0, 4))
    second = peers.serve(range(2, 6), throughput=250.0)
    port = free_port()
    stop = SwarmMetrics(first, peers.thread.loop).listen("127.0.0.1", port)
    try:
        peers.run(second.announce())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        stop()
    values = {
        (name, member): float(value)
        for name, member, value in re.findall(r'ridgeline_swarm_(\w+)\{member="(.+?)"\} (\S+)', text)
    }
    for server, blocks, throughput in ((first, 4, 100.0), (second, 4, 250.0)):
        assert values["up", server.address] == 1
        assert values["first_block", server.address] == server.engine.start
        assert values["blocks", server.address] == blocks
        assert values["throughput", server.address] == throughput
        assert values["room_tokens", server.address] == server.engine.room
        assert values["refused", server.address] == 0


def test_a_taken_port_is_said(peers):
    first = peers.serve(range(0, 6))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"nothing can listen at 127.0.0.1:{port}"):
            SwarmMetrics(first, peers.thread.loop).listen("127.0.0.1", port)
