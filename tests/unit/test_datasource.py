"""What the data source checks on the driver, without a session and without a server."""

from __future__ import annotations

import logging

import pytest
from pyspark.sql.types import StringType, StructType

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.datasource import RocketMQDataSource

BODY = StructType().add("body", StringType())


class OnASpeculatingCluster(RocketMQDataSource):
    _speculation = True


@pytest.mark.parametrize(("row_id", "warnings"), [("false", 1), ("true", 0), ("columns:body", 0)])
def test_speculation_without_row_ids_is_warned_of(caplog: pytest.LogCaptureFixture, row_id: str, warnings: int) -> None:
    source = OnASpeculatingCluster({"nameServer": "a:1", "topic": "t", "rowId": row_id})
    source.streamWriter(BODY, overwrite=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warnings
    assert all("set rowId=true" in message for message in caplog.messages)


def test_without_speculation_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    RocketMQDataSource({"nameServer": "a:1", "topic": "t"}).streamWriter(BODY, overwrite=False)
    assert caplog.messages == []


def test_a_selector_class_is_looked_for_on_the_driver() -> None:
    source = RocketMQDataSource({"nameServer": "a:1", "topic": "t", "queueSelector": "no_such_module:Thing"})
    with pytest.raises(OptionError, match="importing module no_such_module failed"):
        source.streamWriter(BODY, overwrite=False)
