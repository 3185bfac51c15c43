"""How a fake broker executes the requests other than sends: pulls, offsets, transactions, groups, topics, figures.

`HANDLERS` has a function for each request code that the broker supports. A function returns the answer, raises the
`Refusal` to answer, or returns None if the broker answers later or never. Follows ``PullMessageProcessor.java``,
``EndTransactionProcessor.java``, ``ConsumerManageProcessor.java`` and ``AdminBrokerProcessor.java``.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.model.hashes import string_hash
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.model.names import MAX_TOPIC_LENGTH, RETRY_PREFIX, is_legal
from rocketmq_spark.model.route import PERM_READ
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_ROLLBACK_TYPE
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand, loads
from rocketmq_spark.protocol.remoting.records import encode_record
from rocketmq_spark.testing.fake_broker import Call, FakeBroker, Handler
from rocketmq_spark.testing.fake_replies import response_to
from rocketmq_spark.testing.fake_sends import Refusal
from rocketmq_spark.testing.fake_storage import CLEANUP_POLICY, TopicSettings, immunity_of

_SUSPEND: Final = 2
_HAS_SUBSCRIPTION: Final = 4
_ATTRIBUTES: Final = frozenset({"message.type", "queue.type", CLEANUP_POLICY})
_NOTHING_YET: Final = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)
_REMARKS: Final = {
    PullStatus.FOUND: "FOUND",
    PullStatus.NO_NEW_MSG: "OFFSET_OVERFLOW_ONE",
    PullStatus.NO_MATCHED_MSG: "NO_MATCHED_MESSAGE",
    PullStatus.OFFSET_ILLEGAL: "OFFSET_TOO_SMALL",
}


def pull(broker: FakeBroker, call: Call) -> RemotingCommand | None:
    """Answer a pull, or hold it until a message arrives or its time is over."""
    fields = call.fields
    queue, flags, offset = _queue(broker, call), int(fields["sysFlag"]), int(fields["queueOffset"])
    topic = broker.storage.topics.get(queue.topic)
    if topic is None:
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"topic[{queue.topic}] not exist, apply first please!")
    if not topic.perm & PERM_READ:
        raise Refusal(ResponseCode.NO_PERMISSION, f"the topic[{queue.topic}] pulling message is forbidden")
    if queue.queue_id >= topic.queue_nums:
        raise Refusal(ResponseCode.INVALID_PARAMETER, f"queueId[{queue.queue_id}] is illegal, topic:[{queue.topic}]")
    if not flags & _HAS_SUBSCRIPTION and not broker.consumers[fields["consumerGroup"]]:
        raise Refusal(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist")
    expression = fields.get("subscription", "*")
    if fields.get("expressionType", "TAG") != "TAG":
        raise Refusal(ResponseCode.SYSTEM_ERROR, "The broker does not support consumer to filter message by SQL92")
    request = PullRequest(
        PullTarget(queue, fields["consumerGroup"], int(fields["maxMsgNums"]), expression, "TAG"), broker.address, offset
    )
    outcome = broker.storage.store.pull(request, broker.settings.max_transfer_count, _matcher(expression))
    suspend = int(fields.get("suspendTimeoutMillis", "0")) / 1000
    if outcome.status is PullStatus.NO_NEW_MSG and flags & _SUSPEND and suspend:
        _hold(broker, call, suspend)
        return None
    return _pulled(call, outcome, at_start=offset == 0)


def max_offset(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the offset that the next message will get; 0 for an unknown queue."""
    return _offset(call, broker.storage.store.end(_queue(broker, call)))


def min_offset(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the offset of the oldest message; 0 for an unknown queue."""
    return _offset(call, broker.storage.store.expired.get(_queue(broker, call), 0))


def search_offset(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the first offset at or after a time, or with ``boundaryType=upper`` the last at or before it."""
    queue, timestamp = _queue(broker, call), int(call.fields["timestamp"])
    store = broker.storage.store
    if not store.end(queue):
        return _offset(call, 0)
    if call.fields.get("boundaryType", "lower").lower() == "upper":
        return _offset(call, max(0, store.search(queue, timestamp + 1) - 1))
    return _offset(call, max(store.search(queue, timestamp), store.expired.get(queue, 0)))


def earliest_store_time(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer when the oldest message was stored."""
    timestamp = broker.storage.store.earliest(_queue(broker, call))
    return response_to(call.command, ext_fields={"timestamp": str(timestamp)})


def view_message(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the message at a commit-log offset."""
    offset = int(call.fields["offset"])
    message = broker.storage.store.view(offset)
    if message is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
    return response_to(call.command, body=encode_record(message))


def query_group_offset(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer a group's committed offset, or 0 if the group is new and the queue has its first message."""
    queue, fields = _queue(broker, call), call.fields
    committed = broker.storage.group_offsets.get((fields["consumerGroup"], queue))
    if committed is not None:
        return _offset(call, committed)
    if fields.get("setZeroIfNotFound", "true") == "true" and broker.storage.store.messages(queue, 0, 1):
        return _offset(call, 0)
    raise Refusal(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")


def update_group_offset(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Commit a group's offset, unchecked."""
    fields = call.fields
    key = fields["consumerGroup"], _queue(broker, call)
    broker.storage.group_offsets[key] = int(fields["commitOffset"])
    return response_to(call.command)


def heart_beat(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Register a connection for the groups of its client."""
    body = loads(call.body)
    for kind, groups in (("producerDataSet", broker.producers), ("consumerDataSet", broker.consumers)):
        for group in body[kind]:
            groups[group["groupName"]][body["clientID"]] = call.channel
    for group in body["consumerDataSet"]:
        retry_topic = RETRY_PREFIX + group["groupName"]
        if retry_topic not in broker.storage.topics:
            broker.storage.create_topic(retry_topic, TopicSettings(1, 1))
    return response_to(call.command, ext_fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"})


def unregister_client(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Remove a client from its groups."""
    fields = call.fields
    for name, groups in (("producerGroup", broker.producers), ("consumerGroup", broker.consumers)):
        if name in fields:
            groups[fields[name]].pop(fields["clientID"], None)
    return response_to(call.command)


def consumer_list(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the client ids of a consumer group."""
    group = call.fields["consumerGroup"]
    if not broker.consumers[group]:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
    return _json(call, {"consumerIdList": list(broker.consumers[group])})


def check_client_config(_: FakeBroker, call: Call) -> RemotingCommand:
    """Accept filters by tag, and refuse others like a broker with ``enablePropertyFilter=false``."""
    subscription = loads(call.body).get("subscriptionData") or {}
    if (subscription.get("expressionType") or "TAG") != "TAG":
        remark = "The broker does not support consumer to filter message by SQL92"
        raise Refusal(ResponseCode.SYSTEM_ERROR, remark)
    return response_to(call.command)


def end_transaction(broker: FakeBroker, call: Call) -> RemotingCommand | None:
    """Commit or roll back a half message (docs/internals/messages.md#end_transaction)."""
    fields, storage = call.fields, broker.storage
    offset, end = int(fields["commitLogOffset"]), int(fields["commitOrRollback"])
    if end not in (TRANSACTION_COMMIT_TYPE, TRANSACTION_ROLLBACK_TYPE):
        return None
    half = storage.store.view(offset)
    if half is None:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "Find prepared transaction message failed")
    immunity = immunity_of(half)
    if immunity is not None and fields.get("fromTransactionCheck") != "true":
        limit = max(immunity, broker.settings.transaction_timeout)
        if broker.timers.time() * 1000 > half.born_timestamp + limit * 1000:
            raise Refusal(ResponseCode.ILLEGAL_OPERATION, "check immunity time expired")
    if half.properties.get(const.PGROUP) != fields["producerGroup"]:
        raise Refusal(ResponseCode.SYSTEM_ERROR, "The producer group wrong")
    if half.queue_offset != int(fields["tranStateTableOffset"]):
        raise Refusal(ResponseCode.SYSTEM_ERROR, "The transaction state table offset wrong")
    if end == TRANSACTION_COMMIT_TYPE:
        storage.commit(offset)
        return response_to(call.command)
    storage.roll_back(offset)
    return response_to(call.command, remark="not set any response code")


def recall_message(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Drop a delayed message, and answer its id."""
    words = base64.urlsafe_b64decode(call.fields["recallHandle"]).decode().split(" ")
    if not broker.storage.recall(words[4]):
        raise Refusal(ResponseCode.ILLEGAL_OPERATION, "recall failed, the message is not found")
    return response_to(call.command, ext_fields={"msgId": words[4]})


def create_topic(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Create a topic, or overwrite its settings; its queue type and cleanup policy stay."""
    fields = call.fields
    topic = fields["topic"]
    if not is_legal(topic) or len(topic) > MAX_TOPIC_LENGTH:
        raise Refusal(ResponseCode.INVALID_PARAMETER, f"The specified topic[{topic}] is illegal or too long.")
    changes = dict(item[1:].split("=") for item in fields.get("attributes", "").split(",") if item.startswith("+"))
    if unknown := changes.keys() - _ATTRIBUTES:
        raise Refusal(ResponseCode.SYSTEM_ERROR, f"unsupported key: {min(unknown)}")
    old = broker.storage.topics.get(topic)
    settings = TopicSettings(
        int(fields["readQueueNums"]),
        int(fields["writeQueueNums"]),
        int(fields["perm"]),
        int(fields.get("topicSysFlag", "0")),
        fields.get("order") == "true",
        {**changes, **({} if old is None else old.attributes)},
    )
    broker.storage.create_topic(topic, settings)
    return response_to(call.command, remark="not set any response code")


def delete_topic(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Delete a topic; its messages stay in the commit log."""
    broker.storage.topics.pop(call.fields["topic"], None)
    broker.on_change()
    return response_to(call.command)


def topic_config(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer a topic's settings."""
    topic = call.fields["topic"]
    settings = broker.storage.topics.get(topic)
    if settings is None:
        raise Refusal(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {topic}")
    return _json(call, _config(topic, settings))


def all_topic_configs(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the settings of all topics."""
    configs = {topic: _config(topic, settings) for topic, settings in broker.storage.topics.items()}
    return _json(call, {"topicConfigTable": configs})


def runtime_info(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the broker's figures; an entry of `FakeBroker.figures` replaces the broker's own."""
    days, seconds = divmod(int(broker.timers.time() - broker.started_at), 86_400)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    stored = str(len(broker.storage.store.log))
    table = {
        "brokerVersionDesc": "V5_5_0",
        "brokerVersion": "513",
        "commitLogDiskRatio": "0.99" if broker.settings.disk_full else "0.2",
        "bootTimestamp": str(int(broker.started_at * 1000)),
        "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]",
        "msgPutTotalTodayMorning": "0",
        "msgPutTotalTodayNow": stored,
        "msgGetTotalTodayMorning": "0",
        "msgGetTotalTodayNow": "0",
        **broker.figures,
    }
    return _json(call, {"table": {name: text for name, text in table.items() if text is not None}})


def broker_config(broker: FakeBroker, call: Call) -> RemotingCommand:
    """Answer the settings as lines ``name=value``; an entry of `FakeBroker.config` replaces the broker's own."""
    settings = {
        "brokerName": broker.name,
        "brokerId": broker.broker_id,
        "brokerPermission": broker.settings.permission,
        "autoCreateTopicEnable": str(broker.settings.auto_create_topic).lower(),
        "maxMessageSize": broker.settings.max_message_size,
        "flushDiskType": "SYNC_FLUSH" if broker.settings.sync_flush else "ASYNC_FLUSH",
        "transactionTimeOut": round(broker.settings.transaction_timeout * 1000),
        "transRocksDBEnable": "true",
        "transWriteOriginTransHalfEnable": "false",
        "maxTransferCountOnMessageInMemory": "1024",
        **broker.config,
    }
    lines = (f"{name}={value}" for name, value in settings.items() if value is not None)
    return response_to(call.command, body="\n".join(lines).encode())


HANDLERS: Final[Mapping[int, Handler]] = {
    RequestCode.PULL_MESSAGE: pull,
    RequestCode.GET_MAX_OFFSET: max_offset,
    RequestCode.GET_MIN_OFFSET: min_offset,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: search_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: earliest_store_time,
    RequestCode.VIEW_MESSAGE_BY_ID: view_message,
    RequestCode.QUERY_CONSUMER_OFFSET: query_group_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: update_group_offset,
    RequestCode.HEART_BEAT: heart_beat,
    RequestCode.UNREGISTER_CLIENT: unregister_client,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: consumer_list,
    RequestCode.CHECK_CLIENT_CONFIG: check_client_config,
    RequestCode.END_TRANSACTION: end_transaction,
    RequestCode.RECALL_MESSAGE: recall_message,
    RequestCode.UPDATE_AND_CREATE_TOPIC: create_topic,
    RequestCode.DELETE_TOPIC_IN_BROKER: delete_topic,
    RequestCode.GET_TOPIC_CONFIG: topic_config,
    RequestCode.GET_ALL_TOPIC_CONFIG: all_topic_configs,
    RequestCode.GET_BROKER_RUNTIME_INFO: runtime_info,
    RequestCode.GET_BROKER_CONFIG: broker_config,
}


def _queue(broker: FakeBroker, call: Call) -> MessageQueue:
    return MessageQueue(call.fields["topic"], broker.name, int(call.fields["queueId"]))


def _offset(call: Call, offset: int) -> RemotingCommand:
    return response_to(call.command, ext_fields={"offset": str(offset)})


def _json(call: Call, body: Any) -> RemotingCommand:
    return response_to(call.command, body=json.dumps(body).encode())


def _config(topic: str, settings: TopicSettings) -> dict[str, Any]:
    return {
        "attributes": settings.attributes,
        "order": settings.order,
        "perm": settings.perm,
        "readQueueNums": settings.read_queue_nums,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": settings.topic_sys_flag,
        "writeQueueNums": settings.write_queue_nums,
    }


def _matcher(expression: str) -> Callable[[MessageExt], bool] | None:
    """Return the filter of a tag expression, by the hash of the tag, as brokers filter; None for ``*``."""
    if expression.strip() in ("", "*"):
        return None
    hashes = {string_hash(tag.strip()) for tag in expression.split("||")}
    return lambda message: string_hash(message.tags or "") in hashes


def _pulled(call: Call, outcome: PullOutcome, *, at_start: bool) -> RemotingCommand:
    assert outcome.status is not None
    code, remark = outcome.status.value, _REMARKS[outcome.status]
    if outcome.status is PullStatus.OFFSET_ILLEGAL and outcome.next_begin_offset == outcome.max_offset:
        remark = "OFFSET_OVERFLOW_BADLY" if outcome.max_offset else "NO_MESSAGE_IN_QUEUE"
    elif outcome.status is PullStatus.NO_NEW_MSG and at_start:
        remark = "NO_MESSAGE_IN_QUEUE"
    fields = {
        "nextBeginOffset": str(outcome.next_begin_offset),
        "minOffset": str(outcome.min_offset),
        "maxOffset": str(outcome.max_offset),
        "suggestWhichBrokerId": "0",
    }
    return response_to(call.command, code, remark, fields, bytes(outcome.body))


def _hold(broker: FakeBroker, call: Call, seconds: float) -> None:
    """Answer a pull when a message that matches has arrived, or after some seconds."""
    fields = {**call.fields, "suspendTimeoutMillis": "0"}
    now = call._replace(command=replace(call.command, ext_fields=fields))
    answered = False

    def answer(*, time_is_over: bool) -> None:
        nonlocal answered
        if answered:
            return
        response = broker.execute(now)
        if response is not None and (time_is_over or response.code not in _NOTHING_YET):
            answered = True
            broker.respond(call, response)
        else:
            broker.storage.when_stored(functools.partial(answer, time_is_over=False))

    broker.storage.when_stored(functools.partial(answer, time_is_over=False))
    broker.later(seconds, functools.partial(answer, time_is_over=True))
