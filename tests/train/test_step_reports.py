"""Reports of steps that arrive while the next step runs, as on a GPU: losses, checkpoints and ends are the same."""

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from tests.training import experiment, make_trainer
from tests.world import world

from ridgeline.jobs.job import RankContext, TrainOptions
from ridgeline.train import training_loop
from ridgeline.train.checkpoint import checkpoints
from ridgeline.train.step_reports import Sent
from ridgeline.train.trainer import Trainer


class Ahead(Trainer):
    """Has a step under way while the host reads of the last, as on a GPU."""

    ahead = 1

    def __init__(self, *args):
        super().__init__(*args)
        self.order = []

    def begin(self):
        self.order.append(("begin", self.steps_done))
        super().begin()

    def _read(self):
        stats = super()._read()
        self.order.append(("read", stats.step))
        return stats


def trained(e, folder, trainer, watch=lambda event: None, rank=0, **options):
    """What the loop returns, the trainer, and what was reported."""
    made, events = [], []

    def make(*args):
        made.append(trainer(*args))
        return made[-1]

    def report(event):
        events.append(event)
        watch(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_loop, "Trainer", make)
        here = RankContext(rank=rank, ranks=e.world, device=torch.device("cpu"), report=report)
        result = training_loop.train(e, TrainOptions(out=str(folder), **options), here)
    return result, made[0], events


@pytest.mark.parametrize("plan", [(), ("mixed_precision:dtype=fp16",)])
def test_a_step_ahead_changes_nothing(plan, corpus, tmp_path):
    e = experiment(corpus, *plan, steps=7, lr=1e-2, eval_batches=2)
    (now, _, told), (later, _, told_later) = (
        trained(e, tmp_path / kind.__name__, kind, save_every=3, eval_every=2) for kind in (Trainer, Ahead)
    )
    same = [name for name in now if name not in ("step_s", "checkpoint")]
    assert {n: now[n] for n in same} == {n: later[n] for n in same}
    assert len(later["losses"]) == len(later["step_s"]) == 7
    steps = [[(s["step"], s["loss"]) for s in t if "loss" in s] for t in (told, told_later)]
    assert steps[0] == steps[1] == [(i + 1, loss) for i, loss in enumerate(now["losses"])]
    names = [[c.name for c in checkpoints(tmp_path / k.__name__)] for k in (Trainer, Ahead)]
    assert names[0] == names[1]


def test_the_next_step_begins_before_a_report_is_read(corpus, tmp_path):
    _, trainer, _ = trained(experiment(corpus, steps=5), tmp_path, Ahead, save_every=3, eval_every=0)
    assert trainer.order == [("begin", 0), ("begin", 1), ("read", 0), ("begin", 2), ("read", 1), ("read", 2),  # saved
                             ("begin", 3), ("begin", 4), ("read", 3), ("read", 4)]  # fmt: skip


def test_a_signal_while_a_step_is_under_way_loses_nothing(corpus, tmp_path):
    def watch(event):
        if event.get("step") == 2 and "loss" in event:
            os.kill(os.getpid(), signal.SIGTERM)

    e = experiment(corpus, steps=9)
    stopped, trainer, _ = trained(e, tmp_path, Ahead, watch, eval_every=0)
    # Step 3 was under way; step 4 has the signal, which the host reads when step 5 is.
    assert (stopped["stopped"], len(stopped["losses"]), trainer.steps_done) == (True, 5, 5)
    straight = trained(e, tmp_path / "straight", Trainer, eval_every=0)[0]["losses"]
    rest = trained(e, tmp_path, Ahead, eval_every=0, resume=True)[0]
    assert (rest["stopped"], rest["losses"]) == (False, straight)


def stop_on_the_last(rank, e, folder):
    def watch(event):
        if rank and event.get("step") == 1 and "loss" in event:
            os.kill(os.getpid(), signal.SIGTERM)

    result, trainer, _ = trained(e, folder, Ahead, watch, rank, eval_every=0)
    return result["stopped"], len(result["losses"]), trainer.steps_done


def test_all_ranks_stop_at_the_same_step(corpus, tmp_path):
    found = world(2).run(stop_on_the_last, experiment(corpus, "data_parallel", ranks=2, steps=9), tmp_path)
    assert found == [(True, 4, 4)] * 2


def test_a_loss_that_is_not_finite_ends_training_before_it_is_saved(corpus, tmp_path):
    def watch(event):
        if event.get("step") == 4 and "loss" in event:
            with torch.no_grad():
                trainers[0].parameters[0].fill_(math.nan)

    trainers = []

    class Broken(Ahead):
        def __init__(self, *args):
            super().__init__(*args)
            trainers.append(self)

    with pytest.raises(FloatingPointError, match="loss is nan at step 5"):
        trained(experiment(corpus, steps=9), tmp_path, Broken, watch, save_every=3, eval_every=0)
    assert [c.name for c in checkpoints(tmp_path)] == ["step-000003"]


def test_a_report_is_read_once_it_has_arrived():
    numbers = torch.zeros(2, dtype=torch.float64)
    arrived = SimpleNamespace(synchronize=lambda: numbers.copy_(torch.tensor([2.5, 0.5])))
    assert Sent(numbers, (True, False), arrived).read() == (2.5, 0.5, True, False)


def test_a_step_that_has_begun_ends_when_the_watcher_stops(corpus):
    trainer, seen = Ahead(experiment(corpus, steps=6)), []
    trainer.drive(lambda stats: seen.append(stats.step) or len(seen) == 2)
    assert (seen, trainer.steps_done, list(trainer.reports(complete=True))) == ([0, 1], 3, [])
    trainer.drive(lambda stats: bool(seen.append(stats.step)))
    assert seen[2:] == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("plan", "ahead"),
    [
        ((), 1),
        (("mixed_precision",), 1),
        (("mixed_precision:dtype=fp16",), 0),  # whether there is an update depends on the gradients
        (("cramming:tokens=200",), 0),  # a step's report says whether it was the last
        (("activation_offload",), 0),
    ],
)
def test_steps_are_ahead_on_a_gpu_where_the_host_need_not_wait(plan, ahead, corpus):
    trainer = make_trainer(experiment(corpus, *plan))
    assert trainer.ahead == 0
    trainer.device = torch.device("cuda")
    assert trainer.ahead == ahead
