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
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import find_ivy, server_jars
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.properties import RESERVED_PROPERTIES, SHARDING_KEY, TRANSACTION_ID
from rocketmq_spark.protocol.compression import CompressionType
from tests.support.cluster import SharedCluster, create_topic
from tests.support.processes import PATIENCE
from tests.tools.jar_lists import listed_jars

RELEASE = "5.2.0"
PLACE = f"rocketmq-client-java-{RELEASE}"


def grpc_client_jar() -> Path:
    """Return the jar, fetching it first if this user has never done so (27 MB).

    Raises
    ------
    ClusterError
        It can't be fetched, or it is not the listed one; the text has Ivy's last output.
    """
    (jar,) = listed_jars(PLACE, fetch_client)
    return jar


def fetch_client(work: Path) -> None:
    """Fetch the jar into ``work/jars``."""
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    (work / "ivysettings.xml").write_text(render("ivysettings.xml"), encoding="utf-8")
    command = [str(find_java()), f"-Divy.default.ivy.user.dir={work / 'home'}", "-jar", str(find_ivy())]
    command += ["-settings", settings, "-cache", str(work / "ivy"), "-confs", "default"]
    command += ["-dependency", "org.apache.rocketmq", "rocketmq-client-java", RELEASE]
    done = subprocess.run(
        [*command, "-retrieve", f"{work}/jars/[artifact]-[revision].[ext]"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"fetching {PLACE}.jar: {done.stdout[-2000:]}")


SOURCES = Path(__file__).parents[1] / "interop" / "java"

Line = dict[str, Any]

# Seconds that a program waits for messages. The whole program, with the start of its JVM, may take PATIENCE.
WITHIN = PATIENCE / 2

# Short-lived programs: a quick start is worth more than fast code.
_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss2m", "-Xmx512m")


class Java:
    """Compiles the programs once in a run of the tests, and runs them.

    Parameters
    ----------
    folder : Path
        The programs write their files here.
    classes : Path
        Folder of the compiled classes, shared by all processes of the run. The first process compiles them.
    over_grpc : bool, default False
        Compile and run the programs for proxies.

    Raises
    ------
    ClusterError
        There is no JDK, or the jars cannot be fetched.
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
        self._class_path = os.pathsep.join(map(str, (*jars, classes)))
        command = [str(compiler), "-J-XX:TieredStopAtLevel=1", "-proc:none", "-nowarn", "-encoding", "UTF-8"]
        command += ["-cp", self._class_path, *map(str, sources)]
        with classes.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not classes.exists():
                _run([*command, "-d", str(folder / "classes")], folder)
                (folder / "classes").rename(classes)

    def run(self, program: str, requests: Iterable[Mapping[str, Any]]) -> list[Line]:
        """Give `requests` to a program and return its answers.

        `program` is the name of a class in ``tests/interop/java``. Requests are JSON objects; `b64` encodes bytes for
        them.
        """
        name = f"{program}-{uuid.uuid4().hex}"
        given, answered = self._folder / f"{name}.requests", self._folder / f"{name}.answers"
        given.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="ascii")
        # The client's log goes below the user's home.
        command = [str(self._java), *_JVM, f"-Duser.home={self._folder}", "-cp", self._class_path]
        _run([*command, program, str(given), str(answered)], self._folder)
        return [json.loads(line) for line in answered.read_text(encoding="ascii").splitlines()]

    def read_topic(
        self,
        name_server: str,
        topic: str,
        count: int,
        *,
        tags: str = "*",
        namespace: str | None = None,
        only: Sequence[str] = (),
        within: float = WITHIN,
    ) -> list[Line]:
        """Return the messages of a topic as a Java consumer sees them; see `read_topics`."""
        return self.read_topics(name_server, [topic], count, tags=tags, namespace=namespace, only=only, within=within)

    def read_topics(
        self,
        name_server: str,
        topics: Sequence[str],
        count: int,
        *,
        tags: str = "*",
        namespace: str | None = None,
        only: Sequence[str] = (),
        within: float = WITHIN,
    ) -> list[Line]:
        """Return the messages of topics as a Java consumer sees them, once there are `count` or time is over.

        Each has ``topic``, ``body`` (bytes, decompressed by Java), ``properties``, ``flag``, ``sysFlag``,
        ``brokerName``, ``queueId``, ``queueOffset``, ``commitLogOffset``, ``msgId``, ``offsetMsgId``,
        ``bornTimestamp``, ``bornHost``, ``storeTimestamp``, ``storeHost`` (both with their ports) and
        ``reconsumeTimes``; or `only` some of these, the body among them.
        """
        request = {
            "nameServer": name_server,
            "topics": topics,
            "count": count,
            "tags": tags,
            "namespace": namespace,
            "only": list(only),
            "withinMs": int(within * 1000),
        }
        return _with_bodies(self.run("Reader", [request]))

    def read_over_grpc(self, endpoints: str, topics: Sequence[str], count: int, *, group: str) -> list[Line]:
        """Return the messages of topics as a consumer of a proxy sees them, once there are `count` or time is over.

        Each has ``topic``, ``body`` (bytes, decompressed by Java), ``keys`` (a list), ``tag``, ``group`` (the message
        group), ``properties`` (the user's), ``msgId`` and ``bornTimestamp``. `group` must be new.
        """
        request = {
            "endpoints": endpoints,
            "topics": topics,
            "count": count,
            "group": group,
            "withinMs": int(WITHIN * 1000),
        }
        return _with_bodies(self.run("GrpcReader", [request]))

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
    """Return bytes as a base64 text for JSON."""
    return base64.b64encode(data).decode("ascii")


def un64(text: str) -> bytes:
    """Return the bytes of a text of `b64`."""
    return base64.b64decode(text, validate=True)


def _with_bodies(lines: list[Line]) -> list[Line]:
    return [{**line, "body": un64(line["body"]) if line["body"] else b""} for line in lines]


def _run(command: list[str], folder: Path) -> None:
    # JAVA_TOOL_OPTIONS and similar variables would add options and output to the JVM.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA_TOOL", "_JAVA", "JDK_"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{Path(command[0]).name} left with {done.returncode}:\n{said[-4000:]}"


CLIENTS = ("java", "java over gRPC", "python over gRPC")

# Clients for proxies show these among the user's.
_NOT_THE_USERS = {*RESERVED_PROPERTIES, SHARDING_KEY, TRANSACTION_ID}

_PYTHON_READER = """
import base64, json, os, sys, threading, time, traceback
from rocketmq import ClientConfiguration, Credentials, FilterExpression, SimpleConsumer
endpoints, group, count, within, *topics = sys.argv[1:]
consumer = SimpleConsumer(
    ClientConfiguration(endpoints, Credentials()), group, {topic: FilterExpression() for topic in topics}, 5
)
consumer.startup()
found, missing = {}, threading.Semaphore(0)
def read():
    # A message is delivered again after 15 s if its call failed or its acknowledgement came too late.
    for message in consumer.receive(32, 15) or ():
        line = {
            "topic": message.topic, "body": base64.b64encode(message.body).decode(), "tag": message.tag,
            "keys": sorted(message.keys), "group": message.message_group, "properties": message.properties,
            "msgId": message.message_id, "bornTimestamp": message.born_timestamp,
        }
        if found.setdefault(message.message_id, line) is line:
            missing.release()
        consumer.ack(message)
def read_on():
    while True:
        try:
            read()
        except Exception:
            traceback.print_exc()
            time.sleep(0.1)
# A call waits for one topic at one broker, and brings 32 messages at most.
for _ in range(8 * len(topics)):
    threading.Thread(target=read_on, daemon=True).start()
deadline = time.monotonic() + float(within)
for _ in range(int(count)):
    missing.acquire(timeout=max(0, deadline - time.monotonic()))
print(json.dumps(list(found.values())), flush=True)
os._exit(0)
"""


class Seen(NamedTuple):
    """The fields of a message that its user set, as every client sees them."""

    topic: str
    body: bytes
    keys: tuple[str, ...] = ()
    tag: str | None = None
    group: str | None = None
    properties: tuple[tuple[str, str], ...] = ()


class Read(NamedTuple):
    """A message that a client has read; `born` is in epoch milliseconds."""

    seen: Seen
    id: str
    born: int


# (which client, where, topics, how many messages to wait for)
ReadWith = Callable[[str, LocalCluster | SharedCluster, Sequence[str], int], list[Read]]


def with_java(java: Java, name_server: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with the client for brokers."""
    return [_read(_as_over_grpc(line)) for line in java.read_topics(name_server, topics, count)]


def with_java_over_grpc(java_over_grpc: Java, endpoints: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with Java's client for proxies."""
    lines = java_over_grpc.read_over_grpc(endpoints, topics, count, group=_new_group())
    return [_read(line) for line in lines]


def with_python_over_grpc(home: Path, endpoints: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with Python's client for proxies; `home` is where it may write."""
    command = [sys.executable, "-c", _PYTHON_READER, endpoints, _new_group(), str(count), str(WITHIN), *topics]
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = [_read({**line, "body": un64(line["body"])}) for line in json.loads(done.stdout)]
    assert len(found) >= count, f"{len(found)} of {count} within {WITHIN:.0f} s: {done.stderr}"
    return found


def _new_group() -> str:
    return f"group-{uuid.uuid4().hex}"


def _as_over_grpc(line: Line) -> Line:
    properties = line["properties"]
    fields = {"keys": properties.get("KEYS", "").split(), "tag": properties.get("TAGS")}
    return {**line, **fields, "group": properties.get(SHARDING_KEY)}


def _read(line: Line) -> Read:
    properties_of_user = {name: value for name, value in line["properties"].items() if name not in _NOT_THE_USERS}
    keys, properties = tuple(sorted(line["keys"])), tuple(sorted(properties_of_user.items()))
    seen = Seen(line["topic"], line["body"], keys, line["tag"], line["group"], properties)
    return Read(seen, line["msgId"], line["bornTimestamp"])


# A Java producer compresses what is longer than 4 KiB.
LONG_BODY = b" ".join(random.Random(5).choices([b"queue", b"topic", b"broker", b"a message of many words"], k=500))

# The broker stores these twice, first in a system topic. The producer gets the queue and offset of the system topic.
_STORED_AGAIN = ("delayed", "timer", "transaction")


class Topics(NamedTuple):
    """Topics for all kinds of messages."""

    normal: str
    fifo: str
    long: str
    inner: str


def create_topics(cluster: LocalCluster | SharedCluster, name: str) -> Topics:
    """Create topics on all brokers whose names begin with `name`, a text of at most 100 characters."""
    return Topics(
        create_topic(cluster, f"{name}-normal", "NORMAL"),
        create_topic(cluster, f"{name}-fifo", "FIFO"),
        create_topic(cluster, f"{name}-long".ljust(120, "x"), "NORMAL"),
        create_topic(cluster, f"{name}-inner", "NORMAL", inner=True),
    )


def send_every_kind(java: Java, name_server: str, topics: Topics) -> dict[str, list[Line]]:
    """Send messages of every kind with a Java producer, and return them by kind.

    Each has ``topic``, ``body`` (bytes, not compressed), ``properties`` (the user's), ``flag``, ``msgId``,
    ``brokerName`` and ``queueId``. It also has ``queueOffset`` and ``offsetMsgId`` if the broker stores it in its topic
    at once. Delayed messages become readable a second or two later.
    """
    requests = dict(_requests(topics))
    results = java.send(name_server, requests.values())
    assert {"SEND_OK"} == {result["status"] for result in results}
    return {
        kind: list(_sent(kind, request["messages"], result))
        for (kind, request), result in zip(requests.items(), results, strict=True)
    }


def _requests(topics: Topics) -> Iterator[tuple[str, Line]]:
    def one(body: bytes, properties: dict[str, str] | None = None, flag: int = 0, topic: str = topics.normal) -> Line:
        return line_of(topic, body, properties, flag)

    yield "plain", {"messages": [one(b"plain")]}
    yield "keys and tags", {"messages": [one(b"keys and tags", {"KEYS": "k1 k2", "TAGS": "a-tag"})]}
    properties_of_user = {"number": "1", "gr\u00fc\u00df": "dich \U0001f600", "empty line": "a\nb"}
    yield "properties", {"messages": [one(b"properties", properties_of_user)]}
    yield "flag", {"messages": [one(b"flag", flag=-7)]}
    yield "one byte", {"messages": [one(b"\0")]}
    for codec in CompressionType:
        yield codec.name, {"messages": [one(LONG_BODY, {"TAGS": codec.name})], "compressType": codec.name}
    members = [(f"member {place}".encode(), {"KEYS": f"k{place}", "TAGS": f"t{place}"}, place) for place in range(3)]
    yield "batch", {"messages": [one(*member) for member in members], "batch": True}
    yield "delayed", {"messages": [one(b"delayed", {"DELAY": "1"})]}
    yield "timer", {"messages": [{**one(b"timer"), "deliverInMs": 1500}]}
    yield "transaction", {"messages": [one(b"transaction", {"KEYS": "order-1"})], "transaction": "COMMIT_MESSAGE"}
    for name, topic in (("ordered", topics.normal), ("fifo", topics.fifo)):
        yield name, {"messages": [one(name.encode(), {"__SHARDINGKEY": "h\u00e9"}, topic=topic)], "hashKey": "h\u00e9"}
    yield "long topic", {"messages": [one(b"long topic", topic=topics.long)]}
    yield "inner batch", {"messages": [one(*member, topic=topics.inner) for member in members], "batch": True}


def _sent(kind: str, messages: list[Line], result: Line) -> Iterator[Line]:
    at_once = kind not in _STORED_AGAIN
    offset_ids = (result["offsetMsgId"] or "").split(",")
    for place, (message, unique_id) in enumerate(zip(messages, result["uniqKeys"], strict=True)):
        line = {name: message[name] for name in ("topic", "properties", "flag")}
        line |= {name: result[name] for name in ("brokerName", "queueId")}
        line |= {"body": un64(message["body"]), "msgId": unique_id}
        if at_once:
            # The messages of an inner batch share one position in the commit log.
            offset_id = offset_ids[min(place, len(offset_ids) - 1)]
            line |= {"queueOffset": result["queueOffset"] + place, "offsetMsgId": offset_id}
        yield line
