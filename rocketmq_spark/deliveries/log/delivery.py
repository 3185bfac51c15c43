"""What the deliveries with a log share: their options, identities, plans, and the logs that a process has read.

Spark plans a write, runs its tasks, and ends it in calls that share nothing but the pickled writer. So each call reads
the log. A process keeps what it has read, so that the next call reads only new records.
"""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rocketmq_spark.deliveries.base import Delivery, OpenInstance, R, TaskResults, Write
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.deliveries.log.state import WriteState, shown_time
from rocketmq_spark.errors import DeliveryError, OptionError
from rocketmq_spark.options.kinds import option_text
from rocketmq_spark.options.sink import SINK_SPELLING, SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.model.message import MessageQueue

logger = logging.getLogger("rocketmq_spark.producer")

# The logs that this process has read and no call uses now, by connection, topic, name and keys.
_logs: dict[tuple[str, str, str, tuple[str, ...]], DecisionLog] = {}
_MOST_LOGS = 100
# Checkpoints and queries whose log needs no other check. Reading the checkpoint may take as long as a micro-batch.
_owners: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlan:
    """What tasks need to know of the log; Spark pickles it."""

    write: Write | None  # The batch write; None for a stream, whose tasks know the micro-batch
    done: bool  # Whether the batch write was decided or completed before
    newest: Write | None  # The newest micro-batch in the log
    key_id: str  # The fingerprint of the key that signs the records of the write; empty without a key

    def write_of(self, query: str, batch_id: int) -> Write:
        """Return the write that a task belongs to; DeliveryError if Spark has not told the task its micro-batch."""
        if self.write is None and (not query or batch_id < 0):
            raise DeliveryError(
                f"a task of a stream knows query {query or 'unknown'} and micro-batch {batch_id}, so it is unknown "
                "which rows are stored; this is an error of Spark, which sets both for each micro-batch. Report it"
            )
        return self.write or Write(str(batch_id), query)

    def is_done(self, write: Write) -> bool:
        """Return whether a driver has decided or completed a write before, so that tasks have nothing to send."""
        return self.done and write == self.write


P = TypeVar("P", bound=LogPlan)
L = TypeVar("L", bound="LoggedDelivery[Any, Any]")


@dataclass(frozen=True, repr=False)
class LoggedDelivery(Delivery[R], Generic[R, P]):
    """A delivery that records the progress of writes in ``transactionTopic``, under ``transactionalId``."""

    REFUSES_COMPACTION: ClassVar[str] = "a recovery could repeat them"
    # What proxies lack.
    NOT_OVER_GRPC: ClassVar[str]
    # Field, the values that are allowed, and why others are not.
    ALLOWED: ClassVar[tuple[tuple[str, tuple[object, ...], str], ...]]

    options: SinkOptions
    planned: P
    write: Write | None = None

    @classmethod
    def log_name(cls, options: SinkOptions) -> str:
        """Return the name of the log of a write."""
        return str(options.transactional_id)

    @classmethod
    def contradictions(cls, options: SinkOptions) -> Iterator[str]:
        """Yield an error text for each option that this delivery does not allow, or lacks."""
        delivery = options.delivery
        if options.over_grpc:
            yield (
                f"delivery={delivery} is not available over gRPC, because proxies {cls.NOT_OVER_GRPC}: give "
                "nameServer, not endpoints"
            )
        if options.transactional_id is None:
            yield f"delivery={delivery} requires transactionalId: give a name that is the same after each restart"
        if options.transaction_topic in (options.topic, options.dead_letter_topic):
            yield f"transactionTopic={options.transaction_topic} is also a topic of rows: name another topic"
        for field, allowed, why in cls.ALLOWED:
            value = getattr(options, field)
            if value not in allowed:
                name = SINK_SPELLING(field)
                shown = f"columns:{','.join(value)}" if isinstance(value, tuple) else option_text(value)
                yield f"{name}={shown} is not available with delivery={delivery}, because {why}: remove {name}"

    @classmethod
    def check_columns(cls, schema: pa.Schema, options: SinkOptions) -> None:
        """Raise a SchemaError for columns of delays and priorities."""
        from rocketmq_spark.arrow.schema import check_transactional

        check_transactional(schema, options.delivery)

    @classmethod
    def identify(cls, options: SinkOptions, batch_id: int | None) -> Write:
        """Return the write that ``writeId`` or the number of a micro-batch names; raise an OptionError without one."""
        if batch_id is None:
            if options.write_id is None:
                raise OptionError(
                    f"delivery={options.delivery} requires writeId, by which a repetition of the write is recognised: "
                    "set it to a name of this write, such as writeId=orders-2026-11-24. A repetition needs the same "
                    "name, each other write of this transactionalId another one. Within foreachBatch use "
                    "rocketmq_spark.foreach_batch(...), or a name with the number of the micro-batch, such as "
                    "writeId=counts-17"
                )
            return Write(options.write_id)
        if options.write_id is not None:
            raise OptionError(
                f"writeId={options.write_id}: foreach_batch identifies each micro-batch by transactionalId and its "
                "number; remove writeId"
            )
        # On Spark Connect and in another thread the id of the query is unknown. Names with the topic let `check_stream`
        # find two writes of one micro-batch that share a transactionalId.
        return Write(str(batch_id), f"{options.transactional_id}#{options.topic or ''}")

    @classmethod
    def plan(
        cls: type[L],
        options: SinkOptions,
        open_instance: OpenInstance,
        write: Write | None = None,
        queues: Sequence[MessageQueue] | None = None,
    ) -> L:
        """Return the delivery of a write, by the log; warn if the log has it already. Raises as `check_same_query`."""
        with cls._opened(options, open_instance) as (brokers, log):
            batch = None if write is None or write.query else write
            planned = cls._plan(brokers, log, batch, queues)
            if write is not None and planned.is_done(write):
                check_same_query(write, log.writes[write])
                warn_of_complete(write, log.writes[write])
            return cls(options, planned, write)

    @classmethod
    @abstractmethod
    def _plan(cls, brokers: Brokers, log: DecisionLog, write: Write | None, queues: Sequence[MessageQueue] | None) -> P:
        """Return the plan of a batch write, or of a stream (None)."""

    @classmethod
    @contextmanager
    def _opened(cls, options: SinkOptions, open_instance: OpenInstance) -> Iterator[tuple[Brokers, DecisionLog]]:
        with open_instance() as instance, log_of(options, cls.log_name(options)) as log:
            yield Brokers(options, instance), log

    def check_checkpoint(self, checkpoint: str, query_of: Callable[[str], str | None]) -> None:
        """Raise an OptionError if the log is of another query. Tasks check it, too, by the query's id."""
        newest = self.planned.newest
        if newest is None or (checkpoint, newest.query) in _owners:
            return
        query = query_of(checkpoint)
        if query is not None:
            check_query(self.options, newest, query, f"checkpoint {checkpoint}")
        _owners.add((checkpoint, newest.query))

    def _write_of(self, done: TaskResults[Any]) -> Write:
        return self.write or self.planned.write_of(done.query, done.batch_id)


def check_stream(options: SinkOptions, plan: LogPlan, write: Write, begun: Iterable[Write] = ()) -> None:
    """Raise an OptionError if the log does not continue with a micro-batch; each task checks this.

    The log has attempts at the writes `begun`. Spark begins a micro-batch after the end of the one before.
    """
    if plan.write is not None:
        return
    check_newest(options, plan.newest, write)
    if plan.newest is None:
        return
    latest = max((other.batch_id for other in (plan.newest, *begun) if other.query == write.query), default=0)
    if write.batch_id < latest:
        raise OptionError(
            f"{write}: the decision log of transactionalId={options.transactional_id} has micro-batch {latest} "
            "already, so the checkpoint is an old copy. Restore the newest checkpoint, or use another transactionalId "
            "and startAnew=true if repeated rows are acceptable"
        )


def check_newest(options: SinkOptions, newest: Write | None, write: Write) -> None:
    """Raise an OptionError if a log whose newest micro-batch is `newest` is none of the query, as `check_query`."""
    if newest is not None:
        check_query(options, newest, write.query, str(write))
    elif write.batch_id > 0 and not options.start_anew:
        raise OptionError(
            f"{write}: the decision log has no record of transactionalId={options.transactional_id}, so it is unknown "
            "whether the micro-batch was committed: the log has expired, its broker is not registered, or "
            "transactionalKey has not the key of its records. Start the broker, give the key, or set startAnew=true if "
            "repeated rows are acceptable"
        )


def check_query(options: SinkOptions, newest: Write, query: str, write: str) -> None:
    """Raise an OptionError if the `newest` micro-batch of the log is not of this query, unless ``startAnew`` is set."""
    if newest.query != query and not options.start_anew:
        raise OptionError(
            f"{write}: transactionalId={options.transactional_id} belongs to query {newest.query}, which has another "
            "checkpoint. Give each query its own transactionalId, or set startAnew=true if the old checkpoint was "
            "deleted on purpose"
        )


def mark_of(write: Write | None) -> str:
    """Return what ends the run ids of a query of `foreach_batch`, which differs from that of any other query.

    It is empty if Spark's id of the query is unknown.
    """
    query = "" if write is None else write.spark_query
    return query and f"_{hashlib.sha256(query.encode()).hexdigest()[:16]}"


def check_same_query(write: Write, state: WriteState) -> None:
    """Raise an OptionError if another query of `foreach_batch` has decided a micro-batch, whose rows are others."""
    own, decision = mark_of(write), state.decisions.get(1)
    run_id = "" if decision is None else decision.group.rpartition("#")[2]
    if own and "_" in run_id and not run_id.endswith(own):
        raise OptionError(
            f"{write} was decided by a query with another checkpoint, so the rows of this query are not written. Give "
            "each query its own transactionalId, or set startAnew=true if the old checkpoint was deleted on purpose, "
            "and the micro-batch has the same rows"
        )


def warn_of_complete(write: Write, state: WriteState) -> None:
    """Warn that rows are not written, because the log says that their write was done or decided before."""
    when = "was decided before, and is completed now"
    if state.done:
        when = f"was completed at {shown_time(state.done_ms)}"
    text = "%s %s: the rows of this save are not written. If they are other rows, write them with another %s"
    logger.warning(text, write, when, "transactionalId" if write.query else "writeId")


def warn_of_other_rows(write: Write, state: WriteState, rows: int) -> None:
    """Warn if a write that was decided before has another number of rows now."""
    decision = state.decisions.get(1)
    if decision is not None and decision.rows != rows:
        logger.warning(
            "%s was decided with %d rows, and has %d rows now. Either the query does not give the same rows at each "
            "run, or its checkpoint is an older copy. In the second case, compare the topic with the source, and write "
            "the rows that are missing with another transactionalId",
            *(write, decision.rows, rows),
        )


@contextmanager
def log_of(options: SinkOptions, name: str) -> Iterator[DecisionLog]:
    """Return a log, with what this process has read of it.

    Another thread that needs the log before this one leaves the context reads it itself, as another driver does.
    """
    # The repr of the connection has no secrets, and names the servers.
    keys = keys_of(options)
    key = repr(options.connection), options.transaction_topic, name, keys.fingerprints
    # One call takes the log out, so that no two threads get the same one.
    log = _logs.pop(key, None) or DecisionLog(name, options.transaction_topic, keys)
    try:
        yield log
    finally:
        if len(_logs) >= _MOST_LOGS:
            _logs.clear()
        _logs[key] = log


def forget_logs() -> None:
    """Read all logs again, as a new process does."""
    _logs.clear()


def read_log(log: DecisionLog, brokers: Brokers, *, everything: bool) -> None:
    """Read the records of the log that are new to this process."""
    # Without a record, the home is only drawn, and another process may have drawn another one since.
    if not (log.writes or log.start_offsets) or (everything and not log.everything):
        log.open(brokers, everything=everything)
    else:
        log.refresh(brokers)
