"""The figures and the look of the live display, without servers."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    RemotingTimeoutException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import BrokerData, TopicRouteData
from rocketmq_spark.protocol.remoting.responses import ClusterInfo
from rocketmq_spark.spark.live import LiveView, TaskCounts, lines_screen, notebook_screen
from rocketmq_spark.spark.live_arrivals import Arrivals, BrokerArrivals
from tests.support.processes import PATIENCE
from tests.support.scripted import route

UNKNOWN = TopicRouteStaleException("no route", 17, "", "")


class Cluster:
    """Name servers and brokers that answer, or raise, what a test sets."""

    def __init__(self, **queues: int) -> None:
        self.route: TopicRouteData | Exception = route(queues)
        self.registered: list[str] | Exception = list(queues)
        self.offsets: dict[tuple[str, int], int] = {
            (name, queue_id): 0 for name, count in queues.items() for queue_id in range(count)
        }
        self.silent: dict[str, Exception] = {}
        self.asked: list[str] = []

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        if isinstance(self.route, Exception):
            raise self.route
        return self.route

    def cluster_info(self, timeout: float) -> ClusterInfo:
        if isinstance(self.registered, Exception):
            raise self.registered
        return ClusterInfo(tuple(BrokerData(name, {}) for name in self.registered), {})

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        self.asked.append(queue.broker_name)
        if queue.broker_name in self.silent:
            raise self.silent[queue.broker_name]
        return self.offsets[queue.broker_name, queue.queue_id]


def arrivals_at(cluster: Any) -> Arrivals:
    return Arrivals(cluster, "orders")


def counted(arrivals: Arrivals) -> dict[str, int]:
    return {one.broker: one.messages for one in arrivals.brokers()}


def test_messages_are_counted_from_the_start_of_the_display() -> None:
    cluster = Cluster(a=2, b=1)
    cluster.offsets.update({("a", 0): 100, ("a", 1): 7})
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    assert counted(arrivals) == {"a": 0, "b": 0}
    cluster.offsets.update({("a", 0): 110, ("a", 1): 8, ("b", 0): 5})
    arrivals.look(0.5)
    assert counted(arrivals) == {"a": 11, "b": 5}
    assert arrivals.messages == 16


def test_a_rate_is_that_of_the_last_two_seconds() -> None:
    cluster = Cluster(a=1)
    arrivals = arrivals_at(cluster)
    for step in range(11):
        # 100 a second for three seconds, then none.
        cluster.offsets["a", 0] = 50 * min(step, 6)
        arrivals.look(step / 2)
        rates = {0: 0, 1: 100, 6: 100, 8: 50, 10: 0}
        if step in rates:
            assert [one.per_second for one in arrivals.brokers()] == [rates[step]], step


@pytest.mark.parametrize("missing", [UNKNOWN, TopicRouteData((), ())])
def test_all_messages_of_a_topic_created_later_count(missing: Any) -> None:
    cluster = Cluster()
    cluster.route, cluster.registered = missing, ["a"]
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    assert counted(arrivals) == {}
    cluster.route = route({"a": 1})
    cluster.offsets["a", 0] = 30
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 30}
    assert (arrivals.problem, arrivals.note) == ("", "")


def test_silent_broker_keeps_its_count_and_does_not_affect_others() -> None:
    cluster = Cluster(a=1, b=1)
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.offsets.update({("a", 0): 10, ("b", 0): 20})
    arrivals.look(0.5)
    cluster.silent["a"] = RemotingTimeoutException("no answer within 0.5 s")
    cluster.offsets.update({("a", 0): 11, ("b", 0): 21})
    arrivals.look(1.0)
    first, second = arrivals.brokers()
    assert first == BrokerArrivals("a", 10, None, "does not answer", "no answer within 0.5 s")
    assert (second.messages, second.problem) == (21, "")


def test_silent_broker_is_queried_again_after_two_seconds() -> None:
    cluster = Cluster(a=4)
    cluster.silent["a"] = RemotingConnectException("refused")
    arrivals = arrivals_at(cluster)
    for step in range(6):
        arrivals.look(step / 2)
    assert cluster.asked == ["a", "a"]
    cluster.silent.clear()
    cluster.offsets["a", 0] = 5
    arrivals.look(4.0)
    # Its first offset is unknown, so it counts from its first answer on.
    assert arrivals.brokers() == [BrokerArrivals("a", 0, 0.0)]


def test_rejecting_broker_and_broker_without_master_are_distinguished() -> None:
    cluster = Cluster(a=1, b=1)
    cluster.silent["a"] = MQBrokerException("no permission", 16, "", "")
    found = route({"a": 1, "b": 1})
    cluster.route = TopicRouteData(found.queue_datas, found.broker_datas[:1])
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    assert [one.problem for one in arrivals.brokers()] == [
        "rejects the request",
        "no name server lists its master now",
    ]
    assert "no permission" in arrivals.brokers()[0].detail


def test_unreachable_name_servers_change_no_count() -> None:
    cluster = Cluster(a=1)
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.route = RemotingConnectException("127.0.0.1:9876: refused")
    cluster.offsets["a", 0] = 3
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 3}
    assert arrivals.problem == "looking up the topic failed: 127.0.0.1:9876: refused"


def test_added_queues_count_from_0() -> None:
    cluster = Cluster(a=1)
    cluster.offsets["a", 0] = 50
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.route = route({"a": 2})
    cluster.offsets["a", 1] = 4
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 4}


@pytest.mark.parametrize("begins", [route({"a": 1}), UNKNOWN])
def test_broker_that_appears_later_counts_from_its_first_answer(begins: Any) -> None:
    cluster = Cluster()
    cluster.route, cluster.registered = begins, ["a"]
    cluster.offsets.update({("a", 0): 0, ("b", 0): 1_000_000})
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.route = route({"a": 1, "b": 1})
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 0, "b": 0}
    cluster.offsets["b", 0] += 3
    arrivals.look(5.5)
    assert counted(arrivals) == {"a": 0, "b": 3}


def test_registered_broker_without_the_topic_counts_from_0() -> None:
    cluster = Cluster(a=1)
    cluster.registered = ["a", "b"]
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.route = route({"a": 1, "b": 1})
    cluster.offsets["b", 0] = 4
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 0, "b": 4}


@pytest.mark.parametrize(
    "registered",
    [
        [],
        MQClientException("127.0.0.1:9876 is no name server"),
        MQBrokerException("no permission", 16, "", "127.0.0.1:9876"),
    ],
)
def test_name_servers_without_brokers_do_not_make_old_messages_count(registered: Any) -> None:
    cluster = Cluster()
    cluster.route, cluster.registered = UNKNOWN, registered
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    cluster.route = route({"a": 1})
    cluster.offsets["a", 0] = 500
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 0}


def test_counting_starts_when_name_servers_report_the_topic_as_missing() -> None:
    cluster = Cluster()
    cluster.route, cluster.registered = UNKNOWN, RemotingTimeoutException("no answer")
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    assert arrivals.problem == "looking up the topic failed: no answer"
    cluster.registered = ["a"]
    arrivals.look(0.5)
    cluster.route = route({"a": 1})
    cluster.offsets["a", 0] = 7
    arrivals.look(5.0)
    assert counted(arrivals) == {"a": 7}


def test_queues_that_disappear_and_return_keep_their_count() -> None:
    cluster = Cluster(a=8)
    cluster.offsets = dict.fromkeys(cluster.offsets, 500)
    arrivals = arrivals_at(cluster)
    for now, queues in ((0.0, 8), (3.0, 4), (6.0, 8)):
        cluster.route = route({"a": queues})
        arrivals.look(now)
    assert counted(arrivals) == {"a": 0}


def test_brokers_are_queried_concurrently() -> None:
    cluster = Cluster(a=1, b=1)
    together = threading.Barrier(2, timeout=PATIENCE)

    class Meeting:
        query_route = cluster.query_route
        cluster_info = cluster.cluster_info

        def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
            together.wait()
            return 0

    arrivals = arrivals_at(Meeting())
    arrivals.look(0.0)
    assert counted(arrivals) == {"a": 0, "b": 0}


def test_static_topic_is_reported() -> None:
    cluster = Cluster(a=1)
    cluster.route = replace(route({"a": 1}), static_topic=True)
    arrivals = arrivals_at(cluster)
    arrivals.look(0.0)
    assert arrivals.problem == (
        "reading topic orders: it is a static (logical) topic, which this release can't read; use an ordinary topic"
    )
    assert (counted(arrivals), cluster.asked) == ({}, [])


VIEW = LiveView(
    topic="orders",
    seconds=4.0,
    over=False,
    tasks=TaskCounts(3, 2, 0, 8),
    brokers=(BrokerArrivals("a", 1_200, 300.4), BrokerArrivals("b<", 800, None, "does not answer", "at length")),
    problems=(),
)


def test_view_has_text_rows_and_html() -> None:
    assert str(VIEW) == (
        "topic orders · 4.0 s · 3 of 8 tasks ended, 2 running · 2,000 messages arrived, 300 per second; "
        "b< does not answer"
    )
    assert VIEW.rows() == [
        ("a", "1,200", "300", ""),
        ("b<", "800", "-", "does not answer"),
        ("all", "2,000", "300", ""),
    ]
    page = VIEW._repr_html_()
    assert page.startswith("<p>topic orders · 4.0 s · 3 of 8 tasks ended, 2 running</p>\n<table>")
    assert "<td>b&lt;</td><td>800</td><td>-</td>" in page
    assert "color" not in page


def test_control_characters_are_shown_as_their_codes() -> None:
    evil = "evil \x1b]0;title\x07"
    view = replace(VIEW, brokers=(BrokerArrivals(evil, 1, None, evil),), problems=(evil,))
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    for shown in (str(view), console.file.getvalue(), view._repr_html_()):  # type: ignore[attr-defined]
        assert shown.count("evil \\x1b]0;title\\x07") == 3
        assert "\x1b" not in shown


def test_view_without_problems_has_no_problem_column() -> None:
    well = replace(VIEW, brokers=VIEW.brokers[:1])
    assert well.rows() == [("a", "1,200", "300")]
    assert well.headings() == VIEW.headings()[:3] == ("broker", "messages arrived", "per second")


def test_the_last_view_has_the_rates_of_the_whole_time() -> None:
    last = replace(VIEW, over=True, tasks=TaskCounts(8, 0, 1, 8), problems=("no name server knows the topic yet",))
    assert [row[2] for row in last.rows()] == ["300", "200", "500"]
    assert last.heading() == "topic orders · 4.0 s, ended · 8 of 8 tasks ended, 1 failed"
    assert str(last).endswith("; no name server knows the topic yet")


def test_a_notebook_has_one_output_that_is_replaced() -> None:
    shown: list[Any] = []

    class Handle:
        def update(self, view: LiveView) -> None:
            shown.append(("update", view))

    def display(view: LiveView, *, display_id: bool) -> Handle:
        shown.append((display_id, view))
        return Handle()

    screen = notebook_screen(display)
    later = replace(VIEW, seconds=5.0)
    screen(VIEW)
    screen(later)
    assert shown == [(True, VIEW), ("update", later)]


def test_a_file_gets_a_line_every_five_seconds_and_the_last_one() -> None:
    now = 0.0
    file = io.StringIO()
    screen = lines_screen(file, clock=lambda: now)
    for step in range(25):
        now = step / 2
        screen(replace(VIEW, seconds=now))
    screen(replace(VIEW, seconds=12.4, over=True))
    assert [line.split(" · ")[1] for line in file.getvalue().splitlines()] == ["5.0 s", "10.0 s", "12.4 s, ended"]
