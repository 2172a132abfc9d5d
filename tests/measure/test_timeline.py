"""The timeline of real steps: its peak is the meter's, and every step has the same tensors."""

import pytest
import torch
from tests.training import MODEL, experiment, make_trainer
from tests.world import world
from torch import nn

from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.memory.timeline import Recorder, Timeline, record


def recorded(trainer) -> Timeline:
    step = trainer.steps_done
    return record(
        trainer.run.root,
        trainer.optimizer,
        lambda: trainer.forward_backward(step),
        lambda: trainer.update(step),
    )


def two_steps(rank, e):
    trainer = make_trainer(e, rank, uneven=False)
    trainer.step(), trainer.step()
    usage = metered_step(trainer)
    return usage.total, recorded(trainer), recorded(trainer)


PLANS = [(), ("recompute",), ("flash_attention",), ("mixed_precision",), ("lora:rank=4",)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "+".join(p) or "plain")
@pytest.mark.parametrize("micro", [None, pytest.param(1, marks=pytest.mark.nightly)])
def test_peak_is_the_meters_and_steps_repeat(plan, micro, corpus):
    peak, first, second = two_steps(0, experiment(corpus, *plan, micro_batch_size=micro))
    assert first.peak == peak
    assert first.keys == second.keys
    assert [(t.birth, t.death, t.uses) for t in first.tensors] == [(t.birth, t.death, t.uses) for t in second.tensors]


@pytest.mark.parametrize("plan", ["data_parallel", "zero:stage=2", "zero:stage=3"])
def test_sharded_steps(plan, corpus):
    e = experiment(corpus, plan, ranks=2)
    for peak, first, second in world(2).run(two_steps, e):
        # gloo's worker thread lets go of a collective's buffer some time after wait() returned: the peak may hold one
        assert first.peak == pytest.approx(peak, rel=0.03)
        assert first.keys == second.keys


def test_lifetimes_of_a_known_program():
    model = nn.Linear(4, 4, bias=False)
    recorder = Recorder(model)
    x = torch.ones(8, 4)
    with recorder:
        a = x * 2  # 0
        b = a + 1  # 1
        del a
        b.mul_(3)  # 2
        c = b @ torch.ones(4, 2)  # 3: ones, 4: mm
        del b
        c.sum()  # 5
        del c
    found = recorder.timeline()
    by_birth = {t.birth: t for t in found.tensors}
    assert by_birth[0].bytes == by_birth[1].bytes == 8 * 4 * 4
    assert (by_birth[0].uses, by_birth[0].death) == ((1,), 2)
    assert (by_birth[1].uses, by_birth[1].writes, by_birth[1].death) == ((2, 4), (2,), 5)
    assert (by_birth[4].uses, by_birth[4].death) == ((5,), 6)
    assert len(found.operators) == len(found.seconds) == 6
    assert found.peak == max(found.live) == 8 * 4 * 4 * 2


def test_categories_at_the_end_of_a_step(corpus):
    trainer = make_trainer(experiment(corpus), uneven=False)
    trainer.step(), trainer.step()
    t = recorded(trainer)
    sums = {c: sum(x.bytes for x in t.tensors if x.category == c) for c in ("parameters", "gradients", "optimizer")}
    parameters = 4 * MODEL.num_parameters
    assert sums["parameters"] == parameters
    assert sums["gradients"] == parameters
    assert sums["optimizer"] >= 2 * parameters
