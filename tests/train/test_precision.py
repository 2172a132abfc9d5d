"""Mixed precision for real: loss scaling, 16-bit weights with one batched update, narrow optimizer states."""

import copy

import pytest
import torch
from tests.training import experiment, make_trainer, state, train
from tests.world import world

from ridgeline.nn.kernels import native
from ridgeline.nn.parallel.collectives import local
from ridgeline.runtime.flat import FlatWeights, lower
from ridgeline.runtime.optimizer import make_optimizer, parameter_groups
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.workload import Pretrain
from ridgeline.techniques.precision.mixed_precision_torch import DynamicScale
from ridgeline.train.checkpoint import resume, save

FP16 = "mixed_precision:dtype=fp16,loss_scale=1024,growth_interval=2"
LOW = "mixed_precision:weights=low"


# ---- loss scaling ---------------------------------------------------------------------------------------------------


def test_scale_halves_doubles_and_is_kept():
    s = DynamicScale(8.0, interval=2)
    for finite, scale in ((True, 8), (True, 16), (True, 16), (False, 8), (True, 8), (True, 16)):
        s.update(finite)
        assert s.scale == scale
    other = DynamicScale()
    other.load_state_dict(s.state_dict())
    assert other == DynamicScale(16.0, 2000, 0)
    for _ in range(60):
        s.update(False)
    assert s.scale == 1.0


@pytest.mark.parametrize("plan", [FP16, f"{FP16},weights=low"])
def test_a_step_that_overflows_is_skipped_and_the_scale_halved(plan, corpus):
    trainer = make_trainer(experiment(corpus, plan, optimizer="adamw"))
    trainer.step()
    scaler = trainer.run.update.scaler
    assert scaler.scale == 1024
    before = copy.deepcopy([p.detach() for p in trainer.parameters])
    states = copy.deepcopy([v for s in trainer.optimizer.state.values() for v in s.values()])

    def poison():
        trainer.parameters[3].grad.view(-1)[0] = float("inf")

    trainer.run.gradients.after_backward.append(poison)
    stats = trainer.step()
    trainer.run.gradients.after_backward.remove(poison)
    assert scaler.scale == 512
    assert not torch.isfinite(torch.tensor(stats.grad_norm))
    assert all(torch.equal(a, p) for a, p in zip(before, trainer.parameters, strict=True))
    after = [v for s in trainer.optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    assert all(p.grad is None or not p.grad.any() for p in trainer.parameters)
    for _ in range(2):
        trainer.step()
    assert scaler.scale == 1024  # two good steps later
    assert any(not torch.equal(a, p) for a, p in zip(before, trainer.parameters, strict=True))


def test_the_scale_does_not_change_what_is_learned(corpus):
    """Clipping is active: it must see unscaled gradients."""
    plans = [f"mixed_precision:dtype=fp16,loss_scale={s}" for s in (1, 4096)]
    a, b = (train(experiment(corpus, p, optimizer="sgd", lr=5.0, grad_clip=0.05)) for p in plans)
    assert a.norms == pytest.approx(b.norms, rel=0.02)
    assert a.losses == pytest.approx(b.losses, rel=1e-3)
    assert abs(a.losses[-1] - a.losses[0]) > 0.02


def one_overflows(rank, e):
    """An overflow in one rank's shard alone, in the second of three steps."""
    trainer = make_trainer(e, rank)
    scales = []
    for step in range(3):
        if step == 1 and rank == 1:
            trainer.run.gradients.after_backward.append(
                lambda: local(trainer.parameters[0].grad).view(-1)[:1].fill_(float("inf"))
            )
        trainer.step()
        if step == 1 and rank == 1:
            trainer.run.gradients.after_backward.pop()
        scales.append(trainer.run.update.scaler.scale)
    return scales, {n: bool(torch.isfinite(t).all()) for n, t in state(trainer).items()}


def test_ranks_skip_together(corpus):
    (a, finite), (b, _) = world(2).run(one_overflows, experiment(corpus, FP16, "zero", ranks=2))
    assert a == b == [1024, 512, 512]
    assert all(finite.values())


# ---- 16-bit weights -------------------------------------------------------------------------------------------------


def small_parameters():
    torch.manual_seed(0)
    shapes = [(7, 5), (5,), (3, 11), (64, 9), (64,), (2, 2)]
    return [torch.nn.Parameter(torch.randn(s)) for s in shapes]


WORKLOAD = Pretrain(seq_len=8, batch_size=1, lr=3e-3, weight_decay=0.1)


def updates(parameters, optimizer, steps=4):
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            g = torch.randn(p.shape, generator=rng)
            if p.grad is None:
                p.grad = g
            else:
                p.grad.copy_(g)
        optimizer.step()


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_the_flat_update_in_fp32_is_the_update_per_tensor(kernel, together, monkeypatch):
    if kernel and native.library() is None:
        pytest.skip("no C++ compiler")
    if not kernel:
        monkeypatch.setattr("ridgeline.runtime.flat.usable", lambda *t: False)
    ours, theirs = small_parameters(), small_parameters()
    flat = FlatWeights(lower(torch.nn.ParameterList(ours), torch.float32))
    optimizer = flat.optimizer(parameter_groups(ours, WORKLOAD), WORKLOAD)
    if together:
        with flat.sync(True):
            pass
        pieces = list(optimizer._pieces([p for p in flat.places if p.ndim > 1]))
        assert len(pieces) == 1  # one update for all matrices
        assert pieces[0][1] == sum(p.numel() for p in ours if p.ndim > 1)
    updates(ours, optimizer)
    updates(theirs, make_optimizer(parameter_groups(theirs, WORKLOAD), WORKLOAD))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)  # two loops of the same formula: vectorized, they may round differently
        assert a.untyped_storage().data_ptr() == ours[0].untyped_storage().data_ptr()


def test_masters_keep_what_16_bits_lose(corpus):
    """Updates far below bf16's resolution add up in the master copy."""
    (p,) = ours = [torch.nn.Parameter(torch.ones(4, 4))]
    w = WORKLOAD.model_copy(update={"optimizer": "sgd", "lr": 1e-4})
    masters = lower(torch.nn.ParameterList(ours), torch.bfloat16)
    optimizer = FlatWeights(masters).optimizer(parameter_groups(ours, w), w)
    for _ in range(100):
        p.grad = torch.ones(4, 4)
        optimizer.step()
    assert p.dtype == torch.bfloat16
    assert torch.allclose(optimizer.state[p]["master"], torch.full((4, 4), 0.99), atol=1e-5)
    assert torch.equal(p, torch.full((4, 4), 0.99).bfloat16())


@pytest.mark.parametrize("plan", [LOW, f"{LOW},dtype=fp16", f"{LOW}|fp8:states=true", f"{LOW}|fused_layers"])
def test_weights_16bit_follow_the_wide_run(plan, corpus):
    wide = train(experiment(corpus, optimizer="adamw", lr=3e-3))
    low = train(experiment(corpus, *plan.split("|"), optimizer="adamw", lr=3e-3))
    print(f"signal {wide.signal:.3g}")
    assert wide.signal > 0.3
    assert low.losses == pytest.approx(wide.losses, rel=0.01 if "fp8" not in plan else 0.02)


def test_gradients_are_summed_in_fp32(corpus):
    """64 micro-batches whose bf16 sum would stop growing."""
    trainer = make_trainer(experiment(corpus, LOW, micro_batch_size=1), uneven=False)
    trainer.forward_backward(0)
    p = trainer.run.model.layers["0"].attention.q_proj.weight
    assert (p.dtype, p.grad.dtype) == (torch.bfloat16, torch.float32)
    first, size, flat = next(iter(trainer.optimizer._pieces(list(trainer.run.root.parameters())[:1])))
    assert (first, size) == (next(iter(trainer.run.root.parameters())), flat.numel())


def ranks_agree(rank, e):
    trainer = make_trainer(e, rank)
    return [trainer.step().loss for _ in range(3)], [p.grad.dtype for p in trainer.parameters]


def test_weights_16bit_in_data_parallel(corpus):
    (a, dtypes), (b, _) = world(2).run(ranks_agree, experiment(corpus, LOW, ranks=2))
    alone = train(experiment(corpus, LOW))
    assert a == b
    assert a == pytest.approx(alone.losses[:3], rel=1e-3)
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("plan", [f"{LOW}|fp8:states=true", f"{FP16},weights=low", FP16])
def test_checkpoints_hold_masters_moments_and_scale(plan, corpus, tmp_path):
    e = experiment(corpus, *plan.split("|"), optimizer="adamw", steps=6)
    trainer = make_trainer(e)
    losses = [trainer.step().loss for _ in range(3)]
    save(trainer, tmp_path, losses)
    rest = [trainer.step().loss for _ in range(3)]
    again = make_trainer(e)
    assert resume(again, tmp_path) == losses
    if again.run.update.scaler:
        assert again.run.update.scaler.scale == 2048  # it grew after two steps
    assert [again.step().loss for _ in range(3)] == rest
    if "low" in plan:
        state = again.optimizer.state[again.parameters[0]]
        assert state["master"].dtype == (torch.float16 if "fp8" in plan else torch.float32)


def test_states_take_5_bytes_per_parameter(corpus):
    trainer = make_trainer(experiment(corpus, LOW, "fp8:states=true", optimizer="adamw"))
    count = sum(p.numel() for p in trainer.parameters)
    tensors = [v for s in trainer.optimizer.state.values() for v in s.values()]
    assert sum(t.nbytes for t in tensors if t.dim()) == 5 * count
    assert sum(t.nbytes for t in tensors if not t.dim()) == 16 * len(trainer.parameters)  # three scales and a counter


def test_refusals(corpus):
    from ridgeline.techniques.registry import check

    for plan, ranks, says in (
        (["mixed_precision", "fp8:states=true"], 1, "weights=fp32 has none"),
        (["mixed_precision", "fp8:gradients=true", "zero"], 2, "zero scatters them"),
        ([LOW, "fp8:states=true", "zero"], 2, "does not know its scale"),
        ([LOW, "fp8:states=true", "zero_offload"], 1, "keeps them in fp32"),
    ):
        with pytest.raises(Incompatible, match=says) as caught:
            check(experiment(corpus, *plan, ranks=ranks))
        assert caught.value.fix
