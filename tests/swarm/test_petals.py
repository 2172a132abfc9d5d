"""Generation and fine-tuning through peers: the tokens and gradients of one machine, whoever dies meanwhile."""

import threading

import pytest
import torch
from tests.swarm.peers import SPEC, Local, Process, checkpoint

from ridgeline.jobs.launch import free_port
from ridgeline.nn import generate as generate_here
from ridgeline.nn import load_checkpoint
from ridgeline.nn.model.loss import token_loss
from ridgeline.spec.errors import UserError
from ridgeline.swarm.remote import RemoteModel
from ridgeline.swarm.session import Session, generate, load_ends, new_tokens
from ridgeline.swarm.span import updated

PROMPT = [5, 17, 300, 2, 41, 9, 77]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(path):
    return load_checkpoint(path)


@pytest.fixture
def peers(path):
    found = Local(path)
    yield found
    found.close()


def joined(peers, count):
    """A client that knows of so many servers."""
    client = peers.client()
    while len(client.table.live()) < count:
        client.refresh()
    return client


def alone(whole, prompt, count):
    return generate_here(whole, torch.tensor([prompt]), count)[0, len(prompt) :].tolist()


def test_kill_9_of_a_span_mid_generation_gives_the_same_tokens(peers, path, whole, tmp_path):
    """Four processes; one on the way is killed after ten tokens."""
    port = str(free_port())
    first = Process(path, tmp_path, "--blocks", "0-1", "--port", port)
    join = ("--join", f"127.0.0.1:{port}")
    others = [Process(path, tmp_path, "--blocks", b, *join) for b in ("2-3", "4-5", "1-5")]
    try:
        peers.addresses = [first.address()]
        addresses = [o.address() for o in others]
        client = joined(peers, 4)
        ends = load_ends(path)
        with Session(client, 60) as session:
            produced, tokens = [], new_tokens(ends, session, torch.tensor(PROMPT))
            for _ in range(10):
                produced.append(next(tokens))
            before = list(session.servers)
            at = next(o for o, a in zip(others, addresses, strict=True) if a in before)
            at.kill()
            for _ in range(30):
                produced.append(next(tokens))
            after = list(session.servers)
        assert produced == alone(whole, PROMPT, 40)
        assert after != before
        assert len(session.replays) == 1
        assert session.replays[0][1] == len(PROMPT) + 10, "the recovery is one prefill of everything so far"
        assert sum("avoided" in line for line in peers.lines) == 1
    finally:
        for p in (first, *others):
            p.close()


def test_tokens_of_several_servers_are_those_of_one_machine(peers, whole, path):
    for blocks in (range(0, 2), range(2, 5), range(5, 6)):
        peers.serve(blocks)
    client, ends = peers.client(), load_ends(path)
    assert list(generate(ends, client, PROMPT, 40)) == alone(whole, PROMPT, 40)
    long = [i % 500 for i in range(200)]
    assert list(generate(ends, client, long, 20)) == alone(whole, long, 20)


def test_8_bits_on_the_wire_are_close_and_a_fourth_of_the_bytes(peers, whole):
    """Of the first logits: the same whether the prompt is sent at once or row by row."""
    peers.serve(range(0, 3))
    peers.serve(range(3, 6))
    x = whole.embed(torch.tensor([PROMPT]), None, None)[0]
    outs, sent = {}, {}
    for wire in ("plain", "blockwise8"):
        client = peers.client(wire=wire)
        with Session(client, 20) as s, Session(client, 20) as t:
            outs[wire] = s.step(x)
            one_by_one = torch.cat([t.step(row[None]) for row in x])
        assert torch.allclose(outs[wire], one_by_one, rtol=0, atol=1e-4 * float(outs[wire].abs().max()))
        sent[wire] = client.sent
    error = (outs["blockwise8"] - outs["plain"]).norm() / outs["plain"].norm()
    assert 1e-4 < error < 0.1, "rounded to 8 bits four times"
    assert sent["plain"] > 3.4 * sent["blockwise8"], "1 byte and 4/32 of a byte for the scales, instead of 4"


def test_many_clients_are_batched_and_none_sees_another(peers, whole, path):
    server = peers.serve(range(0, 6))
    client, ends = peers.client(), load_ends(path)
    prompts = [[i + 1, 2 * i + 3, 7] for i in range(6)]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = list(generate(ends, client, prompts[i], 25))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(found[i] == alone(whole, prompts[i], 25) for i in range(6))
    assert max(server.worker.batches) > 1, "steps of several clients were computed together"
    steps = sum(size * times for size, times in server.worker.batches.items())
    assert steps == 6 * 25
    peers.run(_idle(server))
    assert server.engine.room == 2048
    assert server.engine.blocks.used == 0


async def _idle(server):
    import asyncio

    while server._held:
        await asyncio.sleep(0.01)
    await asyncio.wrap_future(server.worker.call(lambda: None))


def test_a_newcomer_takes_the_worst_covered_blocks_and_the_next_load(peers, whole, path):
    peers.serve(range(0, 4), throughput=1.0)
    old = peers.serve(range(4, 6), throughput=1.0)
    client, ends = peers.client(), load_ends(path)
    with Session(client, 50) as first:
        list(zip(range(5), new_tokens(ends, first, torch.tensor(PROMPT)), strict=False))
        new = peers.serve(2, throughput=300.0)
        assert (new.engine.start, new.engine.stop) == (0, 2), "equal throughputs: the first window"
        faster = peers.serve(2, throughput=300.0)
        assert (faster.engine.start, faster.engine.stop) == (2, 4), "then the worst of the rest"
        last = peers.serve(2, throughput=300.0)
        assert (last.engine.start, last.engine.stop) == (4, 6)
        client.refresh()
        with Session(client, 50) as second:
            list(zip(range(5), new_tokens(ends, second, torch.tensor(PROMPT)), strict=False))
            assert last.address in second.servers
            assert old.address not in second.servers


def test_a_server_moves_to_where_the_bottleneck_is(peers):
    """Two on the first half, of whom one is enough; the second half has a slow one."""
    peers.serve(range(0, 3), throughput=100.0)
    peers.serve(range(3, 6), throughput=10.0)
    second = peers.serve(range(0, 3), throughput=100.0, balance_every=0.3)
    peers.run(_moved(second))
    assert (second.engine.start, second.engine.stop) == (3, 6)
    assert second.moves == 1


async def _moved(server):
    import asyncio

    for _ in range(500):
        if server.moves:
            return
        await asyncio.sleep(0.02)


def test_forward_and_backward_through_three_servers_equal_local(peers, whole, path):
    """Soft prompt and low-rank updates: losses and gradients of the model on one machine."""
    for blocks in (range(0, 2), range(2, 4), range(4, 6)):
        peers.serve(blocks)
    client, ends = peers.client(), load_ends(path)
    ids = torch.randint(SPEC.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    model = RemoteModel(ends, client, prompt_tokens=4, rank=2)
    with torch.no_grad():
        for update in model.updates:
            update.add_(0.05 * torch.randn(update.shape, generator=torch.Generator().manual_seed(update.numel())))
    loss = model(ids, ids.roll(-1, 1))
    loss.backward()
    remote = [p.grad.clone() for p in model.parameters()]

    own = [p.detach().clone().requires_grad_() for p in model.parameters()]
    lora = dict(zip(model.names, zip(own[1::2], own[2::2], strict=True), strict=True))
    x = torch.cat([own[0].expand(3, -1, -1), whole.embed(ids, None, None)], 1)
    labels = torch.cat([torch.full((3, 4), -100), ids.roll(-1, 1)], 1)
    with updated(whole, lora):
        embed, whole.embed = whole.embed, None
        try:
            total, count = token_loss(whole(x, return_hidden=True), whole.head, labels)
        finally:
            whole.embed = embed
    (total / count).backward()
    assert loss.item() == pytest.approx((total / count).item(), rel=1e-5)
    for ours, theirs in zip(remote, own, strict=True):
        assert torch.allclose(ours, theirs.grad, rtol=1e-3, atol=1e-5 * float(theirs.grad.abs().max()) + 1e-8)


def test_a_server_that_goes_between_forward_and_backward_is_replaced(peers, path):
    peers.serve(range(0, 2))
    gone = peers.serve(range(2, 6), throughput=1000.0)
    peers.serve(range(2, 4))
    peers.serve(range(4, 6))
    client, ends = peers.client(), load_ends(path)
    ids = torch.randint(SPEC.vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = []
    for kill in (False, True):
        model = RemoteModel(ends, client, prompt_tokens=3)
        loss = model(ids, ids.roll(-1, 1))
        if kill:
            peers.run(gone.listener.close())
            peers.run(gone.stop())
        loss.backward()
        losses.append((loss.item(), model.prompt.grad.clone()))
    assert losses[0][0] == losses[1][0]
    assert torch.allclose(losses[0][1], losses[1][1], rtol=1e-3, atol=1e-7)


def test_missing_blocks_are_a_users_error(peers, path):
    peers.serve(range(0, 3))
    client = peers.client(patience=0.5)
    with pytest.raises(UserError, match=r"no server has blocks \[3, 4, 5\]"):
        list(generate(load_ends(path), client, PROMPT, 2))
