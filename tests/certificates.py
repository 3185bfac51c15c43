"""Certificates for tests of TLS, made by the `openssl` program: an authority, and servers that it vouches for."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_REQUEST = "[req]\ndistinguished_name=name\nprompt=no\n[name]\nCN={name}\n"
_AUTHORITY = (
    "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
    "authorityKeyIdentifier=keyid\n"
)
_SERVER = "[server]\nsubjectAltName={names}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"


class Authority:
    """A certificate authority of its own; its files are in `folder`."""

    def __init__(self, folder: Path, name: str = "an authority of the tests") -> None:
        if shutil.which("openssl") is None:
            if os.environ.get("CI"):
                pytest.fail("tests of TLS need the program openssl")
            pytest.skip("tests of TLS need the program openssl")
        self.folder = folder
        self.ca_file = folder / "ca.pem"
        (folder / "ca.conf").write_text(_REQUEST.format(name=name) + _AUTHORITY)
        files = ("-config", "ca.conf", "-extensions", "ca", "-keyout", "ca.key", "-out", "ca.pem")
        self._openssl("req", "-x509", *_KEY, "-days", "2", *files)

    def server(self, name: str, names: str) -> tuple[Path, Path]:
        """Return the files of a certificate and its key (PKCS#8) for `names`, as in ``DNS:localhost,IP:127.0.0.1``."""
        (self.folder / f"{name}.conf").write_text(_REQUEST.format(name=name) + _SERVER.format(names=names))
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._openssl("req", *_KEY, "-config", f"{name}.conf", *files)
        by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.conf")
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem")
        self._openssl("x509", "-req", *files, *by, "-extensions", "server", "-days", "2")
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def context(self, name: str, names: str) -> ssl.SSLContext:
        """Return the context of a server for `names`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.server(name, names))
        return context

    def _openssl(self, *arguments: str) -> None:
        run = subprocess.run(
            ["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 0, run.stderr
