"""The remoting transport against a bare socket loop, on loopback, with a peer that answers every frame by its opaque.

Run: python tests/benchmarks/bench_transport.py [seconds per case]

Both sides send the same frames with the same window to the same peer. The peer is another process, so that it does not
share this interpreter's lock. The bare loop is one thread: it writes until the window is full, then reads answers.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import queue
import socket
import struct
import sys
import time

from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.protocol.remoting.command import RemotingCommand, encode_head
from rocketmq_spark.protocol.remoting.headers import SendMessageRequestHeaderV2
from rocketmq_spark.transport.remoting.transport import RemotingTransport

# (name, body bytes, window)
CASES = (
    ("batches of 1 MiB, window 8", 1 << 20, 8),
    ("batches of 1 MiB, window 2", 1 << 20, 2),
    ("batches of 64 KiB, window 8", 1 << 16, 8),
    ("singles of 1 KiB, window 64", 1 << 10, 64),
    ("singles of 100 B, window 1", 100, 1),
)

ANSWER_FIELDS = {"msgId": "7F00000100002A9F00000000002B943DBE", "queueId": "0", "queueOffset": "14"}


def serve(listener: socket.socket) -> None:
    """Read frames and answer each; bodies are skipped, and the opaque is found by its place in the JSON text."""
    pool = bytearray(1 << 20)
    view = memoryview(pool)
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        have = 0
        try:
            while True:
                count = sock.recv_into(view[have:])
                if not count:
                    break
                have += count
                at, answers = 0, []
                while have - at >= 8:
                    length, word = struct.unpack_from(">iI", pool, at)
                    head = at + 8 + (word & 0xFFFFFF)
                    if have < head:
                        break
                    text = bytes(pool[at + 8 : head])
                    opaque = int(text[text.index(b'"opaque":') + 9 :].split(b",", 1)[0])
                    answer = RemotingCommand(0, opaque, ANSWER_FIELDS, flag=1, language="JAVA")
                    answers.append(encode_head(answer, 0))
                    end = at + 4 + length
                    if end > have:
                        skip(sock, end - have, view[have:] if len(pool) - have > 65536 else view[: 1 << 16])
                        at = have = 0
                        break
                    at = end
                if at:
                    view[: have - at] = bytes(view[at:have])
                    have -= at
                if answers:
                    sock.sendall(b"".join(answers))
        except OSError:
            pass
        sock.close()


def skip(sock: socket.socket, count: int, scratch: memoryview) -> None:
    while count:
        got = sock.recv_into(scratch[: min(count, len(scratch))])
        if not got:
            raise ConnectionResetError
        count -= got


def request_for(address: str, body: bytes) -> SendRequest:
    batch = EncodedBatch("orders", (memoryview(body),), rows=len(body) // 100, nbytes=len(body))
    return SendRequest(
        batch, MessageQueue("orders", "broker-a", 0), address, "bench", "TBW102", 4, int(time.time() * 1000)
    )


def run_transport(address: str, body: bytes, window: int, seconds: float) -> tuple[int, float]:
    # A queue of tokens: a semaphore written in Python would cost more than what is measured.
    slots: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(window):
        slots.put(None)
    failed: list[SendOutcome] = []

    def on_outcome(outcome: SendOutcome) -> None:
        if outcome.error is not None:
            failed.append(outcome)
        slots.put(None)

    request, count = request_for(address, body), 0
    with RemotingTransport([]) as transport:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds and not failed:
            slots.get()
            transport.send(request, 3.0, on_outcome)
            count += 1
        for _ in range(window):
            slots.get()
        elapsed = time.perf_counter() - start
    if failed:
        raise failed[0].error or RuntimeError
    return count, elapsed


def run_bare(address: str, body: bytes, window: int, seconds: float) -> tuple[int, float]:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    header = SendMessageRequestHeaderV2(
        producer_group="bench", topic="orders", queue_id=0, born_timestamp=0, batch=True, broker_name="broker-a"
    ).to_ext_fields()
    count = waiting = 0
    pending = b""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or waiting:
        while waiting < window and time.perf_counter() - start < seconds:
            head = encode_head(RemotingCommand(320, count, header), len(body))
            pieces = [memoryview(head), memoryview(body)]
            while pieces:
                sent = sock.sendmsg(pieces)
                while pieces and sent >= len(pieces[0]):
                    sent -= len(pieces.pop(0))
                if sent:
                    pieces[0] = pieces[0][sent:]
            waiting += 1
            count += 1
        pending += sock.recv(1 << 16)
        at = 0
        while len(pending) - at >= 4:
            (length,) = struct.unpack_from(">i", pending, at)
            if len(pending) - at < 4 + length:
                break
            at += 4 + length
            waiting -= 1
        pending = pending[at:]
    elapsed = time.perf_counter() - start
    sock.close()
    return count, elapsed


def main(seconds: float = 3.0) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    peer = multiprocessing.get_context("fork").Process(target=serve, args=(listener,), daemon=True)
    peer.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    print(f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {os.cpu_count()} cores")
    for name, size, window in CASES:
        body = os.urandom(size)
        for label, run in (("bare socket", run_bare), ("transport", run_transport)):
            count, elapsed = run(address, body, window, seconds)
            print(f"{name:<30} {label:<12} {count * size / elapsed / 1e6:8.0f} MB/s {count / elapsed:9.0f} requests/s")
    peer.terminate()
    peer.join()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
