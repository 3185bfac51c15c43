"""The seam's values as codes and ext fields, and a server's commands as the seam's values.

Rule 1: pure functions; an answer is judged by its code alone (spec/remoting.md section 1.2), by the tables of
        ``wire.codes``.

Follows MQClientAPIImpl.java and ClientRemotingProcessor.java.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rocketmq_spark.errors import RemotingCommandException, RocketMQError
from rocketmq_spark.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.transaction import EndTransaction, TransactionCheck
from rocketmq_spark.transport.request import Answer
from rocketmq_spark.wire.codes import STORED, RequestCode, ResponseCode, broker_error
from rocketmq_spark.wire.command import RemotingCommand
from rocketmq_spark.wire.headers import EndTransactionRequestHeader, SendMessageRequestHeaderV2
from rocketmq_spark.wire.records import decode_records
from rocketmq_spark.wire.response_headers import CheckTransactionStateRequestHeader, SendMessageResponseHeader

# SendMessageRequestHeaderV2's letters of what is each message's own.
_BORN_TIMESTAMP: Final = "g"
_PROPERTIES: Final = "i"


def head_of(request: SendRequest) -> tuple[RequestCode, dict[str, str]]:
    """Return the code and ext fields of a send (spec/producer.md sections 7.7 and 8.1)."""
    batch, queue = request.batch, request.queue
    code, fields = _head(
        request.producer_group,
        batch.topic,
        request.default_topic,
        request.default_topic_queue_nums,
        queue.queue_id,
        queue.broker_name,
        batch.sys_flag,
        batch.flag,
        bool(batch.properties),
        request.reconsume_times,
        request.unit_mode,
        request.max_reconsume_times,
        batch.batch,
        request.reply,
    )
    # In their places already: the order is part of what golden frames hold.
    ext_fields = {**fields, _BORN_TIMESTAMP: str(request.born_timestamp)}
    if batch.properties:
        ext_fields[_PROPERTIES] = batch.properties
    return code, ext_fields


@functools.lru_cache(maxsize=4096)
def _head(
    producer_group: str,
    topic: str,
    default_topic: str,
    default_topic_queue_nums: int,
    queue_id: int,
    broker_name: str,
    sys_flag: int,
    flag: int,
    has_properties: bool,
    reconsume_times: int,
    unit_mode: bool,
    max_reconsume_times: int | None,
    batch: bool,
    reply: bool,
) -> tuple[RequestCode, Mapping[str, str]]:
    """Return what most messages of a queue share: to make it anew is a tenth of what a single message costs."""
    header = SendMessageRequestHeaderV2(
        producer_group=producer_group,
        topic=topic,
        default_topic=default_topic,
        default_topic_queue_nums=default_topic_queue_nums,
        queue_id=queue_id,
        sys_flag=sys_flag,
        born_timestamp=0,
        flag=flag,
        properties="?" if has_properties else None,
        reconsume_times=reconsume_times,
        unit_mode=unit_mode,
        max_reconsume_times=max_reconsume_times,
        batch=batch,
        broker_name=broker_name,
    )
    if reply:
        code = RequestCode.SEND_REPLY_MESSAGE_V2
    else:
        code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
    return code, header.to_ext_fields()


def outcome_of(queue: MessageQueue, rows: int, address: str, answer: Answer) -> SendOutcome:
    """Turn the answer to a send into its outcome (spec/producer.md sections 8.3 and 8.4)."""
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


def succeeded(command: RemotingCommand, address: str, doing: str) -> RemotingCommand:
    """Return an answer that is a success, and raise what any other one stands for."""
    if command.code != ResponseCode.SUCCESS:
        raise broker_error(command.code, command.remark, address, doing)
    return command


def end_transaction_fields(request: EndTransaction) -> dict[str, str]:
    """Return the ext fields of END_TRANSACTION (spec/remoting.md section 11.2); the remark is not among them."""
    header = EndTransactionRequestHeader(
        topic=request.topic,
        producer_group=request.producer_group,
        tran_state_table_offset=request.tran_state_table_offset,
        commit_log_offset=request.commit_log_offset,
        commit_or_rollback=request.commit_or_rollback,
        from_transaction_check=request.from_transaction_check,
        msg_id=request.msg_id,
        transaction_id=request.transaction_id,
        broker_name=request.broker_name,
    )
    return header.to_ext_fields()


def transaction_check_of(address: str, command: RemotingCommand) -> TransactionCheck:
    """Read CHECK_TRANSACTION_STATE (spec/remoting.md section 11.3)."""
    header = CheckTransactionStateRequestHeader.from_ext_fields(command.ext_fields)
    records = decode_records(command.body)
    if len(records) != 1:
        raise RemotingCommandException(f"a check of a transaction from {address} holds {len(records)} messages, not 1")
    return TransactionCheck(
        address=address,
        message=records[0],
        tran_state_table_offset=header.tran_state_table_offset,
        commit_log_offset=header.commit_log_offset,
        msg_id=header.msg_id,
        transaction_id=header.transaction_id,
        offset_msg_id=header.offset_msg_id,
        broker_name=header.broker_name,
    )
