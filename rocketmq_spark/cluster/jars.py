"""The RocketMQ server's jars: fetched once by the Ivy that PySpark ships, then trusted only as their manifest says.

Rule 1: a folder of jars appears whole, by one rename, or not at all; Ivy's own cache is thrown away with the rest.
Rule 2: on every use the manifest decides which jars there are and how long each one is; anything else is fetched anew.
Rule 3: one process fetches at a time; the others wait for it and find its result.
Rule 4: nothing is printed here; a `progress` callback is told.

The folder is ``$ROCKETMQ_SPARK_CACHE``, else ``$XDG_CACHE_HOME/rocketmq-spark``, else ``~/.cache/rocketmq-spark``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import queue
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias
from xml.etree import ElementTree

from rocketmq_spark.cluster.config import render
from rocketmq_spark.errors import ClusterError

RELEASE: Final = "5.5.0"
"""The server's release: what the specification was checked against."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told what is being done, and how much of it is done: 0.0 to 1.0."""

FETCH_BYTES: Final = 400 * 1024 * 1024
"""Free disk wanted for a fetch: 106 MB of jars, twice (Ivy's cache and ours), and as much again to be safe."""

_MANIFEST: Final = "manifest.json"
_NEEDED: Final = (
    *(f"rocketmq-{name}-{RELEASE}.jar" for name in ("namesrv", "broker", "proxy", "tools")),
    # One of four that come together: without its own, a proxy with TLS does not start.
    "netty-tcnative-boringssl-static-2.0.53.Final-linux-x86_64.jar",
)

# Ivy asks for one file after the other, and most of its time it waits for an answer: so several of it share the work.
_SHARES: Final = 8

# What Ivy says once per module: having found it, then having its jar. The sum is only for the progress display.
_STEP: Final = re.compile(r"^\s+(found |\[SUCCESSFUL \])")
_STEPS: Final = 141 + 148

# The line of Ivy's output that says most about a failure; the first pattern that matches any line wins.
_CAUSES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"No space left on device",
        r"Host \S+ not found",
        r"java\.net\.\S+Exception: .*",
        r"javax\.net\.ssl\.\S+Exception: .*",
        r"(?i)\bconnect(ion)? timed out.*",
        r"HTTP response status: \d+.*",
        r"Exception in thread .*",
        r":: [\w.]+#[\w.-]+;[\w.-]+: .*",
    )
)


def tell_nobody(what: str, fraction: float) -> None:
    """Do nothing: the progress of someone who doesn't ask for it."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the per-user folder under which the jars are kept; it need not exist."""
    chosen = environ.get("ROCKETMQ_SPARK_CACHE", "")
    if chosen:
        return Path(chosen).absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "rocketmq-spark"


def installed_jars(cache: Path) -> tuple[Path, ...] | None:
    """Return the jars of the server in `cache` if they are all there as their manifest says, else None.

    Names and sizes are compared, not contents: it is done at every start, and takes milliseconds.
    """
    folder = _jar_folder(cache)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        sizes = {name: int(entry["size"]) for name, entry in manifest["jars"].items()}
        jars = tuple(folder / name for name in sorted(sizes))
        whole = all(jar.stat().st_size == sizes[jar.name] for jar in jars)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return jars if whole and all(name in sizes for name in _NEEDED) else None


def server_jars(find_java: Callable[[], Path], progress: Progress | None = None) -> tuple[Path, ...]:
    """Return the server's jars, fetching them first if this user has never done so.

    Parameters
    ----------
    find_java : callable
        Called only if something must be fetched.
    progress : callable, optional
        See :data:`Progress`.

    Raises
    ------
    ClusterError
        No network, no room, no Java, no PySpark with jars: one line that says what to do.
    """
    cache = cache_folder()
    jars = installed_jars(cache)
    if jars is not None:
        return jars
    return fetch(cache, find_java(), find_ivy(), progress=progress)


def fetch(
    cache: Path,
    java: Path,
    ivy: Path,
    *,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> tuple[Path, ...]:
    """Fetch the server into `cache`, unless another process has done so while this one waited for the lock.

    Parameters
    ----------
    cache : Path
        Created if missing.
    java, ivy : Path
        The program, and Ivy's jar.
    progress : callable, optional
        See :data:`Progress`.
    free_bytes : callable
        How many bytes may be written under a folder.

    Raises
    ------
    ClusterError
        See :func:`server_jars`.
    """
    tell = progress or tell_nobody
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".lock", tell):
            jars = installed_jars(cache)
            if jars is not None:
                return jars
            for stale in cache.glob(".fetch-*"):  # left by a process that was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            free = free_bytes(cache)
            if free < FETCH_BYTES:
                raise ClusterError(
                    f"fetching the RocketMQ server needs {FETCH_BYTES >> 20} MB in {cache}, {free >> 20} MB are free;"
                    " free some, or set ROCKETMQ_SPARK_CACHE to a folder on another disk"
                )
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
                _run_ivy(Path(work), java, ivy, tell)
                return _install(Path(work, "jars"), cache, tell)
    except OSError as exc:
        raise ClusterError(
            f"fetching the RocketMQ server into {cache}: {exc}; ROCKETMQ_SPARK_CACHE can name another folder"
        ) from exc


def find_ivy(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Ivy jar of the installed PySpark, else of ``SPARK_HOME``.

    Raises
    ------
    ClusterError
        Neither has one (``pyspark-client`` ships no jars).
    """
    homes = []
    spec = importlib.util.find_spec("pyspark")  # finds it without importing it
    if spec is not None and spec.submodule_search_locations:
        homes += list(spec.submodule_search_locations)
    if environ.get("SPARK_HOME"):
        homes.append(environ["SPARK_HOME"])
    for home in homes:
        for jar in sorted(Path(home, "jars").glob("ivy-*.jar")):
            return jar
    raise ClusterError(
        "fetching the RocketMQ server needs the Ivy jar that PySpark ships, and found none in"
        f" {', '.join(homes) or 'this Python, which has no PySpark'}; pip install pyspark, or set SPARK_HOME"
    )


def _jar_folder(cache: Path) -> Path:
    return cache / f"rocketmq-{RELEASE}"


@contextlib.contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    tell("another process is fetching the RocketMQ server; waiting for it", 0.0)
                waiting = True
                time.sleep(0.2)
        yield


def _run_ivy(work: Path, java: Path, ivy: Path, tell: Progress) -> None:
    """Let Ivy fill ``work/jars``. Its settings may be the user's own: a company's mirror of Maven Central."""
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    what = f"fetching the RocketMQ {RELEASE} server, once"
    tell(what, 0.0)
    # What the readers have seen: a step, or (False) the end of one's output.
    steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_SHARES))
        readers = []
        for number, share in enumerate(_shares(render("ivy.xml", release=RELEASE))):
            home = work / str(number)
            home.mkdir()
            (home / "ivy.xml").write_text(share, encoding="utf-8")
            # Ivy's own idea of a home is moved too: nothing is read from or left in ~/.ivy2.
            command = [str(java), f"-Divy.default.ivy.user.dir={home}", "-XX:TieredStopAtLevel=1"]
            command += ["-cp", str(ivy), "org.apache.ivy.Main", "-settings", settings, "-ivy", str(home / "ivy.xml")]
            command += ["-cache", str(home / "cache")]
            command += ["-retrieve", f"{work / 'jars'}/[artifact]-[revision](-[classifier]).[ext]"]
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # a Ctrl-C comes to us first, and we end it
                )
            )
            stack.callback(process.kill)  # does nothing if it has left
            readers.append((process, pool.submit(_read, process, steps)))
        done, running = 0, len(readers)
        while running:
            if steps.get():
                done += 1
                tell(what, min(done / _STEPS, 0.99))
            else:
                running -= 1
        for process, reader in readers:
            code = process.wait(60)  # its output has ended: it is about to leave
            if code != 0:
                raise ClusterError(_why_ivy_failed(reader.result(), code))


def _shares(ivy_xml: str) -> Iterator[str]:
    """Deal the dependencies of an Ivy file out to several of them."""
    module = ElementTree.fromstring(ivy_xml)
    dependencies = module.find("dependencies")
    assert dependencies is not None
    all_of_them = list(dependencies)
    for number in range(_SHARES):
        dependencies[:] = all_of_them[number::_SHARES]
        yield ElementTree.tostring(module, "unicode")


def _read(process: subprocess.Popen[str], steps: queue.SimpleQueue[bool]) -> list[str]:
    """Return all that Ivy says, telling each step that it has made, and in the end that it was the last one."""
    output: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip())
            if _STEP.match(line):
                steps.put(True)
    finally:
        steps.put(False)
    return output


def _why_ivy_failed(output: list[str], code: int) -> str:
    found = (match[0] for cause in _CAUSES for line in output if (match := cause.search(line)))
    reason = next(found, output[-1].strip() if output else f"exit code {code}")
    return (
        f"fetching the RocketMQ server failed: {reason}. It needs the network once; behind an HTTP proxy set"
        " JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=..., for a mirror set ROCKETMQ_SPARK_IVY_SETTINGS to an ivysettings.xml"
    )


def _install(jars: Path, cache: Path, tell: Progress) -> tuple[Path, ...]:
    """Write the manifest beside the jars, then move them to their place."""
    tell("checking what was fetched", 1.0)
    entries = {}
    for jar in sorted(jars.glob("*.jar")):
        with jar.open("rb") as file:
            digest = hashlib.sha256()
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
            os.fsync(file.fileno())  # a name must not survive a power cut without its bytes
        entries[jar.name] = {"size": jar.stat().st_size, "sha256": digest.hexdigest()}
    missing = [name for name in _NEEDED if name not in entries]
    if missing:
        raise ClusterError(
            f"fetching the RocketMQ server: Ivy brought {len(entries)} jars, but not {', '.join(missing)};"
            " check ROCKETMQ_SPARK_IVY_SETTINGS, or try again"
        )
    with (jars / _MANIFEST).open("w", encoding="utf-8") as manifest:
        json.dump({"release": RELEASE, "jars": entries}, manifest, indent=1)
        manifest.flush()
        os.fsync(manifest.fileno())
    folder = _jar_folder(cache)
    if folder.exists():  # it was not whole, or we would not be here
        shutil.rmtree(folder)
    jars.rename(folder)
    whole = installed_jars(cache)
    if whole is None:
        raise ClusterError(f"fetching the RocketMQ server: {folder} changed while it was being made; try again")
    return whole
