"""What a fake proxy does with each request: routes, sends, transactions, settings of producers.

The proxy gives sends, recalls and ends of transactions to a broker as remoting requests, without a socket. So the
replies that a test sets for these requests have effect. The proxy reads routes and topics' types in the name servers
and brokers directly, and registers producers there. Follows ``GrpcMessagingApplication.java``,
``ProducerProcessor.java`` and ``ClusterTransactionService.java``.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from google.protobuf.message import Message as ProtoMessage

from rocketmq_spark.model.hashes import consistent_hash
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.model.names import DLQ_PREFIX, RETRY_PREFIX, is_blank
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
)
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.protocol.remoting.headers import end_transaction_fields
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.testing import fake_proxy_messages as answers
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from rocketmq_spark.testing.fake_proxy_messages import status
from rocketmq_spark.testing.fake_sends import Refusal
from rocketmq_spark.testing.fake_storage import ProxySettings

_ENDS: Final = {pb.COMMIT: TRANSACTION_COMMIT_TYPE, pb.ROLLBACK: TRANSACTION_ROLLBACK_TYPE}


class Client(NamedTuple):
    """The client of a call: the id that it gave itself, and its address."""

    client_id: str
    peer: str


@dataclass(frozen=True, slots=True)
class Transaction:
    """A half message as the proxy remembers it, and when the proxy got it (seconds since the epoch)."""

    broker_name: str
    tran_state_table_offset: int
    commit_log_offset: int
    message: pb.Message
    since: float


class Servers(Protocol):
    """The servers that a proxy is in front of."""

    name_servers: tuple[FakeNameServer, ...]
    brokers: dict[str, FakeBroker]


class ProxyService:
    """The state of one proxy. A call raises Refusal if it fails.

    `topics` has the topics of producers, by client id. `on_check` is called with the topic of a half message, and the
    command that asks a producer about it.
    """

    def __init__(
        self, cluster: Servers, settings: ProxySettings, on_check: Callable[[str, service.TelemetryCommand], None]
    ) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.topics: dict[str, list[str]] = {}
        self._cluster = cluster
        self._settings = settings
        self._on_check = on_check
        self._links: dict[str, _BrokerLink] = {}
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def check(self, transaction_id: str) -> None:
        """Have the broker check a half message now."""
        transaction = self.transactions[transaction_id]
        self._cluster.brokers[transaction.broker_name].check_transaction(transaction.commit_log_offset)

    def disconnect(self, broker_address: str) -> None:
        """Break the connection to a broker: requests in flight fail."""
        if broker_address in self._links:
            self._links[broker_address].close()

    def forget(self) -> None:
        """Break all connections to brokers, and forget clients and half messages, as a restart does."""
        for link in self._links.values():
            link.close()
        self.topics.clear()
        self.transactions.clear()

    def _route(self, topic: str) -> TopicRouteData | None:
        """Return the route of a topic. A proxy keeps routes while no name server runs."""
        running = [server for server in self._cluster.name_servers if server.running]
        return (running or self._cluster.name_servers)[0].route(topic)

    def _message_type(self, topic: str) -> str | None:
        """Return the type of a topic's messages; None for an unknown topic."""
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return "NORMAL"
        route = self._route(topic)
        names = [] if route is None else [data.broker_name for data in route.queue_datas]
        for broker in (self._cluster.brokers[name] for name in names if name in self._cluster.brokers):
            if topic in broker.storage.topics:
                return broker.storage.topics[topic].attributes.get("message.type", "NORMAL")
        return None

    def query_route(self, request: service.QueryRouteRequest, address: str) -> ProtoMessage:
        """Answer the queues of a topic and its types; `address` is that of the proxy."""
        topic = request.topic.name
        answers.check_topic(topic)
        route, message_type = self._route(topic), self._message_type(topic)
        if route is None or message_type is None:
            raise _unknown(topic)
        endpoints = answers.access_point(request.endpoints, address)
        queues = answers.route_queues(request.topic, route, endpoints, answers.accepted_types(message_type))
        return service.QueryRouteResponse(status=status(), message_queues=queues)

    def send(self, request: service.SendMessageRequest, client: Client) -> ProtoMessage:
        """Send messages to a broker: those of a group to its queue, others in turn."""
        messages, now = request.messages, time.time()
        answers.check_messages(messages, self._settings.max_message_size, int(now * 1000))
        first, topic = messages[0], messages[0].topic.name
        if self._settings.topic_message_type_check:
            answers.check_type(self._message_type(topic), answers.type_of(first.system_properties))
        route = self._route(topic)
        if route is None:
            raise _unknown(topic)
        queues = answers.writable_queues(route)
        if not queues:
            raise Refusal(Code.FORBIDDEN, "no writable queue")
        system = first.system_properties
        group = (system.message_group or system.lite_topic) if len(messages) == 1 else ""
        index = consistent_hash(group, len(queues)) if group else next(self._turns[topic]) % len(queues)
        target = replace(queues[index], topic=topic)
        command = answers.broker_request(messages, target, client.peer)
        response = self._invoke(self._cluster.brokers[target.broker_name], command)
        reply = answers.send_reply(messages, response)
        if first.system_properties.message_type == pb.TRANSACTION and reply.status.code == pb.OK:
            offset = decode_message_id(response.ext_fields["msgId"])[1]
            at = reply.entries[0].offset, offset
            self.transactions[reply.entries[0].transaction_id] = Transaction(target.broker_name, *at, first, now)
        return reply

    def recall(self, request: service.RecallMessageRequest) -> ProtoMessage:
        """Take a delayed message back."""
        topic = request.topic.name
        answers.check_topic(topic)
        answers.check_type(self._message_type(topic), "DELAY")
        words: list[str] = []
        with contextlib.suppress(ValueError):
            words = base64.urlsafe_b64decode(request.recall_handle).decode().split(" ")
        if len(words) != 5:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, "recall handle is invalid")
        if words[2] not in self._cluster.brokers:
            raise Refusal(Code.BAD_REQUEST, f"broker {words[2]} not found")
        fields = {"producerGroup": topic, "topic": topic, "recallHandle": request.recall_handle}
        response = self._invoke(self._cluster.brokers[words[2]], RemotingCommand(RequestCode.RECALL_MESSAGE, 0, fields))
        if response.code != ResponseCode.SUCCESS:
            raise Refusal(answers.refused_code(response.code), response.remark)
        return service.RecallMessageResponse(status=status(), message_id=response.ext_fields["msgId"])

    def end_transaction(self, request: service.EndTransactionRequest) -> ProtoMessage:
        """Commit or roll back a half message that this proxy knows; the broker does not answer."""
        topic, transaction_id = request.topic.name, request.transaction_id
        answers.check_topic(topic)
        if is_blank(transaction_id):
            raise Refusal(Code.INVALID_TRANSACTION_ID, "transaction id cannot be blank")
        transaction = self.transactions.get(transaction_id)
        if transaction is None or transaction.message.topic.name != topic:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data")
        del self.transactions[transaction_id]
        if time.time() - transaction.since > self._settings.transaction_data_expire:
            raise Refusal(Code.INTERNAL_SERVER_ERROR, "cannot found transaction data")
        end = EndTransaction(
            topic=topic,
            producer_group=topic,
            tran_state_table_offset=transaction.tran_state_table_offset,
            commit_log_offset=transaction.commit_log_offset,
            commit_or_rollback=_ENDS.get(request.resolution, TRANSACTION_NOT_TYPE),
            from_transaction_check=request.source == pb.SOURCE_SERVER_CHECK,
            msg_id=request.message_id,
            transaction_id=transaction_id,
            broker_name=transaction.broker_name,
        )
        broker = self._cluster.brokers[transaction.broker_name]
        command = RemotingCommand(RequestCode.END_TRANSACTION, 0, end_transaction_fields(end), flag=FLAG_ONEWAY)
        broker.receive(command, self._link(broker))
        return service.EndTransactionResponse(status=status())

    def take_settings(self, settings: pb.Settings, client: Client) -> ProtoMessage:
        """Keep the settings of a producer, and answer those of the proxy."""
        if not settings.HasField("publishing"):
            raise Refusal(Code.BAD_REQUEST, "there is no publishing or subscription data in settings")
        topics = [topic.name for topic in settings.publishing.topics]
        for topic in topics:
            answers.check_topic(topic)
        self.topics[client.client_id] = topics
        self._register(topics)
        limits = self._settings
        merged = answers.merged_settings(settings, limits.max_message_size, type_check=limits.topic_message_type_check)
        return service.TelemetryCommand(status=status(), settings=merged)

    def heart_beat(self, client: Client) -> ProtoMessage:
        """Keep a producer registered at the brokers."""
        self._register(self._topics_of(client))
        return service.HeartbeatResponse(status=status())

    def terminate(self, client: Client) -> ProtoMessage:
        """Forget a producer."""
        self._topics_of(client)
        del self.topics[client.client_id]
        return service.NotifyClientTerminationResponse(status=status())

    def _topics_of(self, client: Client) -> list[str]:
        topics = self.topics.get(client.client_id)
        if topics is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "cannot find client settings for this client")
        return topics

    def _register(self, topics: Sequence[str]) -> None:
        """Have brokers check half messages here. The group of a half message is its topic."""
        for broker in tuple(self._cluster.brokers.values()):
            with broker.lock:
                for topic in topics:
                    broker.producers[topic]["proxy"] = self._link(broker)

    def _invoke(self, broker: FakeBroker, command: RemotingCommand) -> RemotingCommand:
        """Return a broker's answer. Raises a Refusal if the broker gives no answer."""
        failed = "org.apache.rocketmq.remoting.exception.Remoting"
        if not broker.running:
            text = f"{failed}ConnectException: connect to {broker.address} failed"
            raise Refusal(Code.INTERNAL_SERVER_ERROR, text)
        link = self._link(broker)
        opaque, answer = link.expect()
        broker.receive(replace(command, opaque=opaque), link)
        try:
            return answer.result(self._settings.broker_timeout)
        except FutureTimeoutError:
            link.forget(opaque)
            text = f"{failed}TimeoutException: wait response on the channel <{broker.address}> timeout"
            raise Refusal(Code.PROXY_TIMEOUT, text) from None
        except ConnectionError:
            text = f"{failed}SendRequestException: send request to <{broker.address}> failed"
            raise Refusal(Code.INTERNAL_SERVER_ERROR, text) from None

    def _link(self, broker: FakeBroker) -> _BrokerLink:
        on_check = functools.partial(self._check, broker.name)
        return self._links.setdefault(broker.address, _BrokerLink(on_check))

    def _check(self, broker_name: str, check: RemotingCommand) -> None:
        """Forward a broker's check to a client whose settings name the topic, if one has a stream."""
        (half,) = decode_records(check.body)
        message, fields = answers.half_message(half), check.ext_fields
        transaction_id = fields["transactionId"]
        at = int(fields["tranStateTableOffset"]), int(fields["commitLogOffset"])
        self.transactions[transaction_id] = Transaction(broker_name, *at, message, time.time())
        recover = service.RecoverOrphanedTransactionCommand(message=message, transaction_id=transaction_id)
        self._on_check(half.topic, service.TelemetryCommand(recover_orphaned_transaction_command=recover))


class _BrokerLink:
    """The proxy's connection to a broker, without a socket."""

    peer = "127.0.0.1:0"

    def __init__(self, on_check: Callable[[RemotingCommand], None]) -> None:
        self._on_check = on_check
        self._opaques = itertools.count()
        self._pending: dict[int, Future[RemotingCommand]] = {}

    def expect(self) -> tuple[int, Future[RemotingCommand]]:
        """Return the opaque of a new request, and its answer to come."""
        opaque, answer = next(self._opaques), Future[RemotingCommand]()
        self._pending[opaque] = answer
        return opaque, answer

    def forget(self, opaque: int) -> None:
        """Expect an answer no more."""
        self._pending.pop(opaque, None)

    def send(self, command: RemotingCommand) -> None:
        """Take an answer or a check from the broker."""
        if not command.is_response:
            self._on_check(command)
        elif (answer := self._pending.pop(command.opaque, None)) is not None:
            answer.set_result(command)

    def close(self) -> None:
        """Fail the requests in flight, as when the connection breaks."""
        while self._pending:
            with contextlib.suppress(KeyError):
                self._pending.popitem()[1].set_exception(ConnectionError())


def _unknown(topic: str) -> Refusal:
    text = f"CODE: 17 DESC: No topic route info in name server for the topic: {topic}"
    return Refusal(Code.TOPIC_NOT_FOUND, text)
