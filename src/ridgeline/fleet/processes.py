"""A fleet on one machine: servers as processes of their own, started again when they end, behind one router."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ridgeline.fleet.members import Member, Members
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.router import Limits, Router
from ridgeline.fleet.tenants import Tenant, Tenants, tenants_of
from ridgeline.jobs.launch import free_port
from ridgeline.serve.address import server_addresses
from ridgeline.serve.transfer.secret import VARIABLE, read_secret
from ridgeline.serve.transfer.tls import Tls
from ridgeline.spec.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN_OPTIONS = {"--role": 'write role = "…" beside it', **dict.fromkeys(("--port", "--host", "--fleet-secret-file"),
               "leave it out"), **dict.fromkeys(("--tls-cert", "--tls-key", "--tls-ca", "--tls-clients"),
               "write tls_cert, tls_key and tls_ca in [fleet]")}  # fmt: skip
"""Options of a server that the fleet gives itself, and what to do instead."""
MISTAKE = 2
"""Exit code of a server for a mistake in its options or files."""
LONGEST_PAUSE = 30.0
"""Seconds at most before a server that keeps ending is started again."""
LINE = 1 << 14
"""Longest line of a server that is passed on whole."""
START = 1800.0
"""Seconds that a restarted server gets to be healthy before the next one is restarted."""
DRAIN = 30.0
"""Seconds that a server gets to finish its requests when it is told to end, unless its options say otherwise."""
GRACE = 20.0
"""Seconds that it gets to end by itself after that."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerTable(_Table):
    """One ``[[servers]]`` of a file."""

    checkpoint: str
    replicas: int = Field(default=1, ge=1)
    role: Literal["prefill", "decode", "mixed"] | None = None
    """What it is preferred for, where prompts and outputs are computed on different servers."""
    options: list[str] = []
    """Options of ``ridgeline serve``."""


class FleetTable(_Table):
    """``[fleet]``."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    members: list[str] = []
    """Addresses of servers of other machines, which were started there."""
    tls_cert: Path | None = None
    """This machine's certificate (PEM). With it all connections are encrypted, and the router and the servers check
    each other's certificates."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificate of the authority whose certificates are accepted."""
    policy: Literal["prefix", "least-loaded", "random"] = "prefix"
    wait_s: float = Field(default=30.0, ge=0)
    """Seconds that a request waits for a server to come up."""
    drain_s: float = Field(default=300.0, ge=0)
    """Seconds that a server gets to finish its requests before it is restarted."""


class FleetFile(_Table):
    """A fleet as written in its file, but for the tenants."""

    fleet: FleetTable = FleetTable()
    servers: list[ServerTable] = Field(min_length=1)

    @property
    def tls(self) -> Tls | None:
        """The certificates, if there are any."""
        f = self.fleet
        return Tls(f.tls_cert, f.tls_key, f.tls_ca, clients=True) if f.tls_cert or f.tls_key or f.tls_ca else None


def load_fleet(path: Path) -> tuple[FleetFile, list[Tenant]]:
    """The fleet of a TOML file, and its tenants. Raises :class:`UserError` naming what is wrong."""
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", "give a TOML file with [[servers]]") from None
    except ValueError as e:
        raise UserError(f"{path} is not valid TOML: {e}") from None
    tenants = tenants_of(tables.pop("tenants", {}), path)
    try:
        file = FleetFile.model_validate(tables)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}", "see docs/fleet.md") from None
    for s in file.servers:
        if not Path(s.checkpoint).is_dir():
            raise UserError(f"{path}: no checkpoint at {s.checkpoint}", "give the directory of a checkpoint")
        if taken := OWN_OPTIONS.keys() & {o.partition("=")[0] for o in s.options}:
            raise UserError(f"{path}: {min(taken)} is the fleet's own", OWN_OPTIONS[min(taken)])
    _check_members(file, path)
    if file.tls is not None:
        _require_usable(file.tls, path)
    return file, tenants


def _check_members(file: FleetFile, path: Path) -> None:
    """Raise :class:`UserError` for members that cannot be reached, are listed twice, or cannot reach those of this
    machine."""
    try:
        server_addresses(file.fleet.members, encrypted=file.tls is not None)
    except UserError as e:
        raise UserError(f"{path}: fleet.members: {e.what}", e.fix) from None
    if file.fleet.members and any(s.role for s in file.servers):
        raise UserError(f"{path}: fleet.members cannot fetch caches from servers with a role that start here",
                        "start all with `ridgeline serve --role`, and `ridgeline router` before them")  # fmt: skip


def _require_usable(tls: Tls, path: Path) -> None:
    """Raise :class:`UserError` unless machines can check each other with these files."""
    given = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}
    if lacking := [name for name, file in given.items() if file is None]:
        raise UserError(f"{path}: [fleet] lacks {' and '.join(lacking)}",
                        "write the machine's certificate, its key and the authority's certificate")  # fmt: skip
    tls.require_signed()


class ServerProcess:
    """One server, whose address stays when it is started again. ``say`` gets its lines."""

    def __init__(self, table: ServerTable, say: Callable[[str], None], secret: bytes, tls: Tls | None = None) -> None:
        self.table, self.say = table, say
        self._own = ["--role", table.role] if table.role is not None else []
        if tls is not None:
            self._own += ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca),
                          "--tls-clients"]  # fmt: skip
        self.drain = _drain_timeout(table.options)
        """Seconds that it gets to finish its requests when it is told to end."""
        self._environment = {**os.environ, VARIABLE: secret.decode()}
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None
        self.stopping = self.asked = False

    async def run(self) -> None:
        """Start it, and again whenever it ends, until :meth:`stop`. Raises :class:`UserError` when it refuses its first
        start, as for an unknown option: it would refuse all others, too."""
        pause, first = 1.0, True
        while not self.stopping:
            began = asyncio.get_running_loop().time()
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "ridgeline", "serve", self.table.checkpoint, "--host", "127.0.0.1",
                "--port", str(self.port), *self._own, "--drain-timeout", str(DRAIN), *self.table.options,
                stderr=asyncio.subprocess.PIPE, start_new_session=True, env=self._environment,
            )  # fmt: skip
            assert self.process.stderr is not None
            await self._read(self.process.stderr)
            code = await self.process.wait()
            if self.stopping:
                return
            if first and code == MISTAKE:
                raise UserError(f"a server of {self.table.checkpoint} does not start: its message is above",
                                "correct its checkpoint or options in [[servers]]")  # fmt: skip
            first = False
            if self.asked:
                self.asked = False
                continue
            pause = 1.0 if asyncio.get_running_loop().time() - began > 60 else min(2 * pause, LONGEST_PAUSE)
            self.say(f"{self.url} ended with code {code}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Pass on what the process says, line by line; what has no end of line is cut."""
        rest = ""
        while data := await stream.read(LINE):
            *lines, rest = (rest + data.decode(errors="replace")).replace("\r", "\n").split("\n")
            for line in [*lines, *([rest] if len(rest) > LINE else [])]:
                if line.strip():
                    self.say(f"{self.url}: {line[:LINE].rstrip()}")
            rest = "" if len(rest) > LINE else rest

    async def end(self) -> None:
        """Ask the process to end, and kill it if it does not; :meth:`run` starts it again unless it is stopping."""
        if self.process is None or self.process.returncode is not None:
            return
        self.asked = True
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), self.drain + GRACE)
        except asyncio.TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End it for good."""
        self.stopping = True
        await self.end()


def _drain_timeout(options: list[str]) -> float:
    """The last ``--drain-timeout`` of a server's options; :data:`DRAIN` where there is none, or none that it takes."""
    words = [part for o in options for part in (o.split("=", 1) if o.startswith("--drain-timeout=") else [o])]
    given = [value for name, value in pairwise(words) if name == "--drain-timeout"]
    try:
        seconds = float(given[-1]) if given else DRAIN
    except ValueError:
        return DRAIN
    return seconds if 0 <= seconds < math.inf else DRAIN


class Fleet:
    """The servers of a file, and the router before them."""

    def __init__(
        self, file: FleetFile, tenants: list[Tenant], say: Callable[[str], None], admin_key: str = "",
        member_key: str = "",
    ) -> None:  # fmt: skip
        self.file, self.say = file, say
        secret = read_secret(None, os.environ.get(VARIABLE)) or secrets.token_hex(32).encode()
        tls = file.tls
        self.servers = [ServerProcess(t, say, secret, tls) for t in file.servers for _ in range(t.replicas)]
        own = [s.url for s in self.servers]
        members = Members([*own, *file.fleet.members], say, member_key)
        if tls is not None:
            for m in members.all:  # a certificate names its machine, not the loopback address
                m.tls = tls.connecting(named=m.url not in own)
        limits = Limits(wait_s=file.fleet.wait_s)
        self.router = Router(members, POLICIES[file.fleet.policy](), Tenants(tenants), limits, admin_key, secret)
        self.router.restart, self.router.down, self.router.started = self.restart, self.down, own
        self.ended = asyncio.Event()
        self.restarting = asyncio.Lock()

    async def run(self) -> None:
        """Keep the servers running until :meth:`down`; then end them."""
        tasks = [asyncio.create_task(s.run()) for s in self.servers]
        ended = asyncio.create_task(self.ended.wait())
        try:
            done, _ = await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # what a server's task raised ends the fleet, with its message
        finally:
            ended.cancel()
            await asyncio.gather(*(s.stop() for s in self.servers))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def down(self) -> None:
        """End the fleet."""
        self.ended.set()

    async def restart(self) -> None:
        """Restart the servers one after another: each finishes its requests first, and the next one waits until it is
        healthy again."""
        async with self.restarting:
            for s in self.servers:
                member = self.router.members.find(s.url)
                assert member is not None
                if member.state == "draining":  # by somebody who wants it so
                    continue
                member.become("draining")
                await self._until(partial(_idle, member), self.file.fleet.drain_s)
                await s.end()
                member.become("down")
                self.router.policy.forget(member)
                await self._until(partial(_up, member), START)
                self.say(f"{s.url} was restarted")

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not holds() and asyncio.get_running_loop().time() < deadline and not self.ended.is_set():
            await asyncio.sleep(0.05)


def _idle(member: Member) -> bool:
    return not member.running


def _up(member: Member) -> bool:
    return member.state == "up"
