"""A fake cluster and a real one have the same outcomes while brokers die, hang and return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import MQBrokerException
from rocketmq_spark.model.message import SendOutcome
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.conformance import Target, error_class, outcome_class
from tests.support.contract import Outcomes
from tests.support.processes import PATIENCE, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.integration]

# Seconds: the time-out of sends that a paused broker does not answer.
SOON = 1.0


class Victim(NamedTuple):
    """The first broker of a cluster, and what can be done to it."""

    target: Target
    kill: Callable[[], None]
    restart: Callable[[], None]
    pause: Callable[[], None]
    resume: Callable[[], None]

    def start_send(self, body: bytes, timeout: float = PATIENCE) -> Outcomes:
        return self.target.start_send(self.target.single(body), timeout=timeout)

    def send(self, body: bytes, timeout: float = PATIENCE) -> str:
        return described(self.start_send(body, timeout).wait(1)[0])

    def in_route(self) -> bool:
        try:
            route = self.target.transport.query_route(self.target.topic, PATIENCE)
        except MQBrokerException:
            return False
        return self.target.broker_name in masters_of(route.broker_datas)


def described(outcome: SendOutcome) -> str:
    maybe = "" if outcome.error is None else f", maybe stored {outcome.error.maybe_stored}"
    return f"{outcome_class(outcome)}{maybe}"


def dies_and_returns(victim: Victim) -> Iterator[str]:
    yield f"before: {victim.send(b'1')}"
    victim.kill()
    # A request that was written before the client noticed the end of the connection may have been stored.
    wait_for(lambda: victim.send(b"2") == "RemotingConnectException, maybe stored False")
    wait_for(lambda: not victim.in_route())
    yield "the route has no such broker"
    victim.restart()
    wait_for(victim.in_route)
    yield f"returned: {victim.send(b'3')}"
    victim.target.wait_for(2)
    yield f"stored: {victim.target.transport.max_offset(victim.target.queue(), victim.target.address, PATIENCE)}"


def hangs_and_returns(victim: Victim) -> Iterator[str]:
    yield f"before: {victim.send(b'1')}"
    victim.pause()
    yield f"paused: {victim.send(b'2', SOON)}"
    yield f"in the route: {victim.in_route()}"
    victim.resume()
    # The request waited in the broker's socket.
    victim.target.wait_for(2)
    yield f"resumed: {victim.send(b'3')}"


def dies_while_a_request_waits(victim: Victim) -> Iterator[str]:
    yield f"before: {victim.send(b'1')}"
    victim.pause()
    waiting = victim.start_send(b"2")
    victim.kill()
    yield f"killed: {described(waiting.wait(1)[0])}"
    wait_for(lambda: victim.send(b"3") == "RemotingConnectException, maybe stored False")
    victim.restart()
    wait_for(victim.in_route)
    yield f"returned: {victim.send(b'4')}"


def name_server_has_no_broker_for_an_unknown_topic(victim: Victim) -> Iterator[str]:
    for topic in ("no-such-topic", victim.target.topic):
        try:
            victim.target.transport.query_route(topic, PATIENCE)
            yield f"{topic == victim.target.topic}: found"
        except MQBrokerException as exc:
            yield f"{topic == victim.target.topic}: {error_class(exc)}"


SCENARIOS = (
    dies_and_returns,
    hangs_and_returns,
    dies_while_a_request_waits,
    name_server_has_no_broker_for_an_unknown_topic,
)


def real_victim(cluster: LocalCluster, transport: RemotingTransport, topic: str) -> Victim:
    broker = cluster.brokers[0]
    for each in cluster.brokers:
        transport.create_topic(each.address, topic, 4, 6, PATIENCE)
    target = Target(transport, broker.name, broker.address, topic)
    victim = Victim(target, broker.kill, broker.restart, broker.pause, broker.resume)
    wait_for(lambda: len(victim.target.transport.query_route(topic, PATIENCE).queue_datas) == len(cluster.brokers))
    return victim


def fake_victim(cluster: FakeCluster, transport: RemotingTransport, topic: str) -> Victim:
    name, broker = next(iter(cluster.brokers.items()))
    kill, restart = functools.partial(cluster.kill, name), functools.partial(cluster.restart, name)
    return Victim(Target(transport, name, broker.address, topic), kill, restart, broker.pause, broker.resume)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_fake_cluster_fails_and_recovers_like_a_real_one(
    two_brokers: LocalCluster, topic: str, scenario: Callable[[Victim], Iterator[str]]
) -> None:
    with RemotingTransport([two_brokers.name_server]) as transport:
        real = list(scenario(real_victim(two_brokers, transport, topic)))
    with FakeCluster(2, topics={topic: 4}) as fake, RemotingTransport([fake.name_server]) as transport:
        assert list(scenario(fake_victim(fake, transport, topic))) == real
