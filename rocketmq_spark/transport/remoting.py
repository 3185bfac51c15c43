"""The remoting protocol over TCP: one connection per name server and broker, many requests in flight on each.

Rule 1: this file turns what the seam asks for into requests, and answers into outcomes; sockets are the loop's affair.
Rule 2: no retry of a send. Only two things are tried twice: a question to the next name server (admin_client.py), and
        a request that a server refused with GO_AWAY, which it then has not executed.

Follows MQClientAPIImpl.java.
"""

from __future__ import annotations

import json
import logging
import math
import random as random_module
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from rocketmq_spark.credentials import CredentialsProvider
from rocketmq_spark.errors import (
    BrokerOutcomeUnknownException,
    MQClientException,
    OptionError,
    RemotingCommandException,
    RemotingSendRequestException,
)
from rocketmq_spark.message import MessageQueue, SendRequest
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.recall import RecallMessage
from rocketmq_spark.transaction import EndTransaction, ending
from rocketmq_spark.transport.admin_client import AdminClient
from rocketmq_spark.transport.base import OnCheckTransaction, OnEnd, OnOutcome
from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.frames import (
    end_transaction_fields,
    head_of,
    outcome_of,
    transaction_check_of,
)
from rocketmq_spark.transport.hooks import RequestHooks
from rocketmq_spark.transport.loop import IoLoop
from rocketmq_spark.transport.request import Answer, Request
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.codes import RequestCode, ResponseCode, broker_error
from rocketmq_spark.wire.command import RemotingCommand
from rocketmq_spark.wire.headers import (
    GetEarliestMsgStoreTimeRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    RecallMessageRequestHeader,
    SearchOffsetRequestHeader,
    UnregisterClientRequestHeader,
    ViewMessageRequestHeader,
    heart_beat_body,
)
from rocketmq_spark.wire.records import decode_records
from rocketmq_spark.wire.response_headers import EarliestMsgStoreTimeResponseHeader, OffsetResponseHeader

logger = logging.getLogger("rocketmq_spark.transport")


class RemotingTransport(AdminClient):
    """Implements :class:`.base.Transport` and :class:`.base.ReadTransport` over the remoting protocol (4.x and 5.x).

    Parameters
    ----------
    name_servers : sequence of str
        ``host:port`` each; a 5.x proxy's remoting port will do as well. May be empty if no route is ever asked for.
    connect_timeout : float, default 3.0
        Seconds for one connect, the name's look-up, all its addresses and TLS handshakes included.
    credentials : CredentialsProvider, optional
        Signs requests to brokers. Default: none is signed.
    sign_name_server_requests : bool, default False
        Sign requests to name servers, too. RocketMQ's own know no users; a proxy with access control does.
    namespace_v2 : str, default ""
        Namespace that a 5.x cluster is told with every request; names stay as they are.
    tls : TlsSettings, optional
        Encrypts every connection, to name servers too. Default: none is encrypted.
    random : random.Random, optional
        Picks the name server to start with.
    clock : callable, default time.monotonic
        Seconds.
    client_async_semaphore_value, client_oneway_semaphore_value : int, default 65535
        How many requests may be under way whose callers do not wait for the answer (sends), and how many oneway ones.
        An asynchronous one beyond the limit ends at once with a ``RemotingTooMuchRequestException``; a oneway one waits
        within its timeout. Calls that wait for their answer need no permit, as in 4.x.
    polled : bool, default False
        It has no thread: the one thread that uses it calls `poll`, and all callbacks come from there.

    Attributes
    ----------
    on_check_transaction : callable or None
        See :class:`.base.Transport`.

    Raises
    ------
    OptionError
        A name server that is not ``host:port``, a limit below 1, or a file of `tls` that can't be used.

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
        credentials: CredentialsProvider | None = None,
        sign_name_server_requests: bool = False,
        namespace_v2: str = "",
        tls: TlsSettings | None = None,
        random: random_module.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        client_async_semaphore_value: int = 65_535,
        client_oneway_semaphore_value: int = 65_535,
        polled: bool = False,
    ) -> None:
        for address in name_servers:
            try:
                parse_address(address)
            except ValueError as exc:
                raise OptionError(f"nameServer: {exc}") from exc
        secure = None if tls is None else tls.secure()
        hooks = RequestHooks(namespace_v2, credentials, sign_name_server_requests=sign_name_server_requests)
        loop = IoLoop(clock, connect_timeout, self._on_request, secure, hooks, polled=polled)
        draw = random or random_module.Random()
        super().__init__(
            loop, loop.clock, client_async_semaphore_value, client_oneway_semaphore_value, name_servers, draw
        )
        self.on_check_transaction: OnCheckTransaction | None = None
        self._well = True

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of its timeouts, in seconds; that of a polled transport passes only during `poll`."""
        return self._clock

    def __repr__(self) -> str:
        return f"<RemotingTransport name_servers={';'.join(self._name_servers.addresses)} {self._loop!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RemotingTransport holds sockets and can't be pickled: pickle its options, and make it there")

    def __enter__(self) -> RemotingTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt (SEND_MESSAGE_V2, or SEND_BATCH_MESSAGE); see :class:`.base.Transport`.

        Raises
        ------
        MQClientException
            The frame would be longer than 16 MiB; `on_outcome` is not called then.
        RocketMQError
            This transport is closed, or was made in another process; `on_outcome` is not called then.
        """
        queue, rows, address = request.queue, request.batch.rows, request.address

        def on_answer(answer: Answer) -> None:
            on_outcome(outcome_of(queue, rows, address, answer))

        code, ext_fields = head_of(request)
        expires = self._clock() + within
        self._start(address, Request(code, ext_fields, request.batch.body, timeout, on_answer, expires=expires))

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Send without an acknowledgement; see :class:`.base.Transport`.

        Raises
        ------
        MQClientException
            The frame would be longer than 16 MiB.
        RemotingConnectException, RemotingTooMuchRequestException, RemotingTimeoutException
            No connection, no permit, or not written within `timeout`.
        """
        code, ext_fields = head_of(request)
        try:
            self.invoke_oneway(request.address, code, ext_fields, request.batch.body, timeout)
        except (RemotingSendRequestException, RemotingCommandException) as exc:
            logger.warning("oneway send of %d rows to %s: %s", request.batch.rows, request.queue, exc)

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Tell a broker that these producer groups live (HEART_BEAT)."""
        body = heart_beat_body(client_id, producer_groups)
        self._call(address, RequestCode.HEART_BEAT, {}, timeout, f"heart-beat of {client_id}", (body,))

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Tell a broker that this producer group is gone (UNREGISTER_CLIENT)."""
        header = UnregisterClientRequestHeader(client_id=client_id, producer_group=producer_group)
        doing = f"unregistering {producer_group} of {client_id}"
        self._call(address, RequestCode.UNREGISTER_CLIENT, header.to_ext_fields(), timeout, doing)

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Ask for the queue's max offset, as Java's detector does."""
        self.max_offset(queue, address, timeout)

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

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset stored at or after a time (SEARCH_OFFSET_BY_TIMESTAMP); 0 for an empty queue."""
        header = SearchOffsetRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, timestamp=timestamp_ms, broker_name=queue.broker_name
        )
        return self._offset(queue, address, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header.to_ext_fields(), timeout)

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return when the queue's oldest message was stored (GET_EARLIEST_MSG_STORETIME); not over a proxy."""
        header = GetEarliestMsgStoreTimeRequestHeader(
            topic=queue.topic, queue_id=queue.queue_id, broker_name=queue.broker_name
        )
        code = RequestCode.GET_EARLIEST_MSG_STORETIME
        command = self._call(address, code, header.to_ext_fields(), timeout, f"{code.name} of {queue}")
        return EarliestMsgStoreTimeResponseHeader.from_ext_fields(command.ext_fields).timestamp

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset (VIEW_MESSAGE_BY_ID); see :class:`.base.Transport`."""
        code = RequestCode.VIEW_MESSAGE_BY_ID
        header = ViewMessageRequestHeader(offset=physical_offset, topic=topic or None)
        doing = f"viewing the message at commit-log offset {physical_offset}"
        try:
            records = decode_records(self._call(address, code, header.to_ext_fields(), timeout, doing).body)
        except (BrokerOutcomeUnknownException, RemotingCommandException) as exc:
            # SYSTEM_ERROR, with one of several remarks, or bytes from the middle of a record (spec/remoting.md 13.3).
            raise MQClientException(f"{doing}: {address} has no message that begins there ({exc})") from exc
        if [record.physical_offset for record in records] != [physical_offset]:
            raise MQClientException(f"{doing}: {address} has no message that begins there")
        return records[0]

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Have a broker look at an expression (CHECK_CLIENT_CONFIG): in a pull it takes one that it can't read for all.

        Raises
        ------
        MQBrokerException
            It knows no such expressions (SYSTEM_ERROR), or can't read this one (SUBSCRIPTION_PARSE_FAILED).
        """
        subscription = {"topic": topic, "subString": expression, "expressionType": expression_type}
        body = json.dumps({"clientId": group, "group": group, "subscriptionData": subscription}).encode()
        self._call(address, RequestCode.CHECK_CLIENT_CONFIG, {}, timeout, f"checking {expression!r}", (body,))

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message (END_TRANSACTION); see :class:`.base.Transport`.

        A 5.5.0 proxy answers with success and does nothing, because it does not know half messages that it got over
        remoting. Over it, only the answer to a check has an effect.
        """
        doing = ending(request)

        def on_answer(answer: Answer) -> None:
            error = answer.error
            if answer.command is not None and answer.command.code != ResponseCode.SUCCESS:
                error = broker_error(answer.command.code, answer.command.remark, address, doing)
            on_end(error)

        self._start(
            address,
            Request(
                RequestCode.END_TRANSACTION,
                end_transaction_fields(request),
                (),
                timeout,
                on_answer,
                expires=self._clock() + timeout,
                remark=request.remark,
            ),
        )

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Send END_TRANSACTION without waiting for an answer; see :class:`.base.Transport`."""
        fields = end_transaction_fields(request)
        self.invoke_oneway(address, RequestCode.END_TRANSACTION, fields, (), timeout, request.remark)

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Take a delayed message back (RECALL_MESSAGE); see :class:`.base.Transport`."""
        header = RecallMessageRequestHeader(
            producer_group=request.producer_group,
            topic=request.topic,
            recall_handle=request.recall_handle,
            broker_name=request.broker_name,
        )
        doing = f"recalling a message of topic {request.topic} from {request.broker_name}"
        command = self._call(address, RequestCode.RECALL_MESSAGE, header.to_ext_fields(), timeout, doing)
        return command.ext_fields.get("msgId", "")

    def _offset(
        self, queue: MessageQueue, address: str, code: RequestCode, ext_fields: Mapping[str, str], timeout: float
    ) -> int:
        command = self._call(address, code, ext_fields, timeout, f"{code.name} of {queue}")
        return OffsetResponseHeader.from_ext_fields(command.ext_fields).offset

    def _on_request(self, address: str, command: RemotingCommand) -> bool:
        """Hand a check of a transaction to who answers it; on the loop's thread. Other requests are not ours."""
        on_check = self.on_check_transaction
        if command.code != RequestCode.CHECK_TRANSACTION_STATE or on_check is None:
            return False
        try:
            on_check(transaction_check_of(address, command))
            self._well = True
        except Exception:
            # What a broker sends, or a handler does, must not cost the connection and all that waits on it. With its
            # story once, until a good one has come: a broker may send them without end.
            level = logging.ERROR if self._well else logging.DEBUG
            self._well = False
            what = "%s: a check of a transaction was not taken; the broker will ask again"
            logger.log(level, what, address, exc_info=level > logging.DEBUG)
        return True
