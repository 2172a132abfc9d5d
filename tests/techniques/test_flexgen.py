"""FlexGen: the same tokens wherever weights and cache rest, each weight read once for all batches, a linear program
that finds what a grid finds, and a policy that is settled within the memories."""

import os
import random
from itertools import product

import pytest
import torch
from tests.compressing import LLAMA, MIXTRAL, checkpoint
from tests.crossings import crossing
from tests.techniques.test_zero_inference import built, tokens

from ridgeline import catalog, experiments
from ridgeline.graph import decode_graph
from ridgeline.nn.memory.cache_tiers import CacheDisk
from ridgeline.nn.memory.hidden_tiers import HiddenStates
from ridgeline.nn.memory.layer_stream import LayerStream
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.model.attention import BACKENDS, LayerCache
from ridgeline.nn.model.generate import decode, make_cache, prefill
from ridgeline.nn.model.mask import Mask
from ridgeline.predict import predict
from ridgeline.predict.common import rewritten
from ridgeline.spec.device import Cluster, Host, Link
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.memory import flexgen_torch
from ridgeline.techniques.memory.flexgen import spread
from ridgeline.techniques.memory.flexgen_policy import KINDS, TIERS, PassCosts, PolicyCosts, place
from ridgeline.techniques.registry import resolve

DEEP = {**LLAMA, "num_layers": 5}
PLACES = {
    "device": "weights_device=100,weights_host=0,cache_device=100,cache_host=0",
    "host": "weights_device=0,weights_host=100,cache_device=0,cache_host=100",
    "disk": "weights_device=0,weights_host=0,cache_device=0,cache_host=0",
    "mixed": "weights_device=40,weights_host=30,cache_device=30,cache_host=40",
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("deep") / "m", DEEP)


@pytest.fixture(scope="module")
def want(deep):
    return {b: answers(built(deep, batch_size=b)[1], b) for b in (4,)}


@torch.inference_mode()
def answers(model, batch, count=6):
    """Greedy tokens and last logits of ``batch`` sequences; twice, as another generation must begin anew."""
    prompt = torch.randint(258, (batch, 8), generator=torch.Generator().manual_seed(1))
    runs = []
    for _ in range(2):
        cache = make_cache(model, batch, 8 + count)
        found = [prefill(model, prompt, cache)]
        for _ in range(count - 1):
            found.append(decode(model, found[-1].argmax(-1), cache))
        runs.append(torch.stack(found))
    assert torch.equal(*runs)
    return runs[0]


HOW = ["overlap=true", "overlap=false", "activations_device=0,activations_host=100",
       "activations_device=25,activations_host=25"]  # fmt: skip


@pytest.mark.parametrize(("where", "batches", "how"), [
    pytest.param(*case, marks=crossing("+".join(map(str, case)), 2)) for case in product(PLACES, [1, 2, 4], HOW)
])  # fmt: skip
def test_the_same_tokens(deep, want, tmp_path, where, batches, how):
    """Logits agree to rounding: a product of fewer rows may sum in another order."""
    plan = f"flexgen:batches={batches},{PLACES[where]},{how},path={tmp_path / 'scratch'}"
    got = answers(built(deep, plan, batch_size=4)[1], 4)
    torch.testing.assert_close(got, want[4], rtol=1e-4, atol=1e-4)
    assert torch.equal(got.argmax(-1), want[4].argmax(-1))
    if where in ("disk", "mixed"):
        assert os.listdir(tmp_path / "scratch") == []


@pytest.mark.parametrize("beside", ["flash_attention", "kv_quant:dtype=int8", "kv_quant:dtype=int4"])
def test_beside_what_changes_the_cache(deep, beside):
    want = answers(built(deep, beside, batch_size=4)[1], 4)
    plan = "flexgen:batches=2,weights_device=0,weights_host=100,cache_device=50,cache_host=50"
    got = answers(built(deep, beside, plan, batch_size=4)[1], 4)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_mixture(tmp_path):
    source = checkpoint(tmp_path / "m", {**MIXTRAL, "num_layers": 3})
    want = tokens(built(source)[1])
    plan = f"flexgen:batches=2,weights_device=0,weights_host=34,cache_device=0,cache_host=0,path={tmp_path / 's'}"
    assert torch.equal(tokens(built(source, plan)[1])[0], want[0])


def test_weights_are_read_once_for_all_batches(deep, monkeypatch):
    """Row by row, every batch of its own reads all weights in every step: the zig-zag reads 1/n of that."""
    read, streams = {}, []

    class Seen(LayerStream):
        def __post_init__(self):
            super().__post_init__()
            streams.append(self)

    monkeypatch.setattr(flexgen_torch, "LayerStream", Seen)
    for n in (1, 2, 4):
        _, model = built(deep, f"flexgen:batches={n},weights_device=0,weights_host=100,cache_device=100,cache_host=0",
                         batch_size=4)  # fmt: skip
        answers(model, 4)
        read[n] = streams[-1].bytes
    assert read[1] == read[2] == read[4] == 2 * 6 * sum(s.size for s in streams[-1].sources)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("batches", [1, 4])
def test_no_more_memory_on_the_device_than_predicted(deep, tmp_path, where, batches):
    """Weights and their buffers; the cache's part of it."""
    plan = f"flexgen:batches={batches},{PLACES[where]},path={tmp_path / 'scratch'}"
    e, model = built(deep, plan, batch_size=4)
    meter = Meter(model)
    meter.register(model.parameters(), "parameters")
    with meter:
        answers(model, 4)
    memory = {m.category: m.bytes for m in predict(e).memory}
    slack = 64 * 12 * 5 + 4 * 4096
    assert meter.peak.categories["parameters"] == pytest.approx(memory["parameters"], abs=slack)
    one = 2 * 4 // batches * 2 * 8 * 14 * 4  # a layer's cache of a part
    tiers = [t for row in resolve_tiers(e) for t in row]
    assert memory.get("kv_cache", 0.0) == pytest.approx(one * tiers.count("device"))


def resolve_tiers(e):
    from ridgeline.techniques.registry import techniques_of

    (t,) = [t for t in techniques_of(e.plan) if t.card.name == "flexgen"]
    return t.cache_tiers(e.model.num_layers)


def test_tiers_are_spread_evenly():
    assert spread(8, 0.5, 0.25) == ["device", "disk", "device", "host"] * 2
    for count, device, host in ((7, 0.3, 0.3), (32, 0.0, 0.5), (5, 1.0, 0.0), (6, 0.0, 1.0), (3, 0.34, 0.66)):
        tiers = spread(count, device, host)
        assert len(tiers) == count
        assert tiers.count("device") == int(count * device + 1e-9)
        if device + host == 1:
            assert "disk" not in tiers


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("where", ["disk", "mixed"])
def test_requests_to_the_disk_are_those_that_are_predicted(deep, tmp_path, monkeypatch, where, batches):
    """Of a decode step, caches and hidden states: every part has its own in every layer, however small."""
    plan = f"flexgen:batches={batches},{PLACES[where]},activations_device=0,activations_host=0,path={tmp_path / 's'}"
    e, model = built(deep, plan, batch_size=4)
    made = dict.fromkeys(("disk_read", "disk_write"), 0)
    calls = {"disk_read": os.preadv, "disk_write": os.pwritev}

    def counted(kind):
        def call(*args):
            made[kind] += 1
            return calls[kind](*args)

        return call

    with torch.inference_mode():
        cache = make_cache(model, 4, 14)
        logits = decode(model, prefill(model, torch.randint(258, (4, 8)), cache).argmax(-1), cache)
        model.cache_of._disk.settle()
        monkeypatch.setattr(os, "preadv", counted("disk_read"))
        monkeypatch.setattr(os, "pwritev", counted("disk_write"))
        for _ in range(4):
            logits = decode(model, logits.argmax(-1), cache)
        model.cache_of._disk.settle()
    e, techniques = resolve(e)
    want = dict.fromkeys(made, 0.0)
    for b in rewritten(decode_graph(e), e, techniques).blocks:
        for op in b.gather_forward:
            if op.kind in want:
                want[op.kind] += b.repeat * op.requests
    # Hidden states also rest between the embedding and the first layer; the part that is read ahead at a pass's end is
    # of no use to the next. What is read ahead may still be under way, before and after: at most four requests.
    beside = {"disk_read": batches + (batches > 1), "disk_write": batches}
    assert {k: n / 4 for k, n in made.items()} == pytest.approx({k: n + beside[k] for k, n in want.items()}, abs=1)


# ---- the disk's cache ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_caches_on_disk_hold_what_others_hold(tmp_path):
    """Two layers' caches, steps of several tokens, a generation that is broken off, and a longer one after it."""
    draw = torch.Generator().manual_seed(3)
    disk = CacheDisk(tmp_path)
    for steps, most in (([5, 1, 1, 2], 9), ([3], 12), ([4, 1, 1, 1, 1], 40)):
        disk.clear()
        shape = (2, 2, most, 8)
        ours = [disk.cache(shape, torch.float32) for _ in range(2)]
        plain = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
        for n in steps:
            for mine, theirs in zip(ours, plain, strict=True):
                q = torch.randn(2, 4, n, 8, generator=draw)
                k, v = (torch.randn(2, 2, n, 8, generator=draw) for _ in range(2))
                total = theirs.length + n
                allowed = torch.ones(n, total).tril(total - n).bool()
                mask = Mask(torch.zeros(n, total).masked_fill(~allowed, float("-inf")), False)
                got = mine.attend(BACKENDS["naive"], q, k, v, mask)
                torch.testing.assert_close(got, theirs.attend(BACKENDS["naive"], q, k, v, mask))
    disk.settle()
    assert os.listdir(tmp_path) == []
    assert disk.read_bytes % 4096 == disk.written_bytes % 4096 == 0


def test_a_disk_without_room(tmp_path):
    with pytest.raises(UserError, match="are needed"):
        CacheDisk(tmp_path).cache((1 << 20, 64, 1 << 20, 128), torch.float32)


# ---- the policy ------------------------------------------------------------------------------------------------------


def grid(c, step=0.05):
    """The least seconds on a grid of shares."""
    points = [i * step for i in range(round(1 / step) + 1)]
    best = None
    thirds = [(a, b) for a, b in product(points, repeat=2) if a + b <= 1 + 1e-9]
    for shares in product(thirds, repeat=3):
        x = {f"{kind}_{tier}": share for kind, (device, host) in zip(KINDS, shares, strict=True)
             for tier, share in zip(TIERS, (device, host, max(0.0, 1 - device - host)), strict=True)}  # fmt: skip
        if c.fits(x):
            seconds = c.seconds(x)
            best = seconds if best is None else min(best, seconds)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_linear_program_finds_what_a_grid_finds(seed):
    draw = random.Random(seed)

    def costs():
        return PassCosts(*(draw.uniform(0.1, 3) for _ in range(7)))

    c = PolicyCosts(costs(), costs(), draw.randint(1, 40), draw.uniform(1, 20), draw.uniform(1, 20), draw.uniform(1, 9),
                    draw.uniform(2, 12), draw.uniform(5, 30), serial=bool(seed % 2))  # fmt: skip
    found = place(c)
    assert c.fits(found)
    for kind in KINDS:
        assert sum(found[f"{kind}_{t}"] for t in TIERS) == pytest.approx(1)
    on_grid = grid(c, 0.2)
    assert c.seconds(found) <= on_grid * (1 + 2e-6)  # of which the second program gives up a millionth
    assert c.seconds(found) >= 0.75 * on_grid  # a grid of fifths cannot be far off


def test_all_on_the_device_where_it_fits():
    c = PolicyCosts(PassCosts(1, 2, 3, 1, 1, 1, 1), PassCosts(1, 2, 3, 1, 1, 1, 1), 10, 5.0, 5.0, 1.0, 11.0)
    found = place(c)
    assert c.seconds(found) == pytest.approx(11.0)


def test_what_takes_no_time_still_rests_near():
    """Where computation hides everything, nothing goes to disk that has room in host memory."""
    slow = PassCosts(100, 2, 3, 0, 1, 1, 1)
    c = PolicyCosts(slow, slow, 10, 5.0, 5.0, 1.0, 2.0, 8.0)
    found = place(c)
    assert c.seconds(found) == pytest.approx(1100)
    assert sum(found[f"{kind}_disk"] * getattr(c, kind) for kind in KINDS) == pytest.approx(1.0)


def t4(host=208e9, disk=2e9):
    """The FlexGen paper's machine: a T4 with 208 GB of host memory and an NVMe disk of 2 GB/s."""
    device = catalog.device("t4").model_copy(update={
        "host": Host(name="n1-standard-32", cores=32, memory_bytes=host, memory_bandwidth=1e11),
        "disk": Link(name="nvme", bandwidth=disk, latency=1e-4),
    })  # fmt: skip
    return Cluster(device=device)


def predicted(*plan, model="opt-6.7b", batch=64, on=None):
    w = {"kind": "generate", "batch_size": batch, "prompt_len": 512, "output_len": 32}
    e = experiments.make(model, on or t4(), w, ["flash_attention", *plan])
    return e, predict(e)


def test_what_it_settles_fits_and_beats_others():
    """No other policy of a sample is predicted faster by more than what whole percents and layers round off."""
    e, best = predicted("flexgen")
    assert best.status == "ok"
    assert experiments.make("opt-6.7b", t4(), e.workload.model_dump(exclude_none=True), e.plan.strings()).id == e.id
    rate = best.metrics["tokens_per_s"].value
    draw = random.Random(0)
    for _ in range(20):
        wd, cd = draw.randint(0, 100), draw.randint(0, 100)
        plan = (f"flexgen:batches={draw.choice((1, 2, 4, 8))},weights_device={wd},weights_host={100 - wd},"
                f"cache_device={cd},cache_host={100 - cd}")  # fmt: skip
        other = predicted(plan)[1]
        if other.status == "ok":
            assert other.metrics["tokens_per_s"].value <= rate * 1.1


def test_the_disk_is_used_where_host_memory_is_short():
    e, r = predicted("flexgen", on=t4(host=16e9))
    options = next(c for c in e.plan.calls if c.name == "flexgen").options
    assert r.status == "ok"
    assert (
        min(options["weights_device"] + options["weights_host"], options["cache_device"] + options["cache_host"]) < 100
    )
    assert r.metrics["host_bytes"].value <= 16e9
    assert r.metrics["tokens_per_s"].value < predicted("flexgen")[1].metrics["tokens_per_s"].value


def test_refusals():
    shares = "weights_device=80,weights_host=30,cache_device=0,cache_host=0"
    for plan, why in (("flexgen:batches=3", "no multiple of batches=3"),
                      ("flexgen:weights_device=50", "without the other shares"),
                      ("flexgen:activations_device=80,activations_host=50", "without the other shares"),
                      (f"flexgen:batches=1,{shares}", "110 percent")):  # fmt: skip
        with pytest.raises(Incompatible, match=why):
            predicted(plan)
    with pytest.raises(Incompatible, match="no form on disk"):
        predicted("flexgen:batches=1,weights_device=100,weights_host=0,cache_device=0,cache_host=0", "kv_quant")


# ---- hidden states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [["disk"], ["disk", "disk", "host"], ["device", "disk", "host", "disk"]])
@pytest.mark.parametrize("ahead", [True, False])
def test_hidden_states_are_read_as_they_were_stored(tmp_path, tiers, ahead):
    """Through layers, passes of other lengths, and a pass that is broken off with a part read ahead."""
    draw = torch.Generator().manual_seed(0)
    states = HiddenStates(tiers, tmp_path, torch.device("cpu"), ahead)
    for length, layers in ((3, 2), (1, 1), (40, 2), (1, 3)):
        held = [torch.randn(2, length, 8, generator=draw) for _ in tiers]
        for i, x in enumerate(held):
            states[i] = x.clone()
        for _ in range(layers):
            for i, x in enumerate(held):
                assert torch.equal(states[i], x)
                states[i] = held[i] = x + 1
        if length != 40:  # there, the last layer's parts are never asked for
            assert all(torch.equal(states[i], x) for i, x in enumerate(held))
        states.clear()
    assert os.listdir(tmp_path) == []
    assert states.disk.written_bytes == 4096 * tiers.count("disk") * (3 + 2 + 3 + 4)


def test_hidden_states_on_a_full_disk(tmp_path):
    states = HiddenStates(["disk"], tmp_path, torch.device("cpu"), True)
    states.dtype = torch.float32
    with pytest.raises(UserError, match="are needed"):
        states[0] = torch.empty(1).expand(1 << 30, 1 << 20)


def test_where_hidden_states_rest_is_predicted():
    """A prompt's hidden states of all batches leave the device, and cost the link there and back in every layer."""
    shares = "flexgen:batches=4,weights_device=0,weights_host=100,cache_device=0,cache_host=100"
    one = 16 * 512 * 4096 * 2  # of a batch
    on = predicted(shares)[1]
    found = {where: predicted(f"{shares},activations_device={device},activations_host={host}")[1]
             for where, (device, host) in {"host": (0, 100), "disk": (0, 0), "half": (50, 50)}.items()}  # fmt: skip

    def buffers(r):
        return next((m.bytes for m in r.memory if m.category == "buffers"), 0.0)

    assert buffers(on) - buffers(found["host"]) == pytest.approx(4 * one)
    assert buffers(on) - buffers(found["half"]) == pytest.approx(2 * one)
    assert found["host"].metrics["host_bytes"].value - on.metrics["host_bytes"].value == pytest.approx(4 * one)
    moved = 32 * 2 * 2 * 4 * one  # into and out of attention and feed-forward part of every layer

    def ttft(hidden, weights="weights_device=0,weights_host=100"):
        plan = f"flexgen:batches=4,{weights},cache_device=0,cache_host=100,overlap=false,{hidden}"
        return predicted(plan)[1].metrics["ttft_s"].value

    device, host, disk = (f"activations_device={d},activations_host={h}" for d, h in ((100, 0), (0, 100), (0, 0)))
    weights = 32 * 12 * 4096 * 4096 * 2
    copied = ttft(device) - ttft(device, "weights_device=100,weights_host=0")
    read = ttft(device, "weights_device=0,weights_host=0") - ttft(device)
    assert ttft(host) - ttft(device) == pytest.approx(copied * moved / weights, rel=0.05)
    assert ttft(disk) - ttft(host) == pytest.approx(read * moved / weights, rel=0.05)
