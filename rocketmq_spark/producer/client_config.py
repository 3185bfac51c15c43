"""What a client instance needs of its owner's options, be it a write's or a producer's."""

from __future__ import annotations

from typing import Protocol


class ClientConfig(Protocol):
    """Route, schedule and fault settings; times are milliseconds (spec/producer.md section 2)."""

    @property
    def over_grpc(self) -> bool:
        """True if routes come from proxies."""
        ...

    @property
    def create_topic_key(self) -> str:
        """Template topic for topics without a route of their own."""
        ...

    @property
    def default_topic_queue_nums(self) -> int:
        """Most queues per broker that the template gives."""
        ...

    @property
    def poll_name_server_interval(self) -> int:
        """Time between two refreshes of the routes."""
        ...

    @property
    def heartbeat_broker_interval(self) -> int:
        """Time between two heart-beats."""
        ...

    @property
    def fault_preset(self) -> str:
        """Rule set of the fault strategy."""
        ...

    @property
    def latency_max(self) -> tuple[int, ...] | None:
        """Steps of the latency ladder, or the preset's."""
        ...

    @property
    def not_available_duration(self) -> tuple[int, ...] | None:
        """Times to stay away, one for each step, or the preset's."""
        ...

    @property
    def send_latency_fault_enable(self) -> bool:
        """Use the fault strategy."""
        ...

    @property
    def start_detector_enable(self) -> bool:
        """Probe brokers that could not be reached."""
        ...

    @property
    def detect_timeout(self) -> int:
        """Time for one probe."""
        ...

    @property
    def detect_interval(self) -> int:
        """Time between two probes of one broker."""
        ...
