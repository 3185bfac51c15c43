"""Hostile servers: limits of the memory that their answers can make a reader use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack

import pytest

from rocketmq_spark.errors import RemotingCommandException, RocketMQError
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, FLAG_RESPONSE, RemotingCommand
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.frames import SerializeType, encode_command
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE, wait_for

_MIB = 1024 * 1024


def test_incomplete_frames_hold_at_most_256_mib_over_all_servers() -> None:
    done = threading.Event()

    def all_but_the_last_byte(session: Session) -> None:
        session.read()
        session.sock.sendall((16 * _MIB - 4).to_bytes(4, "big") + bytes(16 * _MIB - 5))
        done.wait(PATIENCE)

    errors: list[str] = []

    def ask(transport: RemotingTransport, address: str) -> None:
        with pytest.raises(RocketMQError) as failed:
            transport.name_servers.route_at(address, "orders", PATIENCE)
        errors.append(str(failed.value))

    with ExitStack() as stack, RemotingTransport([]) as transport:
        peers = [stack.enter_context(Peer(all_but_the_last_byte)) for _ in range(20)]
        threads = [threading.Thread(target=ask, args=(transport, peer.address)) for peer in peers]
        for thread in threads:
            thread.start()
        # Sixteen of the twenty answers fit into the limit.
        wait_for(lambda: len(errors) >= 4)
        done.set()
        transport.close()
        for thread in threads:
            thread.join(PATIENCE)
    held = [int(found[1]) for one in errors if (found := re.search(r"of all servers hold (\d+) bytes", one))]
    assert len(errors) == 20
    assert held, "the four others fail with an error that names the limit"
    assert max(held) < 256 * _MIB + 4 * _MIB


def test_reading_unrequested_frames_ends_after_a_limit() -> None:
    nobody_asked = b"".join(
        encode_command(RemotingCommand(40, 999_999, flag=flag), SerializeType.ROCKETMQ)
        for flag in (FLAG_RESPONSE, FLAG_ONEWAY)
    )

    def flood(session: Session) -> None:
        session.read()
        while True:
            session.sock.sendall(nobody_asked * 2500)

    refused = pytest.raises(RemotingCommandException, match="100000 frames in a row that answer no request")
    with Peer(flood) as peer, RemotingTransport([]) as transport, refused:
        transport.name_servers.route_at(peer.address, "orders", PATIENCE)


def test_bodies_that_decompress_to_gigabytes_are_read_in_bounded_memory() -> None:
    # A pull of 140 kB with 256 bodies of 4 MiB, read in another process, which reports its peak memory.
    program = textwrap.dedent(
        """
        import json, resource
        from dataclasses import replace
        import pyarrow as pa
        from rocketmq_spark.arrow.decode import batches_of
        from rocketmq_spark.protocol.compression import CompressionType, compress
        from rocketmq_spark.model.message import MessageQueue
        from rocketmq_spark.model.message_ext import Pulled
        from tests.support.strategies import HALF, encode_stored_record
        import zlib

        def held():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

        kind = CompressionType.ZSTD
        body = compress(bytes(4 * 1024 * 1024), kind)
        crc = zlib.crc32(body) & 0x7FFFFFFF
        one = replace(HALF, body=body, body_crc=crc, sys_flag=kind.sys_flag)
        pull = b"".join(encode_stored_record(replace(one, queue_offset=offset)) for offset in range(256))
        schema = pa.schema([("body", pa.binary()), ("queueOffset", pa.int64())])
        before, rows = held(), []
        for batch in batches_of([Pulled(MessageQueue("orders", "a", 0), 0, 256, pull)], schema):
            rows += batch.column("queueOffset").to_pylist()
            assert batch.nbytes < 70 * 1024 * 1024
        print(json.dumps({"rows": rows, "pull": len(pull), "held": held() - before}))
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["rows"] == list(range(256))
    assert found["pull"] < _MIB
    assert found["held"] < 500
