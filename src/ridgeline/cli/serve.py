"""`ridgeline serve`: a checkpoint over an OpenAI-compatible API."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ridgeline.cli import serve_options as own
from ridgeline.cli.base import With, app, number_of_bytes, require_checkpoint, require_package, say
from ridgeline.cli.engine_options import (
    BatchedTokens,
    ChatTemplate,
    Checkpoint,
    DeviceMemory,
    DiskFolder,
    DType,
    EngineOptions,
    HostMemory,
    Kernels,
    Length,
    Pool,
    SecretFile,
    Seqs,
    TlsCa,
    TlsCert,
    TlsClients,
    TlsKey,
    Tokenizer,
    build,
)
from ridgeline.serve.transfer.secret import VARIABLE, read_secret, require_secret
from ridgeline.serve.transfer.tls import Tls

if TYPE_CHECKING:
    from ridgeline.serve.checkpoint_settings import Options
    from ridgeline.serve.engine import Engine
    from ridgeline.serve.engine_loop import EngineLoop
    from ridgeline.serve.queue_limits import QueueLimits
    from ridgeline.serve.remote_engine import RemoteEngine
    from ridgeline.serve.transfer.member import MemberOptions
    from ridgeline.serve.transfer.transfers import Transfers


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: own.Host = "127.0.0.1",
    port: own.Port = 8000,
    root_path: own.RootPath = "",
    allowed_origins: own.AllowedOrigins = None,
    with_: With = None,
    adapters: own.Adapters = None,
    api_key: own.ApiKey = None,
    admin_key: own.AdminKey = None,
    insecure: own.Insecure = False,
    served_model_name: own.ServedModelName = None,
    tokenizer: Tokenizer = None,
    chat_template: ChatTemplate = None,
    enable_auto_tool_choice: own.EnableAutoToolChoice = False,
    tool_call_parser: own.ToolCallParser = None,
    reasoning_parser: own.ReasoningParser = None,
    generation_config: own.GenerationConfig = "auto",
    max_logprobs: own.MaxLogprobs = 20,
    enable_force_include_usage: own.EnableForceIncludeUsage = False,
    enable_per_request_metrics: own.EnablePerRequestMetrics = False,
    return_tokens_as_token_ids: own.ReturnTokensAsTokenIds = False,
    pooling: own.Pooling = None,
    role: own.Role = None,
    transfer_port: own.TransferPort = 0,
    fleet_secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_clients: TlsClients = False,
    max_model_len: Length = None,
    dtype: DType = "auto",
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: BatchedTokens = None,
    kv_cache: Pool = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: DiskFolder = None,
    kernels: Kernels = None,
    max_num_queued_reqs: own.MaxNumQueuedReqs = 512,
    max_num_queued_tokens: own.MaxNumQueuedTokens = 1 << 20,
    first_token_timeout: own.FirstTokenTimeout = 300.0,
    ttft_slo: own.TtftSlo = None,
    scheduling_policy: own.SchedulingPolicy = "priority",
    async_scheduling: own.AsyncScheduling = None,
    engine_process: own.EngineProcess = None,
    stall_timeout: own.StallTimeout = 120.0,
    drain_timeout: own.DrainTimeout = 30.0,
    max_body: own.MaxBody = "8MiB",
    max_connections: own.MaxConnections = 1000,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible API."""
    require_package("fastapi")
    from ridgeline.serve.address import path_prefix, require_free
    from ridgeline.serve.checkpoint_settings import Options
    from ridgeline.serve.queue_limits import QueueLimits
    from ridgeline.serve.transfer.member import MemberOptions
    from ridgeline.techniques.registry import bringing

    keys, admin_keys = _keys("API", api_key), _keys("ADMIN", [admin_key] if admin_key is not None else None)
    _check_access(host, scheduling_policy, keys, insecure or tls_clients)
    body, prefix = number_of_bytes("--max-body", max_body), path_prefix(root_path)
    options = Options(tool_call_parser, enable_auto_tool_choice, pooling, reasoning_parser, generation_config,
                      max_logprobs, enable_force_include_usage, enable_per_request_metrics,
                      return_tokens_as_token_ids)  # fmt: skip
    options.check()
    secret = read_secret(fleet_secret_file, os.environ.get(VARIABLE))
    tls = Tls.of(tls_cert, tls_key, tls_ca, tls_clients)
    _check_fleet(role, secret, tls, certain=not with_)
    more = bringing("adapter_table") if adapters is not None or admin_keys else ()
    if role is not None:
        more = (*more, *(f"{name}:role={role}" for name in bringing("phase_pools")))
    asked = EngineOptions(checkpoint, with_, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache, dtype, more,
                          (device_memory, host_memory, disk), scheduling_policy, async_scheduling,
                          kernels)  # fmt: skip
    limits = QueueLimits(max_num_queued_reqs, max_num_queued_tokens, first_token_timeout, ttft_slo, stall_timeout)
    text = _Text(checkpoint, limits, served_model_name, tokenizer, chat_template, options, adapters)
    http = _Http(host, port, prefix, allowed_origins or (), keys, admin_keys, body or 0, max_connections, drain_timeout,
                 tls)  # fmt: skip
    member = MemberOptions(secret, host, transfer_port, tls, say, stall_timeout)
    require_free(host, port)  # before the model is loaded
    if not _run(partial(build, asked), member, engine_process, text, http):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Text:
    """What a service is made with, beside the engine."""

    checkpoint: Path
    limits: QueueLimits
    name: str | None
    tokenizer: str | None
    template: str | None
    options: Options
    adapters: Path | None


@dataclass(frozen=True)
class _Http:
    """How the server is reached, and by whom."""

    host: str
    port: int
    prefix: str
    origins: Sequence[str]
    keys: list[str]
    admin_keys: list[str]
    body: int
    connections: int
    drain: float
    tls: Tls | None


def _run(
    make: Callable[[], Engine], member: MemberOptions, engine_process: bool | None, text: _Text, http: _Http
) -> bool:
    """Serve until it is told to end → whether it ended well. ``engine_process``: whether the engine has a process of
    its own; None: if there is a core for it."""
    from ridgeline.measure.environment import cores, spare_core
    from ridgeline.serve.remote_engine import RemoteEngine

    with ExitStack() as ended:
        apart = cores() > 1 if engine_process is None else engine_process
        remote = RemoteEngine(make, spare_core, member) if apart else None
        if remote is not None:
            ended.callback(remote.close)
        # These take long to import, and a tokenizer to read: meanwhile the other process loads the model.
        from ridgeline.serve.app import create_app
        from ridgeline.serve.server import make_service, read_vocabulary
        from ridgeline.serve.server import serve as run
        from ridgeline.spec.model import ModelSpec

        require_checkpoint(text.checkpoint)
        size = ModelSpec.from_path(text.checkpoint).vocab_size
        vocabulary = read_vocabulary(text.checkpoint, text.tokenizer, size)
        engine = remote.wait_ready() if remote is not None else make()
        service = make_service(
            engine, text.checkpoint, text.limits, text.name, text.tokenizer, text.template, text.options, vocabulary
        )
        if text.adapters is not None:
            service.load_all(text.adapters)
        service.loop.rebuild = service.loop.rebuild or make
        transfers = _join(service.loop, engine, member)
        asgi = create_app(service, http.keys, http.admin_keys, http.body, http.prefix, http.origins)
        say(f"{service.name}: {engine.max_model_len} tokens of context, {engine.blocks.count} blocks of cache")
        with nullcontext() if remote is not None else spare_core():
            well = run(asgi, service.loop, http.host, http.port, http.drain, say, http.connections, http.tls)
        if transfers is not None:
            transfers.close()
        if remote is not None:
            well = remote.close() and well
        elif not service.loop.asleep:
            service.loop.engine.close()
    return well


def _check_access(host: str, policy: str, keys: list[str], others: bool) -> None:
    """Raise :class:`UserError` for a server that other machines reach without a key (unless it is open to ``others``
    on purpose), and for a policy that has no keys to tell clients apart."""
    from ridgeline.serve.address import loopback
    from ridgeline.serve.fair_shares import POLICIES
    from ridgeline.spec.errors import UserError, unknown

    if not (keys or others or loopback(host)):
        raise UserError(f"--host {host} lets other machines in, and there is no key",
                        "give --api-key, --tls-clients, or --insecure")  # fmt: skip
    if policy not in POLICIES:
        raise unknown("scheduling policy", policy, POLICIES, "--scheduling-policy")
    if policy == "fair" and len(keys) < 2:
        raise UserError("--scheduling-policy fair shares between API keys, and there are not two", "give two --api-key")


def _check_fleet(role: str | None, secret: bytes, tls: Tls | None, certain: bool) -> None:
    """Raise :class:`UserError` for wrong certificates, before the checkpoint is loaded, and for a member without a
    secret. ``certain``: that no technique makes the server a member."""
    if tls is not None and (tls.cert or role is not None):
        tls.listening(mutual=role is not None or tls.clients)
    if role is not None:
        require_secret(role, secret)
    elif certain:
        _require_peers(tls)


def _require_peers(tls: Tls | None) -> None:
    """Raise :class:`UserError` for an authority at a server that exchanges nothing with others."""
    from ridgeline.spec.errors import UserError

    if tls is not None and tls.ca and not tls.clients:
        raise UserError("--tls-ca checks the certificates of a fleet's other servers, and this one has no --role;"
                        " clients are known by their keys",
                        "give --api-key KEY and leave --tls-ca out, --tls-clients to check clients with it, or"
                        " --role prefill|decode|mixed")  # fmt: skip


def _join(loop: EngineLoop, engine: Engine | RemoteEngine, options: MemberOptions) -> Transfers | None:
    """Make the server a member of a fleet, if its plan makes it one → the exchange of caches, where that is not in the
    engine's own process. Raises :class:`UserError` without a secret."""
    from ridgeline.serve.remote_engine import RemoteEngine
    from ridgeline.serve.transfer.member import FleetMember

    if not engine.role:
        _require_peers(options.tls)
        return None
    if isinstance(engine, RemoteEngine):
        transfers, port, fingerprint = None, engine.transfer_port, engine.fingerprint
    else:
        from ridgeline.serve.transfer.transfers import Transfers

        transfers = Transfers(
            engine, options, loop.post, loop.metrics.registry, lambda: loop.draining,
            lambda: loop.failure is None and loop.step_age <= options.stall,
        )  # fmt: skip
        port, fingerprint = transfers.port, transfers.fingerprint
    loop.member = FleetMember(loop, engine.role, options.secret, port, fingerprint)
    say(f"{engine.role}: caches of prompts on port {port}")
    return transfers


def _keys(kind: str, given: list[str] | None) -> list[str]:
    """The keys that were given. Raises :class:`UserError` for an empty one, as of a variable that is not set."""
    from ridgeline.spec.errors import UserError

    variable = f"RIDGELINE_{kind}_KEY"
    found = given if given is not None else [os.environ[variable]] if variable in os.environ else []
    if not all(key.strip() for key in found):
        raise UserError(f"the {kind.lower()} key is empty", f"give --{kind.lower()}-key KEY, or unset {variable}")
    return found
