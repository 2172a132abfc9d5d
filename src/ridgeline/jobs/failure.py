"""The report of a failed rank: the rank, the step, the phase and the collective it was in, read from its traceback.

Nothing is recorded while training runs: the frames of the exception hold the step and the operation.
"""

from __future__ import annotations

import re
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ridgeline.spec.errors import Incompatible, UserError

_PHASES = {
    "global_batches": "reading the text", "_build": "building the model", "forward_backward": "forward and backward",
    "update": "update", "_send_report": "adding up the losses", "reports": "waiting for the loss",
    "evaluate": "evaluation", "save": "saving a checkpoint", "resume": "loading a checkpoint", "export": "export",
    "init_process_group": "meeting the other ranks",
}  # fmt: skip
"""Functions of the engine and its loop by what to call them in a message; the innermost on the stack is reported."""
_AWAITED = {"reducer.finish": "all_reduce"}
"""Functions that wait for collectives started earlier."""
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_PACKAGE = Path(__file__).parents[1].as_posix() + "/"
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_LOST = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|remote process|unexpected eof|"
                   r"recv(value|bytes)|failed to (recv|send)", re.IGNORECASE)  # fmt: skip


def describe(error: BaseException, rank: int | None = None) -> tuple[dict[str, Any], int]:
    """An exception as data, and the exit code of the rank that raised it.

    ``kind``: user, oom, interrupted, timeout (a collective that the others did not join), lost (another rank is gone)
    or error; ``what`` and ``fix`` in words; ``time`` of the failure.
    """
    text = str(error)
    first = text.splitlines()[0] if text else ""
    failure = {"kind": "error", "what": f"{type(error).__name__}: {first}", "fix": "", "incompatible": False,
            "time": time.time()}  # fmt: skip
    if isinstance(error, UserError):
        failure.update(kind="user", what=error.what, fix=error.fix, incompatible=isinstance(error, Incompatible))
        return failure, 3
    if isinstance(error, KeyboardInterrupt):
        failure.update(kind="interrupted", what="interrupted")
        return failure, 130
    step, phase, operation = where(error.__traceback__)
    me = "a rank" if rank is None else f"rank {rank}"
    place = ", ".join(x for x in (f"step {step}" if step is not None else "", phase) if x)
    place = f" ({place})" if place else ""
    refused = isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
    if refused or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        failure.update(kind="oom", what=f"out of memory: {first}")
    elif isinstance(error, RuntimeError) and _TIMED_OUT.search(text):
        failure.update(kind="timeout", what=f"{me} waited in vain in {operation or 'a collective'}{place}: {first}")
    elif isinstance(error, RuntimeError) and _LOST.search(text):
        failure.update(kind="lost", what=f"{me} lost another rank in {operation or 'a collective'}{place}: {first}")
    elif place and rank is not None:
        failure["what"] = f"{failure['what']} — {me}{place}"
    return failure, 4


def where(trace: TracebackType | None) -> tuple[int | None, str, str]:
    """(step under way, phase, collective or function) of a traceback; what is not known is None or empty."""
    step: int | None = None
    phase = operation = ""
    for frame, _ in traceback.walk_tb(trace):
        name, file = frame.f_code.co_name, frame.f_code.co_filename.replace("\\", "/")
        trainer = frame.f_locals.get("trainer", frame.f_locals.get("self"))
        done = getattr(trainer, "steps_done", None)
        if isinstance(done, int):
            step = done if name in ("save", "resume", "export") else done + 1
            if name == "_read":  # of a step behind which others may have begun
                step = frame.f_locals.get("step", done - 1) + 1
        if name in _PHASES:
            phase = _PHASES[name]
        if file.endswith(_COLLECTIVES):
            return step, phase, name
        if file.startswith(_PACKAGE):
            operation = f"{file.rpartition('/')[2].removesuffix('.py')}.{name}"
    return step, phase, _AWAITED.get(operation, operation)
