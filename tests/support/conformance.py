"""Scenarios whose outcome classes must be the same on a real cluster and on `FakeCluster`.

A scenario sends requests through the connector's transport, and yields a line for each outcome: a status, the class and
code of an error, or values that do not depend on time and place. `run` returns the lines of one scenario.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from rocketmq_spark.errors import MQBrokerException, RocketMQError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullTarget
from rocketmq_spark.model.send_result import EndTransaction
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.records import decode_records, encode_batch, encode_properties
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.contract import Outcomes, next_id
from tests.support.processes import PATIENCE, wait_for

GROUP: Final = "pg-conformance"
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class Target:
    """A cluster's transport, and the topics of one scenario, each with four queues on each broker."""

    transport: RemotingTransport
    broker_name: str
    address: str
    topic: str

    def queue(self, queue_id: int = 0) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, queue_id)

    def start_send(
        self, encoded: EncodedBatch, queue_id: int = 0, default_topic: str = "TBW102", *, timeout: float = PATIENCE
    ) -> Outcomes:
        """Send; the outcome comes later."""
        outcomes = Outcomes()
        queue, born = MessageQueue(encoded.topic, self.broker_name, queue_id), int(time.time() * 1000)
        self.transport.send(SendRequest(encoded, queue, self.address, GROUP, default_topic, 4, born), timeout, outcomes)
        return outcomes

    def send(
        self, encoded: EncodedBatch, queue_id: int = 0, default_topic: str = "TBW102", *, timeout: float = PATIENCE
    ) -> SendOutcome:
        """Send, and wait for the outcome."""
        outcome: SendOutcome = self.start_send(encoded, queue_id, default_topic, timeout=timeout).wait(1)[0]
        return outcome

    def single(self, body: bytes = b"x", sys_flag: int = 0, topic: str = "", **properties: str) -> EncodedBatch:
        text = encode_properties({"UNIQ_KEY": next_id(), "WAIT": "true", **properties}).decode()
        return EncodedBatch(topic or self.topic, (body,), 1, len(body), batch=False, properties=text, sys_flag=sys_flag)

    def batch(self, *bodies: bytes, properties: str = "", sys_flag: int = 0, **others: str) -> EncodedBatch:
        messages = [Message(self.topic, body, properties={"UNIQ_KEY": next_id(), **others}) for body in bodies]
        body = encode_batch(messages)
        return EncodedBatch(self.topic, (body,), len(bodies), len(body), properties=properties, sys_flag=sys_flag)

    def pull(self, offset: int, queue_id: int = 0, *, most: int = 32, tags: str = "*", topic: str = "") -> PullOutcome:
        queue = MessageQueue(topic or self.topic, self.broker_name, queue_id)
        target = PullTarget(queue, "cg-conformance", most, tags, "TAG")
        return self.transport.pull_now(PullRequest(target, self.address, offset), PATIENCE)

    def wait_for(self, count: int, queue_id: int = 0) -> None:
        """Wait until consumers see that many messages: a broker builds its queues after the acknowledgement."""
        wait_for(lambda: self.transport.max_offset(self.queue(queue_id), self.address, PATIENCE) >= count)
        wait_for(lambda: self.pull(count - 1, queue_id).body != b"")


Scenario = Callable[[Target], Iterator[str]]


def outcome_class(outcome: SendOutcome | PullOutcome) -> str:
    """Return the status, or the class and code of the error."""
    return outcome.status.name if outcome.status is not None else error_class(outcome.error)


def error_class(error: BaseException | None) -> str:
    code = f"/{error.response_code}" if isinstance(error, MQBrokerException) else ""
    return f"{type(error).__name__}{code}"


def result_of(call: Callable[[], object]) -> str:
    """Return what a blocking call returns, or the class of its error."""
    try:
        return str(call())
    except RocketMQError as exc:
        return error_class(exc)


def sends(target: Target) -> Iterator[str]:
    """Accepted and refused sends."""
    single, batch = target.single, target.batch
    whole = batch(b"one", b"two")

    def cut(missing: int) -> EncodedBatch:
        return replace(whole, body=(bytes(whole.body[0])[:-missing],), nbytes=whole.nbytes - missing)

    requests = {
        "single": single(),
        "batch": batch(b"one", b"two", b""),
        "empty body": single(b""),
        "body of the largest size": single(b"x" * 4 * _MIB),
        "body too long": single(b"x" * (4 * _MIB + 1)),
        "batch too long": batch(*[b"x" * _MIB] * 4),
        "batch without its last properties": cut(3),
        "batch without the head of its last message": cut(len(encode_batch([Message("", b"")])) + 47),
        "empty batch": EncodedBatch(target.topic, (), 0, 0),
        "reserved topic": single(topic="SCHEDULE_TOPIC_XXXX"),
        "illegal topic": single(topic="not/legal"),
        "topic too long": single(topic="t" * 128),
        "inner number": single(INNER_NUM="2"),
        "needs unwrapping": single(sys_flag=0x40),
        "inner batch": single(sys_flag=0x80),
        "both bits": single(sys_flag=0xC0),
        "long properties": single(mine="x" * 32_700),
        "delay level": single(DELAY="1"),
        "level that is no number": single(DELAY="soon"),
        "timer": single(TIMER_DELAY_MS="1000"),
        "timer in the past": single(TIMER_DELIVER_MS="1000"),
        "timer that is no number": single(TIMER_DELAY_MS="soon"),
        "timer too late": single(TIMER_DELAY_SEC=str(4 * 24 * 3600)),
        "delay of a batch": batch(b"x", properties="DELAY\x013\x02"),
        "transaction bits of a batch": batch(b"x", sys_flag=4),
        "half message": single(TRAN_MSG="true", PGROUP=GROUP, sys_flag=4),
        "half message in a batch": batch(b"x", TRAN_MSG="true", PGROUP=GROUP),
        "compressed": single(sys_flag=0x301),
    }
    for name, encoded in requests.items():
        yield f"{name}: {outcome_class(target.send(encoded))}"
    yield f"queue id: {outcome_class(target.send(single(), 99))}"
    for name, template in (("no template", "no-such-topic"), ("template", "TBW102")):
        encoded = single(topic=f"{target.topic}-{name[:2]}")
        yield f"unknown topic, {name}: {outcome_class(target.send(encoded, default_topic=template))}"


def answers(target: Target) -> Iterator[str]:
    """The fields of acknowledgements."""
    batches = target.batch(b"1", b"2", b"3"), target.batch(b"4", properties=f"UNIQ_KEY\x01{next_id()}\x02")
    for name, encoded in (("single", target.single()), ("batch", batches[0]), ("batch with an id", batches[1])):
        first, second = target.send(encoded, 1), target.send(encoded, 1)
        ids = first.offset_msg_id.split(",")
        yield f"{name}: {second.queue_offset - first.queue_offset} offsets, queue {first.queue.queue_id}"
        yield f"{name}: {len(ids)} ids of {sorted(set(map(len, ids)))}, transaction {bool(first.transaction_id)}"
        yield f"{name}: {first.region_id}, trace {first.trace_on}, recall {bool(first.recall_handle)}"
    timer = target.send(target.single(TIMER_DELAY_MS="60000"), 1)
    yield f"timer: queue {timer.queue.queue_id}, recall {bool(timer.recall_handle)}"
    half = target.send(target.single(TRAN_MSG="true", PGROUP=GROUP, sys_flag=4), 1)
    yield f"half: queue {half.queue.queue_id}, {half.offset_msg_id != '' and half.transaction_id != ''}"


def stored(target: Target) -> Iterator[str]:
    """What a consumer sees of messages."""
    target.send(target.single(b"one", mine="yours", TAGS="a", KEYS="k1 k2"))
    target.send(target.batch(b"two", b"", mine="yours"))
    target.wait_for(3)
    outcome = target.pull(0)
    for message in decode_records(outcome.body):
        yield f"{message.body!r} {message.queue_offset} {sorted(message.properties)} {message.sys_flag} {message.flag}"
        yield f"{message.properties['mine']} {message.reconsume_times} {message.prepared_transaction_offset}"
        viewed = target.transport.view_message(target.address, message.physical_offset, PATIENCE, topic=target.topic)
        yield f"viewed {viewed.body == message.body} {viewed.queue_offset}"
    yield result_of(lambda: target.transport.view_message(target.address, 1 << 40, PATIENCE, topic=target.topic))


def pulls(target: Target) -> Iterator[str]:
    """Pulls, offsets and filters."""
    queue, address, transport = target.queue(), target.address, target.transport
    yield f"empty: {outcome_class(target.pull(0))}, {outcome_class(target.pull(5))}"
    yield f"empty: {transport.search_offset(queue, 0, address, PATIENCE)}"
    yield f"empty: {transport.earliest_msg_store_time(queue, address, PATIENCE)}"
    for tag in "aba":
        target.send(target.single(tag.encode(), TAGS=tag))
    target.wait_for(3)
    for offset, most, tags in ((0, 32, "*"), (1, 1, "*"), (3, 32, "*"), (7, 32, "*"), (0, 32, "b"), (0, 32, "z || y")):
        outcome = target.pull(offset, most=most, tags=tags)
        offsets = [record.queue_offset for record in decode_records(outcome.body)]
        yield f"{offset} {tags}: {outcome_class(outcome)} {outcome.next_begin_offset} {outcome.max_offset} {offsets}"
    for name in (transport.min_offset, transport.max_offset):
        yield f"{name.__name__}: {name(queue, address, PATIENCE)}"
        yield f"{name.__name__} of no queue: {name(target.queue(99), address, PATIENCE)}"
    yield f"search: {transport.search_offset(queue, 0, address, PATIENCE)}"
    yield f"search beyond the end: {transport.search_offset(queue, 1 << 42, address, PATIENCE)}"
    yield f"no such topic: {outcome_class(target.pull(0, topic='no-such-topic'))}"
    yield f"no such queue: {outcome_class(target.pull(0, 99))}"
    for expression, kind in (("a || b", "TAG"), ("a > 1", "SQL92"), ("a >", "SQL92")):
        check = lambda: transport.check_filter(address, target.topic, "cg-conformance", expression, kind, PATIENCE)  # noqa: B023, E731
        yield f"filter {expression}: {result_of(check)}"


def inner_batches(target: Target) -> Iterator[str]:
    """A topic of the type BatchCQ, which stores a batch as one message."""
    transport, address, name = target.transport, target.address, f"{target.topic}-inner"
    transport.create_topic(address, name, 4, 6, PATIENCE, attributes="+queue.type=BatchCQ")
    inner = replace(target, topic=name)
    yield f"empty: {transport.max_offset(inner.queue(), address, PATIENCE)} {outcome_class(inner.pull(0))}"
    for bodies in ((b"a", b"b", b"c"), (b"d", b"e"), (b"f",) * 40):
        outcome = inner.send(inner.batch(*bodies, properties=f"UNIQ_KEY\x01{next_id()}\x02"))
        yield f"{outcome_class(outcome)} {outcome.queue_offset} {bool(outcome.batch_uniq_id)}"
    for encoded in (inner.batch(b"x", b"y"), inner.single(b"z")):
        outcome = inner.send(encoded)
        yield f"{outcome_class(outcome)} {outcome.queue_offset} {bool(outcome.batch_uniq_id)}"
    inner.wait_for(48)
    yield f"offsets from {transport.min_offset(inner.queue(), address, PATIENCE)}"
    for start, most in ((0, 32), (0, 1), (0, 4), (1, 4), (3, 32), (4, 1), (5, 32), (44, 32), (45, 32), (48, 32)):
        pulled = inner.pull(start, most=most)
        yield f"{start} {most}: {outcome_class(pulled)} {pulled.next_begin_offset} {pulled.max_offset}"
        for record in decode_records(pulled.body):
            counts = record.properties.get("INNER_NUM"), record.properties.get("INNER_BASE")
            yield f"{record.queue_offset} {counts} {record.sys_flag} {sorted(record.properties)}"


def transactions(target: Target) -> Iterator[str]:
    """Ends of half messages, repeated ones among them."""
    transport, address = target.transport, target.address

    def half(**properties: Any) -> EndTransaction:
        encoded = target.single(TRAN_MSG="true", PGROUP=GROUP, sys_flag=4, **properties)
        outcome = target.send(encoded)
        return EndTransaction(
            topic=target.topic,
            producer_group=GROUP,
            tran_state_table_offset=outcome.queue_offset,
            commit_log_offset=int(outcome.offset_msg_id[-16:], 16),
            commit_or_rollback=8,
            msg_id=outcome.transaction_id,
            transaction_id=outcome.transaction_id,
            broker_name=target.broker_name,
        )

    def end(request: EndTransaction) -> str:
        outcomes = Outcomes()
        transport.end_transaction(address, request, PATIENCE, outcomes)
        error = outcomes.wait(1)[0]
        return "done" if error is None else error_class(error)

    committed, rolled_back, other = half(), half(), half()
    yield f"wrong group: {end(replace(committed, producer_group='another'))}"
    yield f"wrong offset: {end(replace(committed, tran_state_table_offset=committed.tran_state_table_offset + 1))}"
    yield f"no message: {end(replace(committed, commit_log_offset=1 << 40))}"
    yield f"commit: {end(committed)}"
    yield f"roll back: {end(replace(rolled_back, commit_or_rollback=12))}"
    yield f"commit after roll back: {end(rolled_back)}"
    yield f"commit twice: {end(other)}, {end(other)}"
    target.wait_for(4)
    outcome = target.pull(0)
    for record in decode_records(outcome.body):
        half_offset = record.prepared_transaction_offset
        of = {one.commit_log_offset: name for one, name in ((committed, "a"), (rolled_back, "b"), (other, "c"))}
        # A real broker may have checked the half message before its end.
        names = sorted(record.properties.keys() - {"TRANSACTION_CHECK_TIMES"})
        yield f"{of.get(half_offset)} {record.queue_offset} {record.sys_flag & 0xC} {names}"


def delays(target: Target) -> Iterator[str]:
    """Delivery of delayed messages."""
    target.send(target.single(b"level", DELAY="1"), 1)
    target.send(target.single(b"timer", TIMER_DELAY_MS="1000"), 2)
    for queue_id in (1, 2):
        target.wait_for(1, queue_id)
        (record,) = decode_records(target.pull(0, queue_id).body)
        kept = sorted(record.properties.keys() & {"DELAY", "TIMER_DELAY_MS", "REAL_TOPIC", "REAL_QID"})
        yield f"{record.body!r} {kept} {record.topic == target.topic} {record.queue_id}"


def groups(target: Target) -> Iterator[str]:
    """Consumer groups and their offsets."""
    transport, address, group = target.transport, target.address, f"cg-{target.topic}"
    yield result_of(lambda: transport.consumers(group, address, PATIENCE))
    transport.register_consumer("10.0.0.2@conformance", group, address, PATIENCE)
    yield result_of(lambda: transport.consumers(group, address, PATIENCE))
    yield result_of(lambda: transport.update_consumer_offset(target.queue(), group, 999, address, PATIENCE))
    fields = {"topic": target.topic, "queueId": "0", "bname": target.broker_name}
    for name in (group, "cg-unknown"):
        for zero in ("true", "false"):
            asked = {**fields, "consumerGroup": name, "setZeroIfNotFound": zero}
            command = transport.client.invoke(address, RequestCode.QUERY_CONSUMER_OFFSET, asked, (), PATIENCE)
            yield f"{name == group} {zero}: {command.code} {command.ext_fields.get('offset')}"
    unregister = {"clientID": "10.0.0.2@conformance", "consumerGroup": group}
    yield str(transport.client.invoke(address, RequestCode.UNREGISTER_CLIENT, unregister, (), PATIENCE).code)
    yield result_of(lambda: transport.consumers(group, address, PATIENCE))


def topics(target: Target) -> Iterator[str]:
    """Topics: routes, settings, permissions."""
    transport, address, name = target.transport, target.address, f"{target.topic}-made"
    yield f"config: {transport.topic_config(address, target.topic, PATIENCE)}"
    yield f"unknown config: {result_of(lambda: transport.topic_config(address, 'no-such-topic', PATIENCE))}"
    yield f"unknown route: {result_of(lambda: transport.query_route('no-such-topic', PATIENCE))}"

    def create(topic: str, perm: int = 6, attributes: str = "") -> str:
        return result_of(lambda: transport.create_topic(address, topic, 3, perm, PATIENCE, attributes=attributes))

    yield f"illegal name: {create('not/legal')}"
    yield f"unknown attribute: {create(name, attributes='+no.such=1')}"
    yield f"created: {create(name, attributes='+message.type=FIFO')}"
    yield f"{transport.topic_config(address, name, PATIENCE)}"

    def route() -> list[tuple[int, int, int]]:
        with contextlib.suppress(MQBrokerException):
            datas = transport.query_route(name, PATIENCE).queue_datas
            return [(data.read_queue_nums, data.write_queue_nums, data.perm) for data in datas]
        return []

    wait_for(lambda: bool(route()))
    yield f"route: {route()}"
    yield f"write only: {create(name, perm=2)}"
    wait_for(lambda: [perm for _, _, perm in route()] == [2])
    changed = replace(target, topic=name)
    yield f"pull: {outcome_class(changed.pull(0))}"
    yield f"read only: {create(name, perm=4)}, {outcome_class(changed.send(changed.single()))}"
    yield f"listed: {name in transport.topics(PATIENCE)}"
    for address, code in ((target.address, 106), (target.address, 999)):
        yield f"{code}: {transport.client.invoke(address, code, {}, (), PATIENCE).code}"


SCENARIOS: Final[tuple[Scenario, ...]] = (
    sends,
    answers,
    stored,
    pulls,
    inner_batches,
    transactions,
    delays,
    groups,
    topics,
)


def run(scenario: Scenario, transport: RemotingTransport, topic: str) -> list[str]:
    """Return the lines of a scenario on the first broker of a topic."""
    route = transport.query_route(topic, PATIENCE)
    broker = min(route.broker_datas, key=lambda data: data.broker_name)
    assert broker.master is not None
    return list(scenario(Target(transport, broker.broker_name, broker.master, topic)))
