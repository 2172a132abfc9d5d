"""The predicted transfer of a cache: bytes as two engines count them, time as a queue of layers on a link gives."""

import pytest
import torch
from tests.serving import ask, experiment, model, spec

from ridgeline.predict.serving.kv_transfer import kv_transfer
from ridgeline.spec.device import Link

LINK = Link(name="wire", bandwidth=1e9, latency=1e-5)


@pytest.mark.parametrize("plan", [(), ("kv_quant:dtype=fp8",), ("kv_quant:dtype=int8",), ("kv_quant:dtype=int4",)])
def test_bytes_are_those_that_servers_count(plan):
    pytest.importorskip("fastapi")
    from tests.serve.transferring import pair, split

    made = model(dtype=torch.float32, head_dim=16)
    with pair(made, None, *plan) as (prefill, decode, address):
        split(prefill, decode, address, ask("a", list(range(70)), 4))
        counted = decode.count("received_bytes_total")
    assert kv_transfer(experiment(made.spec, plan), 70, LINK, 0.1).nbytes == counted


@pytest.mark.parametrize("compute", [0.0, 1e-4, 1e-3, 0.1])
@pytest.mark.parametrize("layers", [1, 2, 9])
def test_exposed_time_is_that_of_a_queue(compute, layers):
    """Layer by layer on a link that sends one at a time."""
    e = experiment(spec(num_layers=layers), ())
    t = kv_transfer(e, 50, LINK, compute)
    each = LINK.latency + t.nbytes / layers / LINK.bandwidth
    free = 0.0
    for layer in range(layers):
        free = max(free, (layer + 1) * compute / layers) + each
    assert t.seconds == pytest.approx(layers * each)
    assert t.exposed == pytest.approx(free - compute)


def test_at_once_everything_is_exposed():
    e = experiment(spec(num_layers=4), ())
    t = kv_transfer(e, 50, LINK, 1.0, layerwise=False)
    assert t.exposed == t.seconds == pytest.approx(1e-5 + t.nbytes / 1e9)
    assert kv_transfer(e, 50, LINK, 1.0).exposed < t.exposed
