"""Elastic training: ranks killed with SIGKILL, machines lost and added; the losses are those of an undisturbed run."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import tomli_w
from tests.train.test_failure import _EVENTS as FILE_EVENTS
from tests.train.test_failure import in_a_child
from tests.training import MODEL, experiment
from tests.world import world
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.jobs.job import TrainOptions, train_job
from ridgeline.jobs.launch import JobFailed, free_port, run_job
from ridgeline.jobs.restart import memory_folder, restarts, run_with_restarts
from ridgeline.predict import predict
from ridgeline.spec.errors import UserError
from ridgeline.train.memory_copies import MemoryCopies
from ridgeline.train.trainer import Trainer

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def tmp_path(tmp_path):
    """In memory, where the command keeps its copies: a disk takes most of the time, for a file of each tensor."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


KILLING = """
import os, pathlib, signal, sys
waiting = pathlib.Path(__file__).with_name("kills")

def hook(event, args):
    if event in ("open", "os.rename") and args and ".step-0" in str(args[0]):
        for kill in list(waiting.iterdir()) if waiting.is_dir() else ():
            when, step, part = kill.read_text().split()
            if event == when and step in str(args[0]) and part in str(args[0]):
                kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
"""


@pytest.mark.parametrize(("plan", "every"), [
    (("zero:stage=2", "elastic"), 1),
    pytest.param(("pipeline:degree=2", "elastic:every=3"), 3, marks=pytest.mark.nightly),
])  # fmt: skip
def test_killed_ranks_cost_no_more_than_the_steps_between_copies(plan, every, corpus, tmp_path, monkeypatch):
    """Rank 0 is killed when a copy is whole but for its name, rank 1 when it begins to write its part of another."""
    (tmp_path / "sitecustomize.py").write_text(KILLING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SOURCE}")
    e = experiment(corpus, *plan, ranks=2, steps=6 * every + 1, micro_batch_size=2)
    straight = run_job(train_job(e, TrainOptions(memory=str(tmp_path / "calm"))))["losses"]
    kills = tmp_path / "kills"
    kills.mkdir()
    (kills / "0").write_text(f"os.rename step-{3 * every:06d} .new")
    (kills / "1").write_text(f"open step-{6 * every:06d} __1_")
    begun = []

    def watch(message):
        if message.get("stage") == "training":
            begun.append(message["step"])

    result = run_with_restarts(run_job, train_job(e, TrainOptions(memory=str(tmp_path / "copies"))), watch, 3)
    assert result["losses"] == pytest.approx(straight, rel=1e-6)
    assert result["restarts"] == 2
    assert begun == [0, 2 * every, 5 * every]


# ---- machines that are lost, and others that come -------------------------------------------------------------------


def on_machines(rank, e, folder, each, steps):
    """Go on from what there is, to ``steps``, with ``each`` ranks a machine → (first step, losses)."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(each)
    try:
        trainer = Trainer(e, rank=rank, world=e.world)
        copies = MemoryCopies(trainer, Path(folder) / f"machine{rank // each}")
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE") if before is None else os.environ.__setitem__("LOCAL_WORLD_SIZE", before)
    losses = copies.resume()
    first = trainer.steps_done
    while trainer.steps_done < steps:
        losses.append(trainer.step().loss)
        copies.save(losses)
    return first, losses


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machines_part_is_in_the_memory_of_the_next(lost, corpus, tmp_path):
    e = experiment(corpus, "zero:stage=3", "elastic", ranks=2, steps=6)
    whole = world(2).run(on_machines, e, str(tmp_path / "calm"), 2, 6)[0][1]
    world(2).run(on_machines, e, str(tmp_path), 1, 3)
    shutil.rmtree(tmp_path / f"machine{lost}")
    first, losses = world(2).run(on_machines, e, str(tmp_path), 1, 6)[0]
    assert first == 3
    assert losses == pytest.approx(whole, rel=1e-6)


def test_machines_may_be_fewer_or_more_afterwards(corpus, tmp_path):
    """Two machines; the second is lost; then there are two again. The batch stays what it was."""
    two = experiment(corpus, "elastic", ranks=2, steps=9)
    one = experiment(corpus, "elastic", steps=9)
    whole = world(2).run(on_machines, two, str(tmp_path / "calm"), 2, 9)[0][1]
    world(2).run(on_machines, two, str(tmp_path), 1, 3)
    shutil.rmtree(tmp_path / "machine1")
    assert on_machines(0, one, str(tmp_path), 1, 6)[0] == 3
    (first, losses), _ = world(2).run(on_machines, two, str(tmp_path), 1, 9)
    assert first == 6
    assert losses == pytest.approx(whole, rel=1e-5)


def test_an_unfinished_copy_is_none(corpus, tmp_path):
    e = experiment(corpus, "zero:stage=3", "elastic", ranks=2, steps=6)
    world(2).run(on_machines, e, str(tmp_path), 1, 3)
    for machine in ("machine0", "machine1"):
        newest = next((tmp_path / machine).glob("step-*"))
        draft = tmp_path / machine / ".step-000004-draft.new"
        shutil.copytree(newest, draft)
    shutil.rmtree(next((tmp_path / "machine1").glob("step-*")))
    for file in (tmp_path / "machine0").glob("step-*/__0_*"):
        file.unlink()  # now nobody has rank 0's part
    assert world(2).run(on_machines, e, str(tmp_path), 1, 1)[0][0] == 0


def test_a_kill_at_every_file_operation_of_copying(corpus, tmp_path):
    """SIGKILL before the n-th file operation of a copy, for every n but those of like tensors: the one before or the
    new one is whole."""
    e = experiment(corpus, "elastic", steps=6)
    _, losses = on_machines(0, e, str(tmp_path / "start"), 1, 2)
    trainer = Trainer(e)
    MemoryCopies(trainer, tmp_path / "start" / "machine0").resume()
    losses.append(trainer.step().loss)

    def copying(folder, n):
        seen = 0

        def hook(event, args):
            nonlocal seen
            repeated = args and re.search(r"__0_([2-9]|\d\d)", str(args[0]))  # tensors after the second
            if event in FILE_EVENTS and args and str(folder) in str(args[0]) and not repeated:
                seen += 1
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)

        copies = MemoryCopies(trainer, folder)
        sys.addaudithook(hook)
        copies.save(losses)

    n, found = 0, []
    while True:
        n += 1
        folder = tmp_path / str(n)
        shutil.copytree(tmp_path / "start" / "machine0", folder)
        code = in_a_child(lambda: copying(folder, n))  # noqa: B023
        found = MemoryCopies(Trainer(e), folder).resume()
        assert found in (losses[:2], losses), f"after operation {n}"
        assert len(list(folder.iterdir())) == 1, "nothing is left of the others"
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert n > 10, "it was killed at every operation"
    assert found == losses


def test_a_part_that_was_being_fetched_is_no_copy(corpus, tmp_path):
    e = experiment(corpus, "zero:stage=3", "elastic", ranks=2, steps=6)
    world(2).run(on_machines, e, str(tmp_path), 1, 3)
    (whole,) = (tmp_path / "machine1").glob("step-*")
    (whole / "state.json").unlink()
    next(whole.glob("__1_*")).write_bytes(b"half")
    assert world(2).run(on_machines, e, str(tmp_path), 1, 4)[0][0] == 3


def test_copies_of_another_experiment_are_left_alone(corpus, tmp_path):
    e = experiment(corpus, "elastic", steps=2)
    on_machines(0, e, str(tmp_path), 1, 2)
    other = experiment(corpus, "elastic", steps=2, lr=0.5)
    assert on_machines(0, other, str(tmp_path), 1, 2)[0] == 0
    assert len(list((tmp_path / "machine0").glob("step-*"))) == 2
    assert on_machines(0, e, str(tmp_path), 1, 2)[0] == 2
    assert on_machines(0, other, str(tmp_path), 1, 2)[0] == 2


def test_a_machine_gets_only_the_files_it_needs(corpus, tmp_path):
    """Three machines, of which one lost its memory: then each has its own part and its neighbor's."""
    e = experiment(corpus, "zero:stage=3", "elastic", ranks=3, steps=6, batch_size=6)
    world(3).run(on_machines, e, str(tmp_path), 1, 2)
    shutil.rmtree(tmp_path / "machine1")
    assert world(3).run(on_machines, e, str(tmp_path), 1, 2)[0][0] == 2
    world(3).close()  # no other test needs three
    for machine in range(3):
        (place,) = (tmp_path / f"machine{machine}").glob("step-*")
        held = {rank: sum(f.stat().st_size for f in place.glob(f"__{rank}_*")) for rank in range(3)}
        others = held.pop((machine + 1) % 3)
        assert others < 0.1 * min(held.values()), "a few small tensors that all ranks have alike"


def saving_without_room(rank, e, folder, full):
    """Step 1 is copied, step 2 is not: rank ``full`` cannot write files of more than 1000 bytes then."""
    import resource

    trainer = Trainer(e, rank=rank, world=e.world)
    copies = MemoryCopies(trainer, Path(folder) / "machine0")
    losses = [trainer.step().loss]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = [copies.save(losses)]
    losses.append(trainer.step().loss)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        said.append(copies.save(losses))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_room_for_a_copy_training_goes_on_with_the_one_before(ranks, corpus, tmp_path):
    e = experiment(corpus, *["zero:stage=3"][: ranks - 1], "elastic", ranks=ranks, steps=6)
    run = [saving_without_room(0, e, str(tmp_path), 0)] if ranks == 1 else world(2).run(
        saving_without_room, e, str(tmp_path), 1)  # fmt: skip
    for first, second in run:
        assert first == ""
        assert f"rank {ranks - 1}: " in second
        assert ranks == 2 or "File too large" in second
    assert [p.name[:11] for p in (tmp_path / "machine0").iterdir()] == ["step-000001"]


def test_a_damaged_copy_is_none_or_is_named(corpus, tmp_path):
    e = experiment(corpus, "elastic", steps=6)
    on_machines(0, e, str(tmp_path), 1, 2)
    (place,) = (tmp_path / "machine0").glob("step-*")
    for file in place.glob("__*"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=r"the copy .*step-000002.* cannot be read"):
        on_machines(0, e, str(tmp_path), 1, 2)
    (place / "state.json").write_text('{"step": 2')
    assert on_machines(0, e, str(tmp_path), 1, 0)[0] == 0


def test_the_newest_copy_is_that_of_the_largest_step(corpus, tmp_path):
    e = experiment(corpus, "elastic", steps=6)
    on_machines(0, e, str(tmp_path), 1, 1)
    folder = tmp_path / "machine0"
    (place,) = folder.glob("step-*")
    state = json.loads((place / "state.json").read_text())
    for step in (999_999, 1_000_000):
        shutil.copytree(place, folder / f"step-{step:06d}-x")
        (folder / f"step-{step:06d}-x" / "state.json").write_text(json.dumps({**state, "step": step}))
    assert on_machines(0, e, str(tmp_path), 1, 0)[0] == 1_000_000


def test_only_the_users_own_directory_is_taken(corpus, tmp_path):
    trainer = Trainer(experiment(corpus, "elastic"))
    MemoryCopies(trainer, tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises(UserError, match="other users may write"):
            MemoryCopies(trainer, tmp_path / name)


def test_no_resume_forgets_earlier_runs_and_not_this_ones_copies(corpus, tmp_path):
    """Ranks that the same torchrun starts again go on from the copies, with --no-resume too."""
    e = experiment(corpus, "elastic", steps=6)
    on_machines(0, e, str(tmp_path), 1, 2)
    copies = MemoryCopies(Trainer(e), tmp_path / "machine0")
    copies.begin_anew()
    assert copies.resume() == []
    losses = on_machines(0, e, str(tmp_path), 1, 2)[1]
    copies.begin_anew()
    assert copies.resume() == losses


# ---- restarts -------------------------------------------------------------------------------------------------------


def test_restarts_are_counted_in_a_row(corpus):
    """A run that gets further each time may be restarted without end, and one that does not only so often."""
    job = train_job(experiment(corpus), TrainOptions(memory="/nowhere"))
    for reached, tried in (([1, 2, 3, 4, 5], 6), ([1, 1, 1, 1, 1], 3)):
        calls = []

        def launch(job, progress, calls=calls, reached=reached):
            if len(calls) == len(reached):
                return {}
            calls.append(progress({"step": reached[len(calls)], "loss": 1.0}))
            raise JobFailed("error", "rank 1 was killed")

        if tried == 6:
            assert run_with_restarts(launch, job, lambda m: None, 2)["restarts"] == 5
        else:
            with pytest.raises(JobFailed):
                run_with_restarts(launch, job, lambda m: None, 2)
            assert len(calls) == tried
    assert restarts(None, TrainOptions(memory="x"), 0) == 3
    assert restarts(7, TrainOptions(memory="x"), 0) == 7


def test_the_directory_in_memory(tmp_path):
    with memory_folder(tmp_path) as folder:
        assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()
    with memory_folder(tmp_path, "job7") as folder:
        assert folder == str(tmp_path / "ridgeline-job7")
    with pytest.raises(UserError, match="no directory") as error, memory_folder(tmp_path / "none"):
        pass
    assert "--memory-dir" in error.value.fix


def test_a_command_without_restarts_does_not_ignore_it(corpus):
    with pytest.raises(UserError, match="starts no lost rank again"):
        run_job(train_job(experiment(corpus, "elastic"), TrainOptions()))


def test_too_little_memory_is_said_before_training(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2000, 1000, 1000))
    with pytest.raises(UserError, match=r"two copies.* do not fit") as error:
        MemoryCopies(Trainer(experiment(corpus, "elastic")), tmp_path)
    assert "--shm-size" in error.value.fix


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero:stage=3", "data_parallel", "pipeline:degree=2"])
def test_predicted_bytes_are_those_that_are_copied(plan, corpus, tmp_path):
    e = experiment(corpus, plan, "elastic", ranks=2, steps=1)
    predicted = sum(r.link_bytes for r in predict(e).breakdown if r.operator == "elastic.copy")
    world(2).run(on_machines, e, str(tmp_path), 2, 1)
    metadata = FileSystemReader(str(next(tmp_path.glob("machine0/step-*")))).read_metadata().state_dict_metadata
    held = [m for m in metadata.values() if isinstance(m, TensorStorageMetadata)]
    copied = sum(math.prod(m.size) * m.properties.dtype.itemsize for m in held)
    steps = sum(m.size == () for m in held)  # of Adam, one for each parameter
    assert 2 * predicted == pytest.approx(copied - 4 * steps)


def test_every_divides_the_cost_and_a_failure_costs_steps(corpus):
    plain, each, fifth = (predict(experiment(corpus, "zero", *more, ranks=2)) for more in
                          ((), ("elastic",), ("elastic:every=5,mtbf=3600,restart=10",)))  # fmt: skip
    step = [r.metrics["step_time_s"].value for r in (plain, each, fifth)]
    assert step[0] < step[2] < step[1]
    assert step[1] - step[0] == pytest.approx(5 * (step[2] - step[0]), rel=0.2)
    lost = fifth.metrics["lost_per_failure_s"].value
    assert lost == pytest.approx(10 + 3 * step[2])
    assert fifth.metrics["lost_share"].value == pytest.approx(lost / (lost + 3600))


# ---- from outside ---------------------------------------------------------------------------------------------------


def file_of(folder, corpus, on, steps, *plan):
    path = folder / "experiment.toml"
    workload = {"kind": "pretrain", "seq_len": 16, "batch_size": 4, "steps": steps, "lr": 1e-3, "warmup_steps": 1,
                "data": str(corpus)}  # fmt: skip
    fields = {"model": MODEL.model_dump(mode="json", exclude_none=True), "on": on, "plan": list(plan)}
    path.write_text(tomli_w.dumps({**fields, "workload": workload}), encoding="utf-8")
    return path


@pytest.mark.parametrize(("plan", "options", "says"), [
    (["elastic"], ["--memory-dir", "/no/such/place"], "there is no directory /no/such/place"),
    ([], ["--memory-dir", "/tmp"], "this one keeps none"),
    (["elastic"], ["--backend", "hf"], "elastic"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(plan, options, says, corpus, tmp_path):
    result = CliRunner().invoke(app, ["train", str(file_of(tmp_path, corpus, "1xlocal", 2, *plan)), *options])
    assert isinstance(result.exception, UserError), result.output
    assert says in str(result.exception)


class Agent:
    """torchrun on one of two machines, which has a memory of its own."""

    def __init__(self, number, port, file, memory):
        memory.mkdir()
        self.number, self.memory = number, memory
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                   "--max-restarts", "50", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                   "--rdzv-id", "test", "--rdzv-conf",
                   f"keep_alive_interval=1,keep_alive_max_attempt=2,is_host={number == 0}",  # the second one is lost
                   "-m", "ridgeline", "train", str(file), "--memory-dir", str(memory), "--timeout", "20",
                   "--json"]  # fmt: skip
        self.log = (memory.parent / f"{memory.name}.log").open("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True,
                                        env={**os.environ, "OMP_NUM_THREADS": "1",
                                             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # fmt: skip

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def step(self):
        """The newest step of which a copy is here."""
        return max((int(p.name.split("-")[1]) for p in self.memory.glob("ridgeline-test-*/step-*")), default=0)


@pytest.mark.nightly  # starts torchrun and its ranks five times
def test_torchrun_goes_on_without_a_lost_machine(corpus, tmp_path):
    """A rank is killed, then a machine with its memory; another machine takes its place."""
    steps = 60
    file = file_of(tmp_path, corpus, "2x1xlocal", steps, "zero:stage=3", "elastic")
    port = str(free_port())
    agents = [Agent(i, port, file, tmp_path / f"memory{i}") for i in range(2)]

    def wait(agent, step):
        deadline = time.monotonic() + 240
        while agent.step() < step:
            assert time.monotonic() < deadline, agents[0].said() + agents[1].said()
            time.sleep(0.02)

    try:
        wait(agents[0], 5)
        (rank,) = [p for p in psutil.Process(agents[1].process.pid).children() if "train" in p.cmdline()]
        rank.kill()
        at = agents[0].step()
        wait(agents[0], at + 5)
        lost = agents.pop()
        ranks = psutil.Process(lost.process.pid).children()
        lost.process.kill()
        for p in ranks:
            p.kill()
        shutil.rmtree(lost.memory)
        agents.append(Agent(2, port, file, tmp_path / "memory2"))
        for agent in agents:
            assert agent.process.wait(300) == 0, agent.said()
        said = "".join(agent.said() for agent in agents)
        (result,) = [json.loads(line) for line in said.splitlines() if line.startswith('{"losses"')]
        e = experiment(corpus, "zero:stage=3", ranks=2, steps=steps)
        straight = run_job(train_job(e, TrainOptions()))["losses"]
        assert result["losses"] == pytest.approx(straight, rel=1e-5)
        assert not list(agents[0].memory.iterdir()), "copies are removed at the end"
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                os.killpg(agent.process.pid, signal.SIGKILL)
            agent.log.close()
