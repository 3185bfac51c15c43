"""Presets and the fault strategy."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerUnavailableException,
    MQClientException,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.sink import _PRESET_STEPS
from rocketmq_spark.routing.fault_strategy import PRESETS, FaultSite, FaultStrategy, preset_of, site_of

S = FaultSite


def strategy(preset: str = "v4", *, enabled: bool = True, detector: bool = False) -> FaultStrategy:
    return FaultStrategy(PRESETS[preset], enabled=enabled, detector_enabled=detector)


@pytest.mark.parametrize("preset", ["v4", "legacy"])
@pytest.mark.parametrize(
    ("latency_ms", "away_ms"),
    [
        (0, 0), (50, 0), (100, 0), (549, 0), (549.9, 0), (550, 30_000), (999, 30_000), (1000, 60_000),
        (2000, 120_000), (3000, 180_000), (14_999, 180_000), (15_000, 600_000), (10**9, 600_000),
    ],
)  # fmt: skip
def test_the_4x_ladder_gives_the_time_of_the_highest_step_reached(preset: str, latency_ms: float, away_ms: int) -> None:
    assert away_ms == PRESETS[preset].not_available_ms(latency_ms)
    assert away_ms == strategy(preset).update(S.RETURNED, "a", latency_ms, 5.0)


@pytest.mark.parametrize(
    ("latency_ms", "away_ms"),
    [
        (549, 0), (550, 2_000), (1799, 2_000), (1800, 5_000), (3000, 6_000), (5000, 10_000), (14_999, 10_000),
        (15_000, 30_000),
    ],
)  # fmt: skip
def test_the_5x_ladder_gives_the_time_of_the_highest_step_reached(latency_ms: float, away_ms: int) -> None:
    assert away_ms == PRESETS["v5"].not_available_ms(latency_ms)


@pytest.mark.parametrize("preset", ["v4", "legacy"])
def test_isolation_is_computed_from_30_s_of_latency(preset: str) -> None:
    faults = strategy(preset)
    assert faults.update(S.REMOTING_FAILED, "a", 3.0, 100.0) == 600_000
    assert faults.table.items()["a"].current_latency_ms == 3.0
    assert not faults.is_available("a", 699.9)
    assert faults.is_available("a", 700.0)


def test_isolation_in_v5_is_computed_from_10_s_of_latency() -> None:
    faults = strategy("v5")
    assert faults.update(S.REMOTING_FAILED, "a", 3.0, 100.0) == 10_000
    assert faults.is_available("a", 110.0)


def test_nothing_is_recorded_while_switched_off() -> None:
    faults = strategy(enabled=False)
    assert faults.update(S.REMOTING_FAILED, "a", 20_000, 1.0) == 0
    assert faults.table.items() == {}
    faults.enabled = True
    assert faults.update(S.REMOTING_FAILED, "a", 20_000, 1.0) == 600_000


@pytest.mark.parametrize(("preset", "ends"), [("v4", False), ("v5", False), ("legacy", True)])
def test_fast_success_ends_an_isolation_only_in_legacy(preset: str, ends: bool) -> None:
    faults = strategy(preset)
    faults.update(S.REMOTING_FAILED, "a", 1, 0.0)
    faults.update(S.RETURNED, "a", 1, 1.0)
    assert faults.is_available("a", 1.0) is ends


# Site -> (4.x isolation, 5.x isolation, 5.x reachable).
TABLE = {
    S.RETURNED: (False, False, True),
    S.REMOTING_FAILED: (True, True, True),
    S.CLIENT_FAILED: (True, False, True),
    S.BROKER_REFUSED: (True, True, False),
    S.INTERRUPTED: (False, False, True),
    S.ASYNC_RETURNED: (False, False, True),
    S.ASYNC_REFUSED: (True, True, True),
    S.ASYNC_FAILED: (True, True, True),
    S.ASYNC_NOT_SUBMITTED: (True, True, False),
}


@pytest.mark.parametrize("detector", [False, True])
@pytest.mark.parametrize("preset", ["v4", "v5", "legacy"])
@pytest.mark.parametrize("site", FaultSite)
def test_each_fault_site_isolates_and_marks_as_in_the_table(site: FaultSite, preset: str, detector: bool) -> None:
    faults = strategy(preset, detector=detector)
    isolation_4x, isolation_5x, reachable_5x = TABLE[site]
    if site is S.REMOTING_FAILED:
        reachable_5x = not detector
    faults.update(site, "a", 1.0, 0.0)
    legacy = preset == "legacy"
    assert faults.is_available("a", 0.0) is not (isolation_4x if legacy else isolation_5x)
    assert faults.table.is_reachable("a") is (True if legacy else reachable_5x)


@pytest.mark.parametrize(
    ("error", "site"),
    [
        (RemotingConnectException("refused"), S.REMOTING_FAILED),
        (RemotingTimeoutException("late"), S.REMOTING_FAILED),
        (BrokerUnavailableException("full", 14, "", "a:1"), S.BROKER_REFUSED),
        (BrokerBusyException("busy", 2, "", "a:1"), S.BROKER_REFUSED),
        (MQClientException("no address"), S.CLIENT_FAILED),
    ],
)
def test_an_attempt_s_error_belongs_to_one_site(error: RocketMQError, site: FaultSite) -> None:
    assert site is site_of(error)


def test_custom_ladder_replaces_only_its_part_of_the_preset() -> None:
    custom = preset_of("v5", not_available_duration=(1, 2, 3, 4, 5, 6, 7))
    assert custom.latency_max == PRESETS["v5"].latency_max
    assert custom.not_available_ms(10_000) == 6
    assert custom.isolation_latency_ms == 10_000
    assert preset_of("legacy") == PRESETS["legacy"]


def test_strategy_follows_the_options() -> None:
    options = ConnectionOptions(
        name_server=("ns:1",),
        send_latency_fault_enable=True,
        fault_preset="v5",
        start_detector_enable=True,
        latency_max=(1,),
        not_available_duration=(77,),
    )
    faults = FaultStrategy.of_options(options)
    assert (faults.enabled, faults.detector_enabled) == (True, True)
    assert faults.update(S.RETURNED, "a", 5.0, 0.0) == 77
    assert not FaultStrategy.of_options(ConnectionOptions(name_server=("ns:1",))).enabled


def test_ladders_of_all_presets_have_the_number_of_steps_options_expect() -> None:
    for preset in PRESETS.values():
        assert len(preset.latency_max) == len(preset.not_available_duration) == _PRESET_STEPS


def test_presets_equal_the_allowed_values_of_the_option() -> None:
    from rocketmq_spark.options.sink import SINK_OPTIONS

    (spec,) = (spec for spec in SINK_OPTIONS if spec.name == "faultPreset")
    assert spec.kind.allowed == "one of " + ", ".join(PRESETS)
