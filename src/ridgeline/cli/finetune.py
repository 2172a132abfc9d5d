"""`ridgeline finetune`: a checkpoint and data in, an adapter (or a whole model) out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import Json, On, With, app, next_command, number_of_bytes, require_checkpoint, say
from ridgeline.cli.jobs import require_saves, run_training

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


@app.command()
def finetune(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, with its tokenizer.")],
    data: Annotated[
        str,
        typer.Option(help="Chat, Alpaca or prompt/completion records (.jsonl, .json), or text: a file, a directory, …"),
    ],
    out: Annotated[Path, typer.Option(help="Output directory: the adapter, or the whole model if there is none.")],
    with_: With = None,
    on: On = "local",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate (default 2e-4 for what is added to the model, else 2e-5).")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Sequence length (default 1024, capped at the model's context length).")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Global batch size, in sequences.")] = 8,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch size per device, in sequences.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Learning-rate warm-up steps (default 3 % of the steps).")
    ] = None,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.0,
    template: Annotated[
        str | None, typer.Option(help="Chat template: a Jinja file, or chatml, llama2, alpaca (the checkpoint's own).")
    ] = None,
    packing: Annotated[
        bool, typer.Option(help="Pack several examples into a sequence; attention stays within each.")
    ] = True,
    train_on_prompt: Annotated[bool, typer.Option(help="Compute the loss on prompts, too.")] = False,
    skip_bad: Annotated[bool, typer.Option(help="Skip unreadable records, and report how many.")] = False,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations (default a tenth of the steps); 0 to disable.")
    ] = None,
    eval_batches: Annotated[int, typer.Option(min=1, help="Number of held-out evaluation batches.")] = 8,
    adapter: Annotated[Path | None, typer.Option(help="Continue from this adapter (a PEFT directory).")] = None,
    merged: Annotated[bool, typer.Option(help="Write the whole model with the adapter merged.")] = False,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 to disable.")] = 0,
    async_save: Annotated[
        bool, typer.Option(help="Write checkpoints while training goes on; each rank's host memory holds its part.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Resume where the same command was stopped.")] = True,
    tokenizer: Annotated[str | None, typer.Option(help="Path to a tokenizer.json, if the checkpoint has none.")] = None,
    dtype: Annotated[str, typer.Option(help="Storage dtype of the weights: auto, fp32, bf16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Random seed of adapters and data order.")] = 0,
    device_memory: Annotated[str | None, typer.Option(help="Memory limit per device: 600MB, …")] = None,
    json: Json = False,
) -> None:
    """Fine-tune a checkpoint. Keeps the weights with the lowest held-out loss; Ctrl-C saves, and the same command
    resumes."""
    from ridgeline import catalog, experiments
    from ridgeline.jobs.job import TrainOptions
    from ridgeline.measure.ablate import require_local
    from ridgeline.spec.errors import UserError
    from ridgeline.techniques.registry import techniques_of

    catalog.allow_unprobed()
    _require_paths(checkpoint, tokenizer, out)
    source = str(checkpoint.resolve())
    model = catalog.model(source)
    plan, adapts = _plan(list(with_ or []), adapter, model, merged)
    uses = next(filter(None, (t.serves(str(out)) for t in techniques_of(experiments.plan_of(plan)))), ())
    if uses and merged:
        raise UserError("--merged: this plan trains something beside the model, which is not merged", "leave it out")
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
    if not result["stopped"] and uses:
        next_command("serve", checkpoint, *uses)
    elif not result["stopped"]:
        whole = ["generate", out, "--prompt", "TEXT"] if e.model.is_encoder_decoder else ["serve", out]
        next_command(*(["merge", checkpoint, out, "--out", f"{out}-merged"] if options.adapter else whole))
    if result["stopped"]:
        raise typer.Exit(130)


def _require_paths(checkpoint: Path, tokenizer: str | None, out: Path) -> None:
    """Raise :class:`UserError` when there is no checkpoint, no tokenizer, or no place of its own for the result."""
    from ridgeline.data.batches import own_tokenizer
    from ridgeline.spec.errors import UserError

    require_checkpoint(checkpoint)
    if not (tokenizer or own_tokenizer(str(checkpoint))):
        raise UserError(f"{checkpoint} has no tokenizer.json", "give one with --tokenizer")
    if out.resolve() == checkpoint.resolve():
        raise UserError(f"--out {out} is the checkpoint itself", "give another directory")


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
