"""The proxies of RocketMQ 5: does each answer gRPC.

Rule 1: a proxy is asked for a route; that it knows no such topic is an answer, too, and so is that it tells none of
        RocketMQ's own, as 5.5.0 says of the one that is asked for where no topic is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from rocketmq_spark.client.connect import client_id_of, new_transport
from rocketmq_spark.doctor.brokers import key_refused
from rocketmq_spark.doctor.check import FAILED, OK, Check
from rocketmq_spark.doctor.listener import Listener, who_listens
from rocketmq_spark.doctor.machine import GRPC_PACKAGES, check_packages
from rocketmq_spark.doctor.tls import handshake_failed
from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RemotingException,
    RemotingTlsException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.names import AUTO_CREATE_TOPIC
from rocketmq_spark.producer_options import producer_options
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.codes import RequestCode, missing_right
from rocketmq_spark.wire.grpc_codes import Code

_LOG: Final = "look into the proxy's log (proxy.log)"
_GIVE_ANOTHER: Final = "give the address of a proxy's gRPC server (port 8081, unless it was given another one)"


def check_proxies(endpoints: str, topic: str | None, given: Mapping[str, Any], timeout: float) -> list[Check]:
    """Look at what gRPC needs here, and at each proxy.

    Parameters
    ----------
    endpoints : str
        ``host:8081;host:8081``.
    topic : str or None
    given : mapping of str to value
        Credentials, TLS and namespace, as `Admin` takes them.
    timeout : float
        Seconds, for each proxy.
    """
    checks = check_packages(GRPC_PACKAGES, extra="grpc")
    if any(check.state == FAILED for check in checks):
        return checks
    connection = {name: value for name, value in given.items() if name != "name_server"}
    try:
        options = producer_options({**connection, "endpoints": endpoints}, {})
    except OptionError as exc:
        return [*checks, Check("endpoints", FAILED, str(exc), "correct the option")]
    for endpoint in options.endpoints:
        alone = replace(options, endpoints=(endpoint,))
        try:
            transport = new_transport(alone, client_id_of(alone, "doctor"))
        except RocketMQError as exc:
            return [*checks, Check("endpoints", FAILED, str(exc), "correct the option")]
        try:
            checks.append(_check_proxy(f"proxy {endpoint}", endpoint, transport.query_route, topic, timeout))
        finally:
            transport.close()
    return checks


def _check_proxy(name: str, endpoint: str, query_route: Any, topic: str | None, timeout: float) -> Check:
    try:
        route = query_route(topic or AUTO_CREATE_TOPIC, timeout)
    except TopicRouteStaleException:
        if topic is None:
            return Check(name, OK, "answers gRPC")
        mend = f"create it: rocketmq-spark create-topic {topic}; a proxy creates none"
        return Check(name, FAILED, f"answers gRPC, and knows no topic {topic}", mend)
    except MQBrokerException as exc:
        if topic is None and exc.response_code == Code.ILLEGAL_TOPIC:
            return Check(name, OK, "answers gRPC")
        if exc.response_code != Code.UNAUTHORIZED:
            return Check(name, FAILED, str(exc), _LOG)
        if missing_right(exc.remark):
            said = exc.remark.partition("\n")[0]
            return Check(name, FAILED, said, "let the user's policies allow it (mqadmin updateAcl)")
        return key_refused(name, exc)
    except RocketMQError as exc:
        return _unreachable(name, endpoint, exc, timeout)
    types = ", ".join(sorted(route.message_types))
    return Check(name, OK, f"answers gRPC; topic {topic} takes {types} messages" if topic and types else "answers gRPC")


def _unreachable(name: str, endpoint: str, exc: RocketMQError, timeout: float) -> Check:
    with RemotingTransport([]) as transport:
        try:
            transport.invoke(endpoint, RequestCode.GET_BROKER_CLUSTER_INFO, {}, b"", timeout)
        except RemotingException:
            pass
        else:
            return Check(name, FAILED, "a server of the remoting protocol listens there, not gRPC", _GIVE_ANOTHER)
    if isinstance(exc, RemotingTlsException):
        return handshake_failed(name, exc)
    listener = who_listens(endpoint, timeout)
    if listener is Listener.GRPC:
        mend = "switch TLS on or off as the proxy has it (useTls, --tls), and look at its certificate"
        return Check(name, FAILED, f"a gRPC server listens, and no answer came: {exc}", mend)
    return Check(name, FAILED, listener.value, _GIVE_ANOTHER)
