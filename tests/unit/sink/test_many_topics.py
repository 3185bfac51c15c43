"""The cost of an acknowledgement does not depend on the number of waiting topics: the tests count tried deliveries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.testing import Reply
from tests.support.pipelines import Rig, refused
from tests.support.scripted import route

# An answer frees one slot, or two when it also widens the window; each is tried for a line that waited and for the next
# batch of the line that is served.
MOST = 4
TOPICS = [f"T{number}" for number in range(500)]


def rig_of(brokers: str, **options: Any) -> Rig:
    """Return a rig with 500 topics on these brokers, which answer after 10 ms. Rechecks are 30 s apart."""
    backoff = {"retry_backoff_ms": 30_000, "retry_backoff_max_ms": 30_000, "delivery_timeout_ms": 600_000}
    rig = Rig(route(dict.fromkeys(brokers, 2)), **backoff, **options)
    rig.infos = {topic: publish_info_of(topic, route(dict.fromkeys(brokers, 2))) for topic in TOPICS}
    rig.transport.always.update({broker: Reply(delay=0.01) for broker in brokers})
    return rig


def stored(rig: Rig, brokers: str) -> int:
    facts = rig.facts
    return sum(facts[broker]["rows"] for broker in brokers if broker in facts)


def most_tries_per_outcome(rig: Rig, rows: int) -> float:
    """Run until `rows` rows are stored, and return the largest number of deliveries tried for one outcome."""
    most = 0.0
    rig.step()
    while rig.pipeline.stored_rows < rows:
        assert rig.pipeline.failure is None
        tries, now = rig.tries, rig.clock.now
        if outcomes := len(rig.go_on()):
            rig.step()
            most = max(most, (rig.tries - tries) / outcomes)
        assert rig.clock.now < now + 30, "only a recheck found something to send"
    return most


@pytest.mark.parametrize(
    "options",
    [{}, {"ordered": True}, {"send_mode": "sync"}, {"send_latency_fault_enable": True}, {"queue_selector": "random"}],
    ids=str,
)
def test_acknowledgement_causes_few_attempts_with_500_topics(options: dict[str, Any]) -> None:
    rig = rig_of("ab", **options)
    for topic in TOPICS * 2:
        rig.offer(topic=topic)
    assert most_tries_per_outcome(rig, 1000) <= MOST


def test_acknowledgement_tries_few_topics_on_many_different_brokers() -> None:
    brokers = "abcdefghijklmnopqrstuvwxyz"
    rig = rig_of(brokers)
    for topic, pair in zip(TOPICS, itertools.cycle(itertools.combinations(brokers, 2)), strict=False):
        rig.infos[topic] = publish_info_of(topic, route(dict.fromkeys(pair, 2)))
        rig.offer(4, topic=topic)
    assert most_tries_per_outcome(rig, 2000) <= MOST


@pytest.mark.parametrize("ordered", [False, True])
def test_acknowledgement_tries_no_queue_of_a_resting_broker(*, ordered: bool) -> None:
    rig = rig_of("ab", ordered=ordered)
    rig.transport.play("a", refused(), refused())
    for topic, broker in itertools.product(TOPICS, "ab"):
        rig.offer(bound=MessageQueue(topic, broker, 0), topic=topic)
    assert most_tries_per_outcome(rig, 500) <= MOST
    rig.run()
    assert stored(rig, "a") == 500


def test_acknowledgement_tries_no_topic_without_a_route() -> None:
    rig = rig_of("a")
    missing = TOPICS[:400]
    found = {topic: rig.infos.pop(topic) for topic in missing}
    for topic in TOPICS:
        rig.offer(2, topic=topic)
    assert most_tries_per_outcome(rig, 200) <= MOST
    assert set(rig.refreshed) == set(missing)
    rig.infos.update(found)
    rig.run()
    assert stored(rig, "a") == 1000


def test_acknowledgement_tries_no_topic_that_avoids_an_isolated_broker() -> None:
    rig = rig_of("ab", send_latency_fault_enable=True)
    for topic in TOPICS:
        rig.offer(4, topic=topic)
    rig.step()
    rig.faults.table.update("a", 1.0, rig.clock.now, away_ms=20_000, reachable=True, shorten=False)
    # All lines waited for either broker. An answer of the isolated one lets 64 of them find that they can't use it.
    for _ in range(20):
        tries = rig.tries
        outcomes = len(rig.go_on())
        assert rig.tries - tries <= 64 + MOST * (outcomes + 4)
    before = stored(rig, "a")
    assert most_tries_per_outcome(rig, 1000) <= MOST
    assert stored(rig, "a") == before
    rig.clock.now += 20
    rig.run()
    assert stored(rig, "a") > before
    assert stored(rig, "ab") == 2000


def test_single_messages_and_batches_alternate_at_a_broker() -> None:
    rig = rig_of("a", max_in_flight=2)
    for topic in TOPICS[:4]:
        single = topic in ("T0", "T2")
        rig.offer(12 if single else 3, topic=topic, single=single)
    rig.run()
    topics = [request.queue.topic for request in rig.transport.requests]
    assert topics[:10] == ["T0", "T1", *["T2", "T0"] * 3, "T2", "T3"]
    assert topics[10:21] == ["T1", "T0", "T2", "T3", *["T0", "T2"] * 3, "T1"]


def test_topics_alternate_at_a_broker_with_one_request_in_flight() -> None:
    rig = rig_of("a", max_in_flight=1)
    for topic in TOPICS:
        rig.offer(2, topic=topic)
    rig.run()
    assert [request.queue.topic for request in rig.transport.requests] == TOPICS * 2


def test_new_route_is_used_by_rows_that_wait_for_a_removed_broker() -> None:
    rig = rig_of("a")
    rig.transport.always["a"] = Reply(silent=True)
    for topic in TOPICS:
        rig.offer(topic=topic)
    rig.step()
    rig.infos = {topic: publish_info_of(topic, route({"b": 2})) for topic in TOPICS}
    rig.transport.always["b"] = Reply(delay=0.01)
    rig.run()
    assert rig.pipeline.failure is None
    assert stored(rig, "b") == 500


def test_five_thousand_topics_recover_within_20_rechecks() -> None:
    rig = Rig(route({"a": 2}), retry_backoff_ms=100)
    topics = [f"T{number}" for number in range(5000)]
    for topic in topics:
        rig.offer(topic=topic)
    rig.step()
    rig.infos = {topic: publish_info_of(topic, route({"a": 2})) for topic in topics}
    rig.transport.always["a"] = Reply()
    began = rig.clock.now
    rig.run()
    assert stored(rig, "a") == 5000
    assert rig.clock.now - began <= 20.5 * 0.1
