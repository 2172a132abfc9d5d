"""Certificates of authorities that exist for one test."""

import subprocess
from pathlib import Path

from ridgeline.serve.transfer.tls import Tls


def certificates(folder: Path, name: str, names: str = "IP:127.0.0.1,DNS:localhost") -> Tls:
    """An authority, and a certificate of it for ``names``."""
    folder.mkdir()
    ca, ca_key, cert, key, asked = (folder / f"{name}.{end}" for end in ("ca", "ca-key", "cert", "key", "csr"))
    extra = folder / "san"
    extra.write_text(f"subjectAltName={names}\n")

    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-days", 2, "-subj", f"/CN={name}")
    openssl("req", *curve, "-keyout", key, "-out", asked, "-subj", "/CN=a machine")
    openssl("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert, "-days", 2,
            "-extfile", extra)  # fmt: skip
    return Tls(cert, key, ca)
