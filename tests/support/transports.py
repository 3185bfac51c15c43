"""Each transport, with a test server that has the topic `orders` and plays `Reply`s."""

from __future__ import annotations

import contextlib
import ssl
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trustme

from rocketmq_spark.cluster.security import Certificate, write_certificate
from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerUnavailableException,
    MQBrokerException,
    RemotingConnectException,
    RemotingTimeoutException,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.route import MASTER_ID, BrokerData, TopicRouteData
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.transport.base import ProxyTransport, Transport
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.contract import Seam
from tests.support.proxies import running_proxy, stored
from tests.support.scripted import ScriptedTransport, route

NOW = datetime.now(timezone.utc).replace(tzinfo=None)
YESTERDAY, TOMORROW = NOW - timedelta(days=1), NOW + timedelta(days=1)


class Authority:
    """A new certificate authority. Its files are in a folder of the test."""

    def __init__(self, folder: Path, name: str = "a test of rocketmq-spark") -> None:
        self._folder = folder
        self._ca = trustme.CA(organization_unit_name=name)
        self.ca_file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def server(self, name: str, names: str, **valid: Any) -> Certificate:
        """Return the files of a certificate and its key for `names`, as in ``DNS:localhost,IP:127.0.0.1``.

        It also serves as a client certificate. `valid` may be ``not_before=TOMORROW`` or ``not_after=YESTERDAY``.
        """
        issued = self._ca.issue_cert(*(one.partition(":")[2] for one in names.split(",")), **valid)
        return write_certificate(issued, self._folder, name)

    def context(self, name: str, names: str, **valid: datetime) -> ssl.SSLContext:
        """Return the context of a server for `names`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.server(name, names, **valid))
        return context

    def outdated(self, name: str, names: str) -> ssl.SSLContext:
        """Return the context of a server for `names` that speaks nothing newer than TLS 1.1."""
        context = self.context(name, names)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        return context


QUEUE = MessageQueue("orders", "broker-a", 0)
# The properties that brokers add to each single message.
ADDED = ("MSG_REGION", "TRACE_ON", "CLUSTER")


class Played(Seam):
    """A seam whose server plays scripted replies."""

    # Replies that reject a request, by the error that the transport must report.
    refusals: ClassVar[Mapping[type[MQBrokerException], Reply]] = {
        BrokerBusyException: Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"),
        BrokerUnavailableException: Reply.code(14, "the broker's disk is full"),
        TopicRouteStaleException: Reply.code(17, "topic not exist"),
        UserRefusedException: Reply.code(16, "check signature failed."),
        MQBrokerException: Reply.code(13, "the message is illegal"),
    }
    play: Callable[[Reply], None]


class Brokers(Played):
    """A seam over the remoting protocol, whose stored messages can be read."""

    transport: Transport
    messages: dict[MessageQueue, list[Message]]
    check_transaction: Callable[[int], TransactionCheck | None]

    def stored(self, count: int) -> Sequence[Message]:
        return [message.without_properties(*ADDED) for message in self.messages.get(self.queue, [])]


class Scripted(Brokers):
    def __init__(self, transport: ScriptedTransport, threaded: bool) -> None:
        super().__init__(transport, QUEUE, "broker-a:10911")
        self.scripted = transport
        self.threaded = threaded
        self.play = lambda reply: transport.play("broker-a", reply)
        self.messages = transport.stored
        self.check_transaction = lambda offset: transport.check_transaction(self.address, offset)
        transport.always["silent"] = Reply(silent=True)
        transport.always["dead"] = Reply(error=RemotingConnectException("refused"))

    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue("orders", address.partition(":")[0], 0), address

    def dead(self) -> tuple[MessageQueue, str]:
        self.scripted.fail("max_offset", RemotingConnectException("refused"))
        return self.elsewhere("dead:10911")

    def silent_address(self) -> str:
        return "silent:10911"

    def another(self, address: str) -> ProxyTransport:
        transport = ScriptedTransport({"orders": route_to(address)})
        if address == self.silent_address():
            transport.fail("query_route", RemotingTimeoutException("asking for the route of topic orders: no answer"))
        return transport

    def pass_time(self, seconds: float) -> None:
        if not self.threaded:
            self.scripted.advance(seconds)


class Remoting(Brokers):
    def __init__(self, transport: RemotingTransport, cluster: FakeCluster, tls: TlsSettings | None) -> None:
        broker = cluster.brokers[QUEUE.broker_name]
        super().__init__(transport, QUEUE, broker.address)
        self.tls = tls
        self.name_server = cluster.name_server
        self.play = broker.play
        self.messages = broker.storage.store.queues
        self.check_transaction = broker.check_transaction

    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue("orders", "elsewhere", 0), address

    def another(self, address: str) -> ProxyTransport:
        # A name server is not at the broker's address.
        name_server = self.name_server if address == self.address else address
        return self.stack.enter_context(RemotingTransport([name_server], tls=self.tls))


class Grpc(Played):
    refusals: ClassVar[Mapping[type[MQBrokerException], Reply]] = {
        BrokerBusyException: Reply.code(42900, "flow limit"),
        BrokerUnavailableException: Reply.code(50001, "create mapped file failed"),
        TopicRouteStaleException: Reply.code(40402, "no route"),
        UserRefusedException: Reply.code(40100, "check signature failed."),
        MQBrokerException: Reply.code(40300, "not here"),
    }

    def __init__(self, transport: GrpcTransport, proxy: FakeProxy, tls: TlsSettings | None) -> None:
        super().__init__(transport, MessageQueue("orders", proxy.address, 0), proxy.address)
        self.tls = tls
        self.proxy = proxy
        self.play = proxy.play

    def stored(self, count: int) -> Sequence[Message]:
        return stored(self.proxy)

    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue("orders", address, 0), address

    def another(self, address: str) -> ProxyTransport:
        return self.stack.enter_context(GrpcTransport([address], client_id="another", tls=self.tls))


def route_to(address: str) -> TopicRouteData:
    brokers = (BrokerData("broker-a", {MASTER_ID: address}),)
    return TopicRouteData(route({"broker-a": 4}).queue_datas, brokers)


def one_broker(tls: ssl.SSLContext | None = None) -> FakeCluster:
    return FakeCluster([QUEUE.broker_name], topics={QUEUE.topic: 4}, tls=tls)


def scripted(*, threaded: bool) -> Iterator[Played]:
    with ScriptedTransport({"orders": route_to("broker-a:10911")}, threaded=threaded) as transport:
        yield Scripted(transport, threaded)


def remoting() -> Iterator[Played]:
    with one_broker() as cluster, RemotingTransport([cluster.name_server]) as transport:
        yield Remoting(transport, cluster, None)


def grpc() -> Iterator[Played]:
    with running_proxy() as proxy, GrpcTransport([proxy.address], client_id="test") as transport:
        yield Grpc(transport, proxy, None)


def remoting_with_tls(authority: Authority) -> Iterator[Played]:
    tls = TlsSettings(str(authority.ca_file))
    with (
        one_broker(authority.context("server", "IP:127.0.0.1")) as cluster,
        RemotingTransport([cluster.name_server], tls=tls, credentials=Credentials("ak", "sk")) as transport,
    ):
        yield Remoting(transport, cluster, tls)


def grpc_with_tls(authority: Authority) -> Iterator[Played]:
    tls = TlsSettings(str(authority.ca_file))
    with (
        running_proxy(certificate=authority.server("server", "IP:127.0.0.1")) as proxy,
        GrpcTransport([proxy.address], client_id="test", tls=tls, credentials=Credentials("ak", "sk")) as transport,
    ):
        yield Grpc(transport, proxy, tls)


# Makes the seam of each transport; the argument makes a certificate authority.
BROKERS: dict[str, Callable[[Callable[[], Authority]], Iterator[Played]]] = {
    "scripted": lambda _: scripted(threaded=False),
    "scripted-threaded": lambda _: scripted(threaded=True),
    "remoting": lambda _: remoting(),
    "remoting-tls": lambda authority: remoting_with_tls(authority()),
}
TRANSPORTS = {**BROKERS, "grpc": lambda _: grpc(), "grpc-tls": lambda authority: grpc_with_tls(authority())}


@contextlib.contextmanager
def opened_seam(name: str, request: pytest.FixtureRequest) -> Iterator[Played]:
    """Yield the seam of the transport with that name."""
    opened = contextlib.contextmanager(TRANSPORTS[name])
    with opened(lambda: request.getfixturevalue("authority")) as seam, seam.stack:
        yield seam
