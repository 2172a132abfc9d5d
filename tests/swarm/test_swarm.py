"""Training over unreliable peers: the losses and weights of one machine, whoever is killed, joins or moves."""

import asyncio
import time

import pytest
import torch
from tests.swarm.peers import SECRET, SPEC, Local

from ridgeline.data.batches import Batch
from ridgeline.nn import build, save_checkpoint
from ridgeline.nn.model.loss import token_loss
from ridgeline.runtime.optimizer import learning_rate, make_optimizer, parameter_groups
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import Pretrain
from ridgeline.swarm import peer
from ridgeline.swarm.stage import Stage
from ridgeline.swarm.stage_peer import StagePeer, divided, joined, packed
from ridgeline.swarm.trainer import SwarmTrainer
from ridgeline.techniques.matrix import CPU

STAGES, STEPS = 3, 5


def experiment(**changes):
    fields = {"seq_len": 16, "batch_size": 8, "micro_batch_size": 1, "steps": STEPS, "optimizer": "adamw", "lr": 0.01,
              "warmup_steps": 2, "grad_clip": 0.5, **changes}  # fmt: skip
    return Experiment(model=SPEC, cluster=Cluster(device=CPU), workload=Pretrain(**fields))


def batches(e, steps=STEPS):
    """Rows with unequal numbers of labeled tokens."""
    rng = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(SPEC.vocab_size, (e.batch_size, e.training.seq_len), generator=rng)
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        labels[::2, : e.training.seq_len // 2] = -100
        yield Batch(ids, labels)


def alone(e, steps=STEPS, shared=1):
    """(losses, norms, weights) of plain PyTorch on one machine: the independent reference."""
    model, w = build(e.model, seed=e.training.seed), e.training
    for i in range(e.model.num_layers):
        model.layers[str(i)] = model.layers[str(i - i % shared)]
    model.set_attention("naive")
    optimizer = make_optimizer(parameter_groups(list(model.parameters()), w), w)
    losses, norms = [], []
    for step, batch in enumerate(batches(e, steps)):
        optimizer.zero_grad()
        total, count = token_loss(model(batch.ids, return_hidden=True), model.head, batch.labels)
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), w.grad_clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(w, step)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, norms, dict(model.named_parameters())


class Swarm(Local):
    """Stage peers and a trainer on an event loop."""

    def __init__(self, e) -> None:
        super().__init__(None)
        self.e = e

    def peer(self, stage, kind=StagePeer, **options):
        async def start():
            found = kind(self.e, STAGES, SECRET, self.lines.append, stage, tuple(self.addresses[:1]),
                         announce_every=0.2, **options)  # fmt: skip
            return found, await found.start("127.0.0.1", 0)

        peer, address = self.run(start())
        self.servers.append(peer)
        self.addresses.append(address)
        return peer

    def trainer(self, **options):
        async def start():
            settings = {"wire": "plain", "patience": 5.0, "migrate_every": 0, **options}
            found = SwarmTrainer(self.e, STAGES, secret=SECRET, join=tuple(self.addresses[:1]), say=self.lines.append,
                                 **settings)  # fmt: skip
            await found.open()
            return found

        return self.run(start())

    def kill(self, peer) -> None:
        """Cut all its connections at once, as the end of its process would."""

        async def cut():
            peer.stopped = True
            for task in peer.tasks:
                task.cancel()
            await peer.links.close()
            await peer.listener.close()

        self.run(cut())
        self.servers.remove(peer)

    def close(self) -> None:
        super().close()


@pytest.fixture
def swarm():
    made = []

    def make(e=None, peers=(0, 1, 2)):
        made.append(Swarm(e or experiment()))
        for stage in peers:
            made[-1].peer(stage)
        return made[-1]

    yield make
    for s in made:
        s.close()


def trained(s, trainer, before_step=None):
    done = []
    for step, batch in enumerate(batches(s.e)):
        if before_step:
            before_step(step)
        done.append(s.run(trainer.train(batch)))
    model = s.run(trainer.model())
    s.run(trainer.close())
    return done, dict(model.named_parameters())


def assert_same(done, weights, reference):
    losses, norms, expected = reference
    assert [d.loss for d in done] == pytest.approx(losses, rel=2e-6)
    assert [d.grad_norm for d in done] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 0.5, "clipping is active"
    fresh = dict(build(SPEC, seed=0).named_parameters())
    for name, p in weights.items():
        moved = (expected[name] - fresh[name]).detach().abs().max()
        assert (p - expected[name]).detach().abs().max() < 0.02 * moved, name


def test_losses_and_weights_are_those_of_one_machine(swarm):
    s = swarm(peers=(0, 0, 1, 1, 2, 2))
    trainer = s.trainer()
    done, weights = trained(s, trainer)
    assert_same(done, weights, alone(s.e))
    assert all(d.peers == [2, 2, 2] and not d.recomputed for d in done)
    taken = [n for r in trainer.routers for n in r.taken.values()]
    assert len(taken) == 6
    assert min(taken) > 0, "every peer had work"


def test_layers_of_a_stage_may_share_their_weights(swarm, tmp_path):
    """Losses and weights are those of plain PyTorch with one module in the place of each stage's layers."""
    plan = Plan.parse([f"swarm:stages={STAGES},shared=2"])
    e = experiment().model_copy(update={"plan": plan})
    s = swarm(e, peers=(0, 1, 1, 2))
    done, weights = trained(s, s.trainer())
    reference = alone(e, shared=2)
    assert_same(done, {name: p for name, p in weights.items() if name in reference[2]}, reference)
    for i in (1, 3, 5):
        layer, first = ([p for name, p in weights.items() if name.startswith(f"layers.{j}.")] for j in (i, i - 1))
        assert all(torch.equal(a, b) for a, b in zip(layer, first, strict=True))
    assert sum(p.stage.numel for p in (s.servers[0], s.servers[1], s.servers[3])) == sum(
        p.numel() for p in reference[2].values()
    )
    save_checkpoint(build(SPEC, seed=0), tmp_path)
    own = e.model_copy(update={"workload": e.workload.model_copy(update={"checkpoint": str(tmp_path)})})
    with pytest.raises(UserError, match=r"layer 1 of .* has other weights than layer 0"):
        Stage(own, STAGES, 0)


def test_peers_killed_and_added_mid_run_lose_no_step(swarm):
    """One dies between steps, one within a step while it holds gradients, two join, of whom one finds its own stage."""
    s = swarm(peers=(0, 0, 1, 2, 2))

    class Dies(StagePeer):
        """At the first message that finds gradients of it in the trainer's ledger: how many depends on its speed."""

        async def answer(self, owner, op, m, tensors):
            if self.stage.step >= 2 and any(who == self.peer for who, _ in trainer._ledger.held.values()):
                asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(cut(self)))
                await asyncio.sleep(30)
            return await super().answer(owner, op, m, tensors)

    async def cut(peer):
        await peer.links.close()
        await peer.listener.close()

    s.peer(1, kind=Dies)
    trainer = s.trainer()

    def change(step):
        if step == 1:
            s.kill(s.servers[0])
            s.addresses.pop(0)
        if step == 3:
            new = [s.peer(0).address, s.peer(None).address]
            deadline = time.monotonic() + 60
            while not {*new} <= {a.address for a in trainer.table.live()}:
                assert time.monotonic() < deadline, s.lines
                s.run(trainer._refresh())  # the trainer has heard of them

    done, weights = trained(s, trainer, change)
    assert_same(done, weights, alone(s.e))
    assert sum(d.recomputed for d in done) > 0, "it died with gradients in its hands"
    assert [sum(d.peers) for d in done][-1] == 6
    assert any("joins stage 0 at step 3" in line for line in s.lines)


def test_8_bits_on_the_wire_stay_within_their_noise(swarm):
    s = swarm(peers=(0, 1, 1, 2))
    trainer = s.trainer(wire="blockwise8")
    done, _ = trained(s, trainer)
    losses, norms, _ = alone(s.e)
    signal = max(losses) - min(losses)
    errors = [abs(d.loss - x) for d, x in zip(done, losses, strict=True)]
    assert 0 < max(errors) < signal / 10
    assert done[0].grad_norm == pytest.approx(norms[0], rel=0.02), "of the same weights"


def test_8_bits_take_a_fourth_of_the_bytes(swarm):
    sent = {}
    for wire in ("plain", "blockwise8"):
        s = swarm()
        trainer = s.trainer(wire=wire)
        s.run(trainer.train(next(iter(batches(s.e)))))
        sent[wire] = trainer.links.sent - 8 * 16 * 8 * 3  # ids twice, labels once
        s.run(trainer.close())
    assert sent["plain"] / sent["blockwise8"] == pytest.approx(4 / (1 + 4 / 32), rel=0.01)


def test_slow_peers_get_less_and_a_spare_one_moves_to_the_slowest_stage(swarm):
    s = swarm(peers=(0, 0, 0, 2))
    s.peer(1, slow=0.08)
    s.peer(2, slow=0.08)
    trainer = s.trainer(migrate_every=2)
    done, weights = trained(s, trainer)
    assert_same(done, weights, alone(s.e))
    fast, slow = (trainer.routers[2].taken[p.peer] for p in (s.servers[3], s.servers[5]))
    assert fast > 1.2 * slow
    assert trainer.migrations >= 1
    assert done[-1].peers[1] >= 2
    assert sum(done[-1].peers) == 6


class Garbage(StagePeer):
    async def _pass(self, op, m, tensors):
        answer = await super()._pass(op, m, tensors)
        if op != "forward" and self.stage.step >= 1:
            for t in answer.tensors.values():
                t.fill_(float("nan"))
        return answer


class Forgetful(StagePeer):
    """Drops its gradients once, in silence, in a later step than the first."""

    forgot = False

    async def _reduce(self, m):
        if self.stage.step >= 1 and self.stage.micros and not self.forgot:
            self.forgot = True
            self.stage.drop()
        return await super()._reduce(m)


class Stuck(StagePeer):
    """Misses an update."""

    async def _commit(self, m):
        if m["step"] == 1 and not hasattr(self, "missed"):
            self.missed = True
            await asyncio.sleep(30)
        return await super()._commit(m)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Garbage, "banned for 60 s: it sent grad with values that are not finite"), (Forgetful, ""),
     (Stuck, "left out for 3 s: it gave no answer to 'commit' for 4 s")],
)  # fmt: skip
def test_a_peer_that_goes_wrong_costs_nothing(swarm, kind, says):
    s = swarm(peers=(0, 1, 2))
    s.peer(1, kind=kind)
    trainer = s.trainer(patience=4.0)
    done, weights = trained(s, trainer, lambda step: time.sleep(0.5 if step == 3 else 0))
    assert_same(done, weights, alone(s.e))
    assert sum(says in line for line in s.lines if "peer" in line) >= bool(says)
    assert (sum(d.recomputed for d in done) > 0) == (kind is Forgetful)


def test_a_stage_without_peers_is_a_users_error(swarm):
    s = swarm(peers=(0, 1, 1, 2))
    trainer = s.trainer(patience=1.0)
    first, second = list(batches(s.e))[:2]
    s.run(trainer.train(first))
    s.kill(s.servers[3])
    with pytest.raises(UserError, match="stage 2 has no peers left at step 1"):
        s.run(trainer.train(second))
    s.run(trainer.close())


def test_another_workload_does_not_train_along(swarm, monkeypatch):
    monkeypatch.setattr(peer, "FIRST", 0.5)
    s = swarm()
    other = swarm(experiment(lr=0.02), ())
    other.addresses = s.addresses[:1]
    with pytest.raises(UserError, match="no peer of the swarm answers"):
        other.peer(0)
    assert len(s.servers[0].table.live()) == 3


def test_a_state_of_many_messages_is_joined_again(monkeypatch):
    from ridgeline.swarm import stage_peer

    monkeypatch.setattr(stage_peer, "PIECE", 1000)
    state = {"p0": torch.randn(50, 30), "p1": torch.randn(7), "s0.step": torch.tensor(3.0)}
    cut = divided(state)
    assert len(packed(cut)) >= 6
    back = joined(cut)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[n], t) for n, t in state.items())
