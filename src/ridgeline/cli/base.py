"""What all commands share: the app, their common options, and small helpers."""

from __future__ import annotations

import contextlib
import json as js
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ridgeline import __version__
from ridgeline.cli.completion import clusters, techniques
from ridgeline.cli.other_options import Commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ridgeline.experiments import AblationSpec
    from ridgeline.spec.experiment import Experiment
    from ridgeline.spec.result import Result

T = TypeVar("T", "Experiment", "AblationSpec")

app = typer.Typer(
    name="ridgeline",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ridgeline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Predict, run, measure and search LLM optimization techniques: one Plan, one result schema."""


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with", help="Enable a technique or a system: NAME or NAME:option=value,…", autocompletion=techniques
    ),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        help="Cluster: NAME, 8xNAME, 4x8xNAME or parts joined by +; `local` is this machine.",
        autocompletion=clusters,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides: workload.steps=40 model.num_layers=2")]
File = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Experiment file (TOML).")]
PlanName = Annotated[str | None, typer.Option("--plan", help="Plan of an ablation file.")]
Backend = Annotated[str, typer.Option(help="Training backend: native, hf or deepspeed.")]
Data = Annotated[str | None, typer.Option("--data", help="Training text: a file, a directory, stdlib, or hf:NAME.")]


def predicted_trace(e: Experiment, path: Path) -> None:
    """Write the predicted step as a Chrome trace."""
    from ridgeline.predict import predict_trace
    from ridgeline.report.trace import TraceEvent, write_trace

    events = [
        TraceEvent(v.name, v.start, v.seconds, v.stream, "predicted", {"phase": v.phase}) for v in predict_trace(e)
    ]
    write_trace(path, events)


def load(file: str, plan: str | None, overrides: list[str]) -> Experiment:
    """The experiment of a file, or one named plan of an ablation file."""
    from ridgeline import experiments

    if plan:
        return experiments.load_plan(file, plan, overrides)
    return experiments.load(file, overrides)


def number_of_bytes(option: str, text: str | None) -> int | None:
    """``600MB``, ``1.5GiB`` or a plain number of bytes. Raises :class:`UserError` for anything else, or for none."""
    from ridgeline.spec.errors import UserError
    from ridgeline.spec.sizes import parse_size

    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if size := parse_size(text):
            return size
    raise UserError(f"{option} {text!r} is no amount of memory", "write 600MB, 1.5GiB or a number of bytes")


def data_override(data: str | None) -> list[str]:
    """``--data`` as an override: a text, even where it looks like a number."""
    return [f"workload.data={js.dumps(data, ensure_ascii=False)}"] if data else []


def store() -> Any:
    """The store of results."""
    from ridgeline.store import Store

    return Store()


def keep(*results: Result) -> None:
    """Store results and print their ids."""
    ids = [store().add_result(r) for r in results]
    say("stored as " + ", ".join(ids))


def probed(load: Callable[[], T]) -> T:
    """``load()``; when it needs the profile of this machine and there is none, probe once and load again.

    A training experiment runs only the short part of the probe.
    """
    from ridgeline import catalog
    from ridgeline.spec.experiment import Experiment

    known = True
    try:
        loaded = load()
    except catalog.NoProfile:
        known = False
        catalog.allow_unprobed()  # enough to see what is asked for
        loaded = load()
    experiments = [loaded] if isinstance(loaded, Experiment) else loaded.plans.values()
    inference = any(not e.is_training for e in experiments)
    if known and not (inference and any(e.cluster.device.training_only for e in experiments)):
        return loaded
    from ridgeline.measure.probing.probe import probe as run
    from ridgeline.report.console import Status

    with Status("probing this machine once (its profile is kept)") as status:
        run(max_ranks=2, quick=not inference, progress=status.message, inference=inference)
    return load()


def say(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr, flush=True)


def next_command(*words: object) -> None:
    """Suggest the next useful command, the last line of a long one, on standard error."""
    say(f"next: {shlex.join(['ridgeline', *map(str, words)])}")


def require_checkpoint(path: Path) -> None:
    """Raise :class:`UserError` unless there is such a directory."""
    from ridgeline.spec.errors import UserError

    if not path.is_dir():
        raise UserError(f"no checkpoint directory {path}", "give a directory with config.json and safetensors")


def require_writable(option: str, folder: Path | None = None, file: Path | None = None) -> None:
    """Raise :class:`UserError` unless files can be written to ``folder``, or ``file`` can: before the work whose
    result goes there, not after it. Directories may be missing, and are not made."""
    import tempfile

    from ridgeline.spec.errors import UserError

    place = file.parent if file else folder
    if place is None:
        return
    fix = f"choose another {'path' if file else 'directory'} for {option}"
    if file and file.is_dir():
        raise UserError(f"cannot write {file}: it is a directory", fix)
    there = next(p for p in (place, *place.absolute().parents) if p.exists())
    if not there.is_dir():
        raise UserError(f"cannot write to {place}: {there} is a file, not a directory", fix)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as e:
        raise UserError(f"cannot write to {place}: {e.strerror}", fix) from None


def stored(what: str) -> Any:
    """The result or ablation in a file, or with an id in the store."""
    from ridgeline.report.export import load_any

    path = Path(what)
    return load_any(path) if path.is_file() else store().get(what)


def command_line() -> str:
    """How Ridgeline was started, to paste into a shell."""
    import shlex

    return " ".join(shlex.quote(a) for a in ["ridgeline", *sys.argv[1:]])


@contextlib.contextmanager
def ctrl_c_between_steps() -> Iterator[Callable[[], None]]:
    """Handle the first Ctrl-C where the yielded function is called, and a second one anywhere: an interrupt that
    arrives while Python runs a finalizer would be lost."""
    import signal
    from types import FrameType

    asked = False

    def note(_: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Note any Ctrl-C, and let none end the command: what an interrupted measurement found is summarized and stored
    here. Yields whether there was one."""
    import signal

    noted = False

    def note(*_: object) -> None:
        nonlocal noted
        noted = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, previous)


def require_package(package: str, extra: str = "serve") -> None:
    """Raises :class:`UserError` where a package of an extra is missing."""
    import importlib.util

    from ridgeline.spec.errors import UserError

    if importlib.util.find_spec(package) is None:
        raise UserError(f"this needs the `{package}` package", f"pip install 'ridgeline[{extra}]'")
