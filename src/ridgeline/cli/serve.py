"""`ridgeline serve` and `ridgeline generate`: a checkpoint answers, over HTTP or for a file of prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import With, app, number_of_bytes, say

if TYPE_CHECKING:
    from ridgeline.serve.engine import Engine

Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint directory with its tokenizer.json.")]
Tokenizer = Annotated[str | None, typer.Option(help="A tokenizer.json, if the checkpoint has none.")]
ChatTemplate = Annotated[
    str | None, typer.Option(help="A Jinja file, or chatml, llama2, alpaca (the checkpoint's own).")
]
Length = Annotated[int | None, typer.Option(min=2, help="Longest prompt and output together, in tokens.")]
Seqs = Annotated[int | None, typer.Option(min=1, help="Most sequences in one step.")]
BatchedTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens in one step.")]
Pool = Annotated[str | None, typer.Option(help="Memory of the key/value pool: 600MB, 1.5GiB, …")]


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    with_: With = None,
    adapters: Annotated[Path | None, typer.Option(help="Directory whose folders are adapters to serve.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="RIDGELINE_API_KEY", help="Key that clients must bring (repeatable).")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="RIDGELINE_ADMIN_KEY", help="Key to load and unload adapters with.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a key.")] = False,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    max_model_len: Length = None,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    kv_cache: Pool = None,
    max_num_queued_reqs: Annotated[int, typer.Option(min=1, help="Outputs that may wait to be scheduled.")] = 512,
    max_num_queued_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens that may wait.")] = 1 << 20,
    first_token_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait to be scheduled.")] = 300.0,
    stall_timeout: Annotated[float, typer.Option(min=0.1, help="A step of so many seconds is ill health.")] = 120.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds to finish in after SIGTERM.")] = 30.0,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "8MiB",
    max_connections: Annotated[int, typer.Option(min=1, help="Connections that may be open at once.")] = 1000,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible API."""
    _require("fastapi")
    from ridgeline.measure.environment import spare_core
    from ridgeline.serve.app import create_app
    from ridgeline.serve.engine_loop import Limits
    from ridgeline.serve.server import loopback, make_service
    from ridgeline.serve.server import serve as run
    from ridgeline.spec.errors import UserError
    from ridgeline.techniques.registry import bringing

    keys, admin_keys = _keys("API", api_key), _keys("ADMIN", [admin_key] if admin_key is not None else None)
    if not (keys or insecure or loopback(host)):
        raise UserError(f"--host {host} lets other machines in, and there is no key", "give --api-key, or --insecure")
    body = number_of_bytes("--max-body", max_body)
    more = bringing("adapter_table") if adapters is not None or admin_keys else ()
    engine = _engine(checkpoint, with_, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache, more)
    limits = Limits(max_num_queued_reqs, max_num_queued_tokens, first_token_timeout, stall_timeout)
    service = make_service(engine, checkpoint, limits, served_model_name, tokenizer, chat_template)
    if adapters is not None:
        service.load_all(adapters)
    asgi = create_app(service, keys, admin_keys, body or 0)
    say(f"{service.name}: {engine.max_model_len} tokens of context, {engine.blocks.count} blocks of cache")
    with spare_core():
        well = run(asgi, service.loop, host, port, drain_timeout, say, max_connections)
    engine.close()
    if not well:
        raise typer.Exit(1)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its text goes to standard output.")] = None,
    input_: Annotated[
        Path | None,
        typer.Option("--input", help='JSON lines of {"prompt": …} or {"messages": […]}, with id if wanted.'),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of results (.jsonl); what it holds is not done again.")] = None,
    with_: With = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: all.")] = 0,
    n: Annotated[int, typer.Option(min=1, help="Outputs per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an output (repeatable).")] = None,
    seed: Annotated[int, typer.Option(help="Of each prompt.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    max_model_len: Length = None,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    kv_cache: Pool = None,
) -> None:
    """Generate for one prompt or a file of them. Ctrl-C keeps what is done, and the same command goes on."""
    from ridgeline.data.batches import load_tokenizer
    from ridgeline.data.examples import find_template
    from ridgeline.serve import offline
    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.serve.request import Sampling
    from ridgeline.spec.errors import UserError

    if (prompt is None) == (input_ is None):
        raise UserError("give --prompt TEXT, or --input FILE.jsonl", "one of the two")
    if input_ is not None and out is None:
        raise UserError("--input needs a file for the results", "give --out FILE.jsonl")
    _require_checkpoint(checkpoint)
    if prompt is not None:
        asked = [offline.Prompt("prompt", prompt)]
    else:
        asked = offline.read_prompts(input_ or Path(), find_template(chat_template, str(checkpoint)))
    done = offline.done_ids(out) if out is not None else set()
    left = [p for p in asked if p.id not in done]
    if not left:
        say(f"{len(asked)} of {len(asked)} prompts done already")
        return
    engine = _engine(checkpoint, with_, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache)
    vocabulary = Vocabulary(load_tokenizer(tokenizer or str(checkpoint)), engine.spec.vocab_size)

    def sampling(own: int | None) -> Sampling:
        return Sampling(max_tokens=own or max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, n=n, seed=seed,
                        ignore_eos=ignore_eos)  # fmt: skip

    sampling(None).check(engine.spec.vocab_size)
    try:
        if out is None:
            _print_one(engine, vocabulary, left[0], sampling, tuple(stop or ()))
        else:
            results = offline.generate(engine, vocabulary, left, sampling, tuple(stop or ()))
            _write(results, out, len(asked), len(asked) - len(left))
    finally:
        engine.close()


def _print_one(engine: Engine, vocabulary: Any, prompt: Any, sampling: Any, stops: tuple[str, ...]) -> None:
    """One prompt's outputs on standard output; a single one as it comes."""
    from ridgeline.serve import offline
    from ridgeline.spec.errors import UserError

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    alone = sampling(None).n == 1
    for result in offline.generate(engine, vocabulary, [prompt], sampling, stops, fresh=show if alone else None):
        if "error" in result:
            raise UserError(result["error"])
        print("" if alone else "\n".join(o["text"] for o in result["outputs"]))


def _write(results: Any, out: Path, total: int, before: int) -> None:
    """Each result as a line of ``out`` as soon as it is there."""
    import json

    from ridgeline.report.console import CountBar

    failed = tokens = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file, CountBar("prompts", total, before) as bar:
        for result in results:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            failed += "error" in result
            tokens += sum(o["tokens"] for o in result.get("outputs", ()))
            bar.advance(f"{tokens} tokens")
    say(f"{total - before} prompts, {tokens} tokens, written to {out}" + (f"; {failed} failed" if failed else ""))


def _engine(
    checkpoint: Path, with_: list[str] | None, length: int | None, seqs: int | None, tokens: int | None,
    pool: str | None, more: tuple[str, ...] = (),
) -> Engine:  # fmt: skip
    """The engine of the default plan and ``more``, where ``--with`` does not give their options itself; -NAME leaves a
    technique of these out."""
    from ridgeline.experiments import plan_of
    from ridgeline.serve.build_engine import DEFAULT_PLAN, load_engine
    from ridgeline.spec.errors import unknown
    from ridgeline.spec.model import ModelSpec
    from ridgeline.spec.plan import Call

    _require_checkpoint(checkpoint)
    default, given = (*DEFAULT_PLAN, *more), with_ or []
    mixture = ModelSpec.from_path(checkpoint).num_experts > 0
    asked = plan_of([item for item in given if not item.startswith("-")], "--with", mixture).strings()
    off = [item[1:] for item in given if item.startswith("-")]
    for name in off:
        if name not in default:
            raise unknown("technique", name, default, f"--with -{name}")
    named = {*off, *(Call.parse(item).name for item in asked)}
    plan = [*(name for name in default if name not in named), *asked]
    return load_engine(checkpoint, plan, max_model_len=length, max_num_seqs=seqs, max_num_batched_tokens=tokens,
                       kv_cache_bytes=number_of_bytes("--kv-cache", pool))  # fmt: skip


def _keys(kind: str, given: list[str] | None) -> list[str]:
    """The keys that were given. Raises :class:`UserError` for an empty one, as of a variable that is not set."""
    import os

    from ridgeline.spec.errors import UserError

    variable = f"RIDGELINE_{kind}_KEY"
    found = given if given is not None else [os.environ[variable]] if variable in os.environ else []
    if not all(key.strip() for key in found):
        raise UserError(f"the {kind.lower()} key is empty", f"give --{kind.lower()}-key KEY, or unset {variable}")
    return found


def _require_checkpoint(checkpoint: Path) -> None:
    from ridgeline.spec.errors import UserError

    if not checkpoint.exists():
        raise UserError(f"no checkpoint directory {checkpoint}", "give a directory with config.json and safetensors")


def _require(package: str) -> None:
    import importlib.util

    from ridgeline.spec.errors import UserError

    if importlib.util.find_spec(package) is None:
        raise UserError(f"serving needs the `{package}` package", "pip install 'ridgeline[serve]'")
