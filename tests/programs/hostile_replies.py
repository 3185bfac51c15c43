"""A gRPC client in a separate process, so that a test can measure the memory that one hostile reply costs.

usage: python hostile_replies.py '{"endpoint": "127.0.0.1:8081", "call": "send", "rows": 1}'

Prints JSON: the error of the call, and how many MiB the peak of the resident memory grew with it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import rocketmq_spark
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, RecallMessage
from rocketmq_spark.protocol.remoting.records import encode_batch, encode_single
from rocketmq_spark.transport.grpc.transport import GrpcTransport

arguments = json.loads(sys.argv[1])
endpoint, rows = arguments["endpoint"], arguments.get("rows", 1)
# As tests.support.processes.PATIENCE: no call fails because the machine is slow.
PATIENCE = 600.0


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def batch_of_rows() -> EncodedBatch:
    body = encode_batch([Message("orders", b"x")] * rows)
    return EncodedBatch("orders", (body,), rows, len(body), rows > 1)


def send(transport: GrpcTransport, batch: EncodedBatch) -> object:
    ended = threading.Event()
    outcomes: list[SendOutcome] = []
    request = SendRequest(batch, MessageQueue("orders", endpoint, 0), endpoint, "group", "TBW102", 4, 0)

    def on_outcome(outcome: SendOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    transport.send(request, PATIENCE, on_outcome)
    assert ended.wait(2 * PATIENCE)
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return outcomes[0].status


def end_transaction(transport: GrpcTransport) -> object:
    end = EndTransaction(
        topic="orders",
        producer_group="group",
        tran_state_table_offset=0,
        commit_log_offset=0,
        commit_or_rollback=TRANSACTION_COMMIT_TYPE,
        msg_id="id",
        broker_name="broker",
    )
    ended = threading.Event()
    errors: list[RocketMQError | None] = []

    def on_end(error: RocketMQError | None) -> None:
        errors.append(error)
        ended.set()

    transport.end_transaction(endpoint, end, PATIENCE, on_end)
    assert ended.wait(2 * PATIENCE)
    if errors[0] is not None:
        raise errors[0]
    return None


def recall(transport: GrpcTransport) -> object:
    return transport.recall_message(endpoint, RecallMessage("orders", "handle", "group", "broker"), PATIENCE)


def check_of_half_message(transport: GrpcTransport) -> object:
    checked = threading.Event()
    transport.on_check_transaction = lambda _: checked.set()
    half = Message("orders", b"x", properties={"TRAN_MSG": "true", "UNIQ_KEY": "half", "PGROUP": "group"})
    send(transport, replace(encode_single(half), sys_flag=0x4))
    return checked.wait(PATIENCE)


CALLS: dict[str, Callable[[GrpcTransport], object]] = {
    "send": lambda transport: send(transport, batch_of_rows()),
    "route": lambda transport: transport.query_route("orders", PATIENCE),
    "end": end_transaction,
    "recall": recall,
    "check": check_of_half_message,
}

with GrpcTransport([endpoint], client_id="hostile-replies") as transport:
    transport.query_route("small", PATIENCE)
    before, error = peak_mib(), ""
    try:
        result = repr(CALLS[arguments["call"]](transport))[:200]
    except rocketmq_spark.RocketMQError as exc:
        result, error = type(exc).__name__, str(exc)
    print(json.dumps({"error": error, "result": result, "grew_mib": round(peak_mib() - before)}))
