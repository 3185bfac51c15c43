"""`finish_transactions`, which lists and completes the open writes of a job with ``delivery=exactlyOnce``.

A write is open if its driver has decided to commit it, and has not stored that it is complete. Nothing here creates a
topic: a topic that does not exist is an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from rocketmq_spark.admin.queues import admin_options
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit, new_run_id
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.deliveries.log.state import WriteState
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import (
    DeliveryError,
    MQClientException,
    NoBrokersException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.options.kinds import parse_one
from rocketmq_spark.options.sink import MAX_TRANSACTION_TIMEOUT_MS, SINK_OPTIONS, SinkOptions
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import client_id_of, new_transport
from rocketmq_spark.routing.route_cache import TopicPublishInfo

OPEN: Final = "open"
FINISHED: Final = "finished"

# What to check if the log or a record is missing.
_CAUSES: Final = "the transactionTopic and the namespace of the job, the name server, and that all brokers are running"


@dataclass(frozen=True, slots=True)
class OpenWrite:
    """A write that was open when the decision log was read."""

    SPARE: ClassVar[tuple[str, ...]] = ("round", "topics")

    write: str  # The ``writeId``, in a stream the number of the micro-batch
    query_id: str | None  # Of a stream; None for a batch write
    round: int  # 1, and 1 more for each time that missing rows were prepared again
    rows: int  # All rows of the write
    state: str  # open or finished
    recovered_rows: int | None  # Rows that were prepared again to finish the write; None while it is open
    topics: tuple[str, ...]  # To which the rows go


def finish_transactions(
    transactional_id: str,
    *,
    name_server: str | Sequence[str] | None = None,
    transaction_topic: str = "rocketmq-spark-decisions",
    transactional_key: str | None = None,
    list_only: bool = False,
    timeout: float = 5.0,
    delivery_timeout_ms: int = 120_000,
    **connection: Any,
) -> Table[OpenWrite]:
    """Complete the open writes of a job whose driver died during a commit, and return one row for each.

    A write with ``delivery=exactlyOnce`` is open if its driver has decided to commit it, and has not committed all of
    its rows. Consumers then see only some of them. A stream completes its open micro-batch when it restarts. A batch
    job does this only if it repeats the write with the same ``writeId``.

    Parameters
    ----------
    transactional_id, transaction_topic : str
        The options ``transactionalId`` and ``transactionTopic`` of the job.
    transactional_key : str, optional
        The option ``transactionalKey`` of the job, as text, ``env:NAME`` or ``file:/path``.
    name_server : str or sequence of str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``.
    list_only : bool, default False
        Only return the open writes.
    timeout : float, default 5.0
        Seconds for one request to one server, at most 3,600.
    delivery_timeout_ms : int, default 120,000
        How long a request is retried, in milliseconds.
    connection
        Options of a connection in snake_case, as for `Admin`: ``access_key``, ``use_tls``, ``namespace``.

    Raises
    ------
    MQClientException
        A topic does not exist, the decision log has no record of `transactional_id`, or has one of another version.
    DataLossError
        The brokers have lost records of the decision log.
    DeliveryError
        A write could not be finished. The other open writes are finished nevertheless. A second call continues.

    Notes
    -----
    For each write the call waits until the brokers accept no more commits of the dead driver. This takes up to
    ``transactionTimeoutMs`` and a tenth of it after the driver's last row. Then it commits the rows that are missing.
    This is also safe while a driver is alive, and it may be called in several processes. It ends and copies only half
    messages that were stored for this id and their topic, whatever others have written to the log.

    Half messages and decisions expire with the messages of their broker (``fileReservedTime``, 72 hours by default).
    """
    own = {
        "transactional_id": transactional_id,
        "transaction_topic": transaction_topic,
        "transactional_key": transactional_key,
        "delivery_timeout_ms": delivery_timeout_ms,
    }
    given = {name: value for name, value in own.items() if value is not None}
    values = {
        spec.field: parse_one(spec, given[spec.field], spec.field) for spec in SINK_OPTIONS if spec.field in given
    }
    parsed = admin_options({"name_server": name_server, **connection}, timeout, os.environ).connection
    milliseconds = max(1, round(timeout * 1000))
    options = SinkOptions(connection=parsed, delivery="exactlyOnce", send_msg_timeout=milliseconds, **values)
    client_id = client_id_of(parsed, f"{os.getpid()}#{new_run_id()}")
    with closing(ClientInstance(client_id, new_transport(parsed, client_id), parsed)) as instance:
        instance.start()
        instance.register(options.producer_group)
        return finish_writes(Brokers(options, instance), list_only=list_only)


def finish_writes(brokers: Brokers, *, list_only: bool) -> Table[OpenWrite]:
    """Complete the open writes of a transactional id, or only list them; see `finish_transactions`."""
    options = brokers.options
    log = DecisionLog(str(options.transactional_id), options.transaction_topic, keys_of(options))
    _existing(brokers, log.topic, f"Check {_CAUSES}")
    log.open(brokers, everything=True)
    if not log.writes:
        raise MQClientException(
            f"topic {log.topic} has no decision of transactionalId={log.transactional_id}: no driver has committed a "
            f"write, or its records have expired. Check the transactionalId, {_CAUSES}"
        )
    writes = [(write, state) for write, state in log.writes.items() if not state.done]
    rows = [_row(write, state, OPEN) for write, state in writes] if list_only else _finish(brokers, log, writes)
    return Table(OpenWrite, rows, notes=[] if rows else ["every decided write is complete"])


def _finish(brokers: Brokers, log: DecisionLog, writes: Sequence[tuple[Write, WriteState]]) -> list[OpenWrite]:
    rows, errors = [], []
    for write, state in writes:
        # The next round gets as much time as the driver has had.
        timeout_ms = min(state.decisions[min(state.decisions)].timeout_ms, MAX_TRANSACTION_TIMEOUT_MS)
        options = replace(brokers.options, transaction_timeout_ms=timeout_ms)
        two_phase = TwoPhaseCommit(replace(brokers, options=options), log, new_run_id())
        try:
            _check_topics(brokers, state)
            report = two_phase.finish(write)
        except RocketMQError as exc:
            # For example, one write has expired.
            errors.append((write, exc))
        else:
            rows.append(_row(write, state, FINISHED, report.recovered_rows))
    if errors:
        write, error = errors[0]
        raise DeliveryError(
            f"{len(rows)} of {len(writes)} open writes of transactionalId={log.transactional_id} are finished; "
            f"{write}: {error}"
        ) from error
    return rows


def _row(write: Write, state: WriteState, text: str, recovered_rows: int | None = None) -> OpenWrite:
    # The decisions of later rounds are about the missing rows only.
    first = state.decisions[min(state.decisions)]
    topics = tuple(sorted({queue.topic for queue in first.start_offsets}))
    return OpenWrite(write.name, write.query or None, state.last.round, first.rows, text, recovered_rows, topics)


def _check_topics(brokers: Brokers, state: WriteState) -> None:
    """Raise an error unless the topics of a write exist where its rows are; a broker might create them otherwise."""
    for topic in sorted({queue.topic for queue in state.last.start_offsets}):
        names = {queue.broker_name for queue in state.last.start_offsets if queue.topic == topic}
        info = _existing(brokers, topic, "Create the topic again, or start its brokers")
        if lost := names - info.broker_names:
            raise MQClientException(
                f"topic {topic} has no writable queue on broker {', '.join(sorted(lost))}, to which rows go: start the "
                "broker, or create the topic there"
            )


def _existing(brokers: Brokers, topic: str, advice: str) -> TopicPublishInfo:
    """Return the route of a topic, which must exist."""
    servers = len(brokers.options.connection.name_server)
    try:
        # Unlike the cache of routes, this does not fall back to the template topic, and does not retry for minutes.
        brokers.transport.query_route(topic, brokers.request_timeout * servers)
    except NoBrokersException:
        raise
    except TopicRouteStaleException as exc:
        raise MQClientException(f"topic {topic} does not exist: {exc.broker_addr} returned no route. {advice}") from exc
    info = brokers.routes().look_up(topic)
    if info.template:
        raise MQClientException(f"topic {topic} does not exist on all name servers. {advice}")
    return info
