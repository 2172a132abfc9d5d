"""Starts the ranks of a job as actors on a Ray cluster: one bundle of a placement group and one process per rank.

``RAY_ADDRESS`` (or ``ray start`` on this machine) names the cluster; without one Ray starts a local one. Checkpoints
must be on storage that all machines see. Source: Moritz et al. 2018 (arXiv:1712.05889).
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from ridgeline.jobs.job import LaunchJob, Progress, RankContext
from ridgeline.jobs.launch import JobFailed, error_of
from ridgeline.spec.errors import UserError

_PLACING = 60.0
"""Seconds to wait for free resources in the cluster (which may be needed after the loss of a machine)."""
_HANDED_OVER = ("PYTHONPATH", "RIDGELINE_HOME", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")
"""Environment variables of this process that are passed to the ranks."""


def require_ray() -> None:
    """Raise :class:`UserError` when Ray is not installed."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UserError("--launcher ray needs the `ray` package", "pip install 'ridgeline[ray]', or --launcher local")


class Mailbox:
    """An actor that holds rank 0's messages until the driver reads them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def put(self, message: dict[str, Any]) -> None:
        """From rank 0."""
        self.messages.append(message)

    def take(self) -> list[dict[str, Any]]:
        """To the driver, once."""
        out, self.messages = self.messages, []
        return out


class Rank:
    """An actor that is one rank."""

    def place(self) -> tuple[str, str, int]:
        """(node id, address, a free port)."""
        import socket

        import ray

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), s.getsockname()[1]

    def run(self, job: str, variables: dict[str, str], mailbox: Any) -> dict[str, Any]:
        """Do the rank's part: ``{"result": …}`` or ``{"error": …}``."""
        import traceback

        import ray

        from ridgeline.jobs.failure import describe
        from ridgeline.jobs.worker import run_rank, setup

        os.environ.update(variables)
        rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])

        def report(message: dict[str, Any]) -> None:
            if rank == 0:
                ray.get(mailbox.put.remote({**message, "pid": os.getpid()}))

        try:
            launch = LaunchJob.from_json(job)
            device = setup(ranks, launch.options.timeout)
            return {"result": run_rank(launch, RankContext(device, rank, ranks, report))}
        except BaseException as error:
            failure, _ = describe(error, rank)
            return {"error": {**failure, "trace": traceback.format_exc()}}


def run_on_ray(job: LaunchJob, progress: Progress | None = None) -> dict[str, Any]:
    """Run the job's ranks on Ray; rank 0's result. As :func:`ridgeline.jobs.launch.run_job`, it raises
    :class:`JobFailed` when a rank fails, :class:`UserError` for a user's mistake, and stops every rank then."""
    import ray

    with contextlib.suppress(ConnectionError):  # no cluster named or running: Ray starts one here
        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    group = _placed(job.ranks)
    actors: list[Any] = []
    try:
        return _run(job, group, actors, progress or (lambda message: None))
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)


def _placed(ranks: int) -> Any:
    """A placement group with one bundle (a GPU where there are any, else a CPU) per rank."""
    import ray

    have = ray.cluster_resources()
    kind = "GPU" if have.get("GPU") else "CPU"
    # The whole cluster counts, not what is free now: a rank that was just killed still gives its share back.
    if have.get(kind, 0) < ranks:
        raise UserError(
            f"{ranks} ranks need {ranks} {kind}s, the Ray cluster has {have.get(kind, 0):.0f}",
            f'add machines, or set on="{max(1, int(have.get(kind, 0)))}xlocal"',
        )
    bundles = [{"CPU": 1.0, **({"GPU": 1.0} if kind == "GPU" else {})}] * ranks
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(_PLACING):
        ray.util.remove_placement_group(group)
        raise JobFailed("error", f"Ray found no room for {ranks} ranks within {_PLACING:.0f} s; others are using it")
    return group


def _run(job: LaunchJob, group: Any, actors: list[Any], progress: Progress) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    environment = {k: os.environ[k] for k in _HANDED_OVER if k in os.environ}
    environment |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "RIDGELINE_WORKER": "1"}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    runtime = {"env_vars": environment}
    mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here, runtime_env=runtime).remote()
    actors.append(mailbox)
    gpus = 1 if "GPU" in group.bundle_specs[0] else 0
    members = []
    for bundle in range(job.ranks):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        actor = ray.remote(Rank).options(
            num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy, runtime_env=runtime
        )
        members.append(actor.remote())
        actors.append(members[-1])
    try:
        places = ray.get([m.place.remote() for m in members], timeout=_PLACING)
    except Exception as error:
        raise JobFailed("error", f"the ranks did not start on Ray: {_first_line(error)}") from None
    # Ranks of one machine are neighbors, as everywhere.
    order = sorted(range(job.ranks), key=lambda i: (places[i][0] != places[0][0], places[i][0], i))
    rank_of = {}
    for rank, i in enumerate(order):
        variables = _variables(rank, [places[k] for k in order])
        rank_of[members[i].run.remote(job.to_json(), variables, mailbox)] = rank
    return _follow(rank_of, mailbox, progress)


def _variables(rank: int, places: list[tuple[str, str, int]]) -> dict[str, str]:
    """torchrun's variables of one rank, from every rank's place in rank order."""
    node = places[rank][0]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str([p[0] for p in places[:rank]].count(node)),
        "LOCAL_WORLD_SIZE": str([p[0] for p in places].count(node)),
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": str(places[0][2]),
    }


def _follow(rank_of: dict[Any, int], mailbox: Any, progress: Progress) -> dict[str, Any]:
    import ray

    waiting, step = list(rank_of), 0
    result: dict[str, Any] = {}
    failures: dict[int, dict[str, Any]] = {}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        done, waiting = ray.wait(waiting, num_returns=1, timeout=0.1)
        for message in ray.get(mailbox.take.remote()):
            step = message.get("step", step)
            progress(message)
        for reference in done:
            rank = rank_of[reference]
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                reason = f"rank {rank} was killed or its machine was lost after step {step} ({_first_line(error)})"
                answer = {"error": {"kind": "killed", "what": reason, "trace": "", "time": 0.0}}
            if "error" in answer:
                failures[rank] = answer["error"]
                deadline = deadline or time.monotonic() + 2  # the other ranks may have reported the cause
            elif rank == 0:
                result = answer["result"]
    if not failures:
        return result
    place = {"killed": 0, "timeout": 2, "lost": 3}
    first = min(failures.values(), key=lambda f: (place.get(f["kind"], 1), f["time"]))
    if first["kind"] == "killed":
        raise JobFailed("error", first["what"])
    raise error_of(first)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
