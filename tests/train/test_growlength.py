"""Growing sequences: the same tokens in the same order, the same number in each step, predicted as a mean."""

import pytest
import torch
from tests.training import MODEL, experiment, make_trainer, train
from tests.world import world

from ridgeline.predict import predict
from ridgeline.predict.quick import quick
from ridgeline.spec.errors import Incompatible
from ridgeline.techniques.registry import check
from ridgeline.train.checkpoint import resume, save

CALL = "growlength:lengths=4+8,shares=0.25+0.25"


def test_the_stream_of_tokens_is_that_of_a_fixed_length(corpus):
    fixed, grown = (make_trainer(experiment(corpus, *plan, steps=8), uneven=False) for plan in ((), (CALL,)))
    shapes = []
    for step in range(8):
        a, b = fixed.run.data.batches.batch(step), grown.run.data.batches.batch(step)
        shapes.append(tuple(b.ids.shape))
        assert torch.equal(a.ids.flatten(), b.ids.flatten())
        assert torch.equal(a.labels.flatten(), b.labels.flatten())
        assert len(grown.local_batch(step)[0]) == 1
    assert shapes == [(16, 4)] * 2 + [(8, 8)] * 2 + [(4, 16)] * 4
    assert grown.run.data.batches.held_out_batch().ids.shape == (4, 16)


def test_micro_batches_keep_their_tokens(corpus):
    trainer = make_trainer(experiment(corpus, CALL, steps=8, micro_batch_size=2), uneven=False)
    assert [[tuple(m.ids.shape) for m in trainer.local_batch(s)[0]] for s in (0, 2, 4)] == [
        [(8, 4)] * 2, [(4, 8)] * 2, [(2, 16)] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "ranks", "workload"),
    [
        (("zero:stage=3",), 2, {}),
        (("pipeline:degree=2",), 2, {"micro_batch_size": 2}),
        (("tensor_parallel:degree=2", "sequence_parallel"), 2, {}),
        (("ring_attention:degree=2", "flash_attention"), 2, {}),
    ],
)
def test_layouts_train_the_same(plan, ranks, workload, corpus):
    fields = {"optimizer": "sgd", "lr": 0.5, "steps": 6, **workload}
    whole = train(experiment(corpus, CALL, **fields))
    parts = train(experiment(corpus, CALL, *plan, ranks=ranks, **fields))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.signal > 0.01


def _part(rank, e, folder, steps):
    trainer = make_trainer(e, rank)
    losses = resume(trainer, folder)
    for _ in range(steps):
        losses.append(trainer.step().loss)
    save(trainer, folder, losses)
    return losses


def test_it_is_resumed_within_a_stage(corpus, tmp_path):
    e = experiment(corpus, CALL, ranks=2, steps=8, lr=1e-2)
    straight = world(2).run(_part, e, tmp_path / "a", 8)[0]
    world(2).run(_part, e, tmp_path / "b", 3)
    assert world(2).run(_part, e, tmp_path / "b", 5)[0] == straight


def test_predicted_times_are_means_over_the_run_and_memory_is_that_of_full_length(corpus):
    model = MODEL.model_copy(update={"max_positions": 1024})
    fixed = {n: predict(experiment(corpus, model=model, seq_len=n, batch_size=2048 // n)) for n in (256, 512, 1024)}
    e = experiment(corpus, "growlength:lengths=256+512,shares=0.5+0.25", model=model, seq_len=1024, batch_size=2)
    grown = predict(e)
    seconds = {n: r.metrics["step_time_s"].value for n, r in fixed.items()}
    mean = 0.5 * seconds[256] + 0.25 * seconds[512] + 0.25 * seconds[1024]
    assert seconds[256] < seconds[1024]
    assert grown.metrics["step_time_s"].value == pytest.approx(mean)
    assert grown.metrics["tokens_per_s"].value == pytest.approx(2048 / mean)
    assert grown.metrics["tokens_per_step"].value == 2048
    assert grown.metrics["peak_bytes"].value == fixed[1024].metrics["peak_bytes"].value
    rows = sum(r.seconds for r in grown.breakdown)
    assert rows == pytest.approx(mean, rel=0.02)
    brief = quick(e, check(e), always=True)
    for name, value in brief.metrics.items():
        assert value == pytest.approx(grown.metrics[name].value), name


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (("growlength:lengths=5",), "does not divide"),
        (("growlength:lengths=8+4",), "do not grow"),
        (("growlength:lengths=4+8,shares=0.5",), "2 lengths and 1 shares"),
        (("growlength:lengths=8,shares=1",), "leave nothing"),
        (("growlength", "static_memory"), "shapes must stay"),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, tuple) else "",
)
def test_what_cannot_grow_is_said(plan, says, corpus):
    with pytest.raises(Incompatible, match=says):
        check(experiment(corpus, *plan))


def test_a_stage_that_another_technique_refuses_is_named(corpus):
    with pytest.raises(Incompatible, match="at length 2"):
        check(experiment(corpus, "growlength:lengths=2", "ring_attention:degree=4", "flash_attention", ranks=4))
