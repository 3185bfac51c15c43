"""Implements `Transport` and `ReadTransport` of :mod:`..base` with remoting requests to name servers and brokers.

A 5.x proxy with a remoting port can take the place of both, for some requests (docs/internals/remoting.md#proxies).
docs/internals/remoting.md#request-codes lists the requests.
"""

from __future__ import annotations

import json
import logging
import math
import random as random_module
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rocketmq_spark import errors
from rocketmq_spark.model.credentials import CredentialsProvider
from rocketmq_spark.model.message import MessageQueue, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import EndTransaction, RecallMessage, ending
from rocketmq_spark.protocol.remoting import headers, responses
from rocketmq_spark.protocol.remoting.codes import NAME_SERVER_REQUESTS, RequestCode, ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.groups import decode_committed_offset
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.transport.base import Closes, OnCheckTransaction, OnEnd, OnOutcome, OnPulled
from rocketmq_spark.transport.remoting.client import Namespace, RequestClient
from rocketmq_spark.transport.remoting.loop import IoLoop
from rocketmq_spark.transport.remoting.name_servers import NameServers
from rocketmq_spark.transport.remoting.requests import Answer, Request, outcome_of, pull_outcome_of
from rocketmq_spark.transport.runtime import PROCESS, Runtime
from rocketmq_spark.transport.tls import TlsSettings

logger = logging.getLogger("rocketmq_spark.transport")

# Answers about a group without consumers, of brokers and (a bug) proxies: docs/internals/reads.md#consumer-groups.
_NO_CONSUMER: Final = ("no consumer for this group", "consumerGroupInfo", "NullPointerException")

# 5.2.0 as an ordinal of ``MQVersion.java``. Brokers of 4.9.7 answer 0 for a group without a committed offset.
_ANSWERS_NOT_FOUND: Final = 453


class RemotingTransport(Closes):
    """Implements `Transport` and `ReadTransport` for RocketMQ 4.x and 5.x, with many requests in flight per connection.

    It belongs to the process that created it. After a fork every method but :meth:`close` raises. OptionError: a name
    server is not ``host:port``, a limit is below 1, or a file of `tls` is unusable. Beyond the semaphore values, a
    request with a callback, except a pull, fails with RemotingTooMuchRequestException; a one-way request waits within
    its timeout.
    """

    def __init__(
        self,
        name_servers: Sequence[str],  # Or 5.x proxies with their remoting ports; may be empty if no route is requested
        *,
        connect_timeout: float = 3.0,  # Seconds for the name lookup, all its addresses and TLS handshakes together
        credentials: CredentialsProvider | None = None,
        sign_name_server_requests: bool = False,  # Name servers have no users, but proxies with access control do
        namespace: str = "",
        create_topic_key: str = AUTO_CREATE_TOPIC,
        tls: TlsSettings | None = None,
        random: random_module.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        client_async_semaphore_value: int = 65_535,
        client_oneway_semaphore_value: int = 65_535,
        polled: bool = False,  # There is no thread: the one thread that uses the transport calls `poll`
        runtime: Runtime = PROCESS,
    ) -> None:
        self.namespace = Namespace(namespace, create_topic_key)
        secure = None if tls is None else tls.secure()
        loop = IoLoop(clock, connect_timeout, self._on_request, secure, polled=polled, runtime=runtime)
        unsigned = () if sign_name_server_requests else NAME_SERVER_REQUESTS
        permits = client_async_semaphore_value, client_oneway_semaphore_value
        self.client = RequestClient(loop, self.namespace, credentials, unsigned, *permits, runtime)
        # All deadlines are on this clock; that of a polled transport runs only during `poll`.
        self.clock = self.client.clock
        self.name_servers = NameServers(self.client, name_servers, random or random_module.Random())
        self.on_check_transaction: OnCheckTransaction | None = None
        self._checks_work = True

    def __repr__(self) -> str:
        return f"<RemotingTransport name_servers={';'.join(self.name_servers.addresses)} {self.client.loop!r}>"

    @property
    def closed(self) -> bool:
        """True after `close`, or when its thread has failed."""
        return self.client.loop.closed

    def open(self) -> None:
        """See `Transport.open`."""
        self.client.loop.open()

    def close(self) -> None:
        """Close every connection and end the thread; what is in flight fails. Idempotent."""
        self.client.loop.close()

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt (SEND_MESSAGE_V2, or SEND_BATCH_MESSAGE); see `Sends.send`.

        Raises MQClientException if the frame would be longer than 16 MiB; `on_outcome` is not called then.
        """
        queue, rows, address = request.queue, request.batch.rows, request.address

        def on_answer(answer: Answer) -> None:
            on_outcome(outcome_of(queue, rows, address, answer))

        code, ext_fields = headers.head_of(request)
        expires, body = self.clock() + within, request.batch.body
        self.client.start(
            address, Request(code, ext_fields, body, timeout, on_answer, expires, write_by=request.write_by)
        )

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Send without an acknowledgement; see `Transport.send_oneway`."""
        code, ext_fields = headers.head_of(request)
        try:
            self.client.invoke_oneway(request.address, code, ext_fields, request.batch.body, timeout)
        except (errors.RemotingSendRequestException, errors.RemotingCommandException) as exc:
            text = "oneway send of %d rows to %s failed, and is not repeated: %s"
            logger.warning(text, request.batch.rows, request.queue, exc)

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Register producer groups at a broker, or keep them registered (HEART_BEAT)."""
        body = headers.heart_beat_body(client_id, map(self.namespace.wrap, producer_groups))
        self.client.call(address, RequestCode.HEART_BEAT, timeout, f"heartbeat of {client_id}", body)

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Remove a producer group from a broker (UNREGISTER_CLIENT)."""
        header = headers.UnregisterClientRequestHeader(client_id=client_id, producer_group=producer_group)
        self.client.call(address, header, timeout, f"unregistering {producer_group} of {client_id}")

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Request the queue's max offset, as Java's detector of broken brokers does; raise if that fails."""
        self.max_offset(queue, address, timeout)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route; see `NameServers.query_route`."""
        return self.name_servers.query_route(topic, timeout)

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the names of all topics, or of those in the namespace."""
        return frozenset(self.namespace.members(self.name_servers.topics(timeout)))

    def topics_at(self, name_server: str, timeout: float) -> frozenset[str]:
        """Return the result of `topics` of one name server."""
        return frozenset(self.namespace.members(self.name_servers.topics_at(name_server, timeout)))

    def route_at(self, name_server: str, topic: str, timeout: float) -> TopicRouteData:
        """Return the topic's route of one name server."""
        return self.name_servers.route_at(name_server, topic, timeout)

    def cluster_info(self, timeout: float) -> responses.ClusterInfo:
        """Return all brokers and their clusters."""
        return self.name_servers.cluster_info(timeout)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get (GET_MAX_OFFSET); 0 for an unknown queue."""
        return self._number(headers.GetMaxOffsetRequestHeader(**_place(queue)), queue, address, timeout, "offset")

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue (GET_MIN_OFFSET); 0 for an unknown queue."""
        return self._number(headers.GetMinOffsetRequestHeader(**_place(queue)), queue, address, timeout, "offset")

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the answer to SEARCH_OFFSET_BY_TIMESTAMP; see `Offsets.search_offset`. 0 for an empty queue."""
        header = headers.SearchOffsetRequestHeader(**_place(queue), timestamp=timestamp_ms)
        return self._number(header, queue, address, timeout, "offset")

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return when the queue's oldest message was stored (GET_EARLIEST_MSG_STORETIME); not over a proxy."""
        header = headers.GetEarliestMsgStoreTimeRequestHeader(**_place(queue))
        return self._number(header, queue, address, timeout, "timestamp")

    def _number(
        self, header: headers.RequestHeader, queue: MessageQueue, address: str, timeout: float, field: str
    ) -> int:
        doing = f"{header.code.name} of {queue}"
        return self.client.ask(
            address, header, timeout, doing, lambda answer: responses.read_long(answer.ext_fields, field)
        )

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset (VIEW_MESSAGE_BY_ID); see `Admin.view_message`."""
        header = headers.ViewMessageRequestHeader(offset=physical_offset, topic=topic or None)
        doing = f"viewing the message at commit-log offset {physical_offset}"
        try:
            records = decode_records(self.client.call(address, header, timeout, doing).body)
        except (errors.BrokerOutcomeUnknownException, errors.RemotingCommandException) as exc:
            # SYSTEM_ERROR with one of several remarks, or bytes from the middle of a record.
            raise errors.MQClientException(f"{doing}: {address} has no message that begins there ({exc})") from exc
        if [record.physical_offset for record in records] != [physical_offset]:
            raise errors.MQClientException(f"{doing}: {address} has no message that begins there")
        return replace(records[0], topic=self.namespace.unwrap(records[0].topic))

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start one PULL_MESSAGE; see `Pulls.pull`. It takes no permit, because readers limit their own requests."""

        def on_answer(answer: Answer) -> None:
            on_pulled(pull_outcome_of(request, answer))

        within = timeout + request.suspend_ms / 1000
        fields, expires = headers.pull_fields(request), self.clock() + within
        pull = Request(RequestCode.PULL_MESSAGE, fields, (), within, on_answer, expires)
        self.client.submit(request.address, pull)

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Send one PULL_MESSAGE and wait for its answer; see `Pulls.pull_now`."""
        fields = headers.pull_fields(request)
        command = self.client.invoke(request.address, RequestCode.PULL_MESSAGE, fields, (), timeout)
        return pull_outcome_of(request, Answer(command, None, 0.0))

    def poll(self, timeout: float) -> None:
        """Send, receive and call back for at most `timeout` seconds; see `Pulls.poll`."""
        self.client.loop.poll(timeout)

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Register a client as a reader of a group (HEART_BEAT); the broker creates an unknown group."""
        body = headers.heart_beat_body(client_id, consumer_groups=[self.namespace.wrap(group)])
        self.client.call(address, RequestCode.HEART_BEAT, timeout, f"heartbeat of {client_id} for {group}", body)

    def consumers(self, group: str, address: str, timeout: float) -> tuple[str, ...]:
        """Return the client ids that a broker knows in a group (GET_CONSUMER_LIST_BY_GROUP)."""
        header = headers.GetConsumerListByGroupRequestHeader(consumer_group=group)
        try:
            doing = f"listing the clients of the group {group}"
            return self.client.ask_body(address, header, timeout, doing, responses.decode_consumer_list)
        except errors.MQBrokerException as exc:
            if exc.response_code == ResponseCode.SYSTEM_ERROR and any(words in exc.remark for words in _NO_CONSUMER):
                return ()
            raise

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Commit a group's offset (UPDATE_CONSUMER_OFFSET), unchecked (docs/internals/reads.md#consumer-groups)."""
        header = headers.UpdateConsumerOffsetRequestHeader(consumer_group=group, commit_offset=offset, **_place(queue))
        self.client.call(address, header, timeout, f"committing offset {offset} of {queue} for the group {group}")

    def consumer_offset(self, queue: MessageQueue, group: str, address: str, timeout: float) -> int | None:
        """Return a group's offset; see `Pulls.consumer_offset`."""
        header = headers.QueryConsumerOffsetRequestHeader(consumer_group=group, **_place(queue))
        doing = f"reading the offset of {queue} that the group {group} committed"

        def offset_and_release(answer: RemotingCommand) -> tuple[int, int]:
            return responses.read_long(answer.ext_fields, "offset"), answer.version

        try:
            offset, release = self.client.ask(address, header, timeout, doing, offset_and_release)
        except errors.MQBrokerException as exc:
            if exc.response_code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        if offset == 0 and release < _ANSWERS_NOT_FOUND:
            topic, group = self.namespace.wrap(queue.topic), self.namespace.wrap(group)
            return self.client.ask_body(
                *(address, RequestCode.GET_ALL_CONSUMER_OFFSET, timeout, doing),
                lambda body: decode_committed_offset(body, topic, group, queue.queue_id),
            )
        return offset if offset >= 0 else None

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Have a broker parse a filter (CHECK_CLIENT_CONFIG): a pull with an invalid filter returns every message."""
        wired, topic = self.namespace.wrap(group), self.namespace.wrap(topic)
        subscription = {"topic": topic, "subString": expression, "expressionType": expression_type}
        body = json.dumps({"clientId": wired, "group": wired, "subscriptionData": subscription}).encode()
        self.client.call(address, RequestCode.CHECK_CLIENT_CONFIG, timeout, f"checking {expression!r}", body)

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to end a half message; see `Transactions`. Proxies have a bug: docs/internals/remoting.md#proxies."""
        doing = ending(request)

        def on_answer(answer: Answer) -> None:
            error = answer.error
            if answer.command is not None and answer.command.code != ResponseCode.SUCCESS:
                error = broker_error(answer.command.code, answer.command.remark, address, doing)
            on_end(error)

        code, fields = RequestCode.END_TRANSACTION, headers.end_transaction_fields(request)
        expires = self.clock() + timeout
        self.client.start(address, Request(code, fields, (), timeout, on_answer, expires, remark=request.remark))

    def connection(self, address: str) -> object | None:
        """Return what stands for the connection to an address. It changes when the connection is lost."""
        return self.client.loop.by_address.get(address)

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Send END_TRANSACTION without waiting for an answer; see `Transactions.end_transaction_oneway`."""
        fields = headers.end_transaction_fields(request)
        self.client.invoke_oneway(address, RequestCode.END_TRANSACTION, fields, (), timeout, request.remark)

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Take a delayed message back (RECALL_MESSAGE), and return its id."""
        header = headers.RecallMessageRequestHeader(**asdict(request))
        doing = f"recalling a message of topic {request.topic} from {request.broker_name}"
        return self.client.call(address, header, timeout, doing).ext_fields.get("msgId", "")

    def _on_request(self, address: str, command: RemotingCommand) -> bool:
        """Hand over a check, on the loop's thread; False for others (docs/internals/remoting.md#server-requests)."""
        on_check = self.on_check_transaction
        if command.code != RequestCode.CHECK_TRANSACTION_STATE or on_check is None:
            return False
        try:
            on_check(self.namespace.unwrap_check(responses.transaction_check_of(address, command)))
            self._checks_work = True
        except Exception:
            # An invalid check or a failing handler must not close the connection. A broker may send any number of
            # checks, so the traceback is logged once, until a check succeeds.
            level = logging.ERROR if self._checks_work else logging.DEBUG
            self._checks_work = False
            text = "%s: handling a transaction check failed; the broker will repeat it"
            logger.log(level, text, address, exc_info=level > logging.DEBUG)
        return True

    def topic_config(self, address: str, topic: str, timeout: float) -> responses.TopicConfig:
        """Return a topic's configuration on one broker (GET_TOPIC_CONFIG); proxies do not support this request."""
        header, doing = headers.GetTopicConfigRequestHeader(topic=topic), f"reading the configuration of topic {topic}"
        return self.client.ask_body(address, header, timeout, doing, responses.decode_topic_config)

    def all_topic_attributes(self, address: str, timeout: float) -> Mapping[str, Mapping[str, str] | None]:
        """Return the attributes of all topics of a broker (GET_ALL_TOPIC_CONFIG); None for brokers before 5.0."""
        code, doing = RequestCode.GET_ALL_TOPIC_CONFIG, "looking up the types of a broker's topics"
        attributes = self.client.ask_body(address, code, timeout, doing, responses.decode_all_topic_attributes)
        return {topic: attributes[wired] for topic, wired in self.namespace.members(attributes).items()}

    def runtime_info(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's metrics by name (GET_BROKER_RUNTIME_INFO)."""
        code, doing = RequestCode.GET_BROKER_RUNTIME_INFO, "reading a broker's metrics"
        return self.client.ask_body(address, code, timeout, doing, responses.decode_runtime_info)

    def broker_config(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's settings by name (GET_BROKER_CONFIG); they may include secrets."""
        code, doing = RequestCode.GET_BROKER_CONFIG, "reading a broker's settings"
        return self.client.ask_body(address, code, timeout, doing, responses.decode_properties)

    def create_topic(
        self,
        address: str,
        topic: str,
        queue_nums: int,
        perm: int,
        timeout: float,
        *,
        read_queue_nums: int | None = None,
        topic_sys_flag: int = 0,
        order: bool = False,
        attributes: str = "",
    ) -> None:
        """Create or overwrite a topic on one broker (UPDATE_AND_CREATE_TOPIC); not over a proxy."""
        header = headers.CreateTopicRequestHeader(
            topic=topic,
            read_queue_nums=queue_nums if read_queue_nums is None else read_queue_nums,
            write_queue_nums=queue_nums,
            perm=perm,
            topic_sys_flag=topic_sys_flag,
            order=order,
            attributes=attributes,
        )
        self.client.call(address, header, timeout, f"creating topic {topic}")


def _place(queue: MessageQueue) -> dict[str, Any]:
    """Return the fields that name a queue in a request header."""
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker_name": queue.broker_name}
