"""Failure: what a dead or stuck rank leads to, and that the last complete checkpoint survives a kill at any moment."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time

import psutil
import pytest
from tests.training import experiment, make_trainer

from ridgeline.jobs.failure import describe
from ridgeline.jobs.job import TrainOptions, train_job
from ridgeline.jobs.launch import JobFailed, run_job, watchdog
from ridgeline.jobs.restart import restarts, run_with_restarts
from ridgeline.spec.errors import UserError
from ridgeline.train import step_reports
from ridgeline.train.checkpoint import checkpoints, resume, save
from ridgeline.train.trainer import Trainer

WAITED = 300
"""Seconds after which a job counts as waiting for a dead rank."""
UNWAITED = TrainOptions(timeout=24 * WAITED)
"""Collectives would wait far longer."""


def worker(rank):
    for p in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if p.name() == f"rank {rank}":
                return p
    raise AssertionError(f"no rank {rank}")


def act_at(step, action):
    def watch(message):
        if message.get("step") == step and "loss" in message:
            action()

    return watch


# ---- one clear message ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, "oom"), (signal.SIGSEGV, "error")])
def test_a_dead_rank_is_named_with_its_signal_and_step(number, status, corpus):
    e = experiment(corpus, "zero", ranks=2, steps=100_000)
    with pytest.raises(JobFailed, match=rf"rank 1 was .*signal {int(number)}.* after step \d+") as failure:
        run_job(
            train_job(e, UNWAITED),
            act_at(2, lambda: worker(1).send_signal(number)),
            timeout=WAITED,
        )
    assert failure.value.status == status


def test_a_stuck_rank_times_out_with_the_operation_and_the_step(corpus):
    e = experiment(corpus, "zero", ranks=2, steps=100_000)
    with pytest.raises(JobFailed) as failure:
        run_job(train_job(e, TrainOptions(timeout=8)), act_at(2, lambda: worker(1).suspend()))
    assert failure.value.status == "timeout"
    said = failure.value.reason
    assert re.search(r"rank 0 waited in vain in (all_gather|reduce_scatter|all_reduce)\w* \(step \d+, ", said), said
    assert said.endswith("; rank 1 did not answer")


def test_what_a_traceback_says():
    class Trainer:
        steps_done = 6

        def update(self):
            raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

        def begin(self):
            self.update()

    with pytest.raises(RuntimeError) as caught:
        Trainer().begin()
    said, code = describe(caught.value, 3)
    assert (said["kind"], code) == ("timeout", 4)
    assert said["what"].startswith("rank 3 waited in vain in a collective (step 7, update): Timed out")
    lost, _ = describe(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), 0)
    assert lost["kind"] == "lost"
    other, _ = describe(ValueError("Connection closed"), 0)
    assert other["kind"] == "error", "only what the transport says is about the connection"


def test_a_step_is_named_although_others_have_begun(corpus, monkeypatch):
    class Ahead(Trainer):
        ahead = 1

    def lost(*_):
        raise RuntimeError("Connection closed by peer")

    trainer = Ahead(experiment(corpus, steps=9))
    for _ in range(3):
        trainer.begin()
    assert [stats.step for stats in trainer.reports()] == [0, 1]
    trainer.begin()
    trainer._under_way[0] = (*trainer._under_way[0][:2], lost)
    with pytest.raises(RuntimeError) as caught:
        list(trainer.reports())
    assert describe(caught.value, 0)[0]["what"].startswith("rank 0 lost another rank in trainer._read (step 3, waiting")
    monkeypatch.setattr(step_reports, "send", lost)
    with pytest.raises(RuntimeError) as caught:
        trainer.begin()
    assert "(step 5, adding up the losses)" in describe(caught.value, 0)[0]["what"]


def test_the_watchdog_of_nccl_is_understood():
    line = ("[rank1]:[E ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=20000) ran for 20 s")  # fmt: skip
    assert watchdog(line) == "rank 1 waited in vain in allreduce for 20 s"
    assert watchdog("all is well") == ""


# ---- restarts -------------------------------------------------------------------------------------------------------


def test_restarts_need_checkpoints():
    kept = TrainOptions(out="x", save_every=1)
    assert restarts(None, kept, 3) == 3
    assert restarts(None, TrainOptions(), 3) == 0
    assert restarts(0, TrainOptions(), 3) == 0
    assert restarts(5, kept, 0) == 5
    with pytest.raises(UserError, match="--max-restarts 2 needs checkpoints") as error:
        restarts(2, TrainOptions(out="x"), 3)
    assert "--save-every" in error.value.fix


def test_a_job_is_restarted_so_often_and_no_more(corpus):
    tried = []

    def launch(job, progress):
        tried.append(job.options.resume)
        raise JobFailed("error", "rank 1 was killed")

    job = train_job(experiment(corpus), TrainOptions(out="/nowhere"))
    messages = []
    with pytest.raises(JobFailed, match="rank 1 was killed"):
        run_with_restarts(launch, job, messages.append, 2)
    assert tried == [False, True, True]
    assert [m["stage"] for m in messages] == [f"rank 1 was killed; restart {i} of 2 from the start" for i in (1, 2)]


@pytest.mark.nightly
@pytest.mark.parametrize("async_save", [False, True])
def test_random_kills_and_restarts_end_with_the_undisturbed_losses(async_save, corpus, tmp_path):
    """Rank 0, rank 1 or all of them, at a random moment of a run that saves every step."""
    e = experiment(corpus, "zero", ranks=2, steps=24)
    straight = run_job(train_job(e, TrainOptions()))["losses"]
    rng = random.Random(7)
    plans = [(rng.randrange(2, 9), (0,)), (rng.randrange(10, 20), (1,) if rng.random() < 0.5 else (0, 1))]
    left = list(plans)

    def watch(message):
        if left and message.get("step", 0) >= left[0][0] and "loss" in message:
            _, ranks = left.pop(0)
            time.sleep(rng.uniform(0, 0.03))
            for process in [worker(rank) for rank in ranks]:
                process.kill()

    out = tmp_path / "out"
    job = train_job(e, TrainOptions(out=str(out), save_every=1, async_save=async_save))
    result = run_with_restarts(run_job, job, watch, len(plans))
    assert result["restarts"] == len(plans)
    assert result["losses"] == straight
    assert len(set(straight)) == 24
    assert [p.name for p in out.iterdir()] == ["step-000024"]


# ---- a kill at every moment of saving -------------------------------------------------------------------------------

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.listdir", "os.scandir"}


def in_a_child(work) -> int:
    """Run ``work`` in a forked process; its exit code or minus its signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("scene", ["go on", "start again"])
def test_a_kill_at_every_file_operation_of_saving(scene, corpus, tmp_path):
    """SIGKILL before the n-th file operation of a save, for every n: there is always a whole checkpoint to go on from.

    "start again": the run ignores the checkpoints of an earlier one and saves under the same name.
    """
    e = experiment(corpus, steps=6)
    trainer = make_trainer(e)
    start = tmp_path / "start"
    losses = []
    for step in range(1, 4):
        losses.append(trainer.step().loss)
        if step in (2, 3):
            save(trainer, start if step == 2 else tmp_path / "newer", losses)
    if scene == "start again":  # both names are taken
        shutil.copytree(tmp_path / "newer" / "step-000003", start / "step-000003")

    def saving(folder, n):
        seen = 0

        def hook(event, args):
            nonlocal seen
            touched = args and str(folder) in str(args[0]) if event in _EVENTS else False
            if touched:
                seen += 1
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save(trainer, folder, losses)

    n = 0
    while True:
        n += 1
        folder = tmp_path / str(n)
        shutil.copytree(start, folder)
        code = in_a_child(lambda: saving(folder, n))  # noqa: B023
        again = make_trainer(e)
        found = resume(again, folder)
        assert found in (losses[:2], losses), f"after operation {n}"
        assert len(checkpoints(folder)) >= 1
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        if found == losses[:2]:
            assert again.step().loss == losses[2]
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert n > 15, "it was killed at every operation"
    assert found == losses
    assert json.loads(json.dumps(found)) == losses
