"""Queries the offsets and members of consumer groups, and commits other offsets, for `Admin`.

Follows ``ConsumerProgressSubCommand`` and ``ConsumerConnectionSubCommand`` (docs/internals/reads.md#consumer-groups).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Final

from rocketmq_spark.admin.answers import Group, GroupMember, OffsetReset, QueueLag
from rocketmq_spark.admin.brokers import NO_BROKERS
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import (
    BrokerBusyException,
    MQBrokerException,
    MQClientException,
    OptionError,
    RocketMQError,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import utc
from rocketmq_spark.model.route import TopicRouteData, masters_of
from rocketmq_spark.options.offsets import WORDS, parse_start
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.groups import (
    ConsumerConnection,
    ConsumeStats,
    decode_consume_stats,
    decode_consumer_connections,
)
from rocketmq_spark.protocol.remoting.headers import (
    GetConsumerConnectionListRequestHeader,
    GetConsumeStatsRequestHeader,
)
from rocketmq_spark.source.offset_resolver import OffsetResolver
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.source.topic_routes import refuse_static
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport

_FIRST_MS: Final = 10**11
# The year 9999 ends at this time in milliseconds since 1970; a later one is no datetime.
_LATEST_MS: Final = 253_402_300_799_999


def group_of(transport: RemotingTransport, group: str, timeout: float) -> Group:
    """Return the offsets and members of a group on all masters; see `Admin.group`."""
    masters = masters_of(transport.cluster_info(timeout).brokers)
    stats = query_all(masters, lambda broker: _stats(transport, group, masters[broker], timeout))
    known = {broker: rows for broker, rows in stats.items() if not isinstance(rows, RocketMQError)}
    topics = {row.queue.topic for rows in known.values() for row in rows}
    # A broker does not name the topics of which the group has offsets only at other brokers.
    unnamed = [
        (broker, topic) for broker, rows in known.items() for topic in topics - {row.queue.topic for row in rows}
    ]
    rest = query_all(sorted(unnamed), lambda place: _stats(transport, group, masters[place[0]], timeout, place[1]))
    connections = query_all(masters, lambda broker: _connections(transport, group, masters[broker], timeout))
    missing = [] if masters else [NO_BROKERS]
    queues: list[QueueLag] = []
    for broker, rows in (*stats.items(), *((broker, rows) for (broker, _), rows in rest.items())):
        if isinstance(rows, RocketMQError):
            missing.append(f"the offsets on {broker}: {rows}")
            continue
        try:
            queues += [_lag(transport, group, row, masters[broker], timeout) for row in rows]
        except RocketMQError as exc:
            missing.append(f"the offsets on {broker}: {exc}")
    members: dict[str, GroupMember] = {}
    unknown = []
    for broker, found in connections.items():
        if isinstance(found, RocketMQError):
            unknown.append(f"the members on {broker}: {found}")
            continue
        for one in found:
            others = members[one.client_id].brokers if one.client_id in members else ()
            members[one.client_id] = GroupMember(one.client_id, one.address, one.language, (*others, broker))
    if masters and not (queues or members or missing or unknown):
        raise MQClientException(
            f"no broker knows an offset or a member of the consumer group {group}: check its name and the namespace. A "
            "group with MessageModel.BROADCASTING commits no offsets to brokers"
        )
    queues.sort(key=lambda row: row.queue)
    behind = f"{sum(row.messages for row in queues):,} messages not read in {len(queues):,} queues"
    return Group(
        group,
        Table(QueueLag, queues, missing=missing, notes=[behind] if queues else []),
        Table(
            GroupMember,
            sorted(members.values(), key=lambda member: member.client_id),
            missing=unknown,
            notes=[] if members or unknown else ["the group has no members"],
        ),
    )


def _stats(
    transport: RemotingTransport, group: str, address: str, timeout: float, topic: str = ""
) -> tuple[ConsumeStats, ...]:
    header = GetConsumeStatsRequestHeader(consumer_group=group, topic=transport.namespace.unwrap(topic))
    return transport.client.ask_body(
        address, header, timeout, f"reading the offsets of the group {group}", decode_consume_stats
    )


def _connections(
    transport: RemotingTransport, group: str, address: str, timeout: float
) -> tuple[ConsumerConnection, ...]:
    header = GetConsumerConnectionListRequestHeader(consumer_group=group)
    doing = f"listing the members of the group {group}"
    try:
        return transport.client.ask_body(address, header, timeout, doing, decode_consumer_connections)
    except MQBrokerException as exc:
        if exc.response_code == ResponseCode.CONSUMER_NOT_ONLINE:
            return ()
        raise


def _lag(transport: RemotingTransport, group: str, row: ConsumeStats, address: str, timeout: float) -> QueueLag:
    queue = replace(row.queue, topic=transport.namespace.unwrap(row.queue.topic))
    offset: int | None = row.consumer_offset
    if offset == 0:
        # Also the answer for a queue without a committed offset.
        offset = transport.consumer_offset(queue, group, address, timeout)
    known = 0 < row.last_timestamp <= _LATEST_MS
    until = datetime.fromtimestamp(row.last_timestamp / 1000, timezone.utc) if known else None
    return QueueLag(queue, offset, row.broker_offset, until)


def resetting(options: SourceOptions, to: str | int | datetime) -> SourceOptions:
    """Return the options of a read that begins where a group is to continue; see `Admin.reset_offsets`."""
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise OptionError(f"resetting offsets to {to.isoformat()}: give a time zone, as in {to.isoformat()}+00:00")
        to = round(to.timestamp() * 1000)
    if isinstance(to, int) and not isinstance(to, bool):
        # Milliseconds of 1973 or before are probably seconds.
        if not (to == 0 or _FIRST_MS <= to <= _LATEST_MS):
            raise OptionError(
                f"resetting offsets to the time {to}: allowed are 0, and milliseconds since 1970 from {_FIRST_MS} "
                f"({utc(_FIRST_MS)}) on"
            )
        return replace(options, starting_timestamp=to, starting_offsets_by_timestamp_strategy="latest")
    is_json = isinstance(to, str) and to.strip().startswith("{")
    if not is_json and str(to).strip().lower() not in WORDS:
        example = "2026-11-28T10:00:00+01:00, or ms since 1970"
        raise OptionError(f"resetting offsets to {to!r}: allowed are earliest, latest, a time ({example}), or offsets")
    try:
        spec = parse_start(str(to))
    except ValueError as exc:
        raise OptionError(f"resetting offsets to {to!r}: {exc}") from exc
    others = [queue for queue, _ in spec.offsets if queue.topic not in options.subscribe]
    # A write may have stored rows in several topics.
    if others and (not spec.receipt or len(others) == len(spec.offsets)):
        raise OptionError(
            f"resetting offsets of topic {', '.join(options.subscribe)}: the given offsets have {others[0]}, which is "
            "of another topic: give offsets of this topic"
        )
    return replace(options, starting_offsets=spec)


def reset_offsets(
    options: SourceOptions, transport: RemotingTransport, route: TopicRouteData, *, dry_run: bool
) -> Table[OffsetReset]:
    """Commit the offsets at which a read with these options begins; see `Admin.reset_offsets`."""
    (topic,), group = options.subscribe, options.consumer_group
    refuse_static(topic, route)
    requests = QueueRequests(TopicQueues(options, transport, time.monotonic), time.monotonic)
    queues = requests.queues.look_up()

    def committed(queue: MessageQueue, address: str, timeout: float) -> int | None:
        return transport.consumer_offset(queue, group, address, timeout)

    def committed_and_read(queue: MessageQueue, address: str, timeout: float) -> int | None:
        transport.update_consumer_offset(queue, group, after[queue], address, timeout)
        return committed(queue, address, timeout)

    def commit(queue: MessageQueue, address: str, timeout: float) -> int:
        if not requests.brokers.is_master(queue, address):
            raise MQClientException(
                f"the master of {queue.broker_name} does not answer, and would overwrite the offsets of its slave "
                f"{address}: start the master"
            )
        stored = committed_and_read(queue, address, timeout)
        if stored is not None and stored != after[queue]:
            # After mqadmin resetOffsetByTime a broker ignores commits until it has told a pull of the group.
            with suppress(BrokerBusyException):
                requests.pull(queue, after[queue], address, 1)
            stored = committed_and_read(queue, address, timeout)
        if stored != after[queue]:
            raise MQClientException(
                f"{address} has the offset {stored} of {queue} for the group {group} after a commit of {after[queue]}: "
                "brokers ignore a group that they do not know, and a running consumer commits its own offsets. Create "
                "the group (mqadmin updateSubGroup), or stop its consumers"
            )
        return stored

    def members(_: MessageQueue, address: str, timeout: float) -> tuple[str, ...]:
        return transport.consumers(group, address, timeout)

    of_brokers = requests.each({queue.broker_name: queue for queue in queues}.values(), members)
    running = sorted({member for found in of_brokers.values() for member in found})
    if running and not dry_run:
        raise MQClientException(
            f"resetting the offsets of the group {group}: its members would overwrite them. Stop "
            f"{', '.join(running[:5])}{' and others' if len(running) > 5 else ''}, or wait 2 minutes after a kill"
        )
    resolver = OffsetResolver(requests)
    before, after, ends = requests.each(queues, committed), resolver.starts(queues), resolver.latest(queues)
    for queue in queues:
        # Brokers do not check offsets.
        if after[queue] > ends[queue]:
            raise OptionError(f"resetting {queue} to offset {after[queue]}: the queue ends at {ends[queue]}")
    rows = [OffsetReset(queue, before[queue], after[queue]) for queue in queues]
    if dry_run:
        notes = ["nothing was committed", *([f"the group has {len(running)} members"] if running else [])]
        return Table(OffsetReset, rows, notes=notes)
    done, failed = requests.once(queues, commit, trusted=True)
    missing = [f"{queue}: {why}" for queue, why in failed.items()]
    return Table(OffsetReset, [row for row in rows if row.queue in done], missing=missing)
