"""The interface of a delivery: what it allows, and what the driver and the tasks of a write do for it.

The class of a delivery answers questions before a write. An instance is the delivery of one planned write. Spark
pickles it into the tasks, and into the process that ends the write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from rocketmq_spark.deliveries import DELIVERIES
from rocketmq_spark.options.sink import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from rocketmq_spark.metrics import Recorder
    from rocketmq_spark.model.message import MessageQueue
    from rocketmq_spark.routing.client_instance import ClientInstance
    from rocketmq_spark.sink.task import SendRules


@dataclass(frozen=True, slots=True)
class Write:
    """The identity of a batch write, or of a micro-batch."""

    name: str  # The ``writeId``, or the number of the micro-batch
    query: str = ""  # The query id of a stream
    # With `foreach_batch`, whose `query` is made of options: Spark's id of the query; empty if it is unknown.
    spark_query: str = field(default="", compare=False)

    @property
    def batch_id(self) -> int:
        """The number of the micro-batch; -1 for a batch write."""
        return int(self.name) if self.query else -1

    def __str__(self) -> str:
        return f"micro-batch {self.name} of query {self.query}" if self.query else f"write {self.name}"


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What a task tells the driver for its delivery. A subclass has the values: str, int, bool or bytes."""


R = TypeVar("R", bound=PartitionResult)
D = TypeVar("D", bound="Delivery[Any]")


@dataclass(slots=True)
class WriteReport:
    """What the end of a write has found or done: its text ends the log line, and ``metricsPath`` gets its fields."""

    NAME: ClassVar[str]  # The key of the fields in the lines of ``metricsPath``

    repeated_rows = 0  # Rows that are stored a second time, or more often


OpenInstance: TypeAlias = "Callable[[], AbstractContextManager[ClientInstance]]"
"""Returns a client instance with the producer group of the write; leaving the context releases it."""


class Send(Protocol):
    """Sends the rows of a task."""

    def __call__(
        self, batches: Iterator[pa.RecordBatch], *, row_id_name: str = "", rules: SendRules | None = None
    ) -> None:
        """Return when each row is acknowledged; see `rocketmq_spark.sink.task.write_rows`.

        `row_id_name` begins the ids of rows; without it, the ids begin with a new name. `rules` None are those of at
        least once.
        """


@dataclass(frozen=True, slots=True)
class PartitionTask:
    """One partition of a write, in its task."""

    recorder: Recorder  # Also knows the query and the micro-batch
    rows: Iterator[pa.RecordBatch]  # No batch is empty
    open_instance: OpenInstance
    send: Send


@dataclass(frozen=True, slots=True)
class TaskResults(Generic[R]):
    """What the driver knows of a write when its tasks have ended."""

    results: Sequence[R]  # Of the tasks that have succeeded and returned one
    query: str = ""  # Of a micro-batch: its query and number
    batch_id: int = -1
    # Returns the brokers that have acknowledged rows: it merges the reports of all tasks.
    broker_names: Callable[[], Collection[str]] = tuple


class Finding(NamedTuple):
    """A setting of a broker that a delivery cannot use, or only at a cost."""

    effect: str
    cause: str  # The settings, or the release
    reason: str
    fix: str


class BrokerFindings(Protocol):
    """Yields what is wrong with the settings of a master of a release."""

    def __call__(self, settings: Mapping[str, str], version: str | None) -> Iterator[Finding]:
        """Return the findings."""


class Delivery(Protocol[R]):
    """How often a row of a write may be stored. The defaults are those of a delivery without state."""

    NEEDS_TOPIC: ClassVar[str] = ""  # Why the topic must exist before the write; empty: it need not
    REFUSES_COMPACTION: ClassVar[str] = ""  # Why it cannot be a compaction topic; empty: it can
    # Why only a Spark driver can end such a write; empty: a `Producer` can.
    NEEDS_SPARK: ClassVar[str] = ""
    # What `write_partition` returns.
    RESULT: ClassVar[type[PartitionResult]] = PartitionResult
    # For ``rocketmq-spark doctor``; None: such writes depend on no setting.
    broker_findings: ClassVar[BrokerFindings | None] = None

    options: SinkOptions
    # The identity of the write, if the driver knows it before the tasks.
    write: Write | None

    @classmethod
    def contradictions(cls, options: SinkOptions) -> Iterator[str]:
        """Yield an error text for each option that this delivery does not allow."""
        return iter(())

    @classmethod
    def check_columns(cls, schema: pa.Schema, options: SinkOptions) -> None:
        """Raise a SchemaError for a column that such a write cannot have."""
        return

    @classmethod
    def speculation_warning(cls, options: SinkOptions) -> str:
        """Return a warning about ``spark.speculation=true``, empty if it does no harm.

        Raises an OptionError if the write is not possible with it.
        """
        return ""

    @classmethod
    def identify(cls, options: SinkOptions, batch_id: int | None) -> Write | None:
        """Return the identity of a batch write; `batch_id` is the micro-batch that `foreach_batch` writes.

        Raises an OptionError if the delivery needs an identity, and the options have none.
        """
        return None

    @classmethod
    def plan(
        cls: type[D],
        options: SinkOptions,
        open_instance: OpenInstance,
        write: Write | None = None,
        queues: Sequence[MessageQueue] | None = None,
    ) -> D:
        """Return the delivery of one write, or of one micro-batch whose identity only its tasks know (`write` None).

        `queues` are those of an ordered write.
        """

    def check_checkpoint(self, checkpoint: str, query_of: Callable[[str], str | None]) -> None:
        """Raise an OptionError if an earlier query with the same identity had another ``checkpointLocation``.

        `query_of` returns the id of the query of a checkpoint, None if it is unknown.
        """
        return

    def write_partition(self, task: PartitionTask) -> R | None:
        """Write one partition (in a task); return None if the driver needs to know nothing."""

    def complete(self, open_instance: OpenInstance, done: TaskResults[R]) -> WriteReport | None:
        """End a write whose tasks have all succeeded (on the driver)."""
        return None

    def abort(self, open_instance: OpenInstance, done: TaskResults[R]) -> None:
        """Undo what can be undone of a failed write (on the driver). Does not raise."""
        return


def delivery_of(options: SinkOptions) -> type[Delivery[Any]]:
    """Return the class of a write's delivery."""
    found: type[Delivery[Any]] = DELIVERIES[options.delivery].load()
    return found
