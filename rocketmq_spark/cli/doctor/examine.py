"""Runs the doctor's checks of this machine, name servers, brokers, a topic and proxies, in this order.

A topic and proxies are checked only if they are given. Without a name server, given proxies are checked alone. If the
check of every name server fails, brokers are not checked, and the topic only at the proxies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Final

import rocketmq_spark.cli.doctor.machine as machine
import rocketmq_spark.cli.doctor.servers as servers
from rocketmq_spark import errors
from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.queues import check_timeout
from rocketmq_spark.cli.doctor.durability import check_durability
from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING, Check
from rocketmq_spark.cli.doctor.rights import check_trace_topic, may_publish
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.route import TopicRouteData, masters_of
from rocketmq_spark.source.topic_routes import refuse_static
from rocketmq_spark.transport.parallel import query_all

_TRANSACTION_TOPIC: Final = "rocketmq-spark-decisions"


def examine(
    name_server: str | None = None,
    *,
    topic: str | None = None,
    endpoints: str | None = None,
    timeout: float = 5.0,
    transaction_topic: str = _TRANSACTION_TOPIC,
    transactional_key: str | None = None,
    trace_topic: str | None = None,
    environ: Mapping[str, str] = os.environ,
    **connection_options: Any,
) -> Table[Check]:
    """Return the findings about this machine and the cluster, and about `topic` and the proxies at `endpoints`.

    A missing name server (default: ``NAMESRV_ADDR``) is a finding, unless `endpoints` names proxies. `environ` is the
    environment of Java and Spark's workers. `transaction_topic` and `transactional_key` are options of jobs with a
    decision log. `trace_topic` is checked for jobs with ``enableTrace``. `connection_options` has arguments of `Admin`.
    `timeout` is in seconds per request. Raises an OptionError unless `timeout` is allowed.
    """
    check_timeout(timeout)
    checks = [machine.check_python(), *machine.check_packages()]
    checks += [*machine.check_kernel(environ), machine.check_java(environ), machine.check_workers(environ)]
    named = name_server or os.environ.get("NAMESRV_ADDR", "").strip()
    if named or not endpoints:
        log = transaction_topic, transactional_key
        checks += _check_cluster(name_server, (topic, trace_topic), log, timeout, connection_options)
    if endpoints:
        checks += servers.check_proxies(endpoints, topic, connection_options, timeout)
    return Table(Check, checks)


def check_name_servers(admin: Admin, timeout: float) -> list[Check]:
    """Check each name server of an `Admin` separately, because a working one would hide the faults of others."""
    over_tls = admin.options.connection.use_tls
    answers = query_all(
        admin.options.connection.name_server,
        lambda address: servers.check_name_server(admin.transport, address, timeout, over_tls=over_tls),
    )
    return [answer for answer in answers.values() if not isinstance(answer, errors.RocketMQError)]


def _check_cluster(
    name_server: str | None,
    topics: tuple[str | None, str | None],
    log: tuple[str, str | None],
    timeout: float,
    connection_options: Mapping[str, Any],
) -> list[Check]:
    try:
        admin = Admin(name_server, timeout=timeout, **connection_options)
    except errors.OptionError as exc:
        fix = "give -n host:9876, or start a cluster on this machine: rocketmq-spark cluster up"
        return [Check("name server", FAILED, str(exc), fix if "no name server" in str(exc) else "correct the option")]
    with admin:
        checks = check_name_servers(admin, timeout)
        if all(check.state == FAILED for check in checks):
            return checks
        checks += servers.check_brokers(admin.transport, timeout)
        topic, trace_topic = topics
        checks += _check_durability(admin, topic, timeout)
        with contextlib.suppress(ImportError):  # The checks of this machine report missing packages
            from rocketmq_spark.cli.doctor.decision_log import check_decision_log

            checks += check_decision_log(admin, *log)
        checks += check_topic(admin, topic, timeout) if topic else []
        return checks + ([check_trace_topic(admin.transport, trace_topic, timeout)] if trace_topic else [])


def _check_durability(admin: Admin, topic: str | None, timeout: float) -> list[Check]:
    """Check the brokers of a topic, or without one all; none through a proxy."""
    try:
        brokers = admin.transport.cluster_info(timeout).brokers
    except errors.RocketMQError:
        return []
    if topic:
        with contextlib.suppress(errors.RocketMQError):
            names = {data.broker_name for data in admin.route(topic).queue_datas}
            brokers = tuple(broker for broker in brokers if broker.broker_name in names)
    return check_durability(admin.transport, brokers, timeout)


def check_topic(admin: Admin, topic: str, timeout: float) -> list[Check]:
    """Check that a topic exists, is writable and readable, and whether the user may write to it."""
    name = f"topic {topic}"
    try:
        route = admin.route(topic)
    except errors.TopicRouteStaleException as exc:
        return [_unknown(admin, name, topic, exc, timeout)]
    except errors.RocketMQError as exc:
        return [Check(name, FAILED, str(exc), "check the topic's name, and the access key")]
    try:
        refuse_static(topic, route)
    except errors.OptionError as exc:
        finding, _, fix = str(exc).partition("; ")
        return [Check(name, FAILED, finding, fix)]
    checks = [*_check_permissions(name, route), *_check_on_brokers(admin, name, topic, route, timeout)]
    if may_publish(admin.transport, topic, masters_of(route.broker_datas), timeout) is False:
        fix = f"a job that writes needs the right Pub on Topic:{topic}"
        checks.insert(0, Check(name, OK, "the user may not write to it (no right Pub)", fix))
    return checks


def _unknown(admin: Admin, name: str, topic: str, exc: errors.TopicRouteStaleException, timeout: float) -> Check:
    create = f"create it: rocketmq-spark create-topic {topic}"
    makers: list[str] = []
    with contextlib.suppress(errors.RocketMQError):
        template = admin.transport.query_route(AUTO_CREATE_TOPIC, timeout)
        makers = [data.broker_name for data in template.queue_datas if data.writable]
    if not makers:
        return Check(name, FAILED, str(exc), create)
    on, near = ", ".join(makers), str(exc).partition("did you mean ")[2]
    finding = f"it does not exist; the first write creates it on {on} (autoCreateTopicEnable), a read fails"
    return Check(name, WARNING, finding + (f"; did you mean {near}" if near else ""), create)


def _check_permissions(name: str, route: TopicRouteData) -> list[Check]:
    closed = []
    for done, of in (("written", "writable"), ("read", "readable")):
        barred = [data.broker_name for data in route.queue_datas if not getattr(data, of)]
        if barred:
            everywhere = len(barred) == len(route.queue_datas)
            on = ", ".join(barred) + (" (all its brokers)" if everywhere else "")
            finding = f"its permission does not allow it to be {done} on {on}"
            fix = f"{_update_command(name, route)} sets its permission to rw"
            closed.append(Check(name, FAILED if everywhere else WARNING, finding, fix))
    if not route.queue_datas:
        closed.append(Check(name, FAILED, "no broker has it now", "restart its brokers"))
    return closed


def _update_command(name: str, route: TopicRouteData) -> str:
    """Return the command that updates the topic and removes none of its queues."""
    queues = max(data.queue_nums for data in route.queue_datas)
    return f"rocketmq-spark create-topic {name.removeprefix('topic ')} --update --queues {queues}"


def _check_on_brokers(admin: Admin, name: str, topic: str, route: TopicRouteData, timeout: float) -> list[Check]:
    masters = masters_of(route.broker_datas)

    def ask(broker: str) -> tuple[str, str]:
        # A request for the end of a queue needs the right to see the topic, as the first request of a read does.
        admin.transport.max_offset(MessageQueue(topic, broker, 0), masters[broker], timeout)
        config = admin.transport.topic_config(masters[broker], topic, timeout)
        return config.message_type, config.queue_type

    types = set()
    checks = []
    for broker, answer in query_all(masters, ask).items():
        if not isinstance(answer, errors.RocketMQError):
            types.add(answer)
        elif servers.access_refused(answer):
            checks.append(servers.key_refused(f"{name} on {broker}", answer))
        elif servers.access_refused(answer) is False:
            fix = "give the user the rights that it needs: PUB to write, SUB to read, GET to query offsets"
            finding = f"the user may not query its offsets and settings: {servers.remark_of(answer)}"
            checks.append(Check(f"{name} on {broker}", WARNING, finding, fix))
        elif not isinstance(answer, errors.RemotingException | errors.RequestNotSupportedException):
            # An unreachable broker has its own finding; a proxy instead of a broker does not report types.
            checks.append(Check(f"{name} on {broker}", WARNING, str(answer), "check the broker's log (broker.log)"))
    queues = sum(data.write_queue_nums for data in route.queue_datas)
    on = ", ".join(data.broker_name for data in route.queue_datas)
    kinds = " and ".join(f"{message} messages, queues {queue}" for message, queue in sorted(types))
    if len(types) > 1:
        fix = f"{_update_command(name, route)} --type TYPE sets one message type"
        if len({queue for _, queue in types}) > 1:
            fix = "create it under another name, because queue types can't be changed"
        checks.append(Check(name, WARNING, f"its brokers differ: {kinds}", fix))
    if route.queue_datas and (types or not checks):
        finding = f"{queues} queues on {on}" + (f"; {kinds}" if len(types) == 1 else "")
        checks.insert(0, Check(name, OK, finding))
    return checks
