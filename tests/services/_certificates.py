"""Certificates for test servers on loopback, by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ._homes import fail

__all__ = ["make_certificates"]


def make_certificates(where: Path) -> None:
    """Make a CA (``ca.crt``, ``ca.key``) and by it a certificate for localhost (``server.crt``, ``server.key``).

    Keys are PKCS 8 in PEM, with mode 0600. Valid for 30 days.
    """
    if shutil.which("openssl") is None:
        fail("the tests need openssl to make certificates: apt-get install openssl")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = ["-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=streamfw test CA", "-days", "30"]
    extensions = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl(where, "req", "-x509", *key, *ca, *extensions)
    _openssl(where, "req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (where / "server.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1\nextendedKeyUsage=serverAuth\n")
    by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "server.ext"]
    _openssl(where, "x509", "-req", "-in", "server.csr", "-out", "server.crt", *by)
    for name in ("ca.key", "server.key"):
        (where / name).chmod(0o600)


def _openssl(where: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=where, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fail(f"openssl {arguments[0]} failed: {done.stderr}")
