"""The lease of an attempt: it sends rows only while it knows that no later attempt has begun its partition.

A reading of the home that finds nothing newer allows requests for two thirds of the fence, from the time before the
reading. A later attempt waits for the whole fence after its record is readable. So it begins to read rows when requests
of the earlier attempt have been impossible for a third of the fence (docs/internals/effectively-once.md#leases).

The lease is renewed only while rows are sent: in the background after a third of the fence, and before the next request
if it has expired. So a process that was frozen reads the home before it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import BARRIER_WAIT, DecisionLog
from rocketmq_spark.deliveries.log.state import shown_time
from rocketmq_spark.errors import DeliveryError, RocketMQError
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.transport.runtime import Runtime

# Parts of the fence: how long a reading allows requests, and after which time it is repeated.
_LENGTH: Final = 2 / 3
_RENEWAL: Final = 1 / 3

Instant: TypeAlias = tuple[float, float]
"""The time of two clocks. A reading is as old as the clock says that has moved further."""


def fence_seconds(options: SinkOptions) -> float:
    """Return how long an attempt waits until requests of earlier ones are stored, seconds."""
    return max(options.fence_ms / 1000, BARRIER_WAIT)


def instant(runtime: Runtime) -> Instant:
    """Return the time now.

    The first clock runs on while the system is suspended. The second one is set by other machines, and so shows that a
    hypervisor had stopped the whole system. It may also jump: forward, the lease is renewed too early, which does no
    harm; backward, the first clock counts.
    """
    return runtime.boot_clock(), runtime.wall_clock()


def fresh_id(brokers: Brokers) -> str:
    """Return a random id for an attempt or a driver."""
    return f"{brokers.rng.getrandbits(64):016x}"


@dataclass(eq=False, repr=False)
class Lease:
    """The lease of one attempt. `log` has its ``begun`` record; a reading that began at `read_at` had the record.

    `log` also has the earlier attempts. So a copy of one of their records is no later attempt.
    """

    brokers: Brokers
    log: DecisionLog
    write: Write
    partition_id: int
    attempt: str
    read_at: Instant
    # Whether the write was done at the plan. Spark may repeat such a micro-batch. Then only a later record ends the
    # attempt.
    was_done: bool = False
    # The thread of each reading calls it at the end, with the error that ends the attempt, or None.
    on_read: Callable[[RocketMQError | None], None] = field(default=lambda _: None, init=False)
    _reading: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._runtime = self.brokers.runtime
        self._lock = self._runtime.lock()
        fence = fence_seconds(self.brokers.options)
        self._length, self._renewal = fence * _LENGTH, fence * _RENEWAL
        self.check()

    def left(self) -> float:
        """Return for how many seconds requests may still be written; 0 or less: none may.

        It starts a reading if it is time, and never waits.
        """
        (boot, wall), runtime = self.read_at, self._runtime
        age = max(runtime.boot_clock() - boot, runtime.wall_clock() - wall)
        if age >= self._renewal:
            with self._lock:
                if not self._reading:
                    runtime.start(self._read, "rocketmq-lease")
                    self._reading = True
        return self._length - age

    def check(self) -> None:
        """Raise a DeliveryError if the log has a record that ends the attempt."""
        log, write = self.log, self.write
        if log.is_superseded(write):
            later = log.newest_of[write.query].name
            raise self._replaced(f"by another driver, which has completed the micro-batch, and continued with {later}")
        state = log.writes[write]
        if state.done and not self.was_done:
            at = shown_time(state.done_ms)
            raise self._replaced(f"by another driver, which has completed the write at {at}")
        newest, begun = next(reversed(state.begun[self.partition_id].items()))
        if newest != self.attempt:
            own = driver_of(newest) == driver_of(self.attempt)
            whose = "of the same driver, because Spark has started the task again" if own else "of another driver"
            raise self._replaced(f"by attempt {newest} {whose}. It began at {shown_time(begun.stored_ms)}")

    def _replaced(self, by: str) -> DeliveryError:
        return DeliveryError(
            f"{self.write}, partition {self.partition_id}: attempt {self.attempt} was replaced {by}. So it has "
            "stopped, and sends no more rows. Its successor finds the rows that are stored, and sends the others"
        )

    def _read(self) -> None:
        """Read the home once, and tell the result."""
        error: RocketMQError | None = None
        began = instant(self._runtime)
        # An old master of the home may still answer, without new records. The next reading asks the new one.
        self.brokers.instance.refresh_route(self.log.topic)
        try:
            # A frozen process may miss records that have expired since.
            self.log.refresh(self.brokers, complete=True)
            self.check()
            self.read_at = began
        except DeliveryError as exc:
            error = exc
        except Exception as exc:
            error = DeliveryError(
                f"{self.write}, partition {self.partition_id}: the task cannot find out whether another attempt has "
                f"replaced it, because it cannot read its decision log in queue {self.log.home}: {exc}. So it has "
                "stopped. Start the broker, and check that it is registered"
            )
            error.__cause__ = exc
        with self._lock:
            # Until its requests have ended, the sender asks on. An attempt that has ended needs no more readings.
            self._reading = error is not None
        self.on_read(error)


def attempt_id(brokers: Brokers, driver: str) -> str:
    """Return a new id of an attempt that a driver's plan has started."""
    return f"{driver}-{fresh_id(brokers)}"


def driver_of(attempt: str) -> str:
    """Return the id of the driver in the id of an attempt."""
    return attempt.partition("-")[0]
