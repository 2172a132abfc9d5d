"""Traces experiments on a fake GPU in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.registry import has, mesh_axes, techniques_of


@dataclass(frozen=True)
class Wait:
    """What the host waits for, and the line of the package."""

    kind: str
    place: str
    count: int


@dataclass(frozen=True)
class StepTrace:
    """One step as it would be on a GPU."""

    launches: int
    """Kernels and copies, at least: an operator counts as one."""
    operators: dict[str, int]
    places: dict[str, int]
    """Launches by the line of the package."""
    waits: list[Wait]
    wrong: list[str]
    """Operators that failed, such as those of tensors on different devices, and requests that ended in an error."""
    sequences: int = 0
    replayed: int = 0
    """Kernels of CUDA graphs that the step replays, each by one launch."""
    kernels: dict[str, int] = field(default_factory=dict)
    """The same by name."""
    behind: int = 0
    """Launches that the device has left to do, at least, while the host waits."""
    labels: Sequence[str] = ()
    """Who computes what."""

    @property
    def waited(self) -> int:
        """How often the host waits."""
        return sum(w.count for w in self.waits)


def trace(
    experiments: Sequence[Experiment], sampling: Sequence[dict[str, Any]] = (), sequences: Sequence[int] = ()
) -> list[dict[str, StepTrace]]:
    """Trace each experiment and return its steps by name: ``step`` for training; ``prefill`` and ``decode`` for
    serving; ``site`` for compression (the query projection of one layer).

    ``sampling`` and ``sequences`` apply to serving, one entry per experiment: its sampling parameters (default: greedy)
    and the maximum number of sequences in a step (default: 8).

    Of a tensor-parallel server rank 0 is traced; an all-reduce counts as one launch.

    Kernels are those that an H100 gets, or one of its size of the GPU's architecture, where that is Ampere, Ada or
    Blackwell. Raises :class:`UserError` where there is no compiler,
    where PyTorch was built with CUDA, for another device than a GPU, and for several but tensor-parallel servers.
    """
    for e in experiments:
        if e.cluster.device.kind != "gpu":
            raise UserError(f"{e.cluster.device.name} is no GPU", 'name one, such as on = "h100-sxm"')
        if e.world > 1 and (e.task != "serve" or mesh_axes("serve", techniques_of(e.plan)) != {"tp": e.world}):
            raise UserError(f"{e.world} devices cannot be traced without them", "leave out what divides the model")
        if has(e, "compiled_blocks"):
            raise UserError("what PyTorch's compiler makes of a step cannot be traced", "leave out torch_compile")
        if not e.is_training and e.task not in ("serve", "compress"):
            raise UserError(f"task {e.task!r} has no trace on a fake GPU", "use pretrain, finetune, serve or compress")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    settings = sampling or [{"temperature": 0.0}] * len(experiments)
    most = sequences or [8] * len(experiments)
    asked = [
        {"experiment": e.model_dump(mode="json"), "served": {"sampling": s, "sequences": n}}
        for e, s, n in zip(experiments, settings, most, strict=True)
    ]
    lines = "".join(json.dumps(a) + "\n" for a in asked)
    done = subprocess.run([sys.executable, "-m", "ridgeline.measure.fake.worker"], input=lines, text=True,
                          capture_output=True, env=environment)  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(answers) < len(experiments) and not any("error" in a for a in answers):
        said = done.stderr.strip().splitlines()
        raise UserError(f"the trace on a fake GPU ended: {said[-1] if said else done.returncode}",
                        "see whether PyTorch is a CPU build and g++ is installed")  # fmt: skip
    return [_steps(a) for a in answers]


def _steps(found: dict[str, Any]) -> dict[str, StepTrace]:
    if "error" in found:
        what, fix = found["error"], found.get("fix") or "run it on a real one"
        raise UserError(f"the experiment cannot be traced on a fake GPU: {what}", fix)
    return {
        name: StepTrace(
            s["launches"], s["operators"], s["places"], [Wait(**w) for w in s["waits"]],
            list(dict.fromkeys([*s["wrong"], *s.get("failed", [])])), s.get("sequences", 0), s["replayed"],
            s["kernels"], s["behind"], s.get("labels", []),
        )
        for name, s in found["steps"].items()
    }  # fmt: skip
