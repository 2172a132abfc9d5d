"""`ridgeline eval`: the quality and speed of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.base import Json, app, next_command, require_checkpoint
from ridgeline.cli.jobs import failed


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, compressed or not.")],
    text: Annotated[str, typer.Option(help="Held-out text: a file, a directory, stdlib-prose, or hf:NAME.")],
    seq_len: Annotated[
        int, typer.Option(min=2, help="Tokens per window, capped at the model's context length.")
    ] = 2048,
    windows: Annotated[int, typer.Option(min=2, help="Maximum number of windows, spread over the text.")] = 128,
    against: Annotated[
        Path | None, typer.Option(help="Checkpoint to compare with, window by window (usually the dense one).")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of the timed generation.")] = 64,
    output_len: Annotated[int, typer.Option(min=0, help="Tokens of the timed generation; 0 to skip it.")] = 32,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, comma-separated.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Path to a tokenizer.json, if the checkpoint has none.")] = None,
    json: Json = False,
) -> None:
    """Perplexity with its interval, bits per weight, bytes and tokens/s of a checkpoint."""
    import json as js

    from ridgeline.jobs.job import EvaluateOptions, LaunchJob
    from ridgeline.jobs.launch import JobFailed, run_job
    from ridgeline.measure.harness import harness, require_harness
    from ridgeline.report.console import StepBar

    if tasks:
        require_harness()
    for path in filter(None, (checkpoint, against)):
        require_checkpoint(path)
    options = EvaluateOptions(
        checkpoint=str(checkpoint.resolve()), text=text, seq_len=seq_len, windows=windows,
        against=str(against.resolve()) if against else None, prompt_len=prompt_len, output_len=output_len,
        tokenizer=tokenizer,
    )  # fmt: skip
    with StepBar(f"evaluating {checkpoint.name}", windows) as bar:
        try:
            result = run_job(LaunchJob("eval", None, options), bar.message)
        except JobFailed as failure:
            raise failed(failure) from None
    if tasks:
        result["tasks"] = harness(checkpoint, [t.strip() for t in tasks.split(",") if t.strip()])
    if json:
        print(js.dumps(result))
    else:
        _print_evaluation(result)
        next_command("serve", checkpoint)


def _print_evaluation(r: dict[str, Any]) -> None:
    from ridgeline.report.units import percent, size

    p = r["perplexity"]
    print(f"perplexity {p['value']:.4f} [{p['low']:.4f}, {p['high']:.4f}] on {r['windows']} windows of {r['seq_len']}")
    if "against" in r:
        ratio = r["against"]["ratio"]
        low, high = (percent(ratio[k] - 1, signed=True) for k in ("low", "high"))
        other = r["against"]
        print(f"{percent(ratio['value'] - 1, signed=True)} [{low}, {high}] against "
              f"{other['perplexity']['value']:.4f} of {Path(other['checkpoint']).name}, paired")  # fmt: skip
    print(f"{r['bits_per_weight']:.2f} bits per weight, {size(r['checkpoint_bytes'])} of tensors")
    if "decode_tokens_per_s" in r:
        print(f"{r['decode_tokens_per_s']:.1f} tokens/s decoding one sequence")
    for name, scores in r.get("tasks", {}).items():
        print(f"{name}: " + ", ".join(f"{k} {v:.4f}" for k, v in scores.items()))
