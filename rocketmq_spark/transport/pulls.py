"""What a consumer asks of brokers: messages, many requests at once, and to remember how far it has read.

Rule 1: no retry and no decision about offsets: what a broker answered is reported as it is.

Follows MQClientAPIImpl.java (pullMessageAsync, updateConsumerOffset) and spec/remoting.md section 13.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from rocketmq_spark.errors import RocketMQError, UserRefusedException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.pull import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.transport.base import OnPulled
from rocketmq_spark.transport.client import Body, RemotingClient
from rocketmq_spark.transport.frames import succeeded
from rocketmq_spark.transport.request import Answer, Request
from rocketmq_spark.wire.codes import RequestCode, ResponseCode, broker_error
from rocketmq_spark.wire.command import RemotingCommand
from rocketmq_spark.wire.headers import (
    GetConsumerListByGroupRequestHeader,
    PullMessageRequestHeader,
    UpdateConsumerOffsetRequestHeader,
    heart_beat_body,
)
from rocketmq_spark.wire.name_lists import decode_consumer_list
from rocketmq_spark.wire.response_headers import PullMessageResponseHeader

# PullSysFlag: the subscription comes with the request, so that no heart-beat has to; the broker may hold the request.
_SUBSCRIPTION: Final = 4
_SUSPEND: Final = 2

# What is said of a group that nobody reads for: by a broker (ConsumerManageProcessor.getConsumerListByGroup), and by a
# proxy, which stumbles over it (ConsumerManagerActivity.getConsumerListByGroup).
_NO_CONSUMER: Final = ("no consumer for this group", "consumerGroupInfo", "NullPointerException")

_STATUS: Final = {int(status.value): status for status in PullStatus}

# Remarks of code 20 that do not mean "no message matched the filter" (PullMessageProcessor.composeResponseHeader).
# MESSAGE_WAS_REMOVING: the commit log was deleted, the queue's minimum offset is not corrected yet. A slave whose
# master is alive sends code 20 with every status but FOUND.
_MOVED: Final = frozenset(("MESSAGE_WAS_REMOVING", "OFFSET_TOO_SMALL", "OFFSET_RESET"))


class PullClient(RemotingClient):
    """The consumer's part of a transport."""

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start one PULL_MESSAGE; see :class:`.base.ReadTransport`."""
        queue, address = request.target.queue, request.address

        def on_answer(answer: Answer) -> None:
            on_pulled(_outcome_of(queue, address, answer))

        fields = {**_fields(request.target, request.suspend_ms), "queueOffset": str(request.offset)}
        within = timeout + request.suspend_ms / 1000
        expires = self._clock() + within
        # Without a permit: who pulls has a window of its own.
        self._loop.submit(address, Request(RequestCode.PULL_MESSAGE, fields, (), within, on_answer, expires=expires))

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Send one PULL_MESSAGE and wait for its answer; see :class:`.base.ReadTransport`."""
        queue, address = request.target.queue, request.address
        fields = {**_fields(request.target, request.suspend_ms), "queueOffset": str(request.offset)}
        command = self.invoke(address, RequestCode.PULL_MESSAGE, fields, (), timeout)
        return _outcome_of(queue, address, Answer(command, None, 0.0))

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Tell a broker that a client reads for this group (HEART_BEAT); the broker makes the group if it has none."""
        body = heart_beat_body(client_id, consumer_groups=[group])
        doing = f"heart-beat of {client_id} for the group {group}"
        self._call(address, RequestCode.HEART_BEAT, {}, timeout, doing, (body,))

    def consumers(self, group: str, address: str, timeout: float) -> tuple[str, ...]:
        """Return the client ids that a broker knows in a group (GET_CONSUMER_LIST_BY_GROUP)."""
        header = GetConsumerListByGroupRequestHeader(consumer_group=group).to_ext_fields()
        answer = self.invoke(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header, (), timeout)
        if answer.code == ResponseCode.SYSTEM_ERROR and any(words in answer.remark for words in _NO_CONSUMER):
            return ()
        return decode_consumer_list(bytes(succeeded(answer, address, f"asking who reads for the group {group}").body))

    def poll(self, timeout: float) -> None:
        """Move bytes and call callbacks, for so many seconds at most; see :class:`.base.ReadTransport`."""
        self._loop.poll(timeout)

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Tell a broker how far a group has read (UPDATE_CONSUMER_OFFSET)."""
        header = UpdateConsumerOffsetRequestHeader(
            consumer_group=group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            commit_offset=offset,
            broker_name=queue.broker_name,
        )
        doing = f"committing offset {offset} of {queue} for the group {group}"
        self._call(address, RequestCode.UPDATE_CONSUMER_OFFSET, header.to_ext_fields(), timeout, doing)

    def _call(
        self, address: str, code: int, ext_fields: Mapping[str, str], timeout: float, doing: str, body: Body = ()
    ) -> RemotingCommand:
        """Send a request whose only good answer is SUCCESS, and return that."""
        try:
            return succeeded(self.invoke(address, code, ext_fields, body, timeout), address, doing)
        except UserRefusedException as exc:
            if not self._loop.hooks.leaves_unsigned(code):
                raise
            raise UserRefusedException(
                f"{doing}: {address} answered {exc.response_code}: {exc.remark} It demands signed requests, and those "
                "to name servers are not signed by default. Set signNameServerRequests=true if nameServer is the "
                "address of your own proxy or name server with access control",
                *(exc.response_code, exc.remark, exc.broker_addr),
            ) from exc


@functools.lru_cache(maxsize=1024)
def _fields(target: PullTarget, suspend_ms: int) -> Mapping[str, str]:
    """Return what all pulls of a queue share; its offset goes into the place that is kept for it."""
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


def _outcome_of(queue: MessageQueue, address: str, answer: Answer) -> PullOutcome:
    command = answer.command
    if command is None:
        return PullOutcome(None, error=answer.error)
    status = _STATUS.get(command.code)
    if status is PullStatus.NO_MATCHED_MSG and command.remark in _MOVED:
        status = PullStatus.OFFSET_ILLEGAL
    if status is None:
        return PullOutcome(None, error=broker_error(command.code, command.remark, address, f"pulling from {queue}"))
    try:
        header = PullMessageResponseHeader.from_ext_fields(command.ext_fields)
    except RocketMQError as exc:
        return PullOutcome(None, error=exc)
    return PullOutcome(status, header.next_begin_offset, header.min_offset, header.max_offset, command.body)
