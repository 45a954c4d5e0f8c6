"""An authority and a server's certificate for 127.0.0.1, made by the openssl command."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def make_authority(folder: Path, name: str) -> Path:
    """A certificate that signs others; its key lies beside it. Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (on Debian and Ubuntu: apt install openssl)")
    made = folder / f"{name}.crt"
    extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl("req", "-x509", *_key(made), "-subj", f"/CN={name}", "-days", "2", *extensions, "-out", str(made))
    return made


def server_context(folder: Path, authority: Path) -> ssl.SSLContext:
    """The TLS side of a server on 127.0.0.1 that this authority vouches for."""
    made = folder / f"server-of-{authority.stem}.crt"
    signed = ["-CA", str(authority), "-CAkey", str(authority.with_suffix(".key"))]
    extensions = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    _openssl("req", "-x509", *_key(made), "-subj", "/CN=api", "-days", "2", *extensions, *signed, "-out", str(made))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, made.with_suffix(".key"))
    return context


def _key(made: Path) -> list[str]:
    key = str(made.with_suffix(".key"))
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key]


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
