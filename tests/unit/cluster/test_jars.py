"""The cache of server jars: what is trusted, and what an interrupted fetch leaves behind (nothing)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import FETCH_BYTES, RELEASE, cache_folder, fetch, find_ivy, installed_jars, server_jars
from rocketmq_spark.cluster.state import process_start
from rocketmq_spark.errors import ClusterError

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


def run_fetch(cache: Path, java: Path, progress: Callable[[str, float], None] | None = None) -> tuple[Path, ...]:
    return fetch(cache, java, Path("ivy.jar"), progress=progress, free_bytes=lambda folder: FETCH_BYTES)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_fetched_jars_are_kept_with_size_and_sha256(tmp_path: Path, make_java: MakeJava) -> None:
    cache = tmp_path / "cache"
    jars = run_fetch(cache, make_java(tmp_path, WHOLE))
    assert [jar.name for jar in jars] == sorted([*SERVERS, "guava-1.jar"])
    assert installed_jars(cache) == jars
    manifest = json.loads((cache / f"rocketmq-{RELEASE}" / "manifest.json").read_text())
    assert manifest["jars"]["guava-1.jar"] == {
        "size": 24,
        "sha256": hashlib.sha256(b"the bytes of guava-1.jar").hexdigest(),
    }
    assert leftovers(cache) == [f"rocketmq-{RELEASE}"]


def test_progress_is_told_and_never_goes_back(tmp_path: Path, make_java: MakeJava) -> None:
    script = WHOLE + "printf '\\tfound a#b;1 in central\\n\\t[SUCCESSFUL ] a#b;1!b.jar (3ms)\\n'\n"
    told: list[tuple[str, float]] = []
    run_fetch(tmp_path / "cache", make_java(tmp_path, script), lambda what, fraction: told.append((what, fraction)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    # Nothing, the two steps of each of the eight that share the work, and all.
    assert len(set(fractions)) == 1 + 8 * 2 + 1
    assert fractions[-1] == 1.0


def test_each_jar_is_asked_for_once(tmp_path: Path, make_java: MakeJava) -> None:
    script = f'for word; do case "$word" in */ivy.xml) cp "$word" {tmp_path}/$$.xml;; esac; done\n'
    run_fetch(tmp_path / "cache", make_java(tmp_path, WHOLE + script))

    def modules(text: str) -> list[str | None]:
        return [one.get("name") for one in ElementTree.fromstring(text).iter("dependency")]

    shares = [modules(file.read_text()) for file in tmp_path.glob("*.xml")]
    assert len(shares) == 8
    dealt = [str(name) for share in shares for name in share]
    assert sorted(dealt) == sorted(map(str, modules(render("ivy.xml", release=RELEASE))))


def test_one_of_several_that_fails_fails_the_fetch(tmp_path: Path, make_java: MakeJava) -> None:
    script = WHOLE + 'case "$1" in */3) printf "java.net.SocketException: gone\\n"; exit 1;; esac\n'
    with pytest.raises(ClusterError, match=r"java\.net\.SocketException: gone"):
        run_fetch(tmp_path / "cache", make_java(tmp_path, script))
    assert leftovers(tmp_path / "cache") == []


def test_fetch_that_dies_half_way_leaves_nothing_trusted(tmp_path: Path, make_java: MakeJava) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ClusterError, match="fetching the RocketMQ server failed"):
        run_fetch(cache, make_java(tmp_path, writes(*SERVERS[:2]) + "kill -9 $$\n"))
    assert installed_jars(cache) is None
    assert leftovers(cache) == []
    assert len(run_fetch(cache, make_java(tmp_path, WHOLE))) == len(SERVERS) + 1


def test_interrupted_fetch_ends_ivy_and_leaves_nothing(tmp_path: Path, make_java: MakeJava) -> None:
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


@pytest.mark.parametrize("damage", ["truncated jar", "missing jar", "no manifest", "torn manifest", "other manifest"])
def test_damaged_cache_is_not_trusted_and_fetched_again(tmp_path: Path, make_java: MakeJava, damage: str) -> None:
    cache = tmp_path / "cache"
    java = make_java(tmp_path, WHOLE)
    jars = run_fetch(cache, java)
    manifest = jars[0].parent / "manifest.json"
    if damage == "truncated jar":
        jars[0].write_bytes(jars[0].read_bytes()[:-1])
    elif damage == "missing jar":
        jars[-1].unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "torn manifest":
        manifest.write_text(manifest.read_text()[:100])
    else:
        manifest.write_text(json.dumps({"release": RELEASE, "jars": {}}))
    assert installed_jars(cache) is None
    assert run_fetch(cache, java) == jars
    assert installed_jars(cache) == jars


def test_jar_that_no_manifest_names_is_not_used(tmp_path: Path, make_java: MakeJava) -> None:
    jars = run_fetch(tmp_path, make_java(tmp_path / "bin", WHOLE))
    (jars[0].parent / "stranger.jar").write_text("?")
    assert installed_jars(tmp_path) == jars


def test_fetch_without_the_servers_themselves_is_an_error(tmp_path: Path, make_java: MakeJava) -> None:
    with pytest.raises(ClusterError, match=rf"brought 1 jars, but not rocketmq-namesrv-{RELEASE}\.jar"):
        run_fetch(tmp_path / "cache", make_java(tmp_path, writes("guava-1.jar")))
    assert installed_jars(tmp_path / "cache") is None


def test_no_network_is_one_line_with_the_reason(tmp_path: Path, make_java: MakeJava) -> None:
    script = (
        "echo ':: resolving dependencies :: rocketmq-spark#server;working@vm'\n"
        "printf '\\tHost central.example not found. url=https://central.example/a.pom\\n'\n"
        "echo ':: org.apache.rocketmq#rocketmq-namesrv;5.5.0: not found'\nexit 1\n"
    )
    with pytest.raises(ClusterError, match=r"failed: Host central\.example not found\. It needs the network") as error:
        run_fetch(tmp_path / "cache", make_java(tmp_path, script))
    assert "\n" not in str(error.value)


def test_too_little_disk_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"needs 400 MB in .*, 3 MB are free; .* ROCKETMQ_SPARK_CACHE"):
        fetch(tmp_path, Path("/no/java"), Path("/no/ivy"), free_bytes=lambda folder: 3 << 20)
    assert leftovers(tmp_path) == []


def test_folder_that_can_not_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="ROCKETMQ_SPARK_CACHE can name another folder"):
        run_fetch(tmp_path / "file" / "cache", Path("/no/java"))


def test_java_is_not_looked_for_when_the_cache_is_whole(
    tmp_path: Path, make_java: MakeJava, monkeypatch: pytest.MonkeyPatch
) -> None:
    jars = run_fetch(tmp_path, make_java(tmp_path / "bin", WHOLE))
    monkeypatch.setenv("ROCKETMQ_SPARK_CACHE", str(tmp_path))

    def find_java() -> Path:
        raise AssertionError("not needed")

    assert server_jars(find_java) == jars


def test_second_process_waits_for_the_first_and_takes_its_result(tmp_path: Path, make_java: MakeJava) -> None:
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
    assert found == [installed_jars(tmp_path / "cache")]


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
