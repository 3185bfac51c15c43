"""Sends requests to the servers of a local cluster: checks that they are ready, makes brokers register, creates users.

The administrative requests are in docs/internals/remoting.md#broker-administration. Brokers keep users as in
``AuthenticationMetadataManagerImpl``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import ClusterError, RemotingException, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.names import is_legal
from rocketmq_spark.model.route import BrokerData, TopicRouteData, masters_of
from rocketmq_spark.options.kinds import is_padded, is_printable, is_reference
from rocketmq_spark.options.references import ENV, FILE
from rocketmq_spark.protocol.remoting.codes import STORED, RequestCode, ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import GetRouteInfoRequestHeader, SendMessageRequestHeaderV2
from rocketmq_spark.protocol.remoting.responses import (
    SendMessageResponseHeader,
    decode_cluster_info,
    decode_in_sync_replicas,
    decode_topic_route,
)
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings

_ANSWERED: Final = frozenset((int(ResponseCode.SUCCESS), *STORED))

# gRPC headers contain a user's name unescaped and separated by "/", "," and blanks; brokers use "User:name".
_NAME: Final = r"[A-Za-z0-9._-]+"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Probe:
    """Sends requests to servers of one cluster, each over a new connection, with `timeout` seconds for the answer."""

    credentials: Credentials | None = None
    tls: TlsSettings | None = None
    timeout: float = 3.0

    def ask(
        self, address: str, code: RequestCode, ext_fields: Mapping[str, str], doing: str, body: bytes = b""
    ) -> RemotingCommand:
        """Return the answer to a request; raises a RemotingException or MQBrokerException that begins with `doing`."""
        transport = RemotingTransport(
            (), credentials=self.credentials, sign_name_server_requests=True, tls=self.tls, polled=True
        )
        try:
            with transport:
                answer = transport.client.invoke(address, code, ext_fields, body, self.timeout)
        except RemotingException as exc:
            raise type(exc)(f"{doing} at {address}: {exc}") from exc
        if answer.code not in _ANSWERED:
            raise broker_error(answer.code, answer.remark, address, doing)
        return answer

    def brokers(self, name_server: str) -> Sequence[BrokerData]:
        """Return the brokers that a name server knows (GET_BROKER_CLUSTER_INFO)."""
        answer = self.ask(name_server, RequestCode.GET_BROKER_CLUSTER_INFO, {}, "listing the brokers")
        return decode_cluster_info(bytes(answer.body)).brokers

    def registered_brokers(self, name_server: str) -> dict[str, str]:
        """Return the master address by broker name, from the name server."""
        return masters_of(self.brokers(name_server))

    def in_sync(self, controllers: Iterable[str], broker_name: str) -> frozenset[str]:
        """Return the addresses of a broker's replicas that are in sync, as the leading controller knows them."""
        doing, body, failed = f"listing the replicas of {broker_name}", json.dumps([broker_name]).encode(), None
        for address in controllers:
            try:
                answer = self.ask(address, RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, doing, body)
                return decode_in_sync_replicas(bytes(answer.body), broker_name)
            except RocketMQError as exc:
                # Only the leader answers this request.
                failed = exc
        raise ClusterError(f"{doing}: no controller answers: {failed}") from failed

    def route(self, name_server: str, topic: str) -> TopicRouteData:
        """Return a topic's route (GET_ROUTEINFO_BY_TOPIC)."""
        header = GetRouteInfoRequestHeader(topic=topic)
        answer = self.ask(name_server, header.code, header.to_ext_fields(), f"looking up topic {topic}")
        return decode_topic_route(bytes(answer.body))

    def send(self, address: str, broker_name: str, topic: str, body: bytes) -> SendMessageResponseHeader:
        """Store one message in queue 0 of a topic on one broker."""
        group, now = "rocketmq-spark-probe", int(time.time() * 1000)
        header = SendMessageRequestHeaderV2(
            producer_group=group, topic=topic, queue_id=0, born_timestamp=now, broker_name=broker_name
        )
        doing = f"sending a message to {topic}/{broker_name}/0"
        answer = self.ask(address, header.code, header.to_ext_fields(), doing, body)
        return SendMessageResponseHeader.from_ext_fields(answer.ext_fields)

    def configure(self, address: str, properties: Mapping[str, object]) -> None:
        """Change properties of a running broker, and in its file (UPDATE_BROKER_CONFIG)."""
        lines = [f"{name}={value}" for name, value in properties.items()]
        doing = f"setting {', '.join(lines)}"
        self.ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, doing, "\n".join(lines).encode())


def create_user(probe: Probe, brokers: Collection[str], name: str, secret_key: str, **rights: Sequence[str]) -> None:
    """Create a user with rights as in `LocalCluster.create_user`; after an error, delete it on brokers that answer."""
    check_user(name, secret_key, **rights)
    doing = f"creating the user {name}"
    for address in brokers:
        # For an unknown user the answer is empty.
        if probe.ask(address, RequestCode.AUTH_GET_USER, {"username": name}, doing).body:
            raise ClusterError(
                f"{doing}: the broker at {address} already has this user, with its own secret key and rights. Users in "
                "a folder set by directory= outlive the cluster. Use the existing user, or choose another name"
            )
    try:
        for code, fields, body in user_requests(name, secret_key, **rights):
            for address in brokers:
                probe.ask(address, code, fields, doing, body)
    except RocketMQError as exc:
        # A user that exists on some brokers, or without its rights, could not be created again.
        kept = []
        for address in brokers:
            try:
                probe.ask(address, RequestCode.AUTH_DELETE_USER, {"username": name}, f"deleting the user {name}")
            except RocketMQError:
                kept.append(address)
        if not kept:
            raise
        raise ClusterError(
            f"{exc}. Deleting the incomplete user on {', '.join(kept)} failed, too. It may still exist there: choose "
            "another user name, or create a new cluster"
        ) from exc


def check_user(name: str, secret_key: str, **rights: Sequence[str]) -> None:
    """Raise a ClusterError for a name, key or right that brokers would accept but that would not work as intended."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ClusterError(f"creating the user {name!r}: allowed in a name are letters, digits, '.', '_' and '-'")
    doing = f"creating the user {name}"
    if not isinstance(secret_key, str) or not is_printable(secret_key) or is_padded(secret_key):
        raise ClusterError(
            f"{doing}: secret_key must not be blank, and must not contain control characters or surrounding blanks"
        )
    if is_reference(secret_key):
        raise ClusterError(
            f"{doing}: secret_key begins with {ENV} or {FILE}, which the option secretKey interprets as a reference. "
            "Give the secret itself"
        )
    for parameter, names in rights.items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ClusterError(f"{doing}: {parameter}={names!r} is not a list of names such as ['orders', 'new-*']")
        for resource in names:
            # A broker supports only a '*' at the end and cuts the name at the first one: "*-x" matches nothing, and
            # "a*b*" matches every name that begins with "a" (Resource.of).
            if not isinstance(resource, str) or not (resource == "*" or is_legal(resource.removesuffix("*"))):
                raise ClusterError(
                    f"{doing}: {parameter} contains {resource!r}: allowed are names (letters, digits, '%', '|', '_' and"
                    " '-'), prefixes of names followed by '*', and '*' for all"
                )


def user_requests(
    name: str, secret_key: str, publish: Iterable[str], subscribe: Iterable[str], groups: Iterable[str]
) -> Iterator[tuple[RequestCode, dict[str, str], bytes]]:
    """Yield the code, ext fields and body of each request that creates a user on a broker."""
    user = {"username": name, "password": secret_key, "userType": "Normal"}
    yield RequestCode.AUTH_CREATE_USER, {"username": name}, json.dumps(user).encode()
    # "Get" is the right to ask for the offsets of a topic.
    rights = (("Topic", publish, ["Pub"]), ("Topic", subscribe, ["Sub", "Get"]), ("Group", groups, ["Sub"]))
    entries = [
        {"resource": f"{kind}:{resource}", "actions": actions, "decision": "Allow"}
        for kind, resources, actions in rights
        for resource in resources
    ]
    if entries:
        subject = f"User:{name}"
        acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
        yield RequestCode.AUTH_CREATE_ACL, {"subject": subject}, json.dumps(acl).encode()
