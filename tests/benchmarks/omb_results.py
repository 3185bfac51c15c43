"""The pure parts of `bench_omb`: when messages are due, which rate is next, and results as OpenMessaging writes them.

All times are nanoseconds of the monotonic clock, which is the same for all processes of a machine, Java's among them
(``time.monotonic_ns``, ``System.nanoTime``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]

SECOND = 1_000_000_000
# Each driver has runs at these rates (messages per second), up to the first one that it does not sustain.
LADDER = (500, 2_000, 8_000, 32_000, 128_000, 512_000)
# The search for the highest sustained rate ends when the next rate that fails is at most this much higher.
_PRECISION = 1.5
# This part of a sustained rate is acknowledged, and received, within the time of the run.
_KEPT_UP = 0.95

# The percentiles of OpenMessaging's results, by the names in its fields.
PERCENTILES = {"50": 50, "75": 75, "95": 95, "99": 99, "999": 99.9, "9999": 99.99}
_QUANTILES = (*range(100), *(99 + tenth / 10 for tenth in range(1, 10)), 99.95, 99.99, 99.995, 99.999, 100)


def due_by(elapsed: int, rate: int) -> int:
    """Return how many messages are due `elapsed` nanoseconds after the start: the first one is due at the start."""
    return elapsed * rate // SECOND + 1


def due_at(numbers: Any, rate: int) -> Any:
    """Return when messages are due, nanoseconds after the start, by their numbers from 0."""
    return -(-numbers * SECOND // rate)


def percentile(latencies: Times, percent: float) -> float:
    """Return the lowest latency that `percent` of the messages do not exceed, as HdrHistogram; 0 without messages."""
    return float(np.percentile(latencies, percent, method="inverted_cdf")) if len(latencies) else 0.0


def next_rate(sustained: Mapping[int, bool]) -> int | None:
    """Return the rate to try next, from the rates tried until now and whether they were sustained; None at the end.

    The ladder comes first. Then the gap between the highest sustained rate and the next one is halved, as a ratio.
    """
    refused = min((rate for rate, kept in sustained.items() if not kept), default=None)
    if refused is None:
        return next((rate for rate in LADDER if rate not in sustained), None)
    best = highest(sustained)
    return round((best * refused) ** 0.5) if best and refused > best * _PRECISION else None


def highest(sustained: Mapping[int, bool]) -> int:
    """Return the highest sustained rate below every rate that was not sustained, or 0."""
    refused = min((rate for rate, kept in sustained.items() if not kept), default=None)
    return max((rate for rate, kept in sustained.items() if kept and (refused is None or rate < refused)), default=0)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a driver and the consumer recorded of one run at one rate.

    `began` is when the first message was due. The first `warm_up` nanoseconds do not count, the `seconds` after them
    do. `sent` and `acknowledged` have the times of the messages by number, 0 for none. `received` has a row for each
    received message: when it was due, and when it came.
    """

    rate: int
    began: int
    warm_up: int
    seconds: int
    sent: Times
    acknowledged: Times
    received: Times
    errors: int

    def sustained(self) -> bool:
        """Whether all messages were sent, and sender and consumer kept up with the rate, without an error."""
        # A run that ended early can have acknowledged its first messages, which came late, in the time that counts.
        whole = len(self.sent) == (self.warm_up + self.seconds * SECOND) * self.rate // SECOND
        acknowledged, received = self._ends()
        rates = (self._per_second(acknowledged), self._per_second(received[:, 1]))
        return whole and not self.errors and all(float(one.mean()) >= _KEPT_UP * self.rate for one in rates)

    def lost(self) -> int:
        """Return how many acknowledged messages of the run did not come."""
        due = self.began + due_at(np.arange(len(self.sent)), self.rate)
        return int(np.count_nonzero((self.acknowledged > 0) & ~np.isin(due, self.received[:, 0])))

    def repeated(self) -> int:
        """Return how many messages came again."""
        return len(self.received) - len(np.unique(self.received[:, 0]))

    def publish(self) -> Times:
        """Return the time from when each message was due to its acknowledgement."""
        return self._latencies()[0]

    def end_to_end(self) -> Times:
        """Return the time from when each message was due to the consumer."""
        return self._latencies()[2]

    def result(self, workload: str, driver: str, message_size: int, queues: int) -> dict[str, Any]:
        """Return the fields of OpenMessaging's ``TestResult``, and no other ones: its tools reject those.

        Lists have an entry for each second. Latencies are in ms, delays in µs, both of the messages that were due then.
        """
        acknowledged, received = self._ends()
        published, consumed = self._per_second(acknowledged), self._per_second(received[:, 1])
        ends = self._window()[0] + SECOND * np.arange(1, self.seconds + 1)
        backlog = [int(np.sum(acknowledged <= end)) - int(np.sum(received[:, 1] <= end)) for end in ends]
        fields: dict[str, Any] = {
            "workload": workload,
            "driver": driver,
            "messageSize": message_size,
            "topics": 1,
            "partitions": queues,
            "producersPerTopic": 1,
            "consumersPerTopic": 1,
            "publishRate": published.tolist(),
            "publishErrorRate": [self.errors / self.seconds] * self.seconds,
            "consumeRate": consumed.tolist(),
            "backlog": [max(0, one) for one in backlog],
        }
        kinds = ("publishLatency", 1e6), ("publishDelayLatency", 1000), ("endToEndLatency", 1e6)
        periods = [self._latencies(second) for second in range(self.seconds)]
        for number, ((name, unit), total) in enumerate(zip(kinds, self._latencies(), strict=True)):
            whole = unit == 1000
            each = [_summary(period[number], unit, whole) for period in periods]
            fields |= {f"{name}{what}": [one[what] for one in each] for what in each[0]}
            aggregated = f"aggregated{name[0].upper()}{name[1:]}"
            fields |= {f"{aggregated}{what}": value for what, value in _summary(total, unit, whole).items()}
            points = {str(float(percent)): percentile(total, percent) / unit for percent in _QUANTILES}
            fields[f"{aggregated}Quantiles"] = {at: int(one) if whole else one for at, one in points.items()}
        return fields

    def _window(self) -> tuple[int, int]:
        start = self.began + self.warm_up
        return start, start + self.seconds * SECOND

    def _ends(self) -> tuple[Times, Times]:
        return self.acknowledged[self.acknowledged > 0], self.received

    def _per_second(self, times: Times) -> npt.NDArray[np.float64]:
        edges = self._window()[0] + SECOND * np.arange(self.seconds + 1)
        return np.diff(np.searchsorted(np.sort(times), edges)).astype(np.float64)

    def _latencies(self, second: int | None = None) -> tuple[Times, Times, Times]:
        """Return publish latencies, delays of the sends and end-to-end latencies of what was due in the time."""
        start, end = self._window()
        if second is not None:
            start, end = start + second * SECOND, start + (second + 1) * SECOND
        due = self.began + due_at(np.arange(len(self.sent)), self.rate)
        within = (due >= start) & (due < end)
        stored = within & (self.acknowledged > 0)
        came = self.received[(self.received[:, 0] >= start) & (self.received[:, 0] < end)]
        return (self.acknowledged - due)[stored], (self.sent - due)[within], came[:, 1] - came[:, 0]


def _summary(latencies: Times, unit: float, whole: bool) -> dict[str, float]:
    """Return mean, percentiles and maximum; without fractions if they are `whole`."""
    found = {f"{name}pct": percentile(latencies, percent) / unit for name, percent in PERCENTILES.items()}
    found["Max"] = float(latencies.max(initial=0)) / unit
    mean = float(latencies.mean()) / unit if len(latencies) else 0.0
    return {"Avg": mean, **{name: int(value) if whole else value for name, value in found.items()}}
