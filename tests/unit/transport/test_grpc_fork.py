"""The gRPC transport before and after a fork.

Each case runs in its own process, because gRPC reads `GRPC_ENABLE_FORK_SUPPORT` at import; the proxy runs in this one.
A process that hangs ignores the timeouts of its calls, so the test waits for the process with a timeout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark.testing.fake_proxy import FakeProxy
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy, stored

# Import only the modules of a task, because the test starts a dozen of these processes.
PRELUDE = """
import gc, glob, os, queue, sys, time, traceback
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendRequest
from rocketmq_spark.transport.grpc.transport import GrpcTransport

PROXY = sys.argv[1]

def make():
    return GrpcTransport([PROXY], client_id="test")

def send(transport, body, outcomes, timeout=20.0, **properties):
    text = "".join(f"{name}\\x01{value}\\x02" for name, value in {"UNIQ_KEY": f"{body}", **properties}.items())
    flag = 4 if properties else 0
    encoded = EncodedBatch("orders", (body,), 1, len(body), batch=False, properties=text, sys_flag=flag)
    queue_, now = MessageQueue("orders", PROXY, 0), 1_700_000_000_000
    transport.send(SendRequest(encoded, queue_, PROXY, "pg", "TBW102", 4, now), timeout, outcomes.put)

def stored(transport, body, **properties):
    outcomes = queue.SimpleQueue()
    send(transport, body, outcomes, **properties)
    outcome = outcomes.get(timeout=20.0)
    assert outcome.error is None, outcome.error

def at_rest():
    # With its last channel gRPC takes itself down, in its own threads and its own time; what is forked meanwhile can
    # inherit a lock that nobody gives back.
    while any(name.startswith(("grpc", "event")) for name in map(thread_name, glob.glob("/proc/self/task/*/comm"))):
        time.sleep(0.01)

def thread_name(path):
    try:
        with open(path) as comm:
            return comm.read()
    except OSError:
        return ""

def child(run):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0

"""

# What the parent did before the fork, and what the child does.
CASES = {
    "used, and the child makes its own": """
transport = make()
stored(transport, b"parent")
def run():
    with make() as own:
        stored(own, b"child")
child(run)
stored(transport, b"parent")
""",
    "used, and the child uses it": """
transport = make()
stored(transport, b"parent")
def run():
    stored(transport, b"child")
    transport.close()
child(run)
stored(transport, b"parent")
""",
    "used, and the child lets it go": """
transport = make()
stored(transport, b"parent")
def run():
    global transport
    transport = None
    gc.collect()
    import grpc
    assert any(isinstance(one, grpc.Channel) for one in gc.get_objects()), "the parent's channel was collected"
    with make() as own:
        stored(own, b"child")
child(run)
stored(transport, b"parent")
""",
    "used and closed": """
transport = make()
stored(transport, b"parent")
transport.close()
at_rest()
def run():
    assert transport.closed
    with make() as own:
        stored(own, b"child")
child(run)
with make() as again:
    stored(again, b"parent")
""",
}


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy({"orders": "MIXED"}) as proxy:
        yield proxy


def run(proxy: FakeProxy, script: str, fork_support: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if fork_support is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, proxy.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fork_support", [None, "1"])
@pytest.mark.parametrize("case", CASES)
def test_parent_and_child_both_send_after_a_fork(proxy: FakeProxy, case: str, fork_support: str | None) -> None:
    run(proxy, CASES[case], fork_support)
    bodies = [message.body for message in stored(proxy)]
    assert set(bodies) == {b"parent", b"child"}


def test_unused_transport_works_in_a_child_without_fork_support(proxy: FakeProxy) -> None:
    script = """
transport = make()
child(lambda: stored(transport, b"child"))
stored(transport, b"parent")
"""
    run(proxy, script, "0")
    assert [message.body for message in stored(proxy)] == [b"child", b"parent"]


def test_parent_and_children_have_different_client_ids(proxy: FakeProxy) -> None:
    script = """
transport = make()
for body in (b"one", b"two"):
    child(lambda: stored(transport, body))
stored(transport, b"parent")
stored(transport, b"parent")
"""
    run(proxy, script, None)
    by_body: dict[bytes, set[str]] = {}
    for call, message in zip(proxy.requests("SendMessage"), stored(proxy), strict=True):
        by_body.setdefault(message.body, set()).add(call.metadata["x-mq-client-id"])
    assert [len(ids) for ids in by_body.values()] == [1, 1, 1]
    assert len(set.union(*by_body.values())) == 3


def test_requests_in_flight_of_the_parent_do_not_complete_in_the_child(proxy: FakeProxy) -> None:
    answer = proxy.handlers["SendMessage"]

    def send(request: bytes, context: Any) -> bytes:
        if b"in flight" in request:
            proxy.silence(context)
        return answer(request, context)

    proxy.handlers["SendMessage"] = send
    script = """
transport, outcomes = make(), queue.SimpleQueue()
send(transport, b"in flight", outcomes, timeout=0.4)
def run():
    before = outcomes.qsize()
    stored(transport, b"child")
    transport.close()
    assert outcomes.qsize() == before
child(run)
outcome = outcomes.get(timeout=20.0)
assert "DEADLINE_EXCEEDED" in str(outcome.error), outcome.error
"""
    run(proxy, script, "1")


def test_open_telemetry_stream_stays_with_the_parent(proxy: FakeProxy) -> None:
    answer = proxy.handlers["SendMessage"]

    def send(request: bytes, context: Any) -> bytes:
        if b"half" in request:
            # A thread that is just opening a stream holds a lock of gRPC's, which its own handler of forks would wait
            # for in the child, for ever: the stream is open first.
            wait_for(lambda: bool(proxy.client_settings))
        return answer(request, context)

    proxy.handlers["SendMessage"] = send
    script = """
transport = make()
transport.on_check_transaction = print
stored(transport, b"half", TRAN_MSG="true")
def run():
    global transport
    transport = None
    gc.collect()
    with make() as own:
        stored(own, b"child")
child(run)
stored(transport, b"parent")
transport.close()
"""
    run(proxy, script, "1")
    assert [message.body for message in stored(proxy)] == [b"child", b"parent"]
