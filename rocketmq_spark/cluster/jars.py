"""Fetches the jars of the RocketMQ server with the Ivy jar of PySpark, keeps them, and checks their SHA-256.

After a fetch and at each start of a cluster, the jars must be exactly those of ``conf/jars.sha256``. Otherwise the
fetch fails, or installed jars are fetched again. Fetched jars get their final folder by one rename, so an interrupted
fetch leaves no part there. One process fetches into a cache folder at a time. Other processes wait, and fetch only if
that process failed.
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

from rocketmq_spark.cluster.config import os_errors, render, user_folder
from rocketmq_spark.errors import ClusterError

logger = logging.getLogger("rocketmq_spark.cluster")

RELEASE: Final = "5.5.0"

# Called with the current step and the completed fraction of the work, 0.0 to 1.0.
Progress: TypeAlias = Callable[[str, float], None]

# Disk space for a fetch: 106 MB of jars, twice (Ivy's cache and this one), and a reserve of the same size.
FETCH_BYTES: Final = 400 * 1024 * 1024

_NAMED: Final = 5  # Maximum number of files in an error

# Ivy fetches files sequentially and mostly waits, so this many processes share the work.
_SHARES: Final = 8

# Ivy's output has two such lines per module. The progress display needs their number.
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
    """Return the user's folder of jars, which may not exist: ``rocketmq-spark`` in the cache folder."""
    return user_folder("CACHE", ".cache", environ)


def listed_checksums(text: str) -> dict[str, str]:
    """Return the SHA-256 of each file in a list in the format of ``sha256sum``."""
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
    """Return how the jars of a folder differ from a list, with the first differences; empty if they are equal."""
    # Sizes and times could be forged, so every jar is read. 106 MB take 0.1 s; a cluster's start takes about 5 s.
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
    """Return the jars in `cache` if they are exactly those of the list, else None."""
    folder = _jar_folder(cache)
    if not folder.is_dir() or differences(folder, checksums):
        return None
    return tuple(folder / name for name in sorted(checksums))


def server_jars(
    find_java: Callable[[], Path], progress: Progress | None = None, *, checksums: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """Return the server's jars, and fetch them if necessary. `find_java` is called only for a fetch.

    Raises a ClusterError without network, disk space, Java or PySpark's Ivy, and for jars that differ from `checksums`.
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
    """Fetch the jars into `cache`, unless another process did. `ivy` is a jar. Raises as `server_jars`."""
    tell, checksums = progress or no_progress, checksums or server_checksums()
    with os_errors(f"fetching the RocketMQ server into {cache}", "set ROCKETMQ_SPARK_CACHE to another folder"):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / ".lock", tell):
            jars = installed_jars(cache, checksums)
            if jars is not None:
                return jars
            folder = _jar_folder(cache)
            if folder.exists():
                different = differences(folder, checksums)
                text = "fetching the RocketMQ server again: the jars in %s differ from rocketmq-spark's list: %s"
                logger.warning(text, folder, different)
            for stale in cache.glob(".fetch-*"):  # Left by a killed process; this process holds the lock
                shutil.rmtree(stale, ignore_errors=True)
            free = free_bytes(cache)
            if free < FETCH_BYTES:
                raise ClusterError(
                    f"fetching the RocketMQ server: {cache} has {free >> 20} MB of free disk space, "
                    f"{FETCH_BYTES >> 20} MB are needed. Free some, or set ROCKETMQ_SPARK_CACHE to a folder on "
                    "another disk"
                )
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
                retrieve(Path(work), java, ivy, tell)
                return _install(Path(work, "jars"), cache, checksums, tell)


def find_ivy(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the Ivy jar of the installed PySpark, else of ``SPARK_HOME``; ``pyspark-client`` ships none."""
    spec = importlib.util.find_spec("pyspark")  # Does not import it
    packages = spec.submodule_search_locations if spec is not None else None
    homes = [*(packages or ()), *filter(None, [environ.get("SPARK_HOME")])]
    for home in homes:
        for jar in sorted(Path(home, "jars").glob("ivy-*.jar")):
            return jar
    raise ClusterError(
        "fetching the RocketMQ server: PySpark's jar of Ivy, which downloads it, is missing in"
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
    """Fetch the jars with Ivy into ``work/jars``, with the user's own settings for a mirror of Maven Central."""
    # Ivy compares each jar with the SHA-1 of the same repository, which finds damage but no forged repository.
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    step_name = f"fetching the RocketMQ {RELEASE} server, once"
    tell(step_name, 0.0)
    module = ElementTree.fromstring(render("ivy.xml", release=RELEASE))
    dependencies = module.find("dependencies")
    assert dependencies is not None
    every_dependency = list(dependencies)
    with contextlib.ExitStack() as stack:
        processes: dict[Path, subprocess.Popen[bytes]] = {}  # By output file
        for share in range(_SHARES):
            home = work / str(share)
            home.mkdir()
            dependencies[:] = every_dependency[share::_SHARES]
            (home / "ivy.xml").write_text(ElementTree.tostring(module, "unicode"), encoding="utf-8")
            # Ivy must not use ~/.ivy2 as its user folder either.
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
                        start_new_session=True,  # A Ctrl-C reaches only this process, which then ends Ivy
                    )
                )
            stack.callback(process.kill)  # No effect after its end
            processes[home / "output"] = process
        done, running = 0, True
        while running:
            time.sleep(_POLL)
            running = any(process.poll() is None for process in processes.values())
            steps = sum(len(_STEP.findall(output.read_text(errors="replace"))) for output in processes)
            for step in range(done + 1, steps + 1):
                tell(step_name, min(step / _STEPS, 0.99))
            done = steps
    for file, process in processes.items():
        if process.returncode != 0:
            text = file.read_text(errors="replace").strip()
            causes = (match[0].rstrip() for cause in _CAUSES if (match := re.search(cause, text)))
            reason = next(causes, text.splitlines()[-1] if text else f"exit code {process.returncode}")
            raise ClusterError(
                f"fetching the RocketMQ server failed: {reason}. The first start needs the network. For an HTTP proxy"
                " set JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=..., for a mirror set ROCKETMQ_SPARK_IVY_SETTINGS to an"
                " ivysettings.xml"
            )


def _install(jars: Path, cache: Path, checksums: Mapping[str, str], tell: Progress) -> tuple[Path, ...]:
    """Move the jars to their folder if they are those of the list."""
    tell("checking the fetched jars", 1.0)
    different = differences(jars, checksums)
    if different:
        raise ClusterError(
            f"fetching the RocketMQ server: the fetched jars differ from rocketmq-spark's list of SHA-256: {different}."
            " Nothing was installed. Check the repository in ROCKETMQ_SPARK_IVY_SETTINGS, or unset it to use Maven"
            " Central"
        )
    for name in checksums:
        with (jars / name).open("rb") as file:
            os.fsync(file.fileno())  # Otherwise a power cut could leave the name without the bytes
    folder = _jar_folder(cache)
    if folder.exists():  # Its jars differ from the list
        shutil.rmtree(folder)
    jars.rename(folder)
    return tuple(folder / name for name in sorted(checksums))
