"""Certificates for connections between machines, and for clients. Needs no torch."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from ridgeline.spec.errors import UserError


@dataclass(frozen=True)
class Tls:
    """A machine's certificate and its key, and the authority whose certificates it accepts, all as PEM files."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    clients: bool = False
    """Whether HTTP clients, too, must show a certificate of the authority."""

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None, clients: bool = False) -> Tls | None:
        """What options name; None: nothing. Raises :class:`UserError` for a certificate without its key, or clients to
        be checked without an authority."""
        if (cert is None) != (key is None):
            have, lack = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
            raise UserError(f"{have} is given without {lack}", "give both, as PEM files")
        if clients and not (cert and ca):
            raise UserError("--tls-clients checks the certificates of clients, and one of the files for it is missing",
                            "give --tls-cert, --tls-key and --tls-ca")  # fmt: skip
        return cls(cert, key, ca, clients) if cert or ca else None

    def require_all(self) -> None:
        """Raise :class:`UserError` unless machines can check each other with these files."""
        if not (self.cert and self.key and self.ca):
            raise UserError("machines check each other's certificates, and only a part of what this needs is given",
                            "give --tls-cert, --tls-key and --tls-ca")  # fmt: skip

    def require_signed(self) -> None:
        """Raise :class:`UserError` unless a machine with these files would accept itself: a handshake in memory."""
        wires = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [self.connecting(named=False).wrap_bio(*wires), self.listening(mutual=True).wrap_bio(*wires[::-1], True)]
        try:
            for _ in range(4):  # flights of TLS 1.3, and one to spare
                for end in ends:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as e:
            raise UserError(f"the certificate {self.cert} is not accepted by the authority {self.ca}: {_reason(e)}",
                            "give the certificate of the authority that signed it") from None  # fmt: skip

    def listening(self, mutual: bool) -> ssl.SSLContext:
        """For a socket that listens. ``mutual``: who connects must have a certificate of the authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if mutual:
            self.require_all()
            context.verify_mode = ssl.CERT_REQUIRED
            self._trust(context)
        self._load(context)
        return context

    def connecting(self, named: bool) -> ssl.SSLContext:
        """For a connection. ``named``: the certificate must be for the host that is asked, as browsers want it; peers
        have addresses that change, and theirs must be of the authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = named
        self._trust(context)
        if self.cert:
            self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        assert self.cert is not None
        try:
            context.load_cert_chain(self.cert, self.key, password="")  # or it would ask for one
        except (OSError, ValueError) as e:  # SSLError is an OSError
            raise UserError(f"the certificate {self.cert} and the key {self.key} cannot be used: {_reason(e)}",
                            "give PEM files of a certificate and its key, without a password") from None  # fmt: skip

    def _trust(self, context: ssl.SSLContext) -> None:
        if self.ca is None:
            context.load_default_certs()
            return
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as e:
            raise UserError(f"the authority's certificate {self.ca} cannot be read: {_reason(e)}",
                            "give a PEM file") from None  # fmt: skip


def _reason(e: Exception) -> str:
    return str(getattr(e, "reason", None) or getattr(e, "strerror", None) or e)
