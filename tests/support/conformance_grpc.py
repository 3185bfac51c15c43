"""Scenarios over gRPC whose outcomes must be the same on a real proxy and on that of `FakeCluster`.

As in `conformance`, a scenario yields a line for each outcome. Requests are built here and not by the connector, which
rejects most of what a proxy rejects; sends then go through the connector's transport.
"""

from __future__ import annotations

import base64
import itertools
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from rocketmq_spark.model.message import EncodedBatch, Encoding, MessageQueue, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullRequest, PullTarget
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.conformance import outcome_class, result_of
from tests.support.contract import Outcomes, next_id
from tests.support.processes import PATIENCE, wait_for

TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
_SERVICE: Final = "/apache.rocketmq.v2.MessagingService/"
_MIB: Final = 1024 * 1024
# Properties that only some messages of real brokers have: times of the timer wheel, and of checks of a half message.
SOMETIMES: Final = frozenset(("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_OUT_MS", "TRANSACTION_CHECK_TIMES"))


@dataclass(frozen=True)
class Target:
    """A cluster's transports, and the topics of one scenario: one of each type, with four queues on each broker."""

    transport: GrpcTransport
    remoting: RemotingTransport
    channel: Any
    topics: Mapping[str, str]

    @property
    def endpoint(self) -> str:
        return self.transport.endpoints[0]

    def message(self, kind: str = "NORMAL", body: bytes = b"x", **system: Any) -> pb.Message:
        """Return a message as a client sends it to the topic of its type."""
        message = pb.Message(topic=pb.Resource(name=self.topics[kind]), body=body)
        system_properties = message.system_properties
        system_properties.message_id, system_properties.body_encoding, system_properties.message_type = (
            next_id(),
            pb.IDENTITY,
            getattr(pb, kind),
        )
        system_properties.born_timestamp.FromMilliseconds(1_700_000_000_000)
        system_properties.born_host = "10.0.0.1"
        if kind == "FIFO":
            system_properties.message_group = "group-1"
        if kind == "DELAY":
            system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 1000)
        system_properties.MergeFrom(pb.SystemProperties(**system))
        return message

    def send(self, *messages: pb.Message) -> str:
        """Send messages in one request; return the class of the outcome."""
        body = service.SendMessageRequest(messages=messages).SerializeToString()
        topic = messages[0].topic.name if messages else "none"
        encoded = EncodedBatch(topic, (body,), max(len(messages), 1), len(body), encoding=Encoding.GRPC)
        outcomes = Outcomes()
        request = SendRequest(encoded, MessageQueue(topic, self.endpoint, 0), self.endpoint, "pg", "TBW102", 4, 0)
        self.transport.send(request, PATIENCE, outcomes)
        return outcome_class(outcomes.wait(1)[0])

    def call(self, method: str, request: Any, reply_type: Any = None, **metadata: str) -> Any:
        """Call a proxy without the connector; return the reply, its code without a type, or gRPC's status."""
        headers = {"x-mq-client-id": "conformance", "x-mq-language": "PYTHON", **metadata}
        data = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            reply = self.channel.unary_unary(_SERVICE + method)(data, 20.0, metadata=[*headers.items()])
        except grpc.RpcError as exc:
            return exc.code().name
        if reply_type is not None:
            return reply_type.FromString(reply)
        return pb.Code.Name(service.NotifyClientTerminationResponse.FromString(reply).status.code)

    def telemetry(self, *commands: service.TelemetryCommand) -> str:
        """Return the first answer on a stream: a status and settings, or the gRPC status that ended the stream."""
        sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for command in commands:
            sent.put(command.SerializeToString())
        headers = [("x-mq-client-id", "conformance"), ("x-mq-language", "PYTHON")]
        call = self.channel.stream_stream(_SERVICE + "Telemetry")(iter(sent.get, None), 20.0, metadata=headers)
        try:
            answer = service.TelemetryCommand.FromString(next(call))
        except grpc.RpcError as exc:
            return str(exc.code().name)
        finally:
            sent.put(None)
            call.cancel()
        return str(answer)

    def wait_for(self, kind: str, count: int) -> list[MessageExt]:
        """Return the messages of a topic, when consumers see that many."""
        wait_for(lambda: len(self.read(kind)) >= count)
        return self.read(kind)

    def read(self, kind: str) -> list[MessageExt]:
        """Return the messages of a topic by broker, queue and offset."""
        topic, messages = self.topics[kind], []
        for broker in sorted(
            self.remoting.query_route(topic, PATIENCE).broker_datas, key=lambda data: data.broker_name
        ):
            assert broker.master is not None
            for queue_id in range(4):
                target = PullTarget(MessageQueue(topic, broker.broker_name, queue_id), "cg", 32, "*", "TAG")
                outcome = self.remoting.pull_now(PullRequest(target, broker.master, 0), PATIENCE)
                messages += decode_records(outcome.body)
        return messages


Scenario = Callable[[Target], Iterator[str]]


def sends(target: Target) -> Iterator[str]:
    """Accepted and refused sends."""
    message = target.message

    def named(topic: str) -> pb.Message:
        one = message()
        one.topic.name = topic
        return one

    def having(**properties: str) -> pb.Message:
        one = message()
        one.user_properties.update({name.replace("_0_", "\t"): text for name, text in properties.items()})
        return one

    def late(seconds: int, **system: Any) -> pb.Message:
        one = message("DELAY", **system)
        one.system_properties.delivery_timestamp.FromSeconds(int(time.time()) + seconds)
        return one

    def recovered(seconds: int) -> pb.Message:
        one = message("TRANSACTION")
        one.system_properties.orphaned_transaction_recovery_duration.FromSeconds(seconds)
        return one

    two = message("NORMAL", b"two"), message("NORMAL", b"three")
    requests: dict[str, tuple[pb.Message, ...]] = {
        "single": (message(),),
        "batch": two,
        "batch of one id": (two[0], two[0]),
        "nothing": (),
        "two topics": (message(), message("FIFO")),
        "empty body": (message(body=b""),),
        "batch with an empty body": (message(), message(body=b"")),
        "largest body": (message(body=b"x" * 4 * _MIB),),
        "body too long": (message(body=b"x" * (4 * _MIB + 1)),),
        "largest batch": (message(body=b"x" * (2 * _MIB - 1024)),) * 2,
        "batch too long": (message(body=b"x" * 2 * _MIB),) * 2,
        "unknown topic": (named(f"no-{target.topics['NORMAL']}"),),
        "illegal topic": (named("not/legal"),),
        "empty topic": (named(""),),
        "topic too long": (named("t" * 128),),
        **{
            topic: (named(topic),)
            for topic in ("TBW102", "SCHEDULE_TOPIC_XXXX", "%RETRY%group", "%DLQ%group", "rmq_sys_any")
        },
        "no id": (_without(message(), "message_id"),),
        "any id": (message(message_id="any"),),
        "no type": (_without(message(), "message_type"),),
        "no born timestamp": (_without(message(), "born_timestamp"),),
        "tag": (message(tag="a b"),),
        "blank tag": (message(tag="  "),),
        "tag with a bar": (message(tag="a|b"),),
        "tag with a tab": (message(tag="a\tb"),),
        "keys": (message(keys=["k 1", "k2"]),),
        "blank key": (message(keys=["k", " "]),),
        "empty key": (message(keys=[""]),),
        "key with a control character": (message(keys=["k\x7f"]),),
        "property": (having(mine="yours", empty=""),),
        "reserved property": (having(KEYS="k"),),
        "reserved timer": (having(TIMER_DELAY_MS="1000"),),
        "inner number": (having(INNER_NUM="2"),),
        "property name with a tab": (having(a_0_b="x"),),
        "property with a line feed": (having(mine="a\nb"),),
        "property with C1 control": (having(mine="a\x85b"),),
        "128 properties": (having(**{f"p{number}": "x" for number in range(128)}),),
        "129 properties": (having(**{f"p{number}": "x" for number in range(129)}),),
        "largest properties": (having(mine="x" * (16_384 - 4)),),
        "properties too large": (having(mine="x" * (16_384 - 3)),),
        "compressed": (message(body_encoding=pb.GZIP),),
        "group": (message("FIFO"),),
        "group of 63 bytes": (message("FIFO", message_group="g" * 63),),
        "group of 64 bytes": (message("FIFO", message_group="g" * 64),),
        "blank group": (message("FIFO", message_group=" "),),
        "group with a tab": (message("FIFO", message_group="a\tb"),),
        "batch of a group": (message("FIFO"), message("FIFO")),
        "delay": (message("DELAY"),),
        "delivery in the past": (late(-100),),
        "delivery tomorrow": (late(24 * 3600 - 60),),
        "delivery too late": (late(24 * 3600 + 60),),
        "batch of delays": (message("DELAY"), message("DELAY")),
        "half message": (message("TRANSACTION"),),
        "batch of half messages": (message("TRANSACTION"), message("TRANSACTION")),
        "recovery": (recovered(3600),),
        "recovery too late": (recovered(3601),),
    }
    for name, messages in requests.items():
        yield f"{name}: {target.send(*messages)}"
    for method in ("SendMessage", "QueryRoute", "EndTransaction"):
        yield f"{method} of other bytes: {target.call(method, bytes([255, 255]))}"


def _without(message: pb.Message, name: Any) -> pb.Message:
    message.system_properties.ClearField(name)
    return message


def types(target: Target) -> Iterator[str]:
    """Messages of each type to topics of each type."""
    kinds = {kind: target.message(kind) for kind in TYPES}
    plain = target.message()
    for kind in TYPES:
        message = pb.Message()
        message.CopyFrom(plain)
        message.system_properties.message_type = getattr(pb, kind)
        kinds[f"{kind} by name"] = message
    both = target.message("DELAY", message_group="g")
    half = target.message("TRANSACTION", message_group="g")
    kinds |= {"group and delay": both, "group and transaction": half}
    for (name, message), topic in itertools.product(kinds.items(), TYPES):
        message.topic.name = target.topics[topic]
        yield f"{name} to {topic}: {target.send(message)}"
    first, second = target.message(), target.message("FIFO")
    second.topic.name = first.topic.name
    yield f"another type behind the first: {target.send(first, second)}"
    yield f"another type before the last: {target.send(second, first)}"


def results(target: Target) -> Iterator[str]:
    """The fields of answers to sends."""
    requests = {kind: [target.message(kind)] for kind in TYPES} | {"batch": [target.message() for _ in range(3)]}
    for name, messages in requests.items():
        request = service.SendMessageRequest(messages=messages)
        reply = target.call("SendMessage", request, service.SendMessageResponse)
        ids = [message.system_properties.message_id for message in messages]
        (entry,) = reply.entries
        codes = pb.Code.Name(reply.status.code), pb.Code.Name(entry.status.code)
        yield f"{name}: {codes}, {entry.message_id == ','.join(ids)}, {entry.transaction_id == ids[0]}"
        words = base64.urlsafe_b64decode(entry.recall_handle).decode().split(" ")
        yield f"{name}: {words[0]} {words[1:2] == [messages[0].topic.name]} {words[4:] == ids}"
        if name in ("NORMAL", "FIFO", "batch"):
            yield f"{name}: offset {entry.offset}"


def stored(target: Target) -> Iterator[str]:
    """What a consumer sees of messages."""
    for kind in TYPES[:3]:
        one = target.message(kind, b"one", tag="a", keys=["k1", "k2"], body_encoding=pb.GZIP)
        one.user_properties["mine"] = "yours"
        yield f"{kind}: {target.send(one)}"
    batch = target.message(body=b"two"), _without(target.message(body=b"three"), "born_timestamp")
    yield f"batch: {target.send(*batch)}"
    for kind in TYPES[:3]:
        # A proxy begins with any queue.
        for message in sorted(target.wait_for(kind, 3 if kind == "NORMAL" else 1), key=lambda one: one.body):
            names = sorted(message.properties.keys() - SOMETIMES)
            yield f"{kind}: {names} {message.sys_flag} {message.flag} {message.born_timestamp}"
            shown = ("TAGS", "KEYS", "PGROUP", "RECONSUME_TIME", "__BORNHOST", "BORN_TIMESTAMP", "__SHARDINGKEY")
            texts = [message.properties.get(name) for name in shown]
            yield f"{kind}: {texts} {message.reconsume_times}".replace(target.topics[kind], kind)


def routes(target: Target) -> Iterator[str]:
    """Routes, as a proxy answers them."""
    port = target.endpoint.rpartition(":")[2]
    asked = pb.Endpoints(scheme=pb.DOMAIN_NAME, addresses=[pb.Address(host="proxy.example", port=9999)])
    for kind, topic in target.topics.items():
        for endpoints in (asked, pb.Endpoints()):
            request = service.QueryRouteRequest(topic=pb.Resource(name=topic), endpoints=endpoints)
            reply = target.call("QueryRoute", request, service.QueryRouteResponse)
            queues = sorted(reply.message_queues, key=lambda one: (one.broker.name, one.id))
            yield f"{kind}: {pb.Code.Name(reply.status.code)}, {len(queues)} queues"
            for one in queues[:5]:
                answered = one.broker.endpoints
                addresses = [(address.host, address.port == int(port)) for address in answered.addresses]
                yield f"{one.id} {one.permission} {one.broker.id} {answered.scheme} {addresses}"
                yield f"{one.topic.name == topic} {list(one.accept_message_types)}"
    for topic in (f"no-{target.topics['NORMAL']}", "not/legal", "t" * 128, "", "TBW102", "SELF_TEST_TOPIC"):
        request = service.QueryRouteRequest(topic=pb.Resource(name=topic), endpoints=asked)
        unknown = topic.startswith("no-")
        yield f"{'unknown' if unknown else topic}: {target.call('QueryRoute', request)}"
    route = target.transport.query_route(target.topics["FIFO"], PATIENCE)
    yield f"{sorted(route.message_types)} {[queue.perm for queue in route.queue_datas]}"
    yield result_of(lambda: target.transport.query_route(f"none-{target.topics['FIFO']}", PATIENCE)).partition("(")[0]


def groups(target: Target) -> Iterator[str]:
    """The queues of messages with a group."""
    names = [f"group-{number}" for number in range(12)] + ["ü", "\u20ac"]
    for name in names * 2:
        yield f"{name}: {target.send(target.message('FIFO', name.encode(), message_group=name))}"
    messages = target.wait_for("FIFO", 2 * len(names))
    # The messages are ordered by broker.
    hosts = list(dict.fromkeys(message.store_host for message in messages))
    for name in names:
        places = [(hosts.index(one.store_host), one.queue_id) for one in messages if one.body == name.encode()]
        yield f"{name}: {places}"


def transactions(target: Target) -> Iterator[str]:
    """Ends of half messages, wrong and repeated ones among them."""
    topic = target.topics["TRANSACTION"]

    def half(body: bytes) -> str:
        message = target.message("TRANSACTION", body)
        request = service.SendMessageRequest(messages=[message])
        reply = target.call("SendMessage", request, service.SendMessageResponse)
        assert reply.entries[0].transaction_id == message.system_properties.message_id
        return message.system_properties.message_id

    def end(half_id: str, how: int, *, topic: str = topic, transaction_id: str | None = None) -> str:
        request = service.EndTransactionRequest(
            topic=pb.Resource(name=topic),
            message_id=half_id,
            transaction_id=half_id if transaction_id is None else transaction_id,
            resolution=how,  # type: ignore[arg-type]
            source=pb.SOURCE_CLIENT,
        )
        return str(target.call("EndTransaction", request))

    committed, rolled_back, undecided, other = half(b"a"), half(b"b"), half(b"c"), half(b"d")
    yield f"blank id: {end(committed, pb.COMMIT, transaction_id=' ')}"
    yield f"wrong topic: {end(committed, pb.COMMIT, topic=target.topics['NORMAL'])}"
    yield f"illegal topic: {end(committed, pb.COMMIT, topic='not/legal')}"
    yield f"unknown: {end(committed, pb.COMMIT, transaction_id='unknown')}"
    yield f"no message id: {end('', pb.COMMIT, transaction_id=other)}"
    yield f"commit: {end(committed, pb.COMMIT)}"
    yield f"roll back: {end(rolled_back, pb.ROLLBACK)}"
    yield f"undecided: {end(undecided, pb.TRANSACTION_RESOLUTION_UNSPECIFIED)}"
    for name, half_id in (("commit", committed), ("roll back", rolled_back), ("undecided", undecided)):
        yield f"commit after {name}: {end(half_id, pb.COMMIT)}"
    for message in sorted(target.wait_for("TRANSACTION", 2), key=lambda one: one.body):
        yield f"{message.body!r} {message.sys_flag & 0xC} {sorted(message.properties.keys() - SOMETIMES)}"


def recalls(target: Target) -> Iterator[str]:
    """Requests to take a delayed message back."""

    def recall(topic: str, handle: str) -> str:
        request = service.RecallMessageRequest(topic=pb.Resource(name=topic), recall_handle=handle)
        return str(target.call("RecallMessage", request))

    delays = target.topics["DELAY"]
    words = base64.urlsafe_b64encode(f"v1 {delays} no-broker 1 id".encode()).decode()
    for name, handle in {"empty": "", "no base64": "%%%", "no handle": "aGFuZGxl", "unknown broker": words}.items():
        yield f"{name}: {recall(delays, handle)}"
    yield f"another type: {recall(target.topics['NORMAL'], words)}"
    yield f"unknown topic: {recall('no-such-topic', words)}"
    yield f"illegal topic: {recall('not/legal', words)}"


def clients(target: Target) -> Iterator[str]:
    """Settings, heartbeats and terminations."""
    beat, goodbye = service.HeartbeatRequest(client_type=pb.PRODUCER), service.NotifyClientTerminationRequest()
    route = service.QueryRouteRequest(topic=pb.Resource(name=target.topics["NORMAL"]))
    for method, request in (("QueryRoute", route), ("Heartbeat", beat), ("NotifyClientTermination", goodbye)):
        yield f"{method} without id: {target.call(method, request, **{'x-mq-client-id': ' '})}"
        yield f"{method} without settings: {target.call(method, request)}"
    for method in ("PullMessage", "GetOffset", "NoSuchMethod"):
        yield f"{method}: {target.call(method, b'')}"

    def settings(*topics: str) -> service.TelemetryCommand:
        resources = [pb.Resource(name=topic) for topic in topics]
        publishing = pb.Publishing(topics=resources, max_body_size=9, validate_message_type=False)
        sent = pb.Settings(client_type=pb.PRODUCER, publishing=publishing)
        sent.backoff_policy.max_attempts = 7
        return service.TelemetryCommand(settings=sent)

    nothing = service.TelemetryCommand(settings=pb.Settings(client_type=pb.PRODUCER))
    yield f"settings of nothing: {target.telemetry(nothing)}"
    yield f"illegal topic: {target.telemetry(settings('not/legal'))}"
    for name, topics in (("settings", [target.topics["TRANSACTION"]]), ("unknown", ["no-such-topic"]), ("none", [])):
        yield f"{name}: {target.telemetry(settings(*topics))}".replace(target.topics["TRANSACTION"], "TRANSACTION")
    for method, request in (("Heartbeat", beat), ("NotifyClientTermination", goodbye), ("Heartbeat", beat)):
        yield f"{method}: {target.call(method, request)}"


SCENARIOS: Final[tuple[Scenario, ...]] = (
    *(sends, types, results, stored, routes, groups, transactions, recalls, clients),
)


def run(scenario: Scenario, endpoints: str, name_server: str, topics: Mapping[str, str]) -> list[str]:
    """Return the lines of a scenario at a proxy."""
    with (
        GrpcTransport([endpoints], client_id="conformance") as transport,
        RemotingTransport([name_server]) as remoting,
        grpc.insecure_channel(endpoints) as channel,
    ):
        return list(scenario(Target(transport, remoting, channel, topics)))
