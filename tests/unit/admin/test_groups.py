"""Offsets of a group that are reset while a master does not answer."""

from __future__ import annotations

from datetime import datetime

import pytest

from rocketmq_spark import Admin, OptionError
from rocketmq_spark.admin.groups import resetting
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.testing import FakeCluster


def test_offsets_are_not_reset_on_a_slave() -> None:
    with FakeCluster(slaves=1, topics={"orders": 1}) as cluster, Admin(cluster.name_server, timeout=1.0) as admin:
        queue, master = MessageQueue("orders", "broker-0", 0), cluster.brokers["broker-0"]
        admin.transport.update_consumer_offset(queue, "billing", 0, master.address, 5.0)
        assert [row.after for row in admin.reset_offsets("billing", "orders", "latest")] == [0]
        master.stop()
        found = admin.reset_offsets("billing", "orders", "latest")
    assert list(found) == []
    assert "the master of broker-0 does not answer, and would overwrite the offsets of its slave" in found.missing[0]


@pytest.mark.parametrize(
    ("to", "advice"),
    [
        ("yesterday", "allowed are earliest, latest, a time .*, or offsets"),
        ("committed", "allowed are earliest, latest, a time .*, or offsets"),
        (True, "allowed are earliest, latest, a time .*, or offsets"),
        ("{", "not valid JSON"),
        ('{"orders": {"a": {"0": 1}}, "payments": {"a": {"0": 2}}}', "payments/a/0, which is of another topic"),
        (
            '{"a": {"queues": {"payments": {"0": {"first_offset": 2, "last_offset": 3}}}}}',
            "topic orders: the given offsets have payments/a/0, which is of another topic",
        ),
        (datetime(2026, 11, 30, 8), r"to 2026-11-30T08:00:00: give a time zone, as in 2026-11-30T08:00:00\+00:00"),
    ],
)
def test_error_of_a_wrong_place_to_reset_to_names_the_right_ones(to: str | bool | datetime, advice: str) -> None:
    with pytest.raises(OptionError, match=advice):
        resetting(SourceOptions.of(subscribe=("orders",)), to)


def test_receipt_of_several_topics_resets_one_of_them() -> None:
    span = '{"0": {"first_offset": 2, "last_offset": 3}}'
    options = resetting(
        SourceOptions.of(subscribe=("orders",)), f'{{"a": {{"queues": {{"b": {span}, "orders": {span}}}}}}}'
    )
    assert options.reads(MessageQueue("orders", "a", 0))
