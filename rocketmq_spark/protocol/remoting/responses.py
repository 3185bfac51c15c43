"""Decodes the headers and bodies of servers' answers, and a server's check of a transaction.

Unknown fields are ignored. The size of a route is bounded (docs/internals/remoting.md#routes), and so is that of a list
of names. A route keeps brokers and queues that cannot be used. If a required field is missing or invalid, a
RemotingCommandException is raised.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.names import java_order
from rocketmq_spark.model.route import (
    MAX_ADDRESSES,
    MAX_BROKERS,
    MAX_QUEUES,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    QueueData,
    TopicRouteData,
)
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.command import RemotingCommand, loads, shortened
from rocketmq_spark.protocol.remoting.records import decode_records

DEFAULT_REGION: Final = "DefaultRegion"

_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


@dataclass(slots=True, kw_only=True)
class SendMessageResponseHeader:
    """The answer to a send that stored the message or batch (codes 0, 10, 11, 12)."""

    msg_id: str  # Offset message id; of a batch one for each item, separated by commas
    queue_id: int  # The queue that the broker used
    queue_offset: int  # Of the first message
    transaction_id: str = ""
    batch_uniq_id: str = ""
    recall_handle: str = ""
    region_id: str = DEFAULT_REGION
    trace_on: bool = True

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> SendMessageResponseHeader:
        """Return the header of the ext fields."""
        return cls(
            msg_id=_text(ext_fields, "msgId"),
            queue_id=read_long(ext_fields, "queueId"),
            queue_offset=read_long(ext_fields, "queueOffset"),
            transaction_id=ext_fields.get("transactionId", ""),
            batch_uniq_id=ext_fields.get("batchUniqId", ""),
            recall_handle=ext_fields.get("recallHandle", ""),
            region_id=ext_fields.get("MSG_REGION") or DEFAULT_REGION,
            # Tracing is on unless a server writes exactly "false".
            trace_on=ext_fields.get("TRACE_ON") != "false",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullMessageResponseHeader:
    """The answer to a pull, with or without messages (codes 0, 19, 20, 21)."""

    next_begin_offset: int
    min_offset: int
    max_offset: int

    @classmethod
    def from_ext_fields(cls, ext_fields: Mapping[str, str]) -> PullMessageResponseHeader:
        """Return the header of the ext fields."""
        return cls(
            next_begin_offset=read_long(ext_fields, "nextBeginOffset"),
            min_offset=read_long(ext_fields, "minOffset"),
            max_offset=read_long(ext_fields, "maxOffset"),
        )


def transaction_check_of(address: str, command: RemotingCommand) -> TransactionCheck:
    """Return a broker's CHECK_TRANSACTION_STATE, read as in ``ClientRemotingProcessor.java``."""
    fields, records = command.ext_fields, decode_records(command.body)
    if len(records) != 1:
        raise RemotingCommandException(f"a check of a transaction from {address} holds {len(records)} messages, not 1")
    return TransactionCheck(
        address=address,
        message=records[0],
        tran_state_table_offset=read_long(fields, "tranStateTableOffset"),
        commit_log_offset=read_long(fields, "commitLogOffset"),
        msg_id=fields.get("msgId", ""),
        transaction_id=fields.get("transactionId", ""),
        offset_msg_id=fields.get("offsetMsgId", ""),
        # Proxies send no broker name.
        broker_name=fields.get("bname", ""),
    )


def read_long(ext_fields: Mapping[str, str], name: str) -> int:
    """Return the 64-bit integer of a required ext field."""
    text = _text(ext_fields, name)
    if _INTEGER.fullmatch(text) and -(2**63) <= (value := int(text)) < 2**63:
        return value
    raise RemotingCommandException(f"reading a header: ext field {name!r} is {text[:40]!r}, not an integer")


def _text(ext_fields: Mapping[str, str], name: str) -> str:
    value = ext_fields.get(name)
    if value is None:
        raise RemotingCommandException(
            f"reading a header: ext field {name!r} is missing; there are {shortened(str(sorted(ext_fields)))}"
        )
    return value


# Strings are matched first, so that no key matches inside them. The closing quote is optional, so that a body that ends
# within a string costs one scan.
_STRING_OR_KEY: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|([{,]\s*)(-?[0-9]+)(\s*:)', re.DOTALL)

# Of a broker, a cluster, an address. A DNS name has 253 characters at most.
_LONGEST: Final = 512

_BROKER_ID: Final = re.compile(r"-?[0-9]{1,19}")

# A frame of 16 MiB has room for 5 million empty names. 200,000 names of 25 characters have 6 MB.
_MAX_NAMES: Final = 200_000

# Attributes of a topic. In the request that creates a topic, their names have a leading ``+`` (5.5.0).
MESSAGE_TYPE: Final = "message.type"
QUEUE_TYPE: Final = "queue.type"
CLEANUP_POLICY: Final = "cleanup.policy"
_ATTRIBUTES: Final = {MESSAGE_TYPE: "message_type", QUEUE_TYPE: "queue_type", CLEANUP_POLICY: "cleanup_policy"}

BATCH_CQ: Final = "BatchCQ"
"""The queue type of queues that hold batches as units (inner batches)."""
COMPACTION: Final = "COMPACTION"
"""The cleanup policy of a topic that keeps the newest message of each key."""


def loads_lenient(body: bytes) -> Any:
    """Return the value of JSON that may have unquoted numbers as keys, as fastjson writes ``Map<Long, ..>``."""
    try:
        return loads(body, lambda text: _STRING_OR_KEY.sub(_quote_key, text))
    except ValueError as exc:
        raise RemotingCommandException(
            f"reading a JSON body of {len(body)} bytes: {exc}. The body starts {bytes(body[:60])!r}"
        ) from exc


def decode_topic_route(body: bytes) -> TopicRouteData:
    """Return the route of a GET_ROUTEINFO_BY_TOPIC answer; both tuples are in Java's order of broker names."""
    route = loads_lenient(body)
    if not isinstance(route, dict):
        raise _wrong("the route", route, "an object")
    queue_datas = [_queue_data(item) for item in _objects(route, "queueDatas")]
    broker_datas = [decode_broker_data(item) for item in _objects(route, "brokerDatas")]
    queues = sum(max(data.queue_nums, 0) for data in queue_datas)
    if queues > MAX_QUEUES:
        raise _wrong("the number of queues", queues, f"at most {MAX_QUEUES}")
    order = route.get("orderTopicConf")
    return TopicRouteData(
        queue_datas=tuple(sorted(queue_datas, key=lambda queue: java_order(queue.broker_name))),
        broker_datas=tuple(sorted(broker_datas, key=lambda broker: java_order(broker.broker_name))),
        order_topic_conf=None if order is None else _string(route, "orderTopicConf", longest=MAX_BROKERS * _LONGEST),
        static_topic=bool(route.get("topicQueueMappingByBroker")),
    )


def decode_broker_data(item: dict[str, Any]) -> BrokerData:
    """Return the broker of an entry of a route's ``brokerDatas``, or of a cluster's ``brokerAddrTable``."""
    addrs = item.get("brokerAddrs")
    if not isinstance(addrs, dict):
        raise _wrong("brokerAddrs", addrs, "an object")
    if len(addrs) > MAX_ADDRESSES:
        raise _wrong("the number of addresses of a broker", len(addrs), f"at most {MAX_ADDRESSES}")
    for broker_id in addrs:
        if not _BROKER_ID.fullmatch(broker_id):
            raise _wrong("a broker id in brokerAddrs", broker_id, "a number")
    return BrokerData(
        broker_name=_string(item, "brokerName"),
        broker_addrs={int(broker_id): _string(addrs, broker_id) for broker_id in addrs},
        cluster=_string(item, "cluster", ""),
        slave_may_act=item.get("enableActingMaster") is True,
    )


def _quote_key(match: re.Match[str]) -> str:
    before, number, after = match.groups()
    return match[0] if number is None else f'{before}"{number}"{after}'


def _queue_data(item: dict[str, Any]) -> QueueData:
    return QueueData(
        broker_name=_string(item, "brokerName"),
        read_queue_nums=_int(item, "readQueueNums"),
        write_queue_nums=_int(item, "writeQueueNums"),
        perm=_int(item, "perm"),
        topic_sys_flag=_int(item, "topicSysFlag", 0),
    )


def _objects(route: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = route.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _wrong(name, value, "a list of objects")
    if len(value) > MAX_BROKERS:
        raise _wrong(f"the length of {name}", len(value), f"at most {MAX_BROKERS}")
    return value


def _string(item: dict[str, Any], name: str, default: str | None = None, *, longest: int = _LONGEST) -> str:
    value = item.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    if len(value) > longest:
        raise _wrong(f"the length of {reprlib.repr(name)}", len(value), f"at most {longest} characters")
    return value


def _int(item: dict[str, Any], name: str, default: int | None = None) -> int:
    value = item.get(name, default)
    if type(value) is not int:
        raise _wrong(name, value, "an integer")
    return value


def _wrong(name: str, value: object, required: str) -> RemotingCommandException:
    return RemotingCommandException(
        f"reading brokers and queues: {name} is {reprlib.repr(value)}, {required} is needed"
    )


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The brokers that a name server knows (``ClusterInfo.java``)."""

    brokers: tuple[BrokerData, ...]  # Sorted by name
    clusters: Mapping[str, tuple[str, ...]]  # The names of each cluster's brokers, sorted


def decode_cluster_info(body: bytes) -> ClusterInfo:
    """Return the brokers of a GET_BROKER_CLUSTER_INFO answer."""
    doing, value = "reading the brokers of a cluster", loads_lenient(body)
    table, clusters = _object(value, "brokerAddrTable", doing), _object(value, "clusterAddrTable", doing)
    brokers = [decode_broker_data(item) for item in table.values() if isinstance(item, dict)]
    if len(brokers) < len(table) or not all(isinstance(names, list) for names in clusters.values()):
        raise RemotingCommandException(
            f"{doing}: brokerAddrTable needs objects, clusterAddrTable lists: {reprlib.repr(value)}"
        )
    return ClusterInfo(
        tuple(sorted(brokers, key=lambda broker: broker.broker_name)),
        {name: tuple(sorted(map(str, names))) for name, names in sorted(clusters.items())},
    )


def decode_in_sync_replicas(body: bytes, broker_name: str) -> frozenset[str]:
    """Return the addresses of a broker's replicas that are in sync, from a CONTROLLER_GET_SYNC_STATE_DATA answer."""
    doing = "reading the replicas of a broker"
    table = _object(loads_lenient(body), "replicasInfoTable", doing)
    replicas = table.get(broker_name, {})
    found = replicas.get("inSyncReplicas", []) if isinstance(replicas, dict) else None
    if not isinstance(found, list) or not all(isinstance(replica, dict) for replica in found):
        raise RemotingCommandException(f"{doing}: inSyncReplicas needs a list of objects: {reprlib.repr(replicas)}")
    return frozenset(str(replica.get("brokerAddress")) for replica in found)


def decode_runtime_info(body: bytes) -> Mapping[str, str]:
    """Return the figures of a GET_BROKER_RUNTIME_INFO answer by name, as text."""
    table = _object(loads_lenient(body), "table", "reading a broker's figures")
    return {name: str(value) for name, value in table.items()}


def decode_properties(body: bytes) -> Mapping[str, str]:
    """Return the lines ``name=value`` of a GET_BROKER_CONFIG answer."""
    pairs = (line.partition("=") for line in bytes(body).decode(errors="replace").splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def decode_topic_list(body: bytes) -> frozenset[str]:
    """Return the topics of a GET_ALL_TOPIC_LIST_FROM_NAMESERVER answer."""
    return frozenset(_names(body, "topicList", "reading the list of topics", "names"))


def decode_consumer_list(body: bytes) -> tuple[str, ...]:
    """Return the client ids of a GET_CONSUMER_LIST_BY_GROUP answer."""
    return tuple(_names(body, "consumerIdList", "reading the clients of a consumer group", "ids"))


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic's configuration on one broker; the defaults are a new topic's (docs/internals/remoting.md#topics)."""

    message_type: str = "NORMAL"  # Or ``FIFO``, ``DELAY``, ``TRANSACTION``, ``MIXED``, ``PRIORITY``, ``LITE``
    queue_type: str = "SimpleCQ"  # Or `BATCH_CQ`
    cleanup_policy: str = "DELETE"  # Or `COMPACTION`
    order: bool = False  # The flag of ``mqadmin updateTopic -o``; name servers' order configurations do not need it
    perm: int = PERM_READ | PERM_WRITE

    @classmethod
    def of_attributes(cls, attributes: Mapping[str, str], **fields: Any) -> TopicConfig:
        """Return the configuration with a broker's attributes and other `fields`; the rest has the defaults."""
        named: dict[str, Any] = {field: attributes[name] for name, field in _ATTRIBUTES.items() if name in attributes}
        return cls(**named, **fields)

    @property
    def compacted(self) -> bool:
        """True if the broker keeps only the newest message of each key, and drops messages without keys."""
        return self.cleanup_policy == COMPACTION

    @property
    def holds_batches(self) -> bool:
        """True if a queue entry can be a whole batch (``batchType=inner``)."""
        return self.queue_type == BATCH_CQ


def decode_topic_config(body: bytes) -> TopicConfig:
    """Return the configuration of a GET_TOPIC_CONFIG answer."""
    config = loads_lenient(body)
    attributes = _attributes(config) or {}
    order, perm = config.get("order", False), config.get("perm", PERM_READ | PERM_WRITE)
    if not isinstance(order, bool) or type(perm) is not int:
        raise RemotingCommandException(
            f"reading a topic's configuration: order is {reprlib.repr(order)} and perm {reprlib.repr(perm)}; a boolean "
            "and an integer are required"
        )
    return TopicConfig.of_attributes(attributes, order=order, perm=perm)


def decode_all_topic_attributes(body: bytes) -> Mapping[str, Mapping[str, str] | None]:
    """Return the attributes of every topic in a GET_ALL_TOPIC_CONFIG answer; None from a broker before 5.0."""
    configs = _object(loads_lenient(body), "topicConfigTable", "reading a broker's topics")
    return {topic: _attributes(config) for topic, config in configs.items()}


def _attributes(config: object) -> Mapping[str, str] | None:
    attributes = config.get("attributes") if isinstance(config, dict) else config
    if attributes is None and config is not None:
        return None
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise RemotingCommandException(
            f"reading a topic's configuration: attributes are {reprlib.repr(attributes)}, an object of strings is "
            "required"
        )
    return attributes


def _object(value: Any, name: str, doing: str) -> dict[str, Any]:
    item = value.get(name) if isinstance(value, dict) else None
    if not isinstance(item, dict):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(value)} has no object {name}")
    return item


def _names(body: bytes, field: str, doing: str, kind: str) -> list[str]:
    # Checked before any object is built. Servers accept no name with a comma.
    if body.count(b",") > _MAX_NAMES:
        raise RemotingCommandException(f"{doing}: more than {_MAX_NAMES} {kind}")
    value = loads_lenient(body)
    names = value.get(field) if isinstance(value, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(value)} has no {field} of {kind}")
    return names


def integer_of(table: Mapping[str, str], name: str) -> int | None:
    """Return an integer that a broker reports in its status or settings; None without one."""
    text = table.get(name, "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
