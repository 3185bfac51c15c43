"""Latencies and counts per broker: recorded by a task, merged on the driver, shown to the user."""

from rocketmq_spark.metrics.measures import Measures
from rocketmq_spark.metrics.recorder import PartitionReport, ReadReport, Recorder
from rocketmq_spark.metrics.summary import WriteSummary, merge_into

__all__ = ["Measures", "PartitionReport", "ReadReport", "Recorder", "WriteSummary", "merge_into"]
