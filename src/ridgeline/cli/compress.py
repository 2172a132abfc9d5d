"""`ridgeline compress`: a checkpoint in, a smaller one that loads elsewhere out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.base import Json, With, app, say
from ridgeline.cli.real import failed


@app.command()
def compress(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Directory of the result.")],
    with_: With = None,
    calib: Annotated[
        str, typer.Option(help="Calibration text: a file, a directory, stdlib, hf:NAME, or self.")
    ] = "stdlib",
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 128,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window (2048, or fewer if the model has fewer).")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="How codes are written: compressed-tensors (where that can hold them), gptq, gguf, ridgeline, dense.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on where the same command was stopped.")] = True,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json, if the checkpoint has none.")] = None,
    seed: Annotated[int, typer.Option(help="Of the calibration windows.")] = 0,
    json: Json = False,
) -> None:
    """Compress a checkpoint, layer by layer. What is done survives Ctrl-C; the same command goes on."""
    import json as js

    from ridgeline import catalog, experiments
    from ridgeline.jobs.launch import Job, JobFailed, run_job
    from ridgeline.report.console import StepBar
    from ridgeline.spec.errors import UserError

    catalog.allow_unprobed()
    if not checkpoint.is_dir():
        raise UserError(f"no checkpoint directory {checkpoint}", "give a directory with config.json and safetensors")
    if not with_:
        raise UserError("nothing to compress with", "--with gptq:bits=4,group_size=128 (see `ridgeline techniques`)")
    path = str(checkpoint.resolve())
    model = catalog.model(path)
    workload = {
        "kind": "compress", "checkpoint": path, "data": calib, "samples": samples,
        "seq_len": seq_len or min(2048, model.max_positions), "tokenizer": tokenizer, "seed": seed,
        "prompt_len": min(64, model.max_positions // 2), "output_len": min(32, model.max_positions // 2),
    }  # fmt: skip
    e = experiments.make(path, "local", workload, list(with_))
    options = {"out": str(out.resolve()), "format": format_, "resume": resume}
    with StepBar(f"compressing {checkpoint.name}", model.num_layers) as bar:
        try:
            result = run_job(Job("compress", e, options), bar.message)
        except KeyboardInterrupt:
            say(f"stopped; the same command goes on with what lies in {out}.partial")
            raise typer.Exit(130) from None
        except JobFailed as failure:
            raise failed(failure) from None
    if json:
        print(js.dumps(result))
        return
    _print(result, out)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint directory, compressed or not.")],
    text: Annotated[str, typer.Option(help="Held-out text: a file, a directory, stdlib-prose, or hf:NAME.")],
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window (fewer if the model has fewer).")] = 2048,
    windows: Annotated[int, typer.Option(min=2, help="Most windows that are read, spread over the text.")] = 128,
    against: Annotated[
        Path | None, typer.Option(help="Another checkpoint to compare with, window by window (the dense one).")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt of the timed generation.")] = 64,
    output_len: Annotated[int, typer.Option(min=0, help="Tokens of the timed generation; 0: not timed.")] = 32,
    tasks: Annotated[str | None, typer.Option(help="Benchmarks of lm-eval, with commas between them.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json, if the checkpoint has none.")] = None,
    json: Json = False,
) -> None:
    """Perplexity with its interval, bits per weight, bytes and tokens/s of a checkpoint."""
    import json as js

    from ridgeline.jobs.launch import Job, JobFailed, run_job
    from ridgeline.measure.harness import harness, require_harness
    from ridgeline.report.console import StepBar
    from ridgeline.spec.errors import UserError

    if tasks:
        require_harness()
    for path in filter(None, (checkpoint, against)):
        if not path.is_dir():
            raise UserError(f"no checkpoint directory {path}", "give a directory with config.json and safetensors")
    options = {
        "checkpoint": str(checkpoint.resolve()), "text": text, "seq_len": seq_len, "windows": windows,
        "against": str(against.resolve()) if against else None, "prompt_len": prompt_len, "output_len": output_len,
        "tokenizer": tokenizer,
    }  # fmt: skip
    with StepBar(f"evaluating {checkpoint.name}", windows) as bar:
        try:
            result = run_job(Job("eval", None, options), bar.message)
        except JobFailed as failure:
            raise failed(failure) from None
    if tasks:
        result["tasks"] = harness(checkpoint, [t.strip() for t in tasks.split(",") if t.strip()])
    if json:
        print(js.dumps(result))
    else:
        _print_evaluation(result)


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


def _print(result: dict[str, Any], out: Path) -> None:
    from ridgeline.report.units import size

    layers = result["layers"]
    known = [la["error"] for la in layers if la["error"] is not None]
    worst = max((la for la in layers if la["error"] is not None), key=lambda la: la["error"], default=None)
    print(f"{len(layers)} linear layers at {result['bits_per_weight']:.2f} bits per weight"
          + (f", {result['zeros']:.1%} zeros" if result["zeros"] > 0.01 else ""))  # fmt: skip
    if worst is not None:
        mean = sum(known) / len(known)
        print(f"relative layer error {mean:.3%} in the mean, at worst {worst['error']:.3%} in {worst['layer']}")
    print(f"{size(result['checkpoint_bytes'])} of tensors, {result['seconds']:.0f} s, "
          f"peak memory {size(result['peak_rss_bytes'])}")  # fmt: skip
    print(f"written to {out}")
