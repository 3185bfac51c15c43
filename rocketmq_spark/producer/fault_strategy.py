"""Which brokers to avoid for now: the switches, the preset and the table of fault items, as one.

Rule 1: no clock here; `now` (seconds) always comes in.
Rule 2: switched off, nothing is recorded, and only the broker that failed last is avoided.

Follows ``MQFaultStrategy.java`` (spec/producer.md section 5).
"""

from __future__ import annotations

from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.fault import LatencyFaultTolerance
from rocketmq_spark.producer.fault_preset import PRESETS, FaultPreset, FaultSite, preset_of, without_faults


class FaultStrategy:
    """What the producers of one client instance know of its brokers; safe for many threads.

    Parameters
    ----------
    preset : FaultPreset, default v4
    enabled : bool, default False
        ``sendLatencyFaultEnable``; may be set later.
    detector_enabled : bool, default False
        ``startDetectorEnable``.

    Attributes
    ----------
    table : LatencyFaultTolerance
    """

    def __init__(
        self, preset: FaultPreset = PRESETS["v4"], *, enabled: bool = False, detector_enabled: bool = False
    ) -> None:
        self.enabled = enabled
        self.detector_enabled = detector_enabled
        self.table = LatencyFaultTolerance()
        self._preset = preset

    @classmethod
    def of_options(cls, options: SinkOptions) -> FaultStrategy:
        """Return the strategy that a set of options asks for."""
        return cls(
            preset_of(options.fault_preset, options.latency_max, options.not_available_duration),
            enabled=options.send_latency_fault_enable,
            detector_enabled=options.start_detector_enable,
        )

    @property
    def resets_index(self) -> bool:
        """True if a retry goes on from a new random queue."""
        return self.enabled and self._preset.resets_index

    def update(self, site: FaultSite, broker_name: str, latency_ms: float, now: float) -> float:
        """Take an outcome into account, by what its site says of the broker (spec/producer.md section 5.8).

        Parameters
        ----------
        site : FaultSite
        broker_name : str
        latency_ms : float
            Measured, milliseconds.
        now : float
            Seconds.

        Returns
        -------
        float
            Milliseconds of isolation that this outcome added; 0 when it added none.
        """
        if not self.enabled:
            return 0.0
        preset = self._preset
        said = (preset.updates_with_detector if self.detector_enabled else preset.updates)[site]
        return self.table.update(
            broker_name,
            latency_ms,
            now,
            away_ms=preset.ladder.not_available_ms(preset.isolation_latency_ms if said.isolation else latency_ms),
            reachable=said.reachable,
            shorten=preset.success_ends_isolation,
        )

    def is_available(self, broker_name: str, now: float) -> bool:
        """Tell whether no isolation of the broker is running."""
        return not self.enabled or self.table.is_available(broker_name, now)

    def prefer(
        self, candidates: frozenset[str], last_broker_name: str | None, admitted: frozenset[str], now: float
    ) -> frozenset[str]:
        """Return the brokers that a message may go to now; none while it is better to wait for one that is full.

        Parameters
        ----------
        candidates : frozenset of str
            Brokers with a queue to write to; at least one.
        last_broker_name : str or None
            The broker that failed last.
        admitted : frozenset of str
            Those of `candidates` that take a request just now.
        now : float
            Seconds.
        """
        if not self.enabled:
            return without_faults(candidates, last_broker_name, admitted)
        return self._preset.preference(self.table, candidates, last_broker_name, admitted, now)

    def __repr__(self) -> str:
        return f"<FaultStrategy enabled={self.enabled} {self.table!r}>"
