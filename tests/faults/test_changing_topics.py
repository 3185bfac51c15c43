"""Topics that change during a write: more queues, no write permission."""

from __future__ import annotations

import time

import pytest

from tests.support.processes import wait_for
from tests.support.writes import Trial, make_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]


@pytest.mark.long
def test_queues_added_during_write_are_used(trial: Trial) -> None:
    def expand() -> None:
        make_topic(trial.cluster, trial.topic, queues=8)

    trial.write(60_000, expand, per_second=6_000, pollNameServerInterval=500)
    assert len(trial.queues) == 16
    account = trial.settle("queues expanded in mid-write")
    assert (account.repeats, account.retries) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("everywhere", [False, True], ids=["one", "all"])
def test_broker_without_write_permission_receives_no_rows(trial: Trial, *, everywhere: bool) -> None:
    victim, other = trial.cluster.brokers
    brokers, seconds = [victim, other] if everywhere else [victim], 3.0

    def left_alone() -> bool:
        """Return whether the brokers have stored nothing for a while, although the write has rows to send."""
        now = time.monotonic() if everywhere else trial.ledger.last_stored(other.address)
        return now > max(trial.ledger.last_stored(broker.address) for broker in brokers) + seconds

    def take_away_for_a_while() -> None:
        # A broker does not reject sends for this; producers see the permission in the route.
        make_topic(trial.cluster, trial.topic, perm=4, on=brokers)
        wait_for(left_alone)
        make_topic(trial.cluster, trial.topic, perm=6, on=brokers)

    trial.write(60_000, take_away_for_a_while, per_second=4_000, pollNameServerInterval=500)
    where = "all brokers" if everywhere else "one broker"
    account = trial.settle(f"permission to write taken away for {seconds:g} s, on {where}")
    assert (account.repeats, account.retries) == (0, 0)
    assert (account.longest_stall >= seconds) is everywhere
