"""The step: the loss's normalization, clipping, the schedule, and what ZeRO keeps on a rank."""

import math

import pytest
import torch
from tests.training import experiment, full, make_trainer, train
from tests.world import world

from ridgeline.data.batches import IGNORE, Batch
from ridgeline.runtime.optimizer import learning_rate
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.workload import Pretrain
from ridgeline.train.trainer import Trainer


def gradients(rank, e):
    """(mean loss over all ranks, gradients whole, valid tokens) of the first step's uneven batch."""
    trainer = make_trainer(e, rank)
    loss, valid = trainer.forward_backward(0)
    if e.world > 1:
        torch.distributed.all_reduce(loss)
    return float(loss), {n: full(p.grad) for n, p in trainer.run.root.named_parameters()}, valid


@pytest.fixture
def whole(corpus):
    """The reference: autograd on the plain mean over all valid tokens of the whole batch, by PyTorch's own loss."""
    trainer = make_trainer(experiment(corpus))
    ids, labels, *_ = trainer.run.data.batches.batch(0)
    counts = (labels != IGNORE).sum(1).tolist()
    assert len(set(counts)) == len(counts), "rows must differ in valid tokens, or the test sees nothing"
    logits = trainer.run.model(ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.run.root.named_parameters()}, sum(counts)


SPLITS = [(1, None, ()), (1, 2, ()), (1, 1, ())]
SPLITS += [(2, m, (t,)) for m in (None, 1) for t in ("data_parallel", "zero:stage=1", "zero:stage=2", "zero:stage=3")]


@pytest.mark.parametrize(("ranks", "micro", "plan"), SPLITS)
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(ranks, micro, plan, corpus, whole):
    e = experiment(corpus, *plan, ranks=ranks, micro_batch_size=micro)
    assert e.accumulation == 4 // ranks // (micro or 4 // ranks)
    answers = [gradients(0, e)] if ranks == 1 else world(ranks).run(gradients, e)
    for loss, grads, valid in answers:
        assert valid == whole[2]
        assert loss == pytest.approx(whole[0], rel=1e-6)
        assert set(grads) == set(whole[1])
        for name, grad in grads.items():
            assert torch.allclose(grad, whole[1][name], rtol=1e-5, atol=1e-6), name


def test_the_mean_of_means_is_another_loss(corpus, whole):
    """The batch of these tests can tell a mean of means from the mean."""
    trainer = make_trainer(experiment(corpus))
    ids, labels, *_ = trainer.run.data.batches.batch(0)
    each = torch.nn.functional.cross_entropy(trainer.run.model(ids).transpose(1, 2), labels, reduction="none")
    means = each.sum(1) / (labels != IGNORE).sum(1)
    assert abs(means.mean().item() - whole[0]) > 1e-4


def test_a_batch_without_labels_has_loss_zero(corpus):
    trainer = make_trainer(experiment(corpus), uneven=False)
    ids, labels, *_ = trainer.run.data.batches.batch(0)
    trainer.run.data.batches = type(
        "NoLabels", (), {"batch": lambda self, step: Batch(ids, torch.full_like(labels, IGNORE))}
    )()
    assert trainer.step().loss == 0


@pytest.mark.parametrize("limit", [0.1, 1e9, 0.0])
def test_clipping_is_torchs(limit, corpus):
    trainer = make_trainer(experiment(corpus, optimizer="sgd", lr=1.0, warmup_steps=0, grad_clip=limit))
    twin = make_trainer(experiment(corpus, optimizer="sgd", lr=1.0, warmup_steps=0, grad_clip=limit))
    twin.forward_backward(0)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters, limit or math.inf)
    assert (norm > limit) == (limit in (0.1, 0.0))
    with torch.no_grad():
        for p in twin.parameters:
            p -= p.grad
    assert trainer.step().grad_norm == pytest.approx(norm.item())
    for mine, theirs in zip(trainer.parameters, twin.parameters, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_the_schedule_has_known_values():
    w = Pretrain(steps=12, warmup_steps=2, lr=1.0, min_lr_ratio=0.1)
    assert learning_rate(w, 0) == 0.5
    assert learning_rate(w, 1) == 1.0
    assert learning_rate(w, 2) == 1.0
    assert learning_rate(w, 7) == pytest.approx(0.55)  # half-way down the cosine
    assert learning_rate(w, 12) == pytest.approx(0.1)
    assert learning_rate(w, 99) == pytest.approx(0.1)
    rates = [learning_rate(w, s) for s in range(2, 13)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(Pretrain(steps=1, warmup_steps=0, lr=1.0), 0) == 1.0


def test_adamw_equals_torchs_over_several_steps(corpus):
    """The whole loop against one written with PyTorch's plain parts: groups, decay, schedule and clipping included."""
    e = experiment(corpus, lr=1e-2, weight_decay=0.3, grad_clip=0.5)
    trainer, twin = make_trainer(e), make_trainer(e)
    w, model = e.training, twin.run.model
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0}],
        betas=(w.beta1, w.beta2), fused=False,
    )  # fmt: skip
    for step in range(4):
        ids, labels, *_ = twin.run.data.batches.batch(step)
        logits = model(ids).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE)
        reference.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in reference.param_groups:
            group["lr"] = learning_rate(w, step)
        reference.step()
        assert trainer.step().loss == pytest.approx(loss.item(), rel=1e-5)


def sharded_sizes(rank, e):
    trainer = make_trainer(e, rank)
    trainer.step()

    def local(t):
        return (t.to_local() if hasattr(t, "to_local") else t).numel()

    states = [v for s in trainer.optimizer.state.values() for k, v in s.items() if k != "step"]
    return (
        sum(local(p) for p in trainer.run.root.parameters()),
        sum(p.numel() for p in trainer.run.root.parameters()),
        sum(local(v) for v in states),
    )


@pytest.mark.parametrize("plan", [("zero:stage=1",), ("zero:stage=2",), ("zero:stage=3",), ("zero", "lora", "rtn")])
def test_zero_keeps_a_half_on_each_of_two_ranks(plan, corpus):
    answers = world(2).run(sharded_sizes, experiment(corpus, *plan, ranks=2))
    whole = answers[0][1]
    alone = sharded_sizes(0, experiment(corpus, *plan[1:]))
    for parameters, _, states in answers:
        assert parameters == pytest.approx(whole / 2, rel=0.02)
        assert states == pytest.approx(alone[2] / 2, rel=0.02)
    assert sum(a[0] for a in answers) == whole == alone[0]


def test_data_parallel_keeps_everything_on_every_rank(corpus):
    parameters, whole, states = world(2).run(sharded_sizes, experiment(corpus, "data_parallel", ranks=2))[0]
    assert (parameters, states) == (whole, 2 * whole)


@pytest.mark.parametrize(
    "plan", [("flash_attention",), ("recompute",), ("lora",), ("lora", "rtn"), ("recompute", "lora", "rtn")]
)
def test_weights_stored_in_bf16_train(plan, corpus):
    curve = train(experiment(corpus, *plan, dtype="bf16", lr=0.02, steps=8))
    assert curve.losses[-1] < curve.losses[0]
    assert all(curve.after[n].dtype == torch.bfloat16 for n in curve.trained)


def test_lora_starts_as_the_base_model_and_leaves_it_alone(corpus):
    plain, adapted = make_trainer(experiment(corpus)), make_trainer(experiment(corpus, "lora"))
    ids, *_ = plain.run.data.batches.batch(0)
    assert torch.equal(plain.run.model(ids), adapted.run.model(ids))
    curve = train(experiment(corpus, "lora", lr=0.01))
    assert {n.rpartition(".")[2] for n in curve.trained} == {"lora_a", "lora_b"}
    e = adapted.experiment.model
    widths = e.hidden_size + e.num_heads * e.head_dim, e.hidden_size + e.num_kv_heads * e.head_dim
    assert sum(curve.after[n].numel() for n in curve.trained) == e.num_layers * 8 * sum(widths)


def test_a_loss_that_is_not_finite_stops_the_run(corpus):
    trainer = make_trainer(experiment(corpus))
    with torch.no_grad():
        trainer.parameters[0].fill_(math.nan)
    with pytest.raises(FloatingPointError, match="step 0"):
        trainer.step()


@pytest.mark.parametrize(
    ("plan", "workload", "said"),
    [
        (("rtn",), {}, "cannot be trained"),
        (("zero",), {}, "only 1 process"),
        ((), {"seq_len": 128}, "longer than the 64 positions"),
        ((), {"batch_size": 3, "micro_batch_size": 2}, "does not split"),
    ],
)
def test_what_cannot_work_is_refused_before_data_is_read(plan, workload, said):
    with pytest.raises(Incompatible, match=said) as refusal:
        Trainer(experiment("/nowhere", *plan, **workload))
    assert refusal.value.fix


def test_nothing_to_train_is_said(corpus, monkeypatch):
    from ridgeline.runtime.train_build import TrainBuild

    monkeypatch.setattr(TrainBuild, "assert_trainable", lambda run: run.root.requires_grad_(False))
    with pytest.raises(UserError, match="no parameter to train"):
        Trainer(experiment(corpus))
