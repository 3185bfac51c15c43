"""All checks, in the order in which one thing needs the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rocketmq_spark.admin import Admin, Table
from rocketmq_spark.admin.asking import ask_all
from rocketmq_spark.admin.options import check_timeout
from rocketmq_spark.doctor.brokers import check_brokers
from rocketmq_spark.doctor.check import FAILED, Check
from rocketmq_spark.doctor.machine import check_java, check_packages, check_python, check_workers
from rocketmq_spark.doctor.name_servers import check_name_server
from rocketmq_spark.doctor.proxies import check_proxies
from rocketmq_spark.doctor.topic import check_topic
from rocketmq_spark.errors import OptionError, RocketMQError


def examine(
    name_server: str | None = None,
    *,
    topic: str | None = None,
    endpoints: str | None = None,
    timeout: float = 5.0,
    environ: Mapping[str, str] = os.environ,
    **given: Any,
) -> Table[Check]:
    """Look at this machine, the name servers, the brokers, and if wanted at a topic and at proxies.

    Parameters
    ----------
    name_server : str, optional
        ``host:9876;host:9876``. Default: the environment variable ``NAMESRV_ADDR``; none is a finding, unless
        `endpoints` are given.
    topic : str, optional
    endpoints : str, optional
        ``host:8081;host:8081``: proxies of RocketMQ 5.
    timeout : float, default 5.0
        Seconds that one question may take.
    environ : mapping of str to str, default os.environ
        What is read for Java and for Spark's workers.
    **given
        As of `Admin`: access_key, secret_key, use_tls, ...

    Returns
    -------
    Table of Check
        Its rows' `state` is ``ok``, ``warning`` or ``failed``.

    Raises
    ------
    OptionError
        `timeout` is not allowed.
    """
    check_timeout(timeout)
    checks = [check_python(), *check_packages(), check_java(environ), check_workers(environ)]
    named = name_server or os.environ.get("NAMESRV_ADDR", "").strip()
    if named or not endpoints:
        checks += _check_cluster(name_server, topic, timeout, given)
    if endpoints:
        checks += check_proxies(endpoints, topic, given, timeout)
    return Table(Check, checks)


def check_name_servers(admin: Admin, timeout: float) -> list[Check]:
    """Ask each name server of an `Admin`."""
    over_tls = admin.options.use_tls
    answers = ask_all(
        admin.options.name_server,
        lambda address: check_name_server(admin.transport, address, timeout, over_tls=over_tls),
    )
    return [answer for answer in answers.values() if not isinstance(answer, RocketMQError)]


def _check_cluster(name_server: str | None, topic: str | None, timeout: float, given: Mapping[str, Any]) -> list[Check]:
    try:
        admin = Admin(name_server, timeout=timeout, **given)
    except OptionError as exc:
        mend = "name them with -n, or start a cluster on this machine: rocketmq-spark cluster up"
        return [Check("name server", FAILED, str(exc), mend if "no name server" in str(exc) else "correct the option")]
    with admin:
        checks = check_name_servers(admin, timeout)
        if all(check.state == FAILED for check in checks):
            return checks
        checks += check_brokers(admin.transport, timeout)
        return checks + (check_topic(admin, topic, timeout) if topic else [])
