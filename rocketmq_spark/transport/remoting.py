"""The remoting protocol over TCP: one connection per name server and broker, many requests in flight on each.

Rule 1: this file turns what the seam asks for into frames, and answers into outcomes; sockets are the loop's affair.
Rule 2: an answer is judged by its code alone (spec/remoting.md section 1.2), by the tables of ``wire.codes``.
Rule 3: no retry of a send. Only two things are tried twice: a route at the next name server (as 4.x, spec/producer.md
        10.7), and a request that a server refused with GO_AWAY, which it then has not executed.

Follows MQClientAPIImpl.java and NettyRemotingClient.java.
"""

from __future__ import annotations

import math
import random as random_module
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn, TypeAlias

from rocketmq_spark.errors import (
    MQClientException,
    OptionError,
    RemotingException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.message import Buffer, MessageQueue, SendOutcome, SendRequest, TopicRouteData
from rocketmq_spark.transport.base import OnOutcome
from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.loop import IoLoop
from rocketmq_spark.transport.request import FLAG_REQUEST, Answer, OnAnswer, Request
from rocketmq_spark.wire.codes import STORED, RequestCode, ResponseCode, broker_error
from rocketmq_spark.wire.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.wire.headers import (
    CreateTopicRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    GetRouteInfoRequestHeader,
    OffsetResponseHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
    UnregisterClientRequestHeader,
    heart_beat_body,
)
from rocketmq_spark.wire.route import decode_topic_route

Body: TypeAlias = "Buffer | tuple[Buffer, ...]"

# ClientErrorCode.NO_NAME_SERVER_EXCEPTION.
_NO_NAME_SERVER: Final = 10004

# The loop ends every call in time; this much longer a caller waits before it concludes that the loop is gone, seconds.
_GRACE: Final = 1.0


class RemotingTransport:
    """Implements :class:`~rocketmq_spark.transport.base.Transport` over the remoting protocol (4.x and 5.x).

    Parameters
    ----------
    name_servers : sequence of str
        ``host:port`` each; a 5.x proxy's remoting port will do as well. May be empty if no route is ever asked for.
    connect_timeout : float, default 3.0
        Seconds for one connect, the name's look-up and all its addresses included.
    random : random.Random, optional
        Picks the name server to start with.
    clock : callable, default time.monotonic
        Seconds.

    Raises
    ------
    OptionError
        A name server that is not ``host:port``.

    Notes
    -----
    Nothing is opened before the first request. A transport belongs to the process that made it: after a fork every
    method but :meth:`close` refuses. It can't be pickled.
    """

    def __init__(
        self,
        name_servers: Sequence[str],
        *,
        connect_timeout: float = 3.0,
        random: random_module.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for address in name_servers:
            try:
                parse_address(address)
            except ValueError as exc:
                raise OptionError(f"nameServer: {exc}") from exc
        self.name_servers = tuple(dict.fromkeys(name_servers))
        self._clock = clock
        self._loop = IoLoop(clock, connect_timeout)
        # Where the next route request starts: at random first, so that many workers spread over the servers; then it
        # stays with the one that answered.
        self._good = (random or random_module.Random()).randrange(len(self.name_servers)) if self.name_servers else 0

    def __repr__(self) -> str:
        return f"<RemotingTransport name_servers={';'.join(self.name_servers)} {self._loop!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RemotingTransport holds sockets and can't be pickled: pickle its options, and make it there")

    def __enter__(self) -> RemotingTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True after `close`, or when the thread behind it has failed."""
        return self._loop.closed

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt (SEND_MESSAGE_V2, or SEND_BATCH_MESSAGE); see :class:`.base.Transport`.

        Raises
        ------
        MQClientException
            The frame would be longer than 16 MiB; `on_outcome` is not called then.
        RocketMQError
            This transport is closed, or was made in another process; `on_outcome` is not called then.
        """
        batch, queue = request.batch, request.queue
        header = SendMessageRequestHeaderV2(
            producer_group=request.producer_group,
            topic=batch.topic,
            default_topic=request.default_topic,
            default_topic_queue_nums=request.default_topic_queue_nums,
            queue_id=queue.queue_id,
            sys_flag=batch.sys_flag,
            born_timestamp=request.born_timestamp,
            flag=batch.flag,
            properties=batch.properties or None,
            batch=batch.batch,
            broker_name=queue.broker_name,
        )
        code = RequestCode.SEND_BATCH_MESSAGE if batch.batch else RequestCode.SEND_MESSAGE_V2
        rows, address = batch.rows, request.address

        def on_answer(answer: Answer) -> None:
            on_outcome(_outcome(queue, rows, address, answer))

        expires = self._clock() + within
        self._loop.submit(
            address, Request(code, header.to_ext_fields(), batch.body, timeout, on_answer, expires=expires)
        )

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Ask the name servers for a topic's route; see :class:`.base.Transport`.

        Each server is asked at most once, with an equal share of the time left; the first that answers, whatever it
        answers, has the word, and is asked first the next time.

        Raises
        ------
        MQClientException
            There is no name server (code 10004).
        TopicRouteStaleException
            The name server knows no such topic.
        RemotingException
            None of them answered; the text names each and why.
        """
        servers = self.name_servers
        if not servers:
            raise MQClientException(
                f"looking up the route of topic {topic}: no name server is set; set the option nameServer",
                _NO_NAME_SERVER,
            )
        deadline = self._clock() + timeout
        start, failures = self._good, []
        last: RemotingException | None = None
        header = GetRouteInfoRequestHeader(topic=topic).to_ext_fields()
        for turn in range(len(servers)):
            index = (start + turn) % len(servers)
            share = (deadline - self._clock()) / (len(servers) - turn)
            if share <= 0:
                failures.append(f"{servers[index]}: not asked, no time was left")
                continue
            try:
                command = self.invoke(servers[index], RequestCode.GET_ROUTEINFO_BY_TOPIC, header, (), share)
                self._good = index
                _succeeded(command, servers[index], f"looking up the route of topic {topic}")
                return decode_topic_route(bytes(command.body))
            except RemotingException as exc:
                failures.append(f"{servers[index]}: {exc}")
                last = exc
        kind = RemotingTimeoutException if last is None else type(last)
        reasons = "; ".join(failures)
        raise kind(f"no name server gave the route of topic {topic} within {timeout:g} s: {reasons}") from last

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Tell a broker that these producer groups live (HEART_BEAT)."""
        body = heart_beat_body(client_id, producer_groups)
        self._call(address, RequestCode.HEART_BEAT, {}, timeout, f"heart-beat of {client_id}", (body,))

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Tell a broker that this producer group is gone (UNREGISTER_CLIENT)."""
        header = UnregisterClientRequestHeader(client_id=client_id, producer_group=producer_group)
        doing = f"unregistering {producer_group} of {client_id}"
        self._call(address, RequestCode.UNREGISTER_CLIENT, header.to_ext_fields(), timeout, doing)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get (GET_MAX_OFFSET).

        An unknown topic or queue gives 0, not an error (spec/remoting.md section 13.2).
        """
        header = GetMaxOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id, broker_name=queue.broker_name)
        return self._offset(queue, address, RequestCode.GET_MAX_OFFSET, header.to_ext_fields(), timeout)

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue (GET_MIN_OFFSET); 0 for an unknown queue."""
        header = GetMinOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id, broker_name=queue.broker_name)
        return self._offset(queue, address, RequestCode.GET_MIN_OFFSET, header.to_ext_fields(), timeout)

    def create_topic(self, address: str, topic: str, queue_nums: int, perm: int, timeout: float) -> None:
        """Create or overwrite a topic on one broker (UPDATE_AND_CREATE_TOPIC); not over a proxy."""
        header = CreateTopicRequestHeader(
            topic=topic, read_queue_nums=queue_nums, write_queue_nums=queue_nums, perm=perm
        )
        doing = f"creating topic {topic}"
        self._call(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header.to_ext_fields(), timeout, doing)

    def invoke(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float
    ) -> RemotingCommand:
        """Send a request and wait for its answer, whatever its code.

        Parameters
        ----------
        address : str
            ``host:port``.
        code : int
        ext_fields : mapping of str to str
        body : buffer, or tuple of buffers
        timeout : float
            Seconds in all: connecting, writing and the answer.

        Raises
        ------
        RemotingConnectException, RemotingTooMuchRequestException
            Nothing was sent.
        RemotingSendRequestException, RemotingTimeoutException, RemotingCommandException
            It may have been executed.
        RocketMQError
            Closed, in another process, or called from a callback (which runs on the thread it would wait for).
        """
        answer = self._wait(address, code, ext_fields, body, timeout, FLAG_REQUEST)
        assert answer.command is not None
        return answer.command

    def invoke_async(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float, on_done: OnAnswer
    ) -> None:
        """Send a request and return; `on_done` is called once, on the transport's thread, and must not block.

        `timeout` counts from the last byte written, as in :meth:`send`.
        """
        self._loop.submit(address, Request(code, ext_fields, _pieces(body), timeout, on_done))

    def invoke_oneway(self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float) -> None:
        """Send a request that the server never answers; return when the socket has taken its last byte.

        Raises what :meth:`invoke` raises. Java 5.x only logs a failed oneway; ours follows 4.x and says so
        (spec/producer.md section 10.5).
        """
        self._wait(address, code, ext_fields, body, timeout, FLAG_ONEWAY)

    def close(self) -> None:
        """Close every connection and end the thread; what is in flight fails. Idempotent."""
        self._loop.close()

    def _wait(
        self, address: str, code: int, ext_fields: Mapping[str, str], body: Body, timeout: float, flag: int
    ) -> Answer:
        if self._loop.in_own_thread:
            raise RocketMQError(
                f"request {code} to {address}: a blocking call in a callback would wait for its own thread; "
                "use invoke_async there, or another thread"
            )
        done = threading.Event()
        answers: list[Answer] = []

        def on_answer(answer: Answer) -> None:
            answers.append(answer)
            done.set()

        expires = self._clock() + timeout
        self._loop.submit(
            address, Request(code, ext_fields, _pieces(body), timeout, on_answer, expires=expires, flag=flag)
        )
        if not done.wait(timeout + _GRACE):
            raise RemotingTimeoutException(
                f"request {code} to {address}: the transport's thread did not end it within {timeout:g} s ({self!r})"
            )
        answer = answers.pop()
        if answer.error is None:
            return answer
        try:
            raise answer.error
        finally:
            # The error's traceback holds this frame: together with this name that would be a cycle around the body.
            del answer

    def _call(
        self, address: str, code: int, ext_fields: Mapping[str, str], timeout: float, doing: str, body: Body = ()
    ) -> RemotingCommand:
        return _succeeded(self.invoke(address, code, ext_fields, body, timeout), address, doing)

    def _offset(
        self, queue: MessageQueue, address: str, code: RequestCode, ext_fields: Mapping[str, str], timeout: float
    ) -> int:
        command = self._call(address, code, ext_fields, timeout, f"{code.name} of {queue}")
        return OffsetResponseHeader.from_ext_fields(command.ext_fields).offset


def _pieces(body: Body) -> tuple[Buffer, ...]:
    return body if isinstance(body, tuple) else (body,)


def _succeeded(command: RemotingCommand, address: str, doing: str) -> RemotingCommand:
    if command.code != ResponseCode.SUCCESS:
        raise broker_error(command.code, command.remark, address, doing)
    return command


def _outcome(queue: MessageQueue, rows: int, address: str, answer: Answer) -> SendOutcome:
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
    )
