"""`ridgeline finetune`: a checkpoint and data in, an adapter (or a whole model) out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.cli import finetune_options as own
from ridgeline.cli.base import (
    Json,
    On,
    With,
    app,
    next_command,
    number_of_bytes,
    require_checkpoint,
    require_writable,
    say,
)
from ridgeline.cli.jobs import require_saves, run_training

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


@app.command()
def finetune(
    checkpoint: own.Checkpoint,
    data: own.Data,
    out: own.Out,
    with_: With = None,
    on: On = "local",
    steps: own.Steps = 100,
    lr: own.LearningRate = None,
    seq_len: own.SeqLen = None,
    batch_size: own.BatchSize = 8,
    micro_batch_size: own.MicroBatchSize = None,
    warmup_steps: own.WarmupSteps = None,
    weight_decay: own.WeightDecay = 0.0,
    template: own.Template = None,
    packing: own.Packing = True,
    train_on_prompt: own.TrainOnPrompt = False,
    skip_bad: own.SkipBad = False,
    eval_every: own.EvalEvery = None,
    eval_batches: own.EvalBatches = 8,
    adapter: own.Adapter = None,
    merged: own.Merged = False,
    save_every: own.SaveEvery = 0,
    async_save: own.AsyncSave = False,
    resume: own.Resume = True,
    tokenizer: own.Tokenizer = None,
    dtype: own.Dtype = "auto",
    seed: own.Seed = 0,
    device_memory: own.DeviceMemory = None,
    json: Json = False,
) -> None:
    """Fine-tune a checkpoint. Keeps the weights with the lowest held-out loss; Ctrl-C or SIGTERM saves, and the same
    command resumes."""
    from ridgeline import catalog, experiments
    from ridgeline.jobs.job import TrainOptions
    from ridgeline.measure.ablate import require_local

    catalog.allow_unprobed()
    _require_paths(checkpoint, tokenizer, out)
    source = str(checkpoint.resolve())
    model = catalog.model(source)
    plan, adapts = _plan(list(with_ or []), adapter, model, merged)
    uses = _uses(plan, out, merged)
    workload = {
        "kind": "finetune", "checkpoint": source, "data": data, "steps": steps,
        "lr": lr if lr is not None else 2e-4 if adapts or uses else 2e-5,
        "seq_len": seq_len or min(1024, model.max_positions), "batch_size": batch_size,
        "micro_batch_size": micro_batch_size, "weight_decay": weight_decay, "dtype": dtype, "seed": seed,
        "warmup_steps": warmup_steps if warmup_steps is not None else round(0.03 * steps), "template": template,
        "packing": packing, "train_on_prompt": train_on_prompt, "skip_bad": skip_bad, "tokenizer": tokenizer,
        "eval_batches": eval_batches,
    }  # fmt: skip
    e = experiments.make(source, on, workload, plan)
    require_local(e)
    require_saves(async_save, save_every)
    options = TrainOptions(
        out=str(out / "checkpoints"), export=str(out), adapter=adapts and not merged,
        adapter_from=str(adapter) if adapter else None, save_every=save_every, async_save=async_save, resume=resume,
        eval_every=max(1, steps // 10) if eval_every is None else eval_every,
        device_memory=number_of_bytes("--device-memory", device_memory),
    )  # fmt: skip
    result = run_training(e, options, f"fine-tuning {checkpoint.name}")
    _print(result, out, json)
    if result["stopped"]:
        raise typer.Exit(130)
    if uses:
        next_command("serve", checkpoint, *uses)
    elif options.adapter:
        next_command("merge", checkpoint, out, "--out", f"{out}-merged")
    else:
        next_command(*(["generate", out, "--prompt", "TEXT"] if e.model.is_encoder_decoder else ["serve", out]))


def _require_paths(checkpoint: Path, tokenizer: str | None, out: Path) -> None:
    """Raise :class:`UserError` when there is no checkpoint, no tokenizer, or no place of its own for the result."""
    from ridgeline.data.batches import own_tokenizer
    from ridgeline.spec.errors import UserError

    require_checkpoint(checkpoint)
    if not (tokenizer or own_tokenizer(str(checkpoint))):
        raise UserError(f"{checkpoint} has no tokenizer.json", "give one with --tokenizer")
    if out.resolve() == checkpoint.resolve():
        raise UserError(f"--out {out} is the checkpoint itself", "give another directory")
    require_writable("--out", out)


def _plan(wanted: list[str], adapter: Path | None, model: ModelSpec, merged: bool) -> tuple[list[str], bool]:
    """The techniques asked for, with that of an ``adapter`` to continue from; and whether one of them is an adapter.

    Raises :class:`UserError` for ``merged`` where nothing can be merged: before the training, not after it.
    """
    from ridgeline.experiments import plan_of
    from ridgeline.techniques.adapters.adapted import Adapting
    from ridgeline.techniques.registry import techniques_of

    def adapts() -> bool:
        return any(isinstance(t, Adapting) for t in techniques_of(plan_of(wanted)))

    if adapter:
        from ridgeline.train.adapter_folder import call_text, load_adapter

        if not adapts():
            wanted = [*wanted, call_text(load_adapter(adapter, model).call)]
    if merged:
        for technique in techniques_of(plan_of(wanted)):
            technique.plain({})
    return wanted, adapts()


def _uses(plan: list[str], out: Path, merged: bool) -> tuple[str, ...]:
    """Options of `ridgeline serve` by which the model uses what is written to ``out`` beside it; empty: a model or an
    adapter is. Raises :class:`UserError` for ``merged`` where nothing is merged."""
    from ridgeline.experiments import plan_of
    from ridgeline.spec.errors import UserError
    from ridgeline.techniques.registry import techniques_of

    uses = next(filter(None, (t.serves(str(out)) for t in techniques_of(plan_of(plan)))), ())
    if uses and merged:
        raise UserError("--merged: this plan trains something beside the model, which is not merged", "leave it out")
    return uses


def _print(result: dict[str, Any], out: Path, json: bool) -> None:
    import json as js

    left = result["left_out"]
    if left and left["bad"]:
        say(f"{len(left['bad'])} records left out, the first: {left['bad'][0][0]}: {left['bad'][0][1]}")
    for number, what in ((left.get("cut"), "longer than a row, cut"), (left.get("dropped"), "without a whole answer")):
        if number:
            say(f"{number} examples {what}")
    if json:
        print(js.dumps(result))
        return
    losses, found, best = result["losses"], result["evaluations"], result["best"]
    print(f"{result['step']} steps" + (f", loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else ": nothing to do"))
    if best:
        print(f"held-out loss {found[0][1]:.4f} → {best[1]:.4f} at step {best[0]}, the weights kept")
    if result["device_peak_bytes"]:
        print(f"device memory: {result['device_peak_bytes'] / 1e6:.1f} MB at most")
    if result["stopped"]:
        print(f"stopped; the same command goes on from {result['checkpoint']}")
    else:
        print(f"written to {out}")
    sys.stdout.flush()
