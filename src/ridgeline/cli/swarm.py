"""`ridgeline swarm`: a model over machines that differ, come and go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.base import (
    File,
    Json,
    Overrides,
    PlanName,
    app,
    ctrl_c_between_steps,
    load,
    number_of_bytes,
    require_checkpoint,
    require_package,
    require_writable,
    say,
)
from ridgeline.cli.engine_options import Checkpoint, SecretFile, TlsCa, TlsCert, TlsKey, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ridgeline.serve.transfer.tls import Tls
    from ridgeline.spec.experiment import Experiment
    from ridgeline.spec.wire import Wire
    from ridgeline.swarm.client import Swarm
    from ridgeline.swarm.link import Shape
    from ridgeline.swarm.peer import Peer
    from ridgeline.techniques.parallel.swarm import Swarm as Technique

swarm = typer.Typer(no_args_is_help=True, help="Generate and train over peers that differ, come and go.")
app.add_typer(swarm, name="swarm")
Join = Annotated[list[str] | None, typer.Option(help="Address of a peer, HOST:PORT. Repeatable.")]
Format = Annotated[str, typer.Option("--wire", help="Activations on the network: blockwise8 or plain.")]
Weights = Annotated[
    str, typer.Option("--with", help="Technique that stores the weights: smooth_int8, rtn:bits=4; default: none.")
]
Rtt = Annotated[float, typer.Option("--inject-rtt", min=0, help="Seconds of delay to add, there and back.")]
Rate = Annotated[str | None, typer.Option("--inject-rate", help="Bytes/s to limit each connection to: 25MB.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Port for Prometheus metrics of all members (HTTP, on --host)."),
]
Reach = Annotated[str, typer.Option(help="Host by which others reach this machine, if not --host.")]


@swarm.command()
def serve(
    checkpoint: Checkpoint,
    blocks: Annotated[
        str, typer.Option(help="Blocks to serve: FIRST-LAST, a number of them where they are needed most, or auto.")
    ] = "auto",
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    reach: Reach = "",
    with_: Weights = "",
    cache_tokens: Annotated[int, typer.Option(min=16, help="Tokens of clients' sequences to have room for.")] = 8192,
    throughput: Annotated[float, typer.Option(min=0, help="Tokens/s to announce; 0: measure.")] = 0.0,
    announce_every: Annotated[float, typer.Option(min=0.1, help="Seconds between announcements.")] = 5.0,
    balance_every: Annotated[float, typer.Option(min=0, help="Seconds between looks at other blocks; 0: stay.")] = 60.0,
    metrics_port: MetricsPort = None,
    inject_rtt: Rtt = 0.0,
    inject_rate: Rate = None,
) -> None:
    """Serve some blocks of a checkpoint to a swarm. Ctrl-C leaves it."""
    from ridgeline.swarm.server import Options, Server

    require_checkpoint(checkpoint)
    options = Options(cache_tokens, with_, throughput, announce_every, balance_every)
    server = Server(checkpoint, _secret(fleet_secret_file), options, say, _blocks(blocks, checkpoint),
                    tuple(join or ()), _shape(inject_rtt, inject_rate), _tls(tls_cert, tls_key, tls_ca))  # fmt: skip

    async def start() -> None:
        address = await server.start(host, port, reach)
        _show_metrics(server, host, metrics_port)
        say(f"next: ridgeline swarm generate {checkpoint} --join {address} --prompt TEXT")

    _run(start(), server.stop)


def _show_metrics(peer: Peer, host: str, port: int | None) -> None:
    """Serve metrics of the peer's swarm, if there is a port for them. For its event loop's thread."""
    import asyncio

    if port is None:
        return
    require_package("prometheus_client")
    from ridgeline.swarm.metrics import SwarmMetrics

    SwarmMetrics(peer, asyncio.get_running_loop()).listen(host, port)


def _run(start: Coroutine[Any, Any, None], stop: Any) -> None:
    """Start a server and wait for Ctrl-C or SIGTERM, then stop it."""
    import asyncio
    import contextlib
    import signal

    async def run() -> None:
        done = asyncio.Event()
        for ended in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(ended, done.set)
        try:
            await start
            await done.wait()
        finally:
            await stop()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _blocks(text: str, checkpoint: Path) -> range | int:
    """``0-11`` → those blocks, ``12`` → that many blocks; ``auto``: as many as half of the free memory holds. Raises
    :class:`UserError`."""
    import psutil

    from ridgeline.nn.checkpoint.files import config_dtype
    from ridgeline.spec.errors import UserError
    from ridgeline.spec.model import ModelSpec

    spec = ModelSpec.from_path(checkpoint)
    if text == "auto":
        layers = sum(p.numel for p in spec.parameters() if p.name.startswith("layers."))
        each = layers / spec.num_layers * config_dtype(checkpoint).itemsize
        return min(spec.num_layers, max(1, int(psutil.virtual_memory().available / 2 / each)))
    first, dash, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else not last):
        found: range | int = range(int(first), int(last) + 1) if dash else int(first)
        size = len(found) if isinstance(found, range) else found
        if size > 0 and (found.stop if isinstance(found, range) else found) <= spec.num_layers:
            return found
    raise UserError(f"--blocks {text!r} are no blocks of {spec.name}, which has 0-{spec.num_layers - 1}",
                    "write 0-3, a number of blocks, or auto")  # fmt: skip


@swarm.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="The prompt; the output goes to standard output.")],
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    tokenizer: Tokenizer = None,
    wire: Format = "blockwise8",
    with_: Weights = "",
    inject_rtt: Rtt = 0.0,
    inject_rate: Rate = None,
) -> None:
    """Generate with blocks that others serve. The checkpoint is read for embedding, head and hashes of blocks."""
    import sys
    import time

    from ridgeline.data.tokenizer import load_tokenizer
    from ridgeline.serve.build_engine import ends_of
    from ridgeline.serve.detokenize import Vocabulary
    from ridgeline.swarm.session import generate as tokens_of
    from ridgeline.swarm.session import load_ends

    require_checkpoint(checkpoint)
    ends = load_ends(checkpoint)
    vocabulary = Vocabulary(load_tokenizer(tokenizer or str(checkpoint)), ends.spec.vocab_size)
    tls = _tls(tls_cert, tls_key, tls_ca)
    client = _client(checkpoint, join, fleet_secret_file, wire, with_, _shape(inject_rtt, inject_rate), tls)
    produced: list[int] = []
    shown = ""
    try:
        start = time.monotonic()
        eos = tuple(ends_of(str(checkpoint)))
        for token in tokens_of(ends, client, vocabulary.encode(prompt), max_tokens, temperature, seed, eos):
            produced.append(token)
            text = vocabulary.decode(produced)
            if not text.endswith("\ufffd"):  # else a character is not whole yet
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
        seconds = time.monotonic() - start
        print(vocabulary.decode(produced)[len(shown) :])
        say(
            f"{len(produced)} tokens, {len(produced) / seconds:.2f} tokens/s, {client.sent / 1e6:.2f} MB of activations"
        )
    finally:
        client.close()


@swarm.command()
def status(
    checkpoint: Checkpoint,
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    json: Json = False,
) -> None:
    """Show a swarm's servers and what they cover."""
    import json as js

    client = _client(checkpoint, join, fleet_secret_file, "plain", "", None, _tls(tls_cert, tls_key, tls_ca))
    try:
        found = client.status()
    finally:
        client.close()
    if json:
        print(js.dumps(found))
        return
    for a in found["servers"]:
        delay = f"{a['delay_s'] * 1e3:.0f} ms away, " if a["delay_s"] is not None else ""
        print(f"{a['address']}  blocks {a['start']} to {a['stop']}  {a['throughput']:.0f} tokens/s  {delay}"
              f"{a['running']} running, room for {a['room']} tokens  {a['plan']}".rstrip())  # fmt: skip
    missing = [b for b, n in enumerate(found["covered"]) if not n]
    print(f"{found['blocks']} blocks, " + (f"nobody has {missing}" if missing else
          f"each at {min(found['covered'])} servers or more"))  # fmt: skip


@swarm.command()
def tune(
    checkpoint: Checkpoint,
    data: Annotated[str, typer.Option(help="Training text: a file, a directory, stdlib, or hf:NAME.")],
    out: Annotated[Path, typer.Option(help="File for what was trained (.safetensors).")],
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a soft prompt.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Rank of low-rank updates of the servers' linear layers.")] = 0,
    targets: Annotated[str, typer.Option(help="Linear layers that they update, as in lora:targets.")] = "q_proj+v_proj",
    steps: Annotated[int, typer.Option(min=1)] = 100,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=2)] = 128,
    lr: Annotated[float, typer.Option(min=0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    wire: Format = "blockwise8",
) -> None:
    """Train a soft prompt or low-rank updates through blocks that others serve; Ctrl-C saves what there is."""
    import torch

    from ridgeline.data.batches import TextBatches, load_tokens, own_tokenizer
    from ridgeline.nn.checkpoint.files import write_tensors
    from ridgeline.spec.errors import UserError
    from ridgeline.swarm.remote import RemoteModel
    from ridgeline.swarm.session import load_ends

    require_checkpoint(checkpoint)
    require_writable("--out", file=out)
    ends = load_ends(checkpoint)
    spec = ends.spec
    tokenizer = own_tokenizer(str(checkpoint))
    if tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer.json", "copy there the one that it was trained with")
    text = load_tokens(data, spec.vocab_size, tokenizer, whole=True)
    batches = TextBatches(text, seq_len, batch_size, spec.vocab_size, True, seed, False, 0)
    client = _client(checkpoint, join, fleet_secret_file, wire, "", None, _tls(tls_cert, tls_key, tls_ca))
    try:
        model = RemoteModel(ends, client, prompt_tokens, rank, tuple(targets.split("+")), seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        try:
            for step in range(steps):
                batch = batches.batch(step)
                loss = model(batch.ids, batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                say(f"step {step + 1}/{steps}  loss {loss.item():.4f}")
        except KeyboardInterrupt:
            say(f"interrupted after {step} steps")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(out, model.trained())
        say(f"written to {out}")
    finally:
        client.close()


@swarm.command()
def peer(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    stage: Annotated[int | None, typer.Option(min=0, help="Stage to train; default: where it is needed most.")] = None,
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    reach: Reach = "",
    announce_every: Annotated[float, typer.Option(min=0.1, help="Seconds between announcements.")] = 5.0,
    metrics_port: MetricsPort = None,
    inject_rtt: Rtt = 0.0,
    inject_rate: Rate = None,
) -> None:
    """Train a stage of an experiment whose plan is `swarm`, as one of its peers. Ctrl-C leaves it."""
    from ridgeline.spec.errors import UserError
    from ridgeline.swarm.stage_peer import StagePeer

    e, technique = _training(file, plan, overrides)
    if stage is not None and stage >= technique.stages:
        raise UserError(f"--stage {stage} of {technique.stages} stages", f"give 0 to {technique.stages - 1}")
    member = StagePeer(e, technique.stages, _secret(fleet_secret_file), say, stage, tuple(join or ()),
                       _shape(inject_rtt, inject_rate), announce_every,
                       tls=_tls(tls_cert, tls_key, tls_ca))  # fmt: skip

    async def start() -> None:
        await member.start(host, port, reach)
        _show_metrics(member, host, metrics_port)

    _run(start(), member.stop)


@swarm.command()
def train(
    file: File,
    overrides: Overrides = None,
    plan: PlanName = None,
    join: Join = None,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the trained model.")] = None,
    migrate_every: Annotated[
        int, typer.Option(min=0, help="Steps between looks at moving a peer to the slowest stage; 0: never.")
    ] = 20,
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for a peer.")] = 60.0,
    inject_rtt: Rtt = 0.0,
    inject_rate: Rate = None,
    json: Json = False,
) -> None:
    """Train an experiment whose plan is `swarm` over the peers that are there. Ctrl-C ends it after the step."""
    import asyncio

    from ridgeline.spec.errors import UserError
    from ridgeline.swarm.trainer import SwarmTrainer
    from ridgeline.train.trainer import global_batches

    e, technique = _training(file, plan, overrides)
    if not join:
        raise UserError("there is no address of a swarm", "give --join HOST:PORT of any of its peers")
    require_writable("--out", out)
    batches, w = global_batches(e, 0, 1), e.training
    trainer = SwarmTrainer(e, technique.stages, technique.wire, _secret(fleet_secret_file), tuple(join), say,
                           _shape(inject_rtt, inject_rate), patience, migrate_every,
                           _tls(tls_cert, tls_key, tls_ca))  # fmt: skip
    losses: list[float] = []

    async def run() -> None:
        await trainer.open()
        with ctrl_c_between_steps() as check:
            try:
                while trainer.step < w.steps:
                    check()
                    done = await trainer.train(batches.batch(trainer.step))
                    losses.append(done.loss)
                    lost = f"  {done.recomputed} gradients computed again" if done.recomputed else ""
                    say(f"step {done.step + 1}/{w.steps}  loss {done.loss:.4f}  {done.tokens / done.seconds:.0f} "
                        f"tokens/s  peers {'+'.join(map(str, done.peers))}{lost}")  # fmt: skip
            except KeyboardInterrupt:
                say(f"interrupted at step {trainer.step}; the peers hold it, and the same command goes on")
        if out is not None and losses:
            from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
            from ridgeline.train.training_loop import write_tokenizer

            save_checkpoint(await trainer.model(), out)
            write_tokenizer(batches.tokenizer, w, out)
            say(f"written to {out}")
        await trainer.close()

    asyncio.run(run())
    if json:
        import json as js

        print(js.dumps({"losses": losses, "step": trainer.step}))


def _training(file: str, plan: str | None, overrides: list[str] | None) -> tuple[Experiment, Technique]:
    """The experiment of a file and its plan's technique. Raises :class:`UserError` for another plan."""
    from ridgeline import catalog
    from ridgeline.spec.errors import UserError
    from ridgeline.swarm.stage import require_trainable
    from ridgeline.techniques.parallel.swarm import Swarm as Technique
    from ridgeline.techniques.registry import of_kind

    catalog.allow_unprobed()
    e = load(file, plan, overrides or [])
    technique = of_kind(e, Technique)
    if technique is None or not e.is_training:
        raise UserError(f"the plan of {file} does not train over a swarm", 'write plan = ["swarm:stages=3"]')
    require_trainable(e)
    return e, technique


def _secret(file: Path | None) -> bytes:
    """The shared secret. Raises :class:`UserError` where there is none."""
    from ridgeline.serve.transfer.secret import VARIABLE, read_secret
    from ridgeline.spec.errors import UserError

    secret = read_secret(file, os.environ.get(VARIABLE))
    if not secret:
        raise UserError("peers of a swarm share a secret, and there is none",
                        f"give --fleet-secret-file FILE (`openssl rand -hex 32`), or set {VARIABLE}")  # fmt: skip
    return secret


def _tls(cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """The certificates that options name. Raises :class:`UserError` unless it is all of them or none."""
    from ridgeline.serve.transfer.tls import Tls

    tls = Tls.of(cert, key, ca)
    if tls is not None:
        tls.require_all()
    return tls


def _client(
    checkpoint: Path, join: list[str] | None, secret_file: Path | None, wire: str, plan: str, shape: Shape | None,
    tls: Tls | None,
) -> Swarm:  # fmt: skip
    """The swarm behind some addresses. Raises :class:`UserError`."""
    from ridgeline.spec.errors import UserError
    from ridgeline.swarm.client import Swarm

    require_checkpoint(checkpoint)
    if not join:
        raise UserError("there is no address of a swarm", "give --join HOST:PORT of any of its peers")
    return Swarm(checkpoint, tuple(join), _secret(secret_file), say, _wire(wire), plan, shape, tls=tls)


def _wire(name: str) -> Wire:
    """The format of activations. Raises :class:`UserError`."""
    from ridgeline.spec.errors import unknown

    if name == "plain":
        return "plain"
    if name == "blockwise8":
        return "blockwise8"
    raise unknown("format of activations", name, ("plain", "blockwise8"))


def _shape(rtt: float, rate: str | None) -> Shape | None:
    """A slower network to imitate, if one is asked for."""
    from ridgeline.swarm.link import Shape

    size = number_of_bytes("--inject-rate", rate)
    return Shape(rtt, float(size or 0)) if rtt or size else None
