"""Messages of a process that ends before the shutdown of its producers: programs that send to a fake cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.processes import PATIENCE, wait_for

HEAD = """
import asyncio, atexit, multiprocessing, os, sys, threading
from rocketmq_spark import Message, Producer, aio

# A busy machine needs more than the default of 3 s for all messages.
PATIENT = {"send_msg_timeout": 600_000}


def started(group, **properties):
    producer = Producer(group, **{**SERVERS, **PATIENT, **properties})
    producer.start()
    return producer


def messages(name, number=300):
    return [Message.of("T", f"{name} {place}".encode()) for place in range(number)]


async def send(name, **properties):
    producer = aio.Producer(name, **{**SERVERS, **PATIENT, "batch_bytes": 2000, **properties})
    await producer.start()
    for message in messages(name):
        producer.send(message)
"""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"T": 4}) as running:
        yield running


def run(cluster: FakeCluster, program: str, **servers: str) -> tuple[int, list[str]]:
    """Run a program; return its exit code and the lines of its stderr."""
    settings = servers or {"name_server": cluster.name_server}
    text = f"{HEAD}\nSERVERS = {settings}\n{textwrap.dedent(program)}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", text],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def stored(cluster: FakeCluster) -> Counter[str]:
    """Return the number of distinct messages by the name in their body."""
    return Counter(body.split()[0].decode() for body in {message.body for message in cluster.messages("T")})


def test_all_messages_of_a_producer_without_shutdown_are_stored(cluster: FakeCluster) -> None:
    code, lines = run(
        cluster,
        """
        def child():
            producer = started("child")
            for message in messages("child"):
                producer.send_async(message)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()

        def outlive_the_main_thread(producer):
            threading.main_thread().join()
            for message in messages("thread"):
                producer.send_async(message)
            producer.send_batch_async(messages("batch"))

        outliving = started("thread")
        outliving.send(messages("thread", 1)[0])
        threading.Thread(target=outlive_the_main_thread, args=[outliving]).start()
        producer = started("main")
        for message in messages("callback", 1):
            producer.send_async(message, callback=lambda _: producer.send_async(messages("chained", 1)[0]))
        for message in messages("oneway"):
            producer.send_oneway(message)
        unreferenced = started("unreferenced")
        for message in messages("main"):
            unreferenced.send_async(message)
        del unreferenced
        if not os.fork():
            sys.exit()
        atexit.register(lambda: producer.send_async(messages("atexit", 1)[0]))
        raise KeyboardInterrupt
        """,
    )
    assert [line for line in lines if not line.startswith(" ")] == [
        "Traceback (most recent call last):",
        "KeyboardInterrupt",
    ]
    assert code != 0
    all_of = dict.fromkeys(["child", "thread", "batch", "oneway", "main"], 300)
    assert stored(cluster) == {**all_of, "callback": 1, "chained": 1, "atexit": 1}


def test_all_messages_of_an_asyncio_producer_without_shutdown_are_stored(cluster: FakeCluster) -> None:
    code, lines = run(
        cluster,
        """
        asyncio.run(send("closed"))
        stopped = asyncio.new_event_loop()
        stopped.run_until_complete(send("stopped"))
        running = asyncio.new_event_loop()
        threading.Thread(target=running.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(send("running"), running).result()
        """,
    )
    assert (code, stored(cluster)) == (0, dict.fromkeys(["closed", "stopped", "running"], 300))
    (line,) = lines
    assert "producer closed: its event loop was closed before the shutdown" in line


def test_one_line_has_the_number_of_messages_that_are_not_acknowledged(cluster: FakeCluster) -> None:
    (broker,) = cluster.brokers.values()
    broker.always[None] = Reply(silent=True)
    code, lines = run(
        cluster,
        """
        for number in range(3):
            producer = started(f"g{number}", send_msg_timeout=2000)
            for message in messages("lost", 10):
                producer.send_async(message, timeout_ms=600_000)
        producer.send_batch_async(messages("lost", 5), timeout_ms=1000)
        """,
    )
    (line,) = lines
    assert "35 messages of producer g0, g1, g2 are acknowledged" in line
    assert "5 failed (the first: " in line
    assert "30 had no answer within 2 s" in line
    assert (code, stored(cluster)) == (0, {})


def test_messages_of_a_closed_event_loop_that_fail_are_counted(cluster: FakeCluster, tmp_path: Path) -> None:
    (broker,) = cluster.brokers.values()
    closed_loop = tmp_path / "closed"

    def answer(_: RemotingCommand) -> Reply:
        # A future that fails while the loop is open is not counted, because its owner can see the error.
        wait_for(closed_loop.exists)
        return Reply.code(2, "busy")

    broker.always[None] = answer
    program = f'asyncio.run(send("lost", send_msg_timeout=60_000)); open({str(closed_loop)!r}, "w").close()'
    code, lines = run(cluster, program)
    assert code == 0
    closed, line = lines
    assert "its event loop was closed" in closed
    assert "300 messages of producer lost are acknowledged" in line
    assert "300 failed (the first: " in line


@pytest.mark.parametrize(
    "last",
    [
        'producer.send_async(messages("main", 1)[0])',
        'atexit.register(lambda: producer.send_async(messages("main", 1)[0]))',
        'atexit.register(lambda: producer.send(messages("main", 1)[0]))',
        'atexit.register(producer.shutdown); producer.send_async(messages("main", 1)[0])',
    ],
    ids=["send_async", "send_async at exit", "send at exit", "shutdown at exit"],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "a proxy"])
def test_the_only_message_of_a_process_is_stored(host: str, last: str) -> None:
    """After the last statement no thread starts, as from Python 3.12 on."""
    program = f"""
    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading._register_atexit(lambda: setattr(threading.Thread, "start", refuse))
    producer = started("main")
    {last}
    """
    over_grpc = host == "a proxy"
    if over_grpc:
        pytest.importorskip("grpc")
    with FakeCluster(topics={"T": 4}, proxy=over_grpc) as cluster:
        name_server = cluster.name_server.replace("127.0.0.1", host)
        servers = {"endpoints": cluster.endpoints} if over_grpc else {"name_server": name_server}
        assert run(cluster, program, **servers) == (0, [])
        assert stored(cluster) == {"main": 1}


def test_messages_that_fail_before_the_exit_hook_are_counted(cluster: FakeCluster) -> None:
    code, lines = run(
        cluster,
        """
        import concurrent.futures.thread, time
        from rocketmq_spark import MessageQueue

        def wait_for_the_last_statement():
            while not concurrent.futures.thread._shutdown:
                time.sleep(0.01)

        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(wait_for_the_last_statement)
        producer = started("main", async_sender_executor=pool)
        for message in messages("lost", 50):
            producer.send_async(message, queue=MessageQueue("T", "no broker", 0))
        """,
    )
    (line,) = lines
    assert "50 messages of producer main are acknowledged" in line
    assert (code, stored(cluster)) == (0, {})


def test_messages_over_grpc_are_stored() -> None:
    pytest.importorskip("grpc")
    with FakeCluster(topics={"T": 4}, proxy=True) as cluster:
        code, lines = run(
            cluster,
            """
            producer = started("main")
            for message in messages("main"):
                producer.send_async(message)
            asyncio.run(send("closed"))
            """,
            endpoints=cluster.endpoints,
        )
        assert (code, stored(cluster)) == (0, {"main": 300, "closed": 300})
        assert len(lines) == 1
