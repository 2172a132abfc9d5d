"""The training loop of ``ridgeline train``: steps, evaluation, checkpoints, a clean stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from ridgeline.data.examples import find_template
from ridgeline.data.packing import Instructions
from ridgeline.data.tokenizer import copy_settings
from ridgeline.jobs.job import Progress, RankContext, TrainOptions
from ridgeline.nn.memory.tiled import whole_weights
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.workload import FineTune, Training
from ridgeline.techniques.registry import copies_every, techniques_of
from ridgeline.train.budget import Budget
from ridgeline.train.trainer import Trainer

if TYPE_CHECKING:
    from ridgeline.train.async_checkpoints import AsyncCheckpoints
    from ridgeline.train.memory_copies import MemoryCopies


class Evaluations:
    """Held-out losses during training, (steps done, nats per token); stored in checkpoints."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    @property
    def best(self) -> tuple[int, float] | None:
        """The lowest so far, the first of equal ones; the value before training does not count."""
        return min((e for e in self.found if e[0]), key=lambda e: (e[1], e[0]), default=None)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"found": list(self.found)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint."""
        self.found = [(int(step), float(loss)) for step, loss in state["found"]]


def train(e: Experiment, options: TrainOptions, here: RankContext) -> dict[str, Any]:
    """Train to ``workload.steps``; with evaluations, the export is the model at its lowest held-out loss.

    SIGINT or SIGTERM to any of the ranks finishes the step on all, saves a checkpoint and returns with ``stopped``.
    """
    from ridgeline.train.checkpoint import resume

    trainer = Trainer(e, here.device, here.rank, here.ranks)
    out = Path(options.out) if options.out else None
    evaluations = Evaluations()
    if options.eval_every:
        trainer.run.hooks.states["evaluations"] = evaluations
    copies = _copies(trainer, options)
    if copies and not options.resume:
        copies.begin_anew()
    losses = copies.resume() if copies else []
    if out and options.resume:
        losses = resume(trainer, out) or losses
    if options.adapter_from and not trainer.steps_done:
        from ridgeline.train.adapter_folder import go_on, load_adapter

        go_on(trainer, load_adapter(Path(options.adapter_from), e.model))
    later = _later(trainer, out, options)
    try:
        with on_stop_signal(lambda: setattr(trainer, "stop_requested", True)):
            result = _run(trainer, out, losses, evaluations, copies, later, options, here.report)
            if copies:
                copies.wait()
            return result
    finally:
        if later:
            later.close()


@contextlib.contextmanager
def on_stop_signal(then: Callable[[], None]) -> Iterator[None]:
    """Call ``then`` at SIGINT and SIGTERM, which do nothing else. Slurm and systemd send SIGTERM to every process."""
    before = {s: signal.signal(s, lambda *_: then()) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _later(trainer: Trainer, out: Path | None, options: TrainOptions) -> AsyncCheckpoints | None:
    """What writes checkpoints while training goes on, where that is asked for."""
    from ridgeline.train.async_checkpoints import AsyncCheckpoints

    return AsyncCheckpoints(trainer, out) if out and options.async_save else None


def _copies(trainer: Trainer, options: TrainOptions) -> MemoryCopies | None:
    """Where the plan has the state copied to memory, if it does. Raises :class:`UserError` where there is no place."""
    from ridgeline.train.memory_copies import MemoryCopies

    if options.memory:
        return MemoryCopies(trainer, Path(options.memory))
    if copies_every(trainer.experiment.plan):
        raise UserError("the plan copies the state to memory, and this command starts no lost rank again",
                        "use `ridgeline train`, or drop elastic")  # fmt: skip
    return None


def _run(
    trainer: Trainer, out: Path | None, losses: list[float], evaluations: Evaluations, copies: MemoryCopies | None,
    later: AsyncCheckpoints | None, options: TrainOptions, report: Progress,
) -> dict[str, Any]:  # fmt: skip
    from ridgeline.train.checkpoint import checkpoints, save

    steps = trainer.experiment.training.steps
    folder = Path(options.export) if options.export else None
    write = write_part if trainer.run.hooks.write else write_adapter if options.adapter else export
    report({"stage": "training", "step": trainer.steps_done, "steps": steps})
    save_every, eval_every, copy_every = options.save_every, options.eval_every, copies_every(trainer.experiment.plan)
    if eval_every and not evaluations.found:
        _evaluate(trainer, evaluations, report)
    stopped, finished, place = False, False, None
    seconds: list[float] = []
    budget = Budget(trainer, options.device_memory)
    while trainer.steps_done < steps and not stopped and not finished:
        with budget.step():
            trainer.begin()
        due = [eval_every, save_every if out else None, copy_every if copies else None]
        complete = trainer.steps_done == steps or any(n and trainer.steps_done % n == 0 for n in due)
        for stats in trainer.reports(complete):
            losses.append(stats.loss)
            seconds.append(stats.seconds)
            stopped, finished = stopped or stats.stop, finished or stats.finished
            report({"step": stats.step + 1, "steps": steps, "loss": stats.loss, "tokens": stats.tokens,
                    "seconds": stats.seconds, "grad_norm": stats.grad_norm})  # fmt: skip
        last = stopped or finished or trainer.steps_done == steps
        improved = False
        if eval_every and (trainer.steps_done % eval_every == 0 or (last and not stopped)):
            _evaluate(trainer, evaluations, report)
            improved = evaluations.best == evaluations.found[-1]
        if out and (last or improved or (save_every and trainer.steps_done % save_every == 0)):
            exported = folder if improved else None
            if later and not (last or exported):
                later.save(losses)
            else:
                if later:
                    later.wait()
                place = save(trainer, out, losses)
                if exported:
                    write(trainer, place, exported)
        if copies and not last and trainer.steps_done % copy_every == 0:
            problem = copies.save(losses)
            if problem:
                report({"stage": f"not copied to memory ({problem}); training goes on", "warning": True,
                        "step": trainer.steps_done, "steps": steps})  # fmt: skip
    if out and not place:  # there was nothing left to do
        place = next(reversed(checkpoints(out)), None)
    if place and folder and not stopped and not evaluations.best:
        write(trainer, place, folder)
    return {"losses": losses, "step_s": seconds, "step": trainer.steps_done, "stopped": stopped,
            "checkpoint": str(place) if place else "", "evaluations": evaluations.found, "best": evaluations.best,
            "device_peak_bytes": budget.peak, "traffic": traffic(trainer), "left_out": left_out(trainer)}  # fmt: skip


def _evaluate(trainer: Trainer, evaluations: Evaluations, report: Progress) -> None:
    loss = trainer.evaluate()
    if loss is None:
        w, rows = trainer.experiment.training, trainer.experiment.batch_size
        raise UserError(
            f"data {w.data!r} cannot spare {rows} sequences of {w.seq_len} tokens for evaluation",
            "give more data, a smaller batch or shorter sequences, or do not evaluate (--eval-every 0)",
        )
    evaluations.found.append((trainer.steps_done, loss))
    report({"step": trainer.steps_done, "steps": trainer.experiment.training.steps, "eval_loss": loss})


def left_out(trainer: Trainer) -> dict[str, Any]:
    """Instruction data that was not trained on: bad records with their reasons, cut and dropped examples."""
    data = getattr(trainer.run.data.batches, "data", None)
    return {"bad": data.bad, "cut": data.cut, "dropped": data.dropped} if isinstance(data, Instructions) else {}


def traffic(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Transfers between the device, host memory and disk: bytes, transfers and achieved bytes/s by direction."""
    store = trainer.run.store
    if store is None:
        return {}
    store.finish()
    moved = {name: t for name, t in store.traffic.items() if t.count}
    return {n: {"bytes": t.bytes, "count": t.count, "bandwidth": t.bandwidth} for n, t in moved.items()}


def export(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Export a checkpoint's model in Hugging Face format, with adapters merged into their base. From any layout: rank 0
    reads it completely."""
    from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
    from ridgeline.nn.model.transformer import Transformer
    from ridgeline.train.checkpoint import read_model

    if trainer.rank:
        return
    plain = plain_state(trainer.experiment, whole_weights(read_model(checkpoint)))
    with torch.device("meta"):
        model = Transformer(trainer.experiment.model)
    model.load_state_dict(plain, assign=True, strict=not trainer.experiment.model.tie_embeddings)
    model.tie()
    save_checkpoint(model, folder)
    write_tokenizer(trainer.run.data.batches.tokenizer, trainer.workload, folder)


def write_tokenizer(tokenizer: Tokenizer, w: Training, folder: Path) -> None:
    """Write a trained model's tokenizer, and beside it what its checkpoint has there; a chat template that the workload
    names takes the place of the checkpoint's."""
    for source in filter(None, (w.checkpoint, w.tokenizer)):
        copy_settings(Path(source), folder)
    template = find_template(w.template, None) if isinstance(w, FineTune) and w.instructions else None
    if template:
        (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def write_adapter(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Write the adapter of a checkpoint's model, in the format in which adapters are shared. Rank 0 reads it
    completely."""
    from ridgeline.train.adapter_folder import save_adapter
    from ridgeline.train.checkpoint import read_model

    if not trainer.rank:
        save_adapter(trainer.experiment, whole_weights(read_model(checkpoint)), folder)


def write_part(trainer: Trainer, checkpoint: Path, folder: Path) -> None:
    """Write what a technique has trained beside the model. Rank 0 reads the checkpoint completely."""
    from ridgeline.train.checkpoint import read_model

    write = trainer.run.hooks.write
    if not trainer.rank and write is not None:
        write(whole_weights(read_model(checkpoint)), folder)


def plain_state(e: Experiment, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State of the model as the plan trains it → the state of the plain one: quantized weights expanded, adapters
    merged."""
    for technique in techniques_of(e.plan):
        state = technique.plain(state)
    return state
