"""The RocketMQ server's jars: fetched once by the Ivy that PySpark ships, and compared with the package's list.

``conf/jars.sha256`` lists the jars and their SHA-256. After every fetch and before every use each jar is hashed, and a
jar that is not in the list counts as a difference. The folder of jars appears by one rename. One process fetches at a
time; the others wait and use its result.

The folder is ``$ROCKETMQ_SPARK_CACHE``, else ``$XDG_CACHE_HOME/rocketmq-spark``, else ``~/.cache/rocketmq-spark``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias
from xml.etree import ElementTree

from rocketmq_spark.cluster.config import render, user_folder
from rocketmq_spark.errors import ClusterError

logger = logging.getLogger("rocketmq_spark.cluster")

# Of the server.
RELEASE: Final = "5.5.0"

# Called with the current step and the fraction of the work that is done, 0.0 to 1.0.
Progress: TypeAlias = Callable[[str, float], None]

# Free disk needed for a fetch: 106 MB of jars, twice (Ivy's cache and ours), and as much again to be safe.
FETCH_BYTES: Final = 400 * 1024 * 1024

# The most files that an error names.
_NAMED: Final = 5

# Ivy fetches one file after the other and mostly waits, so this many processes share the work.
_SHARES: Final = 8

# Ivy's output has two such lines per module. Their number is needed for the progress display only.
_STEP: Final = re.compile(r"^[ \t]+(?:found |\[SUCCESSFUL \])", re.MULTILINE)
_STEPS: Final = 141 + 148
_POLL: Final = 0.1

# The causes of a failure in Ivy's output; the first pattern that matches wins.
_CAUSES: Final = (
    r"No space left on device",
    r"Host \S+ not found",
    r"java\.net\.\S+Exception: .*",
    r"javax\.net\.ssl\.\S+Exception: .*",
    r"(?i)\bconnect(ion)? timed out.*",
    r"HTTP response status: \d+.*",
    r"Exception in thread .*",
    r":: [\w.]+#[\w.-]+;[\w.-]+: .*",
)


def no_progress(what: str, fraction: float) -> None:
    """Ignore the progress."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the per-user folder under which the jars are kept; it need not exist."""
    return user_folder("CACHE", ".cache", environ)


def listed_checksums(text: str) -> dict[str, str]:
    """Return the SHA-256 of each file that a list in the format of ``sha256sum`` names."""
    pairs = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {name: checksum for checksum, name in pairs}


def server_checksums() -> dict[str, str]:
    """Return the SHA-256 of each jar of the server, as the package lists them."""
    return listed_checksums(render("jars.sha256"))


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def differences(folder: Path, checksums: Mapping[str, str]) -> str:
    """Return how the jars of a folder differ from a list, naming the first of them; empty if they are equal."""
    # Every jar is read: sizes and times could be forged. 106 MB take about 0.1 s, a cluster's start takes about 5 s.
    texts = []
    for name in sorted({jar.name for jar in folder.glob("*.jar")} | checksums.keys()):
        try:
            if name not in checksums:
                texts.append(f"{name} is not in the list")
            elif sha256_of(folder / name) != checksums[name]:
                texts.append(f"{name} differs")
        except FileNotFoundError:
            texts.append(f"{name} is missing")
        except OSError as exc:
            texts.append(f"{name} can't be read ({exc.strerror})")
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return ", ".join([*texts[:_NAMED], *more])


def installed_jars(cache: Path, checksums: Mapping[str, str]) -> tuple[Path, ...] | None:
    """Return the jars of the server in `cache` if they are those of the list and no others, else None."""
    folder = _jar_folder(cache)
    if not folder.is_dir() or differences(folder, checksums):
        return None
    return tuple(folder / name for name in sorted(checksums))


def server_jars(
    find_java: Callable[[], Path], progress: Progress | None = None, *, checksums: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """Return the server's jars; the first call of a user fetches them. `find_java` is called only then.

    `checksums` has the SHA-256 of every jar by file name, by default the package's list. Raises a ClusterError without
    network, room, Java, or PySpark with jars, and for jars other than the listed ones.
    """
    cache, checksums = cache_folder(), checksums or server_checksums()
    jars = installed_jars(cache, checksums)
    return jars or fetch(cache, find_java(), find_ivy(), progress=progress, checksums=checksums)


def fetch(
    cache: Path,
    java: Path,
    ivy: Path,
    *,
    progress: Progress | None = None,
    checksums: Mapping[str, str] | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> tuple[Path, ...]:
    """Fetch the server into `cache`, unless another process has done so while this one waited for the lock.

    `ivy` is a jar, and `free_bytes` returns the free space of a folder. Raises as `server_jars`.
    """
    tell, checksums = progress or no_progress, checksums or server_checksums()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".lock", tell):
            jars = installed_jars(cache, checksums)
            if jars is not None:
                return jars
            folder = _jar_folder(cache)
            if folder.exists():
                logger.warning(
                    "the RocketMQ server in %s is not used and fetched again: its jars are not those of the package's"
                    " list: %s",
                    folder,
                    differences(folder, checksums),
                )
            for stale in cache.glob(".fetch-*"):  # left by a process that was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            free = free_bytes(cache)
            if free < FETCH_BYTES:
                raise ClusterError(
                    f"fetching the RocketMQ server needs {FETCH_BYTES >> 20} MB in {cache}, {free >> 20} MB are free;"
                    " free some, or set ROCKETMQ_SPARK_CACHE to a folder on another disk"
                )
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
                retrieve(Path(work), java, ivy, tell)
                return _install(Path(work, "jars"), cache, checksums, tell)
    except OSError as exc:
        raise ClusterError(
            f"fetching the RocketMQ server into {cache}: {exc}; ROCKETMQ_SPARK_CACHE can name another folder"
        ) from exc


def find_ivy(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Ivy jar of the installed PySpark, else of ``SPARK_HOME``; ``pyspark-client`` ships none."""
    spec = importlib.util.find_spec("pyspark")  # finds it without importing it
    packages = spec.submodule_search_locations if spec is not None else None
    homes = [*(packages or ()), *filter(None, [environ.get("SPARK_HOME")])]
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is fetching the RocketMQ server; waiting for it", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def retrieve(work: Path, java: Path, ivy: Path, tell: Progress) -> None:
    """Let Ivy fill ``work/jars``, with the user's own settings for a mirror of Maven Central.

    Ivy compares each jar with the SHA-1 of the same repository, which finds damage but no changed repository.
    """
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    what = f"fetching the RocketMQ {RELEASE} server, once"
    tell(what, 0.0)
    module = ElementTree.fromstring(render("ivy.xml", release=RELEASE))
    dependencies = module.find("dependencies")
    assert dependencies is not None
    all_of_them = list(dependencies)
    with contextlib.ExitStack() as stack:
        processes: dict[Path, subprocess.Popen[bytes]] = {}  # by the file of its output
        for share in range(_SHARES):
            home = work / str(share)
            home.mkdir()
            dependencies[:] = all_of_them[share::_SHARES]
            (home / "ivy.xml").write_text(ElementTree.tostring(module, "unicode"), encoding="utf-8")
            # Ivy's user folder is moved too, so that it does not use ~/.ivy2.
            command = [str(java), f"-Divy.default.ivy.user.dir={home}", "-XX:TieredStopAtLevel=1"]
            command += ["-cp", str(ivy), "org.apache.ivy.Main", "-settings", settings, "-ivy", str(home / "ivy.xml")]
            command += ["-cache", str(home / "cache")]
            command += ["-retrieve", f"{work / 'jars'}/[artifact]-[revision](-[classifier]).[ext]"]
            with (home / "output").open("wb") as output:
                process = stack.enter_context(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a Ctrl-C comes to us first, and we end it
                    )
                )
            stack.callback(process.kill)  # does nothing if it has left
            processes[home / "output"] = process
        done, running = 0, True
        while running:
            time.sleep(_POLL)
            running = any(process.poll() is None for process in processes.values())
            steps = sum(len(_STEP.findall(output.read_text(errors="replace"))) for output in processes)
            for step in range(done + 1, steps + 1):
                tell(what, min(step / _STEPS, 0.99))
            done = steps
    for file, process in processes.items():
        if process.returncode != 0:
            raise _ivy_failed(file.read_text(errors="replace").strip(), process.returncode)


def _ivy_failed(output: str, code: int) -> ClusterError:
    causes = (match[0].rstrip() for cause in _CAUSES if (match := re.search(cause, output)))
    reason = next(causes, output.splitlines()[-1] if output else f"exit code {code}")
    return ClusterError(
        f"fetching the RocketMQ server failed: {reason}. It needs the network once; behind an HTTP proxy set"
        " JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=..., for a mirror set ROCKETMQ_SPARK_IVY_SETTINGS to an ivysettings.xml"
    )


def _install(jars: Path, cache: Path, checksums: Mapping[str, str], tell: Progress) -> tuple[Path, ...]:
    """Move the jars to their place if they are those of the list."""
    tell("checking what was fetched", 1.0)
    different = differences(jars, checksums)
    if different:
        raise ClusterError(
            f"fetching the RocketMQ server: the fetched jars are not those of the package's list: {different}. Nothing"
            " was installed. Check the repository that ROCKETMQ_SPARK_IVY_SETTINGS names, or unset it to fetch from"
            " Maven Central"
        )
    for name in checksums:
        with (jars / name).open("rb") as file:
            os.fsync(file.fileno())  # a name must not survive a power cut without its bytes
    folder = _jar_folder(cache)
    if folder.exists():  # it differs from the list, or nothing would have been fetched
        shutil.rmtree(folder)
    jars.rename(folder)
    return tuple(folder / name for name in sorted(checksums))
