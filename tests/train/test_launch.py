"""Processes: what a job's ranks can do to it, and `ridgeline train` from outside: Ctrl-C, resume, torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tomli_w
from tests.training import MODEL, experiment, train

from ridgeline import catalog, cli
from ridgeline.cli.train import _print_training
from ridgeline.jobs import launch
from ridgeline.jobs.job import CellOptions, JobOptions, LaunchJob, TrainOptions, train_job
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.jobs.launchers import run_launched_rank
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.techniques.matrix import CPU


def workers():
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("rank ")]


def test_a_job_gives_the_result_of_the_engine(corpus):
    e = experiment(corpus, "zero", ranks=2, steps=3)
    messages = []
    result = run_job(train_job(e, TrainOptions()), messages.append)
    assert result["losses"] == train(e, uneven=False).losses
    assert [m["loss"] for m in messages if "loss" in m] == result["losses"]
    assert not workers()


def test_sigterm_to_one_rank_ends_all_after_the_same_step_with_a_checkpoint(corpus, tmp_path):
    steps = []

    def end_rank_1(message):
        steps.append(message["step"])
        if message["step"] == 2:
            next(p for p in workers() if p.name() == "rank 1").send_signal(signal.SIGTERM)

    e = experiment(corpus, "data_parallel", ranks=2, steps=100_000)
    result = run_job(train_job(e, TrainOptions(out=str(tmp_path))), end_rank_1, timeout=300)
    assert result["stopped"]
    assert result["step"] == len(result["losses"]) == steps[-1] < 100_000
    assert [str(p) for p in tmp_path.iterdir()] == [result["checkpoint"]]
    assert not workers()


def test_the_reason_is_that_of_the_rank_that_failed(corpus, monkeypatch):
    """Rank 1 has no such network; rank 0 only notices that its peer is gone."""
    whole = launch.rank_environment

    def environment(rank, ranks, port):
        network = {"GLOO_SOCKET_IFNAME": "nowhere"} if rank == 1 else {}
        return {**whole(rank, ranks, port), **network}

    monkeypatch.setattr(launch, "rank_environment", environment)
    with pytest.raises(JobFailed, match="nowhere") as failure:
        run_job(train_job(experiment(corpus, "zero", ranks=2), TrainOptions()), timeout=300)
    assert failure.value.status == "error"
    assert "Traceback" in failure.value.log
    assert not workers()


def test_a_killed_rank_is_out_of_memory(corpus):
    def kill_rank_1(message):
        if message.get("step") == 2:
            rank = next(p for p in workers() if p.name() == "rank 1")
            rank.send_signal(signal.SIGKILL)

    with pytest.raises(JobFailed, match="rank 1 was killed") as failure:
        run_job(
            train_job(experiment(corpus, "data_parallel", ranks=2, steps=100_000), TrainOptions()),
            kill_rank_1,
        )
    assert failure.value.status == "oom"
    assert not workers()


def test_ranks_start_from_one_process_and_end_with_the_one_that_asked(corpus, tmp_path):
    job = train_job(experiment(corpus, ranks=2, steps=1_000_000), TrainOptions())
    (tmp_path / "job.json").write_text(job.to_json())
    script = """
import os, sys
from pathlib import Path
from ridgeline.jobs.job import LaunchJob
from ridgeline.jobs.launch import run_job
job = LaunchJob.from_json(Path(sys.argv[1]).read_text())
run_job(job, lambda message: message.get("step") == 2 and print("two steps", flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "job.json")], stdout=subprocess.PIPE)
    assert parent.stdout.readline()
    ranks = workers()
    assert sorted(p.name() for p in ranks) == ["rank 0", "rank 1"]
    assert len({p.ppid() for p in ranks}) == 1
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(ranks, timeout=300)[1]


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are forked on Linux only")
def test_the_process_that_ranks_are_forked_from_may_die(corpus):
    def kill_it(message):
        if message.get("step") == 2:
            (template,) = {p.parent() for p in workers()}
            assert template.pid != os.getpid(), "the ranks are no forks: this would be the process that runs the tests"
            template.kill()

    job = train_job(experiment(corpus, "data_parallel", ranks=2, steps=1_000_000), TrainOptions())
    with pytest.raises(JobFailed, match="was ended by signal 15"):
        run_job(job, kill_it, timeout=300)
    assert run_job(train_job(experiment(corpus, steps=2), TrainOptions()))["step"] == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_users_mistake_found_by_a_worker_stays_one(ranks):
    with pytest.raises(UserError, match="neither a file nor a directory") as error:
        run_job(train_job(experiment("/nowhere", ranks=ranks), TrainOptions()))
    assert error.value.fix
    assert not isinstance(error.value, Incompatible)


def test_a_job_that_takes_too_long_is_ended(corpus):
    with pytest.raises(JobFailed) as failure:
        run_job(train_job(experiment(corpus, steps=1_000_000), TrainOptions()), timeout=4)
    assert failure.value.status == "timeout"
    assert not workers()


def test_an_unknown_mode_is_an_error_with_its_reason(corpus):
    with pytest.raises(JobFailed, match="ValueError: unknown mode 'dance'"):
        run_job(LaunchJob("dance", experiment(corpus), JobOptions()))


def test_what_the_callers_callback_raises_reaches_the_caller(corpus):
    def stop(message):
        if message.get("step") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(train_job(experiment(corpus, steps=1_000_000), TrainOptions()), stop)
    assert not workers()


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_while_measuring_is_not_a_result(ranks, corpus):
    """What is half measured is dropped, and the caller is interrupted, not told of a failed cell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    e = experiment(corpus, ranks=ranks, steps=1_000_000)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(
                LaunchJob("measure", e, CellOptions(memory=False), ranks=ranks),
                lambda message: message.get("step") == 2 and os.kill(os.getpid(), signal.SIGINT),
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not workers()


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(corpus, tmp_path):
    catalog.save_device(CPU)
    table = {
        "name": "tiny", "on": "local", "model": MODEL.model_dump(exclude_none=True, exclude_defaults=True),
        "workload": {"kind": "pretrain", "data": str(corpus), "seq_len": 16, "batch_size": 4, "steps": 6},
    }  # fmt: skip
    path = tmp_path / "tiny.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def ridgeline(*args, **more):
    return subprocess.run(
        [sys.executable, "-m", "ridgeline", *map(str, args)], capture_output=True, text=True, timeout=600, **more
    )


@pytest.mark.parametrize(
    ("checkpoint", "says"), [("out/step-000003", "the same command goes on"), (None, "nothing was saved")]
)
def test_interrupted_training_says_how_it_goes_on(checkpoint, says, capsys):
    result = {
        "losses": [3.0, 2.5],
        "step": 3,
        "stopped": True,
        "checkpoint": checkpoint,
        "device_peak_bytes": 0,
        "traffic": {},
    }
    _print_training(result, json=False)
    assert "interrupted" in (text := capsys.readouterr().out)
    assert says in text
    _print_training({**result, "stopped": False}, json=False)
    assert "interrupted" not in capsys.readouterr().out


def test_ctrl_c_or_sigterm_finishes_the_step_saves_and_the_same_command_goes_on(file, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ridgeline", "train", str(file), "workload.steps=1000000", "--out", str(out),
               "--save-every", "10", "--json"]  # fmt: skip

    def interrupted(after: int, end: Callable[[subprocess.Popen], None], *more: str) -> dict:
        # A test run in the background of a shell inherits an ignored SIGINT; a user's terminal does not ignore it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        deadline = time.monotonic() + 300
        try:
            while not any(int(p.name[5:]) > after for p in out.glob("step-*")):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        except AssertionError:  # or its ranks would be those of the tests that follow
            process.kill()
            raise
        end(process)
        said, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        return json.loads(said)

    def end_all(process: subprocess.Popen) -> None:
        """As Slurm and systemd do: the ranks, and the process that they are forked from, get it, too."""
        parent = psutil.Process(process.pid)
        for p in (parent, *parent.children(recursive=True)):
            p.send_signal(signal.SIGTERM)

    first = interrupted(0, lambda process: process.send_signal(signal.SIGINT))
    assert first["stopped"]
    assert [p.name for p in out.iterdir()] == [Path(first["checkpoint"]).name]
    assert len(first["losses"]) == first["step"]
    second = interrupted(first["step"], end_all, "--procs", "2", "--async-save")
    assert [p.name for p in out.iterdir()] == [Path(second["checkpoint"]).name]
    assert second["step"] > first["step"]
    assert second["losses"][: first["step"]] == first["losses"]


@pytest.mark.nightly
def test_train_exports_and_has_nothing_left_to_do(file, tmp_path):
    out = tmp_path / "out"
    done = ridgeline("train", file, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["step"] == len(result["losses"]) == 6
    assert {p.name for p in out.iterdir()} == {"step-000006", "model"}
    again = json.loads(ridgeline("train", file, "--out", out, "--json").stdout)
    assert again == {**result, "step_s": []}
    refused = ridgeline("train", file, "workload.lr=0.5", "--out", out)
    assert refused.returncode == 2
    assert "another experiment" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_torchrun_starts_the_ranks_too(file, corpus, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "ridgeline", "train", str(file), "--procs", "2", "--out", str(out), "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    here = train(experiment(corpus, ranks=2, steps=6, lr=3e-4, warmup_steps=2), uneven=False)
    assert json.loads(done.stdout)["losses"] == here.losses
    assert (out / "model" / "model.safetensors").is_file()


def test_another_number_of_ranks_than_torchrun_started_is_refused(corpus, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    result, code, said = run_launched_rank(experiment(corpus), TrainOptions(), print)
    assert (result, code) == (None, 2)
    assert "torchrun started 2 ranks, the experiment has 1" in said


@pytest.mark.nightly  # torchrun on one has a test above
def test_torchrun_on_two_machines(file, corpus, tmp_path):
    """Two agents that meet at a port, one process each: the same curve as two processes started here."""
    port = str(launch.free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
               "-m", "ridgeline", "train", str(file), "on=2x1xlocal", "--out", str(tmp_path / "out"),
               "--json"]  # fmt: skip
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        for _ in range(2)
    ]  # fmt: skip
    said = [agent.communicate(timeout=600) for agent in agents]
    assert [a.returncode for a in agents] == [0, 0], said
    results = [json.loads(out) for out, _ in said if out.strip()]
    assert len(results) == 1, "rank 0 prints the result"
    here = train(experiment(corpus, ranks=2, steps=6, lr=3e-4, warmup_steps=2), uneven=False)
    assert results[0]["losses"] == here.losses


# ---- bad input ------------------------------------------------------------------------------------------------------

BAD = [
    (["plan=tensor_parallel:degree=3+flash_attention"], 4, ["4 devices do not split into groups of 3", "use tp 4"]),
    (["plan=tensor_parallel:degree=3+pipeline:degree=2"], 8, ["groups of 6", "(pp 2 × tp 3)", "use pp 2 × tp 4"]),
    (["plan=tensor_parallel:degree=8+flash_attention"], 8, ["4 attention heads", "over 8 ranks", "use degree=4"]),
    (["plan=pipeline:degree=4+flash_attention"], 4, ["2 layers do not fill 4 stages", "at most 2 stages"]),
    (["workload.batch_size=6"], 4, ["batch_size 6 does not split over 4", "multiple of 4"]),
    (["on=2x2xlocal"], 0, ["2x2xlocal is 2 machines", "torchrun --nnodes 2 --nproc-per-node 2", 'on = "4xlocal"']),
    (["--backend", "hf", "plan=zero:stage=2+flash_attention"], 2, ["backend hf has no zero", "--backend native"]),
    (["--backend", "megatron-core"], 0, ["backend megatron-core", "need CUDA"]),
    (["--backend", "natve"], 0, ["unknown backend 'natve'", "'native'"]),
    (["--launcher", "slurm"], 0, ["unknown launcher 'slurm'", "local, ray"]),
    (["--max-restarts", "2"], 0, ["--max-restarts 2 needs checkpoints", "--save-every"]),
    (["--timeout", "0"], 0, ["--timeout"]),
    (["--async-save"], 0, ["--async-save", "--save-every"]),
]


@pytest.mark.parametrize(("args", "procs", "says"), BAD, ids=[b[2][0] for b in BAD])
def test_bad_input_is_one_clear_message(args, procs, says, file, monkeypatch, capsys):
    more = ["--procs", str(procs)] if procs else []
    monkeypatch.setattr(sys, "argv", ["ridgeline", "train", str(file), *more, *args])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    for text in says:
        assert text in err
    assert "Traceback" not in err
    assert len(err) < 600
    assert not workers()


def test_a_missing_ray_names_the_extra(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["ridgeline", "train", str(file), "--launcher", "ray"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "pip install 'ridgeline[ray]'" in capsys.readouterr().err
