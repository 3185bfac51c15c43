"""Half messages and their ends, without a `Producer`."""

from __future__ import annotations

import itertools
import os
import queue as queues
import time
import uuid
from dataclasses import replace
from typing import Any

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    EndTransaction,
    TransactionCheck,
)
from rocketmq_spark.protocol.remoting.records import encode_properties, unique_id, unique_id_prefix
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.contract import Outcomes
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

_SEQUENCE = itertools.count(int(time.time()) << 16)
_PREFIX = unique_id_prefix(b"\x7f\0\0\1", os.getpid(), 7)


class Transactional:
    """A producer of half messages for one topic, as bare as can be."""

    def __init__(self, transport: Transport, address: str, topic: str) -> None:
        self.transport = transport
        self.address = address
        self.queue = MessageQueue(topic, "broker-0", 0)
        self.group = f"pg-{topic}"
        self.checks: queues.Queue[TransactionCheck] = queues.Queue()
        transport.on_check_transaction = self.checks.put
        self.beat()

    def beat(self) -> None:
        self.transport.heart_beat(self.address, f"127.0.0.1@{self.group}", [self.group], PATIENCE)

    def half_request(self, body: bytes) -> SendRequest:
        key = unique_id(_PREFIX, next(_SEQUENCE))
        properties = encode_properties({"UNIQ_KEY": key, "TRAN_MSG": "true", "PGROUP": self.group, "KEYS": "k1"})
        batch = EncodedBatch(
            self.queue.topic, (body,), 1, len(body), batch=False, properties=properties.decode(), sys_flag=4
        )
        return SendRequest(batch, self.queue, self.address, self.group, "TBW102", 4, int(time.time() * 1000))

    def send_half(self, body: bytes) -> EndTransaction:
        """Send one; return how it would be ended, still undecided."""
        outcomes: queues.Queue[SendOutcome] = queues.Queue()
        request = self.half_request(body)
        self.transport.send(request, PATIENCE, outcomes.put)
        outcome = outcomes.get(timeout=PATIENCE)
        assert outcome.status is SendStatus.SEND_OK
        assert f"UNIQ_KEY\x01{outcome.transaction_id}\x02" in request.batch.properties
        return self.end_of(outcome, TRANSACTION_NOT_TYPE)

    def end_of(self, half: SendOutcome, commit_or_rollback: int = TRANSACTION_COMMIT_TYPE) -> EndTransaction:
        return EndTransaction(
            topic=self.queue.topic,
            producer_group=self.group,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=decode_message_id(half.offset_msg_id)[1],
            commit_or_rollback=commit_or_rollback,
            msg_id=half.transaction_id,
            transaction_id=half.transaction_id,
            broker_name=self.queue.broker_name,
        )

    def end(self, half: EndTransaction, commit_or_rollback: int, remark: str = "") -> None:
        ended = EndTransaction(
            topic=half.topic,
            producer_group=half.producer_group,
            tran_state_table_offset=half.tran_state_table_offset,
            commit_log_offset=half.commit_log_offset,
            commit_or_rollback=commit_or_rollback,
            msg_id=half.msg_id,
            transaction_id=half.transaction_id,
            broker_name=half.broker_name,
            remark=remark,
        )
        self.transport.end_transaction_oneway(self.address, ended, PATIENCE)

    def answered_end(self, half: EndTransaction, **changes: Any) -> RocketMQError | None:
        """End one, by default with a commit, and return what the broker answers."""
        ended = replace(half, **{"commit_or_rollback": TRANSACTION_COMMIT_TYPE, **changes})
        outcomes: queues.Queue[RocketMQError | None] = queues.Queue()
        self.transport.end_transaction(self.address, ended, PATIENCE, outcomes.put)
        return outcomes.get(timeout=PATIENCE)

    def next_check(self) -> TransactionCheck:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.checks.get(timeout=5.0)
            except queues.Empty:
                assert time.monotonic() < deadline, "the broker did not ask back"
                self.beat()


def topic_of(cluster: LocalCluster | SharedCluster, transport: RemotingTransport) -> str:
    name = f"tx_{uuid.uuid4().hex}"
    # A proxy takes half messages for topics of this type only.
    address = cluster.brokers[0].address
    transport.create_topic(address, name, 1, 6, PATIENCE, attributes="+message.type=TRANSACTION")
    return name


def request(endpoint: str, encoded: EncodedBatch) -> SendRequest:
    queue = MessageQueue(encoded.topic, endpoint, 0)
    return SendRequest(encoded, queue, endpoint, "pg", "TBW102", 4, int(time.time() * 1000))


def send(transport: GrpcTransport, *encoded: EncodedBatch) -> list[SendOutcome]:
    """Send, each when the one before it is answered; return the outcomes."""
    outcomes = Outcomes()
    for number, one in enumerate(encoded, 1):
        transport.send(request(transport.endpoints[0], one), PATIENCE, outcomes)
        outcomes.wait(number)
    return outcomes


def stored(name_server: str, topic: str, count: int) -> dict[bytes, MessageExt]:
    found = read_topic(name_server, topic, count)
    assert len(found) == count
    return {message.body: message for message in found}
