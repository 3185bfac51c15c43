"""The cache of server jars: trusted jars, and the absence of leftovers of an interrupted fetch."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import (
    FETCH_BYTES,
    RELEASE,
    cache_folder,
    differences,
    fetch,
    find_ivy,
    installed_jars,
    server_checksums,
    server_jars,
)
from rocketmq_spark.cluster.state import process_start
from rocketmq_spark.errors import ClusterError
from tests.tools.jar_lists import listed_jars

MakeJava = Callable[[Path, str], Path]

SERVERS = [
    *(f"rocketmq-{name}-{RELEASE}.jar" for name in ("namesrv", "broker", "proxy", "tools")),
    "netty-tcnative-boringssl-static-2.0.53.Final-linux-x86_64.jar",
]
# The last argument of Ivy's command line is the pattern of the files to retrieve.
FOLDER = 'for last; do :; done\nfolder="${last%/*}"\nmkdir -p "$folder"\n'


def writes(*jars: str) -> str:
    return FOLDER + "".join(f"printf 'the bytes of {jar}' > \"$folder/{jar}\"\n" for jar in jars)


WHOLE = writes(*SERVERS, "guava-1.jar")
LISTED = {jar: hashlib.sha256(f"the bytes of {jar}".encode()).hexdigest() for jar in [*SERVERS, "guava-1.jar"]}


def run_fetch(cache: Path, java: Path, progress: Callable[[str, float], None] | None = None) -> tuple[Path, ...]:
    return fetch(
        cache, java, Path("ivy.jar"), progress=progress, checksums=LISTED, free_bytes=lambda folder: FETCH_BYTES
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_fetched_jars_are_kept(tmp_path: Path, make_java: MakeJava) -> None:
    cache = tmp_path / "cache"
    jars = run_fetch(cache, make_java(tmp_path, WHOLE))
    assert [jar.name for jar in jars] == sorted(LISTED)
    assert installed_jars(cache, LISTED) == jars
    assert leftovers(cache) == [f"rocketmq-{RELEASE}"]


def test_checksum_list_contains_every_jar_that_ivy_fetches() -> None:
    modules = list(ElementTree.fromstring(render("ivy.xml", release=RELEASE)).iter("dependency"))
    classifier = "{http://ant.apache.org/ivy/maven}classifier"
    names = [
        "-".join(filter(None, (module.get("name"), module.get("rev"), one)))
        for module in modules
        for one in [artifact.get(classifier) for artifact in module] or [None]
    ]
    assert sorted(server_checksums()) == sorted(f"{name}.jar" for name in names)
    assert {len(bytes.fromhex(checksum)) for checksum in server_checksums().values()} == {32}


def test_progress_is_reported_and_never_decreases(tmp_path: Path, make_java: MakeJava) -> None:
    script = WHOLE + "printf '\\tfound a#b;1 in central\\n\\t[SUCCESSFUL ] a#b;1!b.jar (3ms)\\n'\n"
    reported: list[tuple[str, float]] = []
    run_fetch(tmp_path / "cache", make_java(tmp_path, script), lambda what, fraction: reported.append((what, fraction)))
    fractions = [fraction for _, fraction in reported]
    assert fractions == sorted(fractions)
    # The start, two steps for each of the eight parallel downloads, and the end.
    assert len(set(fractions)) == 1 + 8 * 2 + 1
    assert fractions[-1] == 1.0


def test_each_jar_is_fetched_once(tmp_path: Path, make_java: MakeJava) -> None:
    script = f'for word; do case "$word" in */ivy.xml) cp "$word" {tmp_path}/$$.xml;; esac; done\n'
    run_fetch(tmp_path / "cache", make_java(tmp_path, WHOLE + script))

    def modules(text: str) -> list[str | None]:
        return [one.get("name") for one in ElementTree.fromstring(text).iter("dependency")]

    shares = [modules(file.read_text()) for file in tmp_path.glob("*.xml")]
    assert len(shares) == 8
    dealt = [str(name) for share in shares for name in share]
    assert sorted(dealt) == sorted(map(str, modules(render("ivy.xml", release=RELEASE))))


def test_one_failing_download_fails_the_fetch(tmp_path: Path, make_java: MakeJava) -> None:
    script = WHOLE + 'case "$1" in */3) printf "java.net.SocketException: gone\\n"; exit 1;; esac\n'
    with pytest.raises(ClusterError, match=r"java\.net\.SocketException: gone"):
        run_fetch(tmp_path / "cache", make_java(tmp_path, script))
    assert leftovers(tmp_path / "cache") == []


def test_fetch_that_is_killed_leaves_no_trusted_files(tmp_path: Path, make_java: MakeJava) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ClusterError, match="fetching the RocketMQ server failed"):
        run_fetch(cache, make_java(tmp_path, writes(*SERVERS[:2]) + "kill -9 $$\n"))
    assert installed_jars(cache, LISTED) is None
    assert leftovers(cache) == []
    assert len(run_fetch(cache, make_java(tmp_path, WHOLE))) == len(SERVERS) + 1


def test_interrupted_fetch_stops_ivy_and_leaves_no_files(tmp_path: Path, make_java: MakeJava) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    script = writes(*SERVERS) + f": > {pids}/$$\nprintf '\\tfound a#b;1 in central\\n'\nexec sleep 600\n"

    def ctrl_c(what: str, fraction: float) -> None:
        if fraction > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fetch(tmp_path / "cache", make_java(tmp_path, script), ctrl_c)
    started = [int(pid.name) for pid in pids.iterdir()]
    assert started
    assert all(process_start(pid) is None for pid in started)
    assert leftovers(tmp_path / "cache") == []


def test_remains_of_a_killed_fetch_are_removed_and_never_used(tmp_path: Path, make_java: MakeJava) -> None:
    cache = tmp_path / "cache"
    remains = cache / ".fetch-killed" / "jars"
    remains.mkdir(parents=True)
    for jar in SERVERS:
        (remains / jar).write_text("half")
    run_fetch(cache, make_java(tmp_path, WHOLE))
    assert leftovers(cache) == [f"rocketmq-{RELEASE}"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("truncated", "guava-1.jar differs"),
        ("same size and time", "guava-1.jar differs"),
        ("missing", "guava-1.jar is missing"),
        ("added", "stranger.jar is not in the list"),
    ],
)
def test_changed_cache_is_reported_and_fetched_again(
    tmp_path: Path, make_java: MakeJava, caplog: pytest.LogCaptureFixture, damage: str, text: str
) -> None:
    cache = tmp_path / "cache"
    java = make_java(tmp_path, WHOLE)
    jars = run_fetch(cache, java)
    jar = jars[0].with_name("guava-1.jar")
    if damage == "truncated":
        jar.write_bytes(jar.read_bytes()[:-1])
    elif damage == "same size and time":
        times = jar.stat().st_atime_ns, jar.stat().st_mtime_ns
        jar.write_bytes(jar.read_bytes()[::-1])
        os.utime(jar, ns=times)
    elif damage == "missing":
        jar.unlink()
    else:
        jar.with_name("stranger.jar").write_text("?")
    assert installed_jars(cache, LISTED) is None
    assert caplog.text == ""
    assert run_fetch(cache, java) == jars
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert text in caplog.text
    assert installed_jars(cache, LISTED) == jars


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (WHOLE + 'printf x >> "$folder/guava-1.jar"\n', r"guava-1\.jar differs\."),
        (writes(*SERVERS), r"guava-1\.jar is missing\."),
        (WHOLE + writes("stranger.jar"), r"stranger\.jar is not in the list\."),
    ],
)
def test_fetch_of_other_jars_is_refused(tmp_path: Path, make_java: MakeJava, script: str, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        run_fetch(tmp_path / "cache", make_java(tmp_path, script))
    assert leftovers(tmp_path / "cache") == []


def test_differences_name_the_first_files_and_count_the_rest(tmp_path: Path) -> None:
    names = [f"{letter}.jar" for letter in "abcdefgh"]
    assert differences(tmp_path, dict.fromkeys(names, "")) == (
        "a.jar is missing, b.jar is missing, c.jar is missing, d.jar is missing, e.jar is missing, and 3 more"
    )
    (tmp_path / "a.jar").mkdir()
    assert differences(tmp_path, {"a.jar": ""}) == "a.jar can't be read (Is a directory)"


def test_missing_network_is_a_one_line_error_with_the_reason(tmp_path: Path, make_java: MakeJava) -> None:
    script = (
        "echo ':: resolving dependencies :: rocketmq-spark#server;working@vm'\n"
        "printf '\\tHost central.example not found. url=https://central.example/a.pom\\n'\n"
        "echo ':: org.apache.rocketmq#rocketmq-namesrv;5.5.0: not found'\nexit 1\n"
    )
    with pytest.raises(
        ClusterError, match=r"failed: Host central\.example not found\. The first start needs the network"
    ) as error:
        run_fetch(tmp_path / "cache", make_java(tmp_path, script))
    assert "\n" not in str(error.value)


def test_too_little_disk_space_is_reported_before_the_fetch(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"has 3 MB of free disk space, 400 MB are needed.* ROCKETMQ_SPARK_CACHE"):
        fetch(tmp_path, Path("/no/java"), Path("/no/ivy"), free_bytes=lambda folder: 3 << 20)
    assert leftovers(tmp_path) == []


def test_unwritable_cache_folder_is_a_cluster_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="set ROCKETMQ_SPARK_CACHE to another folder"):
        run_fetch(tmp_path / "file" / "cache", Path("/no/java"))


def test_java_is_not_looked_for_when_the_cache_is_whole(
    tmp_path: Path, make_java: MakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = run_fetch(tmp_path, make_java(tmp_path / "bin", WHOLE))
    monkeypatch.setenv("ROCKETMQ_SPARK_CACHE", str(tmp_path))

    def find_java() -> Path:
        raise AssertionError("not needed")

    assert server_jars(find_java, checksums=LISTED) == jars


def test_second_process_waits_for_the_first_and_uses_its_result(tmp_path: Path, make_java: MakeJava) -> None:
    waiting = threading.Event()
    found: list[tuple[Path, ...]] = []
    never = Path("/no/java")
    second = threading.Thread(
        target=lambda: found.append(run_fetch(tmp_path / "cache", never, lambda what, fraction: waiting.set()))
    )
    elsewhere = run_fetch(tmp_path / "elsewhere", make_java(tmp_path, WHOLE))
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert waiting.wait(30)
        elsewhere[0].parent.rename(tmp_path / "cache" / elsewhere[0].parent.name)
    second.join(30)
    assert found == [installed_jars(tmp_path / "cache", LISTED)]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"ROCKETMQ_SPARK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/rocketmq-spark"),
        ({"ROCKETMQ_SPARK_CACHE": "", "XDG_CACHE_HOME": ""}, os.path.expanduser("~/.cache/rocketmq-spark")),
    ],
)
def test_cache_folder_is_the_one_the_user_chose(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)


def test_ivy_comes_with_pyspark() -> None:
    assert find_ivy({}).name.startswith("ivy-")


def test_jars_of_tests_are_checked_before_every_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_CACHE", str(tmp_path))
    checksums = {"a.jar": hashlib.sha256(b"listed").hexdigest()}

    def serve(content: bytes) -> Callable[[Path], None]:
        def fetch_jars(work: Path) -> None:
            (work / "jars").mkdir()
            (work / "jars" / "a.jar").write_bytes(content)

        return fetch_jars

    (jar,) = listed_jars("bench/module-1", serve(b"listed"), checksums)
    jar.write_bytes(b"LISTED")
    with pytest.raises(ClusterError, match=r"bench/module-1: the jars are not those of jars\.sha256: a\.jar differs"):
        listed_jars("bench/module-1", serve(b"other"), checksums)
    assert listed_jars("bench/module-1", serve(b"listed"), checksums) == [jar]
    assert jar.read_bytes() == b"listed"
