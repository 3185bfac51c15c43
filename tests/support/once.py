"""Drivers of once-writes on real brokers, each as a new process has it, and the audit of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.model.message import MessageQueue
from tests.support.auditor import Row, audit
from tests.support.java import Java
from tests.support.two_phase import Driver


class HasNameServer(Protocol):
    """What a driver needs of a cluster."""

    @property
    def name_server(self) -> str: ...


# Rows of `run_task`, and what their keys begin with.
KEYS: Final = "key of "
BODIES: Final = [f"row-{number:04}" for number in range(2_000)]
# More than a commit stores before a test notices the first one.
MANY_BODIES: Final = [f"row-{number:04}" for number in range(6_000)]
# Time for a commit on a slow machine, also if a broker restarts. A driver that recovers a decided write waits so long.
COMMIT_MS: Final = 600_000


def job_with_home(topic: str, broker_name: str, suffix: str) -> str:
    """Return a transactional id whose log is on one of the brokers ``broker-0`` and ``broker-1``."""
    homes = {name: MessageQueue(f"log-{topic}", name, 0) for name in ("broker-0", "broker-1")}
    names = (f"job-{number}-{topic}" for number in itertools.count())
    logs = ((name, DecisionLog(name + suffix, f"log-{topic}")) for name in names)
    return next(name for name, log in logs if max(homes.values(), key=log._draw) == homes[broker_name])


@contextmanager
def new_driver(
    cluster: HasNameServer, topic: str, *, timeout_ms: int = 15_000, home: str = "broker-0", **options: Any
) -> Iterator[Driver]:
    """Return a driver of a write to a topic, which has a decision log of its own, on the broker `home`.

    `options` are those of `Driver`.
    """
    forget_checks()
    forget_logs()
    suffix = f"#{topic}" if options.get("delivery") == "effectivelyOnce" else ""
    given: dict[str, Any] = {
        "topic": topic,
        "transactionTopic": f"log-{topic}",
        "transactionalId": job_with_home(topic, home, suffix),
    }
    with closing(Driver(cluster.name_server, **{"deliveryTimeoutMs": "120000", **given, **options})) as job:
        # As of a driver. Without threads it would not find a new master, and without users it would close while idle.
        job.instance.register(job.options.producer_group)
        job.instance.start()
        # The option allows no deadline of less than 10 s.
        job.options = job.brokers.options = replace(job.options, transaction_timeout_ms=timeout_ms)
        yield job


@contextmanager
def resuming(cluster: HasNameServer, topic: str, **options: Any) -> Iterator[Driver]:
    """Return a driver with ``delivery=effectivelyOnce``."""
    with new_driver(cluster, topic, delivery="effectivelyOnce", fenceMs="1000", **options) as job:
        yield job


@contextmanager
def committing(cluster: HasNameServer, topic: str, **settings: Any) -> Iterator[Driver]:
    """Return a driver with ``delivery=exactlyOnce`` that has read its log."""
    with new_driver(cluster, topic, **settings) as job:
        yield job.open()


def check_once(java: Java, name_server: str, topic: str, bodies: Iterable[str], *accepted: str, keys: str = "") -> None:
    """Fail unless each body is stored once, with the keys `keys` and the body. Findings of `accepted` are no error."""
    given = (Row(topic, body, body.encode(), keys=f"{keys}{body}" if keys else None) for body in bodies)
    audit(java, name_server, given, identity=[":(row-.*)"]).check(*accepted)
