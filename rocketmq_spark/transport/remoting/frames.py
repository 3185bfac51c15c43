"""The model's values as codes and ext fields, and a server's commands as the model's values. Pure functions.

An answer is judged by its code alone. Follows MQClientAPIImpl.java and ClientRemotingProcessor.java.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rocketmq_spark.errors import (
    RemotingCertificateException,
    RemotingCommandException,
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RemotingTlsException,
    RemotingTooMuchRequestException,
    RocketMQError,
)
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.model.send_result import EndTransaction, TransactionCheck
from rocketmq_spark.protocol.remoting.codes import STORED, RequestCode, broker_error
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import (
    EndTransactionRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.protocol.remoting.response_headers import (
    CheckTransactionStateRequestHeader,
    PullMessageResponseHeader,
    SendMessageResponseHeader,
)
from rocketmq_spark.protocol.tls import CertificateError, DisagreementError
from rocketmq_spark.transport.remoting.requests import Answer, Request

# SendMessageRequestHeaderV2's letters of what is each message's own.
_BORN_TIMESTAMP: Final = "g"
_PROPERTIES: Final = "i"

# The fields of SendMessageRequestHeaderV2 that most messages of a queue share, in the order of `head_of`.
_SHARED: Final = (
    *("producer_group", "topic", "default_topic", "default_topic_queue_nums", "queue_id", "broker_name", "sys_flag"),
    *("flag", "properties", "reconsume_times", "unit_mode", "max_reconsume_times", "batch"),
)


def head_of(request: SendRequest) -> tuple[RequestCode, dict[str, str]]:
    """Return the code and ext fields of a send."""
    batch, queue = request.batch, request.queue
    shared = _shared_send_fields(
        request.producer_group,
        batch.topic,
        request.default_topic,
        request.default_topic_queue_nums,
        queue.queue_id,
        queue.broker_name,
        batch.sys_flag,
        batch.flag,
        "?" if batch.properties else None,
        request.reconsume_times,
        request.unit_mode,
        request.max_reconsume_times,
        batch.batch,
    )
    # Both keys keep their places: golden frames fix the order.
    fields = {**shared, _BORN_TIMESTAMP: str(request.born_timestamp)}
    if batch.properties:
        fields[_PROPERTIES] = batch.properties
    if request.reply:
        return RequestCode.SEND_REPLY_MESSAGE_V2, fields
    return RequestCode.SEND_BATCH_MESSAGE if batch.batch else RequestCode.SEND_MESSAGE_V2, fields


@functools.lru_cache(maxsize=4096)
def _shared_send_fields(*values: Any) -> Mapping[str, str]:
    """Return what most messages of a queue share; making it is a tenth of the cost of a single message."""
    return SendMessageRequestHeaderV2(born_timestamp=0, **dict(zip(_SHARED, values, strict=True))).to_ext_fields()


def outcome_of(queue: MessageQueue, rows: int, address: str, answer: Answer) -> SendOutcome:
    """Turn the answer to a send into its outcome."""
    latency_ms = answer.latency * 1000.0
    command = answer.command
    if command is None:
        return SendOutcome(queue, None, answer.error, latency_ms)
    status = STORED.get(command.code)
    if status is None:
        doing = f"sending {rows} rows to {queue}"
        return SendOutcome(queue, None, broker_error(command.code, command.remark, address, doing), latency_ms)
    try:
        header = SendMessageResponseHeader.from_ext_fields(command.ext_fields)
    except RocketMQError as exc:
        return SendOutcome(queue, None, exc, latency_ms)
    return SendOutcome(
        queue=queue if header.queue_id == queue.queue_id else replace(queue, queue_id=header.queue_id),
        status=status,
        error=None,
        latency_ms=latency_ms,
        queue_offset=header.queue_offset,
        offset_msg_id=header.msg_id,
        transaction_id=header.transaction_id,
        region_id=header.region_id,
        trace_on=header.trace_on,
        batch_uniq_id=header.batch_uniq_id,
        recall_handle=header.recall_handle,
    )


def end_transaction_fields(request: EndTransaction) -> dict[str, str]:
    """Return the ext fields of END_TRANSACTION; the remark is not among them."""
    return EndTransactionRequestHeader(**asdict(replace(request, remark=""))).to_ext_fields()


def transaction_check_of(address: str, command: RemotingCommand) -> TransactionCheck:
    """Read CHECK_TRANSACTION_STATE."""
    header = CheckTransactionStateRequestHeader.from_ext_fields(command.ext_fields)
    records = decode_records(command.body)
    if len(records) != 1:
        raise RemotingCommandException(f"a check of a transaction from {address} holds {len(records)} messages, not 1")
    return TransactionCheck(address=address, message=records[0], **asdict(header))


# PullSysFlag: the request carries the subscription, so no heart-beat is needed; the broker may hold the request.
_SUBSCRIPTION: Final = 4
_SUSPEND: Final = 2

_PULL_STATUS: Final = {int(status.value): status for status in PullStatus}

# Remarks of code 20 that do not mean "no message matched the filter" (PullMessageProcessor.composeResponseHeader).
# MESSAGE_WAS_REMOVING: the commit log was deleted, the queue's minimum offset is not corrected yet. A slave whose
# master is alive sends code 20 with every status but FOUND.
_MOVED: Final = frozenset(("MESSAGE_WAS_REMOVING", "OFFSET_TOO_SMALL", "OFFSET_RESET"))


def pull_fields(request: PullRequest) -> dict[str, str]:
    """Return the ext fields of PULL_MESSAGE."""
    return {**_shared_pull_fields(request.target, request.suspend_ms), "queueOffset": str(request.offset)}


@functools.lru_cache(maxsize=1024)
def _shared_pull_fields(target: PullTarget, suspend_ms: int) -> Mapping[str, str]:
    """Return what all pulls of a queue share; the offset of each replaces the 0 in its place."""
    return PullMessageRequestHeader(
        consumer_group=target.consumer_group,
        topic=target.queue.topic,
        queue_id=target.queue.queue_id,
        queue_offset=0,
        max_msg_nums=target.max_msg_nums,
        sys_flag=_SUBSCRIPTION | (_SUSPEND if suspend_ms else 0),
        suspend_timeout_millis=suspend_ms,
        subscription=target.sub_expression,
        expression_type=target.expression_type,
        broker_name=target.queue.broker_name,
    ).to_ext_fields()


def pull_outcome_of(queue: MessageQueue, address: str, answer: Answer) -> PullOutcome:
    """Turn the answer to a pull into its outcome."""
    command = answer.command
    if command is None:
        return PullOutcome(None, error=answer.error)
    status = _PULL_STATUS.get(command.code)
    if status is PullStatus.NO_MATCHED_MSG and command.remark in _MOVED:
        status = PullStatus.OFFSET_ILLEGAL
    if status is None:
        return PullOutcome(None, error=broker_error(command.code, command.remark, address, f"pulling from {queue}"))
    try:
        header = PullMessageResponseHeader.from_ext_fields(command.ext_fields)
    except RocketMQError as exc:
        return PullOutcome(None, error=exc)
    return PullOutcome(status, header.next_begin_offset, header.min_offset, header.max_offset, command.body)


def overdue(request: Request, address: str, others: int, *, connecting: bool) -> RemotingException:
    """Return the error of a request that timed out on an open connection."""
    doing, time = f"{request.name} to {address}", f"{round(request.timeout, 3):g} s"
    if request.written_at is not None:
        return RemotingTimeoutException(f"{doing}: no answer within {time}; {others} other requests wait there")
    if request.started:
        return RemotingTimeoutException(f"{doing}: after {time} it was not yet wholly written")
    if connecting:
        return RemotingConnectException(f"{doing}: not connected within {time}; it was not sent")
    return RemotingTooMuchRequestException(
        f"{doing}: {time} went by while it queued behind {others} others; it was not sent"
    )


def broken(
    requests: Sequence[Request], address: str, what: str, cause: BaseException | None, kind: type[RemotingException]
) -> list[RemotingException]:
    """Return the errors, in order, of the pending requests of a broken connection.

    `what` happened to the connection; `kind` is the class for a request of which bytes were sent.
    """
    if cause is not None:
        # Its frames hold the buffers that were being sent, and the error would keep them.
        cause.__traceback__ = None
    # Permanent TLS failures, before the server has seen any request.
    for_good: type[RemotingTlsException] | None = None
    if isinstance(cause, CertificateError):
        for_good = RemotingCertificateException
    elif isinstance(cause, DisagreementError):
        for_good = RemotingTlsException
    started = sum(request.started for request in requests)
    errors: list[RemotingException] = []
    for request in requests:
        doing = f"{request.name} to {address}: {what}"
        error: RemotingException
        if for_good is not None:
            error = for_good(f"{doing}; nothing was executed")
        elif request.started:
            error = kind(f"{doing}; {started} requests waited for answers and may have been executed")
        else:
            others = f" ({len(requests)} were waiting)" if len(requests) > 1 else ""
            error = RemotingConnectException(f"{doing}; this request was not sent{others}")
        error.__cause__ = cause
        errors.append(error)
    return errors
