"""A pipeline with proxies, each treated like a broker: waits, isolation, a second try of all."""

from __future__ import annotations

import itertools
import math

import pytest

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import SendRequest
from rocketmq_spark.protocol.grpc.codes import call_error, proxy_error
from rocketmq_spark.routing.fault_strategy import PRESETS
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.base import OnOutcome
from tests.support.pipelines import ENDPOINTS, Rig, proxy_route, refused

FIRST, SECOND = ENDPOINTS
# No preset isolates for longer, seconds.
LONGEST = 600.0


@pytest.mark.parametrize(
    "throttled",
    [
        proxy_error(42900, "flow limit", FIRST, "sending"),
        call_error("RESOURCE_EXHAUSTED", "too many", FIRST, "sending"),
    ],
    ids=["by-proxy", "by-gateway"],
)
def test_throttling_proxy_causes_exponential_backoff_up_to_the_cap(
    throttled: RocketMQError,
) -> None:
    rig = Rig(proxy_route("NORMAL", endpoints=(FIRST,)), retry_backoff_ms=100, retry_backoff_max_ms=1600)
    rig.transport.play(FIRST, *[Reply(error=throttled)] * 8)
    send, times = rig.transport.send, list[float]()

    def timed(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        times.append(rig.clock.now)
        send(request, timeout, on_outcome, within=within)

    rig.transport.send = timed
    rig.offer()
    rig.run()
    waits = [after - before for before, after in itertools.pairwise(times)]
    steps = [0.1, 0.2, 0.4, 0.8, 1.6, 1.6, 1.6, 1.6]
    assert len(waits) == len(steps)
    assert all(step / 2 <= wait <= step for wait, step in zip(waits, steps, strict=True)), waits
    assert rig.facts[FIRST]["isolated_times"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_all_endpoints_are_tried_again_after_all_failed(preset: str) -> None:
    rig = Rig(proxy_route("NORMAL"), send_latency_fault_enable=True, fault_preset=preset)
    for endpoint in ENDPOINTS:
        rig.transport.play(endpoint, *[refused()] * 3)
    rig.offer(20)
    rig.run()
    facts = rig.facts
    assert sum(facts[endpoint]["rows"] for endpoint in ENDPOINTS) == 20
    assert all(facts[endpoint]["isolated_times"] > 0 for endpoint in ENDPOINTS)
    assert [facts[endpoint]["retries"] for endpoint in ENDPOINTS] == [3, 3]


@pytest.mark.parametrize("preset", PRESETS)
def test_endpoint_is_used_again_after_its_isolation(preset: str) -> None:
    rig = Rig(proxy_route("NORMAL"), send_latency_fault_enable=True, fault_preset=preset)
    rig.transport.play(FIRST, refused(), refused())
    rig.offer(20)
    rig.run()
    # Two requests are in flight when the first one fails; afterwards none.
    assert rig.brokers.count(FIRST) == 2
    rig.transport.advance(LONGEST)
    rig.offer(20)
    rig.run()
    assert rig.brokers.count(FIRST) > 2
    assert rig.facts[FIRST]["rows"] + rig.facts[SECOND]["rows"] == 40
