"""The name servers: does each answer, and as what.

Rule 1: every address is asked for itself: one good one among several hides what is wrong with the others.
"""

from __future__ import annotations

import contextlib
from typing import Final

from rocketmq_spark.doctor.check import FAILED, OK, WARNING, Check
from rocketmq_spark.doctor.listener import Listener, who_listens
from rocketmq_spark.doctor.tls import handshake_failed
from rocketmq_spark.errors import (
    RemotingCertificateException,
    RemotingException,
    RemotingTlsException,
    RequestNotSupportedException,
    RocketMQError,
)
from rocketmq_spark.names import AUTO_CREATE_TOPIC
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.tls_words import LEAVE_TLS_OUT

_GIVE_ANOTHER: Final = "give the name server's address (port 9876, unless it was given another one)"
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
    """Ask one name server for its brokers.

    Parameters
    ----------
    transport : RemotingTransport
        Set up as for a write: credentials, TLS.
    address : str
        ``host:port``.
    timeout : float
        Seconds.
    over_tls : bool
        Whether `transport` encrypts.
    """
    name = f"name server {address}"
    try:
        brokers = transport.cluster_info_at(address, timeout).brokers
    except RequestNotSupportedException:
        return _not_a_name_server(transport, name, address, timeout)
    except RemotingCertificateException as exc:
        return handshake_failed(name, exc)
    except RemotingException as exc:
        return _unreachable(name, address, timeout, exc, over_tls=over_tls)
    except RocketMQError as exc:
        return Check(name, FAILED, str(exc), "check the access key and the secret key")
    if not brokers:
        mend = f"start a broker with namesrvAddr={address}; one that has just started takes a moment to register"
        return Check(name, FAILED, "answers, and knows no broker", mend)
    return Check(name, OK, f"knows {', '.join(broker.broker_name for broker in brokers)}")


def _not_a_name_server(transport: RemotingTransport, name: str, address: str, timeout: float) -> Check:
    try:
        transport.route_at(address, AUTO_CREATE_TOPIC, timeout)
    except RequestNotSupportedException:
        return Check(name, FAILED, "a broker listens there", _GIVE_ANOTHER)
    except RocketMQError:
        pass  # It knows what a route is, and has none to tell.
    found = "a RocketMQ 5 proxy listens there: reads and writes go through it, brokers can't be asked"
    return Check(name, WARNING, found, f"{_GIVE_ANOTHER}, if brokers can be reached from here")


def _unreachable(name: str, address: str, timeout: float, exc: RemotingException, *, over_tls: bool) -> Check:
    if over_tls:
        with RemotingTransport([address]) as plain, contextlib.suppress(RocketMQError):
            plain.cluster_info_at(address, timeout)
            return Check(name, FAILED, "it speaks no TLS", LEAVE_TLS_OUT)
    listener = who_listens(address, timeout)
    if isinstance(exc, RemotingTlsException) and over_tls and listener is Listener.TLS:
        return handshake_failed(name, exc)
    if over_tls and listener is Listener.TLS:
        return Check(name, FAILED, f"TLS, and no name server behind it: {exc}", _GIVE_ANOTHER)
    return Check(name, FAILED, listener.value, _MEND[listener])
