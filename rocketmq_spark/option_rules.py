"""Which options of a write contradict each other, and what to do about it.

Rule 1: each value is allowed by itself; here is only what two of them together would mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocketmq_spark.options import SinkOptions


def contradictions(options: SinkOptions) -> Iterator[str]:
    """Yield a text for each contradiction."""
    if options.send_msg_max_timeout_per_request == 0:
        yield "sendMsgMaxTimeoutPerRequest=0 leaves no time for an attempt: allowed is -1 (no cap) or 1 and more (ms)"
    if options.max_rate_tasks is not None and options.max_rate_per_second is None:
        yield "maxRateTasks says how many tasks share maxRatePerSecond, which is missing: give both or neither"
    if options.ordered:
        yield from _against_order(options)


def _against_order(options: SinkOptions) -> Iterator[str]:
    if options.send_mode == "oneway":
        yield (
            "ordered=true and sendMode=oneway exclude each other: without acknowledgements nobody knows when the next "
            "batch may go; use sendMode=async or sync"
        )
    if options.queue_selector not in (None, "hash"):
        yield (
            f"ordered=true and queueSelector={options.queue_selector} exclude each other: the hash of a shardingKey "
            "finds the one queue of its rows; leave queueSelector out, or set it to hash"
        )
    if options.send_latency_fault_enable:
        yield (
            "ordered=true and sendLatencyFaultEnable=true exclude each other: rows of one shardingKey wait for their "
            "broker and never go round it; set one of the two to false"
        )
    if options.topic is None:
        yield (
            "ordered=true needs the option topic: the driver finds the queues of one topic for the whole write; where "
            "topics come from a column, write each of them by itself"
        )
