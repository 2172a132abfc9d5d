"""The ablation: every plan predicted, then measured in its own process, in ABBA order; resumable; failures are kept.

No torch here: the orchestrator only starts processes and does statistics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridgeline.data.inputs import input_state, require_text
from ridgeline.data.text import paths_of
from ridgeline.experiments import AblationSpec, to_toml
from ridgeline.jobs.job import CellOptions, LaunchJob, Progress, TrainOptions, train_job
from ridgeline.jobs.launch import JobFailed, run_job
from ridgeline.jobs.live import announced
from ridgeline.measure.backends import NATIVE
from ridgeline.measure.environment import code_hash, fingerprint, load_average
from ridgeline.measure.merge import effect, merge, sameness
from ridgeline.measure.utilization import add_utilization
from ridgeline.predict import predict
from ridgeline.spec.ablation import Ablation, CellRef, Outcome
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.result import Result
from ridgeline.spec.scheduling import OWN
from ridgeline.spec.workload import Compress, Pretrain, Serve, Training
from ridgeline.techniques.registry import require_runnable, techniques_of

Watch = Callable[[CellRef, dict[str, Any]], None]
FAR = 2.0
"""Factor between predicted and measured speed beyond which the machine's profile is in doubt."""
Announce = Callable[[dict[str, Result]], None]
"""Receives the predictions by plan, before anything runs."""


def order(plans: list[str], repeats: int) -> list[CellRef]:
    """Rounds over all plans, every other one reversed (ABBA), so that slow drift of the machine cancels."""
    cells: list[CellRef] = []
    for r in range(repeats):
        cells += [CellRef(p, r) for p in (plans if r % 2 == 0 else reversed(plans))]
    return cells


def require_local(e: Experiment, launched: bool = False, backend: str = NATIVE) -> None:
    """Measuring needs the hardware (only ``local`` devices can run) and techniques with a real side.

    ``launched``: a launcher starts the ranks, so that they may be on several machines like this one. ``backend``: the
    engine that trains; backends other than the native one decide themselves which techniques they support.

    Raises :class:`Incompatible` otherwise, and :class:`UserError` where text that the workload names is missing.
    """
    if e.cluster.device.name != "local":
        raise Incompatible(
            f"{e.cluster.label} is not this machine, so it cannot be measured here",
            'use on = "local" (or "2xlocal" for two processes); `ridgeline predict` answers for other hardware',
        )
    if e.cluster.nodes > 1 and not launched:
        nodes, each = e.cluster.nodes, e.cluster.devices_per_node
        raise Incompatible(
            f"{e.cluster.label} is {nodes} machines, and this command starts processes on one",
            f"use `torchrun --nnodes {nodes} --nproc-per-node {each} -m ridgeline train …` or `--launcher ray`, "
            f'or on = "{e.world}xlocal" for all {e.world} processes here',
        )
    if backend == NATIVE:
        require_runnable(e)
    if isinstance(e.workload, Serve) and e.workload.engine not in ("", OWN):
        raise Incompatible(
            f"engine {e.workload.engine!r} is predicted, and what would be measured is another",
            "leave `engine` out; `ridgeline predict` answers for other engines, `ridgeline load` measures them",
        )
    if not launched:  # else ranks read it where they run
        require_text(e.workload)


def require_measurable(spec: AblationSpec) -> None:
    """Raises what :func:`require_local` does, for every plan and the text of the warm start."""
    for e in spec.plans.values():
        require_local(e)
    if spec.measure.warm_start and spec.measure.warm_start_data:
        paths_of(spec.measure.warm_start_data)


def run_ablation(
    spec: AblationSpec,
    folder: Path,
    command: str = "",
    watch: Watch | None = None,
    announce: Announce | None = None,
    fresh: bool = False,
) -> Ablation:
    """Predict and measure every plan; cells already measured by the same code are taken from ``folder``, unless
    ``fresh``.

    A cell that dies is a recorded result. ``KeyboardInterrupt`` leaves finished cells for the next call.
    """
    require_measurable(spec)
    if announce:
        announce({name: predict(e) for name, e in spec.plans.items()})
    spec = warm_started(spec, folder, watch)
    for name, e in spec.plans.items():  # each plan as a separate runnable file with all defaults written out
        _write(folder / "plans" / f"{name}.toml", to_toml(e))
    predicted = {name: predict(e) for name, e in spec.plans.items()}
    cells = order(list(spec.plans), spec.measure.repeats)
    if fresh:
        forget(folder, spec)
    busy, read = load_average(), [_read_state(e) for e in spec.plans.values()]
    with announced("ablation", spec.name, steps=len(cells)) as announce_cell:
        for done, cell in enumerate(cells):
            announce_cell({"step": done, "stage": f"{cell.plan} ({cell.repeat + 1})"})
            _measure_cell(spec, folder, cell, predicted[cell.plan], watch)
    if read != [_read_state(e) for e in spec.plans.values()]:
        raise UserError("the data changed while it was measured", "give the same command again")
    ablation = assemble(spec, folder, predicted, command)
    if noisy := [o.name for o in ablation.outcomes if o.too_noisy]:
        load = f" (load average {busy:.1f} at the start)" if busy is not None else ""
        ablation.notes.append(f"no verdict on {', '.join(noisy)}: other work on this machine disturbed the timings"
                              f"{load}; repeat when it is idle: {command or 'the same command'} --fresh")  # fmt: skip
    if note := profile_note(ablation):
        ablation.notes.append(note)
    _write(folder / "ablation.json", ablation.to_json())
    return ablation


def profile_note(a: Ablation) -> str:
    """What to do where the baseline's speed is far from its prediction; empty where it is not, or not known."""
    (base,) = (o for o in a.outcomes if o.name == a.baseline)
    speeds = [r.metric("tokens_per_s") if r else None for r in (base.predicted, base.measured)]
    predicted, measured = speeds
    if not predicted or not measured or 1 / FAR <= measured / predicted <= FAR:
        return ""
    return (f"{a.baseline} ran at {measured / predicted:.2g} times its predicted speed: the machine was busy now, or"
            " when it was probed; `ridgeline probe` on an idle machine measures its profile again")  # fmt: skip


def _measure_cell(spec: AblationSpec, folder: Path, cell: CellRef, predicted: Result, watch: Watch | None) -> None:
    file = cell_file(folder, spec, cell)
    if usable(file):
        if watch:
            watch(cell, {"cached": True})
        return
    result = measure_plan(
        spec.plans[cell.plan],
        repeat=cell.repeat,
        memory=spec.measure.memory and cell.repeat == 0,
        timeout=spec.measure.timeout_s,
        progress=(lambda m: watch(cell, m)) if watch else None,
    )
    _write(file, result.to_json())
    if watch:
        watch(cell, {"done": True, "status": result.status, "reason": result.reason, "result": result,
                     "predicted": predicted})  # fmt: skip


def warm_started(spec: AblationSpec, folder: Path, watch: Watch | None = None) -> AblationSpec:
    """The same plans starting from one common checkpoint, trained now if it is not there yet."""
    if not spec.measure.warm_start:
        return spec
    first = spec.plans[spec.baseline]
    task = first.workload
    if not isinstance(task, (Training, Compress)) or task.checkpoint:
        raise UserError("warm_start trains a starting checkpoint, but the workload has one or could not start from one",
                        "drop one of the two")  # fmt: skip
    plain = _warm_start(spec, first, task)
    base = folder / f"base-{plain.id}"  # a changed warm start is another one, and its cells are others
    place = base / "model"
    if not (place / "config.json").is_file():
        progress = (lambda m: watch(CellRef("warm start", 0), m)) if watch else None
        try:
            run_job(train_job(plain, TrainOptions(out=str(base), export=str(place))), progress)
        except JobFailed as failure:
            raise UserError(f"the warm start failed ({failure.status}): {failure.reason}", failure.log) from None
    plans = {}
    for name, e in spec.plans.items():
        started = e.workload.model_copy(update={"checkpoint": str(place)})
        plans[name] = e.model_copy(update={"workload": started})
    return spec.model_copy(update={"plans": plans})


def _warm_start(spec: AblationSpec, first: Experiment, task: Training | Compress) -> Experiment:
    """The plain training that makes the common checkpoint."""
    shared = Pretrain.model_fields if isinstance(task, Training) else ("seq_len", "data", "tokenizer")
    fields = {n: v for n, v in task.model_dump().items() if n in shared and n != "kind"}
    if isinstance(task, Compress):
        fields["eval_batches"] = 10**6  # a quarter of the text is not trained on: perplexity is measured there
    fields |= {"steps": spec.measure.warm_start, "data": spec.measure.warm_start_data or task.data}
    try:
        workload = Pretrain(**{**fields, **spec.measure.warm_start_workload})
    except ValidationError as error:
        first_error = error.errors()[0]
        bad = ".".join(str(p) for p in first_error["loc"])
        raise UserError(f"[measure] warm_start_workload: {bad} is not valid: {first_error['msg']}",
                        "use the fields of a pretrain workload")  from None  # fmt: skip
    return first.model_copy(
        update={"workload": workload, "plan": Plan(), "cluster": Cluster(device=first.cluster.device)}
    )


def measure_plan(
    e: Experiment,
    repeat: int = 0,
    memory: bool = True,
    timeout: float | None = None,
    progress: Progress | None = None,
    backend: str = NATIVE,
) -> Result:
    """Measure one plan once, in its own process(es). Out-of-memory, crash and time-out are results, not exceptions."""
    job = LaunchJob("measure", e, CellOptions(repeat=repeat, memory=memory, backend=backend), ranks=e.world)
    try:
        return Result.model_validate(run_job(job, progress, timeout))
    except JobFailed as failure:
        return Result(
            source="measured",
            experiment_id=e.id,
            name=e.name,
            experiment=e.canonical(),
            status=failure.status,
            reason=failure.reason,
            environment=fingerprint(),
            notes=[failure.log] if failure.log else [],
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def assemble(spec: AblationSpec, folder: Path, predicted: dict[str, Result], command: str) -> Ablation:
    """Merge the cells of each plan and compare it with the baseline."""
    outcomes: list[Outcome] = []
    merged: dict[str, Result] = {}
    for name in spec.plans:
        parts = [Result.load(cell_file(folder, spec, c)) for c in order([name], spec.measure.repeats)
                 if cell_file(folder, spec, c).is_file()]  # fmt: skip
        merged[name] = add_utilization(merge(parts), spec.plans[name])
    base = merged[spec.baseline]
    for name, e in spec.plans.items():
        outcome = Outcome(name=name, plan=e.plan.strings(), predicted=predicted[name], measured=merged[name])
        base_rate = predicted[spec.baseline].metric("tokens_per_s")
        own_rate = predicted[name].metric("tokens_per_s")
        if base_rate and own_rate:
            outcome.predicted_speedup = own_rate / base_rate
        effect(outcome, base, is_baseline=name == spec.baseline, margin=spec.measure.margin)
        if name != spec.baseline:
            outcome.checks = sameness(e, merged[name], base)
        outcomes.append(outcome)
    return Ablation(
        id=f"{ablation_key(spec)}",
        name=spec.name,
        baseline=spec.baseline,
        outcomes=outcomes,
        environment=base.environment or fingerprint(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
    )


def ablation_key(spec: AblationSpec) -> str:
    """Short id of the set of experiments."""
    import hashlib

    text = json.dumps({k: e.id for k, e in spec.plans.items()}) + str(spec.measure.repeats)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def cell_file(folder: Path, spec: AblationSpec, cell: CellRef) -> Path:
    """File of a cell's result: plan, experiment and files that it reads, repeat, and whether memory is recorded."""
    bare = "-bare" if cell.repeat == 0 and not spec.measure.memory else ""
    return folder / "cells" / f"{cell.plan}-{cell_key(spec.plans[cell.plan])}-{cell.repeat}{bare}.json"


def cell_key(e: Experiment) -> str:
    """What a measurement is kept by: the experiment, and the state of the files that it reads."""
    return "-".join(filter(None, (e.id, _read_state(e))))


def _read_state(e: Experiment) -> str:
    """State of the files that its workload and its techniques read."""
    return input_state(e.workload, [path for t in techniques_of(e.plan) for path in t.reads()])


def forget(folder: Path, spec: AblationSpec) -> None:
    """Remove the measured cells of these plans, and nothing else that may lie there."""
    for cell in order(list(spec.plans), spec.measure.repeats):
        cell_file(folder, spec, cell).unlink(missing_ok=True)


def usable(file: Path) -> bool:
    """A finished cell of the same code; failed cells are run again."""
    if not file.is_file():
        return False
    try:
        result = Result.load(file)
    except UserError:
        return False
    return result.status == "ok" and result.environment.get("code") == code_hash()


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(file.suffix + ".new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)
