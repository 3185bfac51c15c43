"""RocketMQ's own Java classes, for tests that compare with them: small programs run against the server's jars.

A program is a class of ``tests/interop/java``. It reads one JSON object a line and answers with one a line, with
`Lines.java`. Bodies travel in base64. The jars are the ones that `LocalCluster` runs, the official client among them;
the programs of ``tests/interop/java/grpc`` have the official client for proxies, too.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.java import find_java
from rocketmq_spark.errors import ClusterError
from tests.grpc_client import grpc_client_jar
from tests.waiting import PATIENCE

SOURCES = Path(__file__).parent / "interop" / "java"

Line = dict[str, Any]

# Short-lived programs: a quick start is worth more than fast code.
_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss2m", "-Xmx512m")


class Java:
    """Compiles the programs, once in a run of the tests, and runs them.

    Parameters
    ----------
    folder : Path
        For what the programs write.
    classes : Path
        A folder for their classes, which all processes of the run have; whoever comes first makes it.
    over_grpc : bool, default False
        Compile and run the programs for proxies.

    Raises
    ------
    ClusterError
        No JDK, or the jars can't be had.
    """

    def __init__(self, folder: Path, classes: Path, *, over_grpc: bool = False) -> None:
        self._java = find_java()
        compiler = self._java.resolve().with_name("javac")
        if not os.access(compiler, os.X_OK):
            raise ClusterError(f"{self._java} has no javac beside it: install a JDK, or set JAVA_HOME to one")
        self._folder = folder
        jars, sources = list(server_jars(find_java)), sorted(SOURCES.glob("*.java"))
        if over_grpc:
            jars.insert(0, grpc_client_jar())
            sources = [SOURCES / "Lines.java", *sorted(SOURCES.glob("grpc/*.java"))]
        self._class_path = os.pathsep.join(map(str, (classes, *jars)))
        command = [str(compiler), "-J-XX:TieredStopAtLevel=1", "-proc:none", "-nowarn", "-encoding", "UTF-8"]
        command += ["-cp", self._class_path, *map(str, sources)]
        with classes.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not classes.exists():
                _run([*command, "-d", str(folder / "classes")], folder, within=PATIENCE)
                (folder / "classes").rename(classes)

    def run(self, program: str, requests: Iterable[Mapping[str, Any]], *, within: float = 60.0) -> list[Line]:
        """Give `requests` to a program and return its answers.

        Parameters
        ----------
        program : str
            Name of a class in ``tests/interop/java``.
        requests : iterable of mappings
            What JSON can carry; `b64` makes it carry bytes.
        within : float, default 60
            Seconds, the start of the JVM included.
        """
        name = f"{program}-{uuid.uuid4().hex}"
        given, answered = self._folder / f"{name}.requests", self._folder / f"{name}.answers"
        given.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="ascii")
        # The client's log goes below the user's home.
        command = [str(self._java), *_JVM, f"-Duser.home={self._folder}", "-cp", self._class_path]
        _run([*command, program, str(given), str(answered)], self._folder, within)
        return [json.loads(line) for line in answered.read_text(encoding="ascii").splitlines()]

    def read_topic(
        self,
        name_server: str,
        topic: str,
        count: int,
        *,
        tags: str = "*",
        namespace: str | None = None,
        within: float = 30.0,
    ) -> list[Line]:
        """Return the messages of a topic as a Java consumer sees them; see `read_topics`."""
        return self.read_topics(name_server, [topic], count, tags=tags, namespace=namespace, within=within)

    def read_topics(
        self,
        name_server: str,
        topics: Sequence[str],
        count: int,
        *,
        tags: str = "*",
        namespace: str | None = None,
        within: float = 30.0,
    ) -> list[Line]:
        """Return the messages of topics as a Java consumer sees them, once there are `count` or time is over.

        Each has ``topic``, ``body`` (bytes, decompressed by Java), ``properties``, ``flag``, ``sysFlag``,
        ``brokerName``, ``queueId``, ``queueOffset``, ``commitLogOffset``, ``msgId``, ``offsetMsgId``,
        ``bornTimestamp``, ``bornHost``, ``storeTimestamp``, ``storeHost`` (both with their ports) and
        ``reconsumeTimes``.
        """
        request = {
            "nameServer": name_server,
            "topics": topics,
            "count": count,
            "tags": tags,
            "namespace": namespace,
            "withinMs": int(within * 1000),
        }
        return _with_bodies(self.run("Reader", [request], within=within + 60.0))

    def read_over_grpc(
        self, endpoints: str, topics: Sequence[str], count: int, *, group: str, within: float = 60.0
    ) -> list[Line]:
        """Return the messages of topics as a consumer of a proxy sees them, once there are `count` or time is over.

        Each has ``topic``, ``body`` (bytes, decompressed by Java), ``keys`` (a list), ``tag``, ``group`` (the message
        group), ``properties`` (the user's), ``msgId`` and ``bornTimestamp``. `group` must be new.
        """
        request = {
            "endpoints": endpoints,
            "topics": topics,
            "count": count,
            "group": group,
            "withinMs": int(within * 1000),
        }
        return _with_bodies(self.run("GrpcReader", [request], within=within + 60.0))

    def send(
        self,
        name_server: str,
        requests: Iterable[Mapping[str, Any]],
        *,
        namespace: str | None = None,
    ) -> list[Line]:
        """Send with a Java producer and return its results.

        Each request has ``messages`` (see `line_of`; one may have ``deliverInMs``, too) and may have ``compressType``,
        and one of ``batch`` (true), ``hashKey`` (a text) and ``transaction`` (the name of a LocalTransactionState).
        Each result has ``status``, ``msgId``, ``offsetMsgId``, ``topic``, ``brokerName``, ``queueId``,
        ``queueOffset``, ``transactionId``, ``regionId``, ``traceOn`` and ``uniqKeys``, an id for each message.
        """
        config = {"nameServer": name_server, "namespace": namespace}
        return self.run("Sender", [config, *requests])


def line_of(topic: str, body: bytes, properties: Mapping[str, str] | None = None, flag: int = 0) -> Line:
    """Return a message as the programs take it."""
    return {"topic": topic, "body": b64(body), "flag": flag, "properties": dict(properties or {})}


def b64(data: bytes) -> str:
    """Return bytes as JSON can carry them."""
    return base64.b64encode(data).decode("ascii")


def un64(text: str) -> bytes:
    """Return what `b64` was given."""
    return base64.b64decode(text, validate=True)


def _with_bodies(lines: list[Line]) -> list[Line]:
    return [{**line, "body": un64(line["body"]) if line["body"] else b""} for line in lines]


def _run(command: list[str], folder: Path, within: float) -> None:
    # JAVA_TOOL_OPTIONS and the like are another program's business.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA_TOOL", "_JAVA", "JDK_"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=within,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{Path(command[0]).name} left with {done.returncode}:\n{said[-4000:]}"
