"""The doctor's checks of brokers, name servers and proxies (docs/internals/remoting.md#broker-administration)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from rocketmq_spark import errors
from rocketmq_spark.admin.brokers import BrokerStatus, clock_of, disk_used_percent, query_brokers
from rocketmq_spark.cli.doctor.machine import FAILED, GRPC_PACKAGES, OK, WARNING, Check, check_packages
from rocketmq_spark.deliveries import DELIVERIES
from rocketmq_spark.deliveries.base import Finding
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.route import PERM_WRITE, permission_text
from rocketmq_spark.options.producer import producer_options
from rocketmq_spark.protocol import tls
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.protocol.remoting.codes import RequestCode, missing_right
from rocketmq_spark.protocol.remoting.responses import integer_of
from rocketmq_spark.routing.connect import client_id_of, new_transport
from rocketmq_spark.routing.topic_configs import version_of
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls_probe import Listener, who_listens

_OLDEST: Final = (4, 9)

# Percent of the disk: diskSpaceCleanForciblyRatio and diskSpaceWarningLevelRatio of ``MessageStoreConfig``.
_DELETES_FROM: Final = 85.0
_REFUSES_FROM: Final = 90.0
_CLOCK_WITHIN: Final = 5.0
# The most messages that a broker returns for a pull, and from how many on reads are fast.
_PULLED: Final = "maxTransferCountOnMessageInMemory"
_PULLED_FROM: Final = 256
_SET_ADDRESS: Final = (
    "if it runs, set brokerIP1 in its configuration to an address that this machine and Spark's executors reach, and "
    "open that port"
)


def check_brokers(transport: RemotingTransport, timeout: float) -> list[Check]:
    """Check every broker that the name servers know; none through a proxy."""
    try:
        brokers = transport.cluster_info(timeout).brokers
    except errors.RocketMQError:
        return []
    no_master = "it has only slaves now and no master, so it accepts no messages"
    checks = [
        Check(f"broker {broker.broker_name}", WARNING, no_master, "restart its master")
        for broker in brokers
        if broker.master is None
    ]
    answers = list(query_brokers(transport, brokers, timeout))
    unreached = {
        broker.broker_addrs[number]
        for broker, number, status in answers
        if isinstance(status, errors.RemotingException)
    }
    listeners = query_all(unreached, lambda address: who_listens(address, timeout))
    masters: dict[str, BrokerStatus] = {}
    for broker, number, status in answers:
        address = broker.broker_addrs[number]
        name = f"broker {broker.broker_name}" + (f", slave {number}" if number else "")
        if isinstance(status, errors.RemotingException):
            heard = listeners[address]
            answer = heard.value if isinstance(heard, Listener) else f"the check of that address failed: {heard}"
            finding = f"it is registered as {address}; from here: {answer}"
            checks.append(Check(name, FAILED, finding, _SET_ADDRESS))
        elif isinstance(status, errors.RocketMQError):
            checks.append(_refused(name, address, status))
        else:
            checks += _examined(name, address, status, is_master=number == 0)
            if number == 0:
                masters[broker.broker_name] = status
    return [*checks, *_check_deliveries(masters), *_check_reads(masters), *_check_cold_reads(masters)]


def _check_deliveries(statuses: Mapping[str, BrokerStatus]) -> list[Check]:
    """Check the settings of masters that deliveries depend on. Brokers with the same finding share one line.

    Most writes do not depend on them, so each finding is a warning.
    """
    checks = []
    unknown = ", ".join(broker for broker, status in statuses.items() if status.settings is None)
    for delivery, entry in DELIVERIES.items():
        try:
            broker_findings = entry.load().broker_findings
        except ImportError:  # The checks of this machine report missing packages
            continue
        if broker_findings is None:
            continue
        name = f"{re.sub('[A-Z]', lambda letter: f'-{letter[0].lower()}', delivery)} writes"
        brokers_of: dict[Finding, list[str]] = {}
        for broker, status in statuses.items():
            if status.settings is not None:
                for finding in broker_findings(status.settings, version_of(status.runtime)):
                    brokers_of.setdefault(finding, []).append(broker)
        checks += [
            Check(name, WARNING, f"{effect} on {', '.join(brokers)} ({cause}): {reason}", fix)
            for (effect, cause, reason, fix), brokers in brokers_of.items()
        ]
        if unknown:
            checks.append(Check(name, OK, f"not checked on {unknown}: this user may not see the settings"))
    return checks


def _check_reads(statuses: Mapping[str, BrokerStatus]) -> list[Check]:
    """Advise the settings for fast reads where a broker returns few messages per pull."""
    returned = {broker: integer_of(status.settings or {}, _PULLED) for broker, status in statuses.items()}
    few = {broker: number for broker, number in returned.items() if number is not None and number < _PULLED_FROM}
    if not few:
        return []
    finding = f"{', '.join(few)} return at most {', '.join(map(str, sorted(set(few.values()))))} messages per pull"
    fix = f"{_PULLED}=1024 and three more settings make reads about 1.5 times as fast: see docs/operations.md#brokers"
    return [Check("reads", OK, f"{finding} ({_PULLED})", fix)]


def _check_cold_reads(statuses: Mapping[str, BrokerStatus]) -> list[Check]:
    """Warn of brokers that limit reads of messages that are not in memory."""
    limits = {
        broker: integer_of(status.settings, "cgColdReadThreshold")
        for broker, status in statuses.items()
        if status.settings is not None and status.settings.get("coldDataFlowControlEnable") == "true"
    }
    if not limits:
        return []
    most = " or ".join(sorted({"an unknown number of" if limit is None else f"{limit:,}" for limit in limits.values()}))
    finding = f"{', '.join(limits)} let a consumer group read {most} bytes of messages outside of memory in 5 s"
    fix = "raise cgColdReadThreshold, or the limit of the job's consumerGroup: see docs/reading.md#cold-reads"
    return [Check("cold reads", WARNING, f"{finding} (coldDataFlowControlEnable)", fix)]


def access_refused(exc: errors.RocketMQError) -> bool | None:
    """Return True for a rejected key, False for a missing right of the user, None for another error."""
    if isinstance(exc, errors.UserRefusedException):
        return True
    return False if isinstance(exc, errors.MQBrokerException) and missing_right(exc.remark) else None


def remark_of(exc: errors.RocketMQError) -> str:
    """Return the broker's own text, else that of the error."""
    return exc.remark if isinstance(exc, errors.MQBrokerException) else str(exc)


def key_refused(name: str, exc: errors.RocketMQError) -> Check:
    """Return the finding for a rejected key."""
    fix = "give the right access key and secret key (accessKey, secretKey; ROCKETMQ_ACCESS_KEY, ROCKETMQ_SECRET_KEY)"
    return Check(name, FAILED, f"the access key is rejected: {remark_of(exc).partition(chr(10))[0]}", fix)


def _refused(name: str, address: str, exc: errors.RocketMQError) -> Check:
    refused = access_refused(exc)
    if refused:
        return key_refused(name, exc)
    if refused is False:
        return Check(name, OK, f"reachable at {address}; this user may not see its release, disk and clock")
    return Check(name, WARNING, str(exc), "check the broker's log (broker.log)")


def _examined(name: str, address: str, status: BrokerStatus, *, is_master: bool) -> list[Check]:
    runtime, perm = status.runtime, status.perm
    version, disk, clock = version_of(runtime), disk_used_percent(runtime), clock_of(runtime)
    facts, problems = [f"reachable at {address}", version or "release unknown"], []
    numbers = tuple(int(part) for part in (version or "").split(".")[:2] if part.isdecimal())
    if numbers and numbers < _OLDEST:
        problems.append(Check(f"{name}: version", FAILED, f"{version}, and 4.9 is the oldest supported", "update it"))
    if perm is not None:
        facts.append(f"permission {permission_text(perm)}")
        if is_master and not perm & PERM_WRITE:
            fix = "set brokerPermission=6, unless it is being removed from service"
            finding = f"it accepts no messages (brokerPermission={perm})"
            problems.append(Check(f"{name}: permission", WARNING, finding, fix))
    if disk is not None:
        facts.append(f"disk {disk:.0f} % full")
        fix = "free some space, give it a larger disk, or keep messages for a shorter time (fileReservedTime)"
        if disk >= _REFUSES_FROM:
            finding = f"{disk:.0f} % full: from 90 % a broker rejects messages"
            problems.append(Check(f"{name}: disk", FAILED, finding, fix))
        elif disk >= _DELETES_FROM:
            finding = f"{disk:.0f} % full: from 85 % a broker deletes messages early"
            problems.append(Check(f"{name}: disk", WARNING, finding, fix))
    ahead = None if clock is None else clock - status.now
    # The broker's clock is truncated to seconds.
    if ahead is None:
        facts.append("clock unknown")
    elif -_CLOCK_WITHIN - 1 <= ahead <= _CLOCK_WITHIN:
        facts.append("clock as on this machine")
    else:
        finding = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        fix = "set both by NTP: delays, message times and reads by time are off by as much"
        problems.append(Check(f"{name}: clock", WARNING, finding, fix))
    return [Check(name, OK, ", ".join(facts)), *problems]


# The advice for an error that contains a text.
_FIXES: Final = (
    (tls.OURS_REFUSED, "give a certificate (tlsCertFile, --tls-cert-file) and its key (tlsKeyFile, --tls-key-file)"),
    (tls.MUST_NAME, "give the certificate's name (tlsServerName, --tls-server-name), or use it as the address"),
    (tls.OUT_OF_DATE, "give the server a new certificate, or correct the clock that is wrong"),
    (tls.NOT_TRUSTED, "give the authority's file (tlsCaFile, --tls-ca-file)"),
    (tls.TOO_OLD, "enable TLS 1.2 or newer on the server"),
    (tls.DEMANDS_TLS, "switch TLS on (useTls=true, --tls)"),
    (tls.SPEAKS_NO_TLS, tls.LEAVE_TLS_OUT),
    ("", "check the server's certificate, and the options of TLS"),
)


def handshake_failed(name: str, exc: errors.RemotingTlsException) -> Check:
    """Return the finding for a failed handshake, with the relevant options."""
    fix = next(fix for words, fix in _FIXES if words in str(exc))
    # The cause is the handshake's own text, without the request.
    return Check(name, FAILED, str(exc.__cause__ or exc), fix)


_GIVE_ANOTHER: Final = "give the name server's address (its default port is 9876)"
_MEND: Final = {
    Listener.UNKNOWN_HOST: "check the spelling, or give the host's IP address",
    Listener.NOBODY: "start a name server (on this machine: rocketmq-spark cluster up), or check the address",
    Listener.SILENT: "check the address, and that the port is open from here",
    Listener.GRPC: f"{_GIVE_ANOTHER}; to write over gRPC, give this address as endpoints",
    Listener.HTTP: _GIVE_ANOTHER,
    Listener.TLS: "switch TLS on (useTls=true, --tls); otherwise " + _GIVE_ANOTHER,
    Listener.OTHER: _GIVE_ANOTHER,
}


def check_name_server(transport: RemotingTransport, address: str, timeout: float, *, over_tls: bool) -> Check:
    """Check that a name server knows brokers; `over_tls` says whether `transport` encrypts."""
    name = f"name server {address}"
    try:
        brokers = transport.name_servers.cluster_info_at(address, timeout).brokers
    except errors.RequestNotSupportedException:
        return _not_a_name_server(transport, name, address, timeout)
    except errors.RemotingCertificateException as exc:
        return handshake_failed(name, exc)
    except errors.RemotingException as exc:
        return _unreachable(name, address, timeout, exc, over_tls=over_tls)
    except errors.RocketMQError as exc:
        return Check(name, FAILED, str(exc), "check the access key and the secret key")
    if not brokers:
        fix = f"start a broker with namesrvAddr={address}; one that has just started takes a moment to register"
        return Check(name, FAILED, "answers, but knows no broker", fix)
    return Check(name, OK, f"knows {', '.join(broker.broker_name for broker in brokers)}")


def _not_a_name_server(transport: RemotingTransport, name: str, address: str, timeout: float) -> Check:
    try:
        transport.name_servers.route_at(address, AUTO_CREATE_TOPIC, timeout)
    except errors.RequestNotSupportedException:
        return Check(name, FAILED, "a broker listens there", _GIVE_ANOTHER)
    except errors.RocketMQError:
        pass  # It supports the request, but has no such route
    finding = "a RocketMQ 5 proxy listens there: reads and writes go through it, brokers can't be checked"
    return Check(name, WARNING, finding, f"{_GIVE_ANOTHER}, if brokers are reachable from here")


def _unreachable(name: str, address: str, timeout: float, exc: errors.RemotingException, *, over_tls: bool) -> Check:
    if over_tls:
        with RemotingTransport([address]) as plain, contextlib.suppress(errors.RocketMQError):
            plain.name_servers.cluster_info_at(address, timeout)
            return Check(name, FAILED, "it does not support TLS", tls.LEAVE_TLS_OUT)
    listener = who_listens(address, timeout)
    if isinstance(exc, errors.RemotingTlsException) and over_tls and listener is Listener.TLS:
        return handshake_failed(name, exc)
    if over_tls and listener is Listener.TLS:
        return Check(name, FAILED, f"a server with TLS listens, which is no name server: {exc}", _GIVE_ANOTHER)
    return Check(name, FAILED, listener.value, _MEND[listener])


_GIVE_PROXY: Final = "give the address of a proxy's gRPC server (its default port is 8081)"


def check_proxies(
    endpoints: str, topic: str | None, connection_options: Mapping[str, Any], timeout: float
) -> list[Check]:
    """Check the packages for gRPC, and each proxy of `endpoints`; `connection_options` has arguments of `Admin`."""
    checks = check_packages(GRPC_PACKAGES, extra="grpc")
    if any(check.state == FAILED for check in checks):
        return checks
    connection = {name: value for name, value in connection_options.items() if name != "name_server"}
    try:
        options = producer_options({**connection, "endpoints": endpoints}, {}).connection
        for endpoint in options.endpoints:
            alone = replace(options, endpoints=(endpoint,))
            with contextlib.closing(new_transport(alone, client_id_of(alone, "doctor"))) as transport:
                checks.append(_check_proxy(f"proxy {endpoint}", endpoint, transport.query_route, topic, timeout))
    except errors.RocketMQError as exc:
        # From an option, because `_check_proxy` raises nothing.
        checks.append(Check("endpoints", FAILED, str(exc), "correct the option"))
    return checks


def _check_proxy(name: str, endpoint: str, query_route: Any, topic: str | None, timeout: float) -> Check:
    try:
        route = query_route(topic or AUTO_CREATE_TOPIC, timeout)
    except errors.TopicRouteStaleException:
        if topic is None:
            return Check(name, OK, "answers gRPC")
        fix = f"create it: rocketmq-spark create-topic {topic}; a proxy creates no topics"
        return Check(name, FAILED, f"answers gRPC, but knows no topic {topic}", fix)
    except errors.MQBrokerException as exc:
        if topic is None and exc.response_code == Code.ILLEGAL_TOPIC:
            return Check(name, OK, "answers gRPC")
        if exc.response_code != Code.UNAUTHORIZED:
            return Check(name, FAILED, str(exc), "check the proxy's log (proxy.log)")
        if missing_right(exc.remark) and topic is None:
            # The key is right. No write needs a right on TBW102.
            return Check(name, OK, "answers gRPC")
        if missing_right(exc.remark):
            fix = "let the user's policies allow it (mqadmin updateAcl)"
            return Check(name, FAILED, exc.remark.partition("\n")[0], fix)
        return key_refused(name, exc)
    except errors.RocketMQError as exc:
        return _unreachable_proxy(name, endpoint, exc, timeout)
    types = ", ".join(sorted(route.message_types))
    accepts = f"; topic {topic} accepts {types} messages" if topic and types else ""
    return Check(name, OK, f"answers gRPC{accepts}")


def _unreachable_proxy(name: str, endpoint: str, exc: errors.RocketMQError, timeout: float) -> Check:
    with RemotingTransport([]) as transport:
        try:
            transport.client.invoke(endpoint, RequestCode.GET_BROKER_CLUSTER_INFO, {}, b"", timeout)
        except errors.RemotingException:
            pass
        else:
            return Check(name, FAILED, "a server of the remoting protocol listens there, not gRPC", _GIVE_PROXY)
    if isinstance(exc, errors.RemotingTlsException):
        return handshake_failed(name, exc)
    listener = who_listens(endpoint, timeout)
    if listener is Listener.GRPC:
        fix = "set TLS as on the proxy (useTls, --tls), and check its certificate"
        return Check(name, FAILED, f"a gRPC server listens, but does not answer: {exc}", fix)
    return Check(name, FAILED, listener.value, _GIVE_PROXY)
