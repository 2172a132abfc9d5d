"""`ridgeline generate`: outputs for one prompt, or for a file of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import With, app, ctrl_c_between_steps, require_checkpoint, require_writable, say
from ridgeline.cli.engine_options import (
    BatchedTokens,
    ChatTemplate,
    Checkpoint,
    DeviceMemory,
    DiskFolder,
    DType,
    HostMemory,
    Kernels,
    Length,
    Pool,
    Seqs,
    Tokenizer,
    make_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ridgeline.serve.engine import Engine
    from ridgeline.serve.grammar import Grammars, Matcher
    from ridgeline.serve.offline import Prompt


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="A single prompt; its output goes to standard output.")] = None,
    input_: Annotated[
        Path | None,
        typer.Option("--input", help='JSON lines of {"prompt": …} or {"messages": […]}, with id if wanted.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output file (.jsonl); prompts that it has outputs of are skipped.")
    ] = None,
    with_: With = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability of a token, as a share of the likeliest's.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option()] = 0.0,
    frequency_penalty: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    json_schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that every output matches.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Number of outputs per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string. Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of each prompt.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.")] = False,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    max_model_len: Length = None,
    dtype: DType = "auto",
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    kv_cache: Pool = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: DiskFolder = None,
    kernels: Kernels = None,
) -> None:
    """Generate for one prompt or a file of prompts. Ctrl-C keeps finished outputs, and the same command resumes."""
    from ridgeline.data.examples import find_template
    from ridgeline.data.tokenizer import load_tokenizer
    from ridgeline.serve import offline
    from ridgeline.serve.answers import answers
    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.serve.grammar import Grammars
    from ridgeline.serve.request import Sampling
    from ridgeline.spec.errors import UserError
    from ridgeline.spec.model import ModelSpec

    if (prompt is None) == (input_ is None):
        raise UserError("give --prompt TEXT, or --input FILE.jsonl", "one of the two")
    if input_ is not None and out is None:
        raise UserError("--input needs a file for the results", "give --out FILE.jsonl")
    require_checkpoint(checkpoint)
    if prompt is not None:
        prompts = [offline.Prompt("prompt", prompt)]
    else:
        prompts = offline.read_prompts(input_ or Path(), find_template(chat_template, str(checkpoint)))
    if out is not None:
        require_writable("--out", file=out)
    left = _not_done(prompts, offline.results_in(out) if out is not None else {}, out)
    if not left:
        say(f"{len(prompts)} of {len(prompts)} prompts done already in {out}: give another --out for other options")
        return
    if ModelSpec.from_path(checkpoint).is_encoder_decoder:
        given = {"--with": with_, "--stop": stop, "--n": n > 1, "--top-k": top_k, "--top-p": top_p != 1,
                 "--min-p": min_p, "--presence-penalty": presence_penalty, "--frequency-penalty": frequency_penalty,
                 "--repetition-penalty": repetition_penalty != 1, "--json-schema": json_schema,
                 "--max-model-len": max_model_len, "--max-num-seqs": max_num_seqs, "--kv-cache": kv_cache,
                 "--max-num-batched-tokens": max_num_batched_tokens, "--device-memory": device_memory,
                 "--host-memory": host_memory, "--disk": disk, "--kernels": kernels}  # fmt: skip
        if engines := ", ".join(name for name, value in given.items() if value):
            raise UserError(f"an encoder-decoder generates without the engine, which has {engines}", "leave it out")
        known = load_tokenizer(tokenizer or str(checkpoint))
        with ctrl_c_between_steps() as check:
            found = answers(checkpoint, left, known, max_tokens, temperature, seed, ignore_eos, _dtype(dtype), check)
            _write(found, out, left, len(prompts)) if out is not None else _print_answer(next(found))
        return
    engine = make_engine(checkpoint, with_, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache, dtype,
                         memory=(device_memory, host_memory, disk), kernels=kernels)  # fmt: skip
    vocabulary = Vocabulary(load_tokenizer(tokenizer or str(checkpoint)), engine.spec.vocab_size)

    schema = None if json_schema is None else _schema(json_schema, Grammars(vocabulary, engine.eos))

    def sampling(own: int | None) -> Sampling:
        return Sampling(max_tokens=own or max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
                        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
                        repetition_penalty=repetition_penalty, n=n, seed=seed, ignore_eos=ignore_eos,
                        grammar=None if schema is None else schema.fresh())  # fmt: skip

    stops = tuple(text for text in stop or () if text)
    sampling(None).check(engine.spec.vocab_size)
    try:
        with ctrl_c_between_steps() as check:
            if out is None:
                _print_one(engine, vocabulary, left[0], sampling, stops, check)
            else:
                results = offline.generate(engine, vocabulary, left, sampling, stops, before_step=check)
                _write(results, out, left, len(prompts))
    finally:
        engine.close()


def _dtype(name: str) -> torch.dtype | None:
    from ridgeline.nn.model.init import DTYPES
    from ridgeline.spec.errors import UserError

    if name != "auto" and name not in DTYPES:
        raise UserError(f"unknown dtype {name!r} in --dtype", f"use auto, {', '.join(DTYPES)}")
    return None if name == "auto" else DTYPES[name]


def _print_answer(found: dict[str, Any]) -> None:
    from ridgeline.spec.errors import UserError

    if "error" in found:
        raise UserError(found["error"])
    print(found["outputs"][0]["text"])


def _schema(file: Path, grammars: Grammars) -> Matcher:
    """The compiled JSON schema of a file. Raises :class:`UserError` for a file that has none."""
    from ridgeline.spec.errors import UserError
    from ridgeline.spec.json_file import read_json

    fix = "give a file with a JSON schema"
    if not file.is_file():
        raise UserError(f"--json-schema: no file {file}", fix)
    return grammars.compile("json", read_json(file, fix), "--json-schema")


def _not_done(prompts: list[Prompt], done: dict[str, str], out: Path | None) -> list[Prompt]:
    """The prompts without outputs. Raises :class:`UserError` where the result of an id is another prompt's."""
    from ridgeline.spec.errors import UserError

    for p in prompts:
        # A conversation's text may change from day to day: templates may write the date.
        if p.special and done.get(p.id, p.text) != p.text:
            raise UserError(f"{out} has the result of another prompt with id {p.id!r}",
                            "give another --out, or each prompt an id of its own")  # fmt: skip
    return [p for p in prompts if p.id not in done]


def _print_one(
    engine: Engine, vocabulary: Any, prompt: Any, sampling: Any, stops: tuple[str, ...], check: Callable[[], None]
) -> None:
    """Print one prompt's outputs to standard output; a single output is streamed."""
    from ridgeline.serve import offline
    from ridgeline.spec.errors import UserError

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    alone = sampling(None).n == 1
    for result in offline.generate(
        engine, vocabulary, [prompt], sampling, stops, fresh=show if alone else None, before_step=check
    ):
        if "error" in result:
            raise UserError(result["error"])
        print("" if alone else "\n".join(o["text"] for o in result["outputs"]))


def _write(results: Any, out: Path, left: list[Prompt], total: int) -> None:
    """Write each result of the prompts that are left as a line of ``out`` as soon as it is finished."""
    import json

    from ridgeline.report.console import CountBar
    from ridgeline.serve.offline import drop_failures

    failed = tokens = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    drop_failures(out, {p.id for p in left})
    with out.open("a", encoding="utf-8") as file, CountBar("prompts", total, total - len(left)) as bar:
        for result in results:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            failed += "error" in result
            tokens += sum(o["tokens"] for o in result.get("outputs", ()))
            bar.advance(f"{tokens} tokens")
    again = f"; {failed} failed: the same command tries them again" if failed else ""
    say(f"{len(left)} prompts, {tokens} tokens, written to {out}{again}")
