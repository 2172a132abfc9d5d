"""A real local Ray cluster of two node processes: a worker killed mid-run changes nothing but the time it takes."""

import os
import signal
from pathlib import Path

import pytest
from tests.training import experiment, train

from ridgeline.jobs.job import JobOptions, LaunchJob, TrainOptions, train_job
from ridgeline.jobs.launch import JobFailed
from ridgeline.jobs.launchers import launcher_of
from ridgeline.jobs.restart import run_with_restarts
from ridgeline.spec.errors import UserError

ray = pytest.importorskip("ray")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(SOURCE)
    for attempt in range(3):  # Ray gives its own processes 30 s to start, a constant of its: too few on a busy machine
        made = Cluster()
        try:
            made.add_node(num_cpus=1, include_dashboard=False)
            made.add_node(num_cpus=1)
            break
        except Exception as e:
            made.shutdown()
            if "timed out during startup" not in str(e) or attempt == 2:
                raise
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.__setitem__("PYTHONPATH", before)


def test_a_worker_killed_mid_run_costs_a_restart_and_nothing_else(cluster, corpus, tmp_path):
    e = experiment(corpus, "zero", ranks=2, steps=8)
    straight = train(e, uneven=False).losses
    launch, most = launcher_of("ray")
    assert most == 3
    restarts, pids, killed = [], set(), []

    def watch(message):
        if "pid" in message:
            pids.add(message["pid"])
        if message.get("restart"):
            restarts.append(message["stage"])
        if message.get("step") == 4 and not killed:
            killed.append(message["pid"])
            os.kill(message["pid"], signal.SIGKILL)

    options = TrainOptions(out=str(tmp_path / "out"), save_every=1, resume=True)
    result = run_with_restarts(launch, train_job(e, options), watch, most)
    assert result["losses"] == straight
    assert len(set(straight)) == 8
    assert result["restarts"] == len(restarts) == 1
    assert "rank 0 was killed or its machine was lost after step" in restarts[0]
    assert "restart 1 of 3 from step-0000" in restarts[0]
    assert len(pids) == 2, "a fresh process"

    # ... a user's mistake is not tried again, and is still one;
    wrong = e.model_copy(update={"workload": e.training.model_copy(update={"lr": 0.5})})
    with pytest.raises(UserError, match="another experiment"):
        run_with_restarts(launch, train_job(wrong, options), None, most)
    # ... and what does not fit on the cluster is refused.
    with pytest.raises(UserError, match="3 ranks need 3 CPUs, the Ray cluster has 2") as error:
        launch(train_job(experiment(corpus, ranks=3, batch_size=3), TrainOptions()))
    assert 'on="2xlocal"' in error.value.fix


def test_an_error_is_the_jobs(cluster, corpus, monkeypatch):
    launch, _ = launcher_of("ray")
    e = experiment(corpus, ranks=2)
    with pytest.raises(JobFailed, match="unknown mode 'dance'"):
        launch(LaunchJob("dance", e, JobOptions(), ranks=2))
