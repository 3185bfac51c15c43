from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.headers import (
    CreateTopicRequestHeader,
    EndTransactionRequestHeader,
    GetEarliestMsgStoreTimeRequestHeader,
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    GetRouteInfoRequestHeader,
    PullMessageRequestHeader,
    SearchOffsetRequestHeader,
    SendMessageRequestHeaderV2,
    UnregisterClientRequestHeader,
    ViewMessageRequestHeader,
    heart_beat_body,
)
from rocketmq_spark.protocol.remoting.records import encode_record
from rocketmq_spark.protocol.remoting.responses import (
    PullMessageResponseHeader,
    SendMessageResponseHeader,
    read_long,
    transaction_check_of,
)


@pytest.mark.parametrize(
    ("header", "ext_fields"),
    [
        (
            SendMessageRequestHeaderV2(
                producer_group="pg",
                topic="%RETRY%cg",
                default_topic="TPL",
                default_topic_queue_nums=8,
                queue_id=-1,
                sys_flag=0x301,
                born_timestamp=1_700_000_000_000,
                flag=-7,
                properties="WAIT\x01false\x02",
                reconsume_times=2,
                unit_mode=True,
                max_reconsume_times=16,
                batch=True,
                broker_name="broker-a",
            ),
            (
                "a=pg b=%RETRY%cg c=TPL d=8 e=-1 f=769 g=1700000000000 h=-7 i=WAIT\x01false\x02 j=2 k=true l=16 m=true"
                " n=broker-a"
            ),
        ),
        (GetRouteInfoRequestHeader(topic="T"), "topic=T"),
        (
            GetRouteInfoRequestHeader(topic="T", accept_standard_json_only=True),
            "topic=T acceptStandardJsonOnly=true",
        ),
        (
            UnregisterClientRequestHeader(client_id="c", producer_group="pg", broker_name="b"),
            "clientID=c producerGroup=pg bname=b",
        ),
        (UnregisterClientRequestHeader(client_id="c", consumer_group="cg"), "clientID=c consumerGroup=cg"),
        (GetMaxOffsetRequestHeader(topic="T", queue_id=0, broker_name="b"), "topic=T queueId=0 bname=b"),
        (
            GetMaxOffsetRequestHeader(topic="T", queue_id=3, committed=False, broker_name="b"),
            "topic=T queueId=3 committed=false bname=b",
        ),
        (GetMinOffsetRequestHeader(topic="T", queue_id=3, broker_name="b"), "topic=T queueId=3 bname=b"),
        (
            SearchOffsetRequestHeader(topic="T", queue_id=3, timestamp=0, broker_name="b"),
            "topic=T queueId=3 timestamp=0 boundaryType=lower bname=b",
        ),
        (
            GetEarliestMsgStoreTimeRequestHeader(topic="T", queue_id=3, broker_name="b"),
            "topic=T queueId=3 bname=b",
        ),
        (ViewMessageRequestHeader(offset=0), "offset=0"),
        (ViewMessageRequestHeader(offset=7, topic="T"), "offset=7 topic=T"),
        (
            EndTransactionRequestHeader(
                topic="T",
                producer_group="pg",
                tran_state_table_offset=5,
                commit_log_offset=36804876,
                commit_or_rollback=8,
                from_transaction_check=True,
                msg_id="U",
                transaction_id="X",
                broker_name="b",
            ),
            (
                "topic=T producerGroup=pg tranStateTableOffset=5 commitLogOffset=36804876 commitOrRollback=8"
                " fromTransactionCheck=true msgId=U transactionId=X bname=b"
            ),
        ),
        (
            EndTransactionRequestHeader(
                topic="T",
                producer_group="pg",
                tran_state_table_offset=0,
                commit_log_offset=0,
                commit_or_rollback=0,
                msg_id="U",
                broker_name="",
            ),
            (
                "topic=T producerGroup=pg tranStateTableOffset=0 commitLogOffset=0 commitOrRollback=0"
                " fromTransactionCheck=false msgId=U"
            ),
        ),
        (
            PullMessageRequestHeader(
                consumer_group="cg", topic="T", queue_id=1, queue_offset=2, max_msg_nums=32, broker_name="b"
            ),
            (
                "consumerGroup=cg topic=T queueId=1 queueOffset=2 maxMsgNums=32 sysFlag=4 commitOffset=0"
                " suspendTimeoutMillis=0 subscription=* subVersion=0 expressionType=TAG bname=b"
            ),
        ),
        (
            CreateTopicRequestHeader(topic="T", read_queue_nums=4, write_queue_nums=8),
            (
                "topic=T defaultTopic=TBW102 readQueueNums=4 writeQueueNums=8 perm=6 topicFilterType=SINGLE_TAG"
                " topicSysFlag=0 order=false"
            ),
        ),
        (
            CreateTopicRequestHeader(topic="T", read_queue_nums=1, write_queue_nums=1, attributes="+message.type=FIFO"),
            (
                "topic=T defaultTopic=TBW102 readQueueNums=1 writeQueueNums=1 perm=6 topicFilterType=SINGLE_TAG"
                " topicSysFlag=0 order=false attributes=+message.type=FIFO"
            ),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_request_header_has_its_fields_as_text_in_wire_order(header: Any, ext_fields: str) -> None:
    assert " ".join(f"{name}={value}" for name, value in header.to_ext_fields().items()) == ext_fields


@pytest.mark.parametrize("properties", [None, ""])
def test_absent_and_empty_values_are_omitted(properties: str | None) -> None:
    header = SendMessageRequestHeaderV2(
        producer_group="pg", topic="T", queue_id=0, born_timestamp=0, properties=properties, broker_name="b"
    )
    assert list(header.to_ext_fields()) == list("abcdefghjkmn")


STORED = {"msgId": "7F", "queueId": "3", "queueOffset": "9223372036854775807"}
PULLED = {"nextBeginOffset": "18", "minOffset": "1", "maxOffset": "19"}


def test_send_response_with_every_field() -> None:
    ext_fields = {
        **STORED,
        "transactionId": "0A",
        "batchUniqId": "0B",
        "recallHandle": "djE=",
        "MSG_REGION": "eu",
        "TRACE_ON": "false",
    }
    assert SendMessageResponseHeader.from_ext_fields(ext_fields) == SendMessageResponseHeader(
        msg_id="7F",
        queue_id=3,
        queue_offset=2**63 - 1,
        transaction_id="0A",
        batch_uniq_id="0B",
        recall_handle="djE=",
        region_id="eu",
        trace_on=False,
    )


@pytest.mark.parametrize(
    ("extra", "region_id", "trace_on"),
    [
        ({}, "DefaultRegion", True),
        ({"MSG_REGION": "", "TRACE_ON": "FALSE"}, "DefaultRegion", True),
        ({"MSG_REGION": "r", "TRACE_ON": "false"}, "r", False),
    ],
)
def test_region_and_trace_of_a_send_response_have_defaults(
    extra: Mapping[str, str], region_id: str, trace_on: bool
) -> None:
    header = SendMessageResponseHeader.from_ext_fields({**STORED, **extra})
    assert (header.region_id, header.trace_on) == (region_id, trace_on)


def test_pull_response_with_every_field() -> None:
    # A broker sends more fields, which a reader does not need.
    ext_fields = {**PULLED, "suggestWhichBrokerId": "1", "topicSysFlag": "2", "groupSysFlag": "x"}
    assert PullMessageResponseHeader.from_ext_fields(ext_fields) == PullMessageResponseHeader(
        next_begin_offset=18, min_offset=1, max_offset=19
    )


HALF_MESSAGE = MessageExt(
    topic="T",
    body=b"x",
    queue_id=0,
    queue_offset=0,
    physical_offset=0,
    sys_flag=0,
    born_timestamp=0,
    born_host="10.0.0.1:1",
    store_timestamp=0,
    store_host="10.0.0.2:2",
    reconsume_times=0,
    prepared_transaction_offset=0,
    body_crc=0,
)


def check_of(fields: Mapping[str, str]) -> TransactionCheck:
    return transaction_check_of("broker:1", RemotingCommand(39, 1, fields, encode_record(HALF_MESSAGE)))


RESPONSES = [
    (SendMessageResponseHeader.from_ext_fields, STORED),
    (PullMessageResponseHeader.from_ext_fields, PULLED),
    (lambda fields: read_long(fields, "offset"), {"offset": "0"}),
    (lambda fields: read_long(fields, "timestamp"), {"timestamp": "0"}),
    (check_of, {"commitLogOffset": "0", "tranStateTableOffset": "0"}),
]
REQUIRED = [(read, fields, name) for read, fields in RESPONSES for name in fields]


@pytest.mark.parametrize(("read", "fields", "name"), REQUIRED, ids=[name for *_, name in REQUIRED])
def test_missing_field_of_a_response_is_named(
    read: Callable[[Mapping[str, str]], object], fields: Mapping[str, str], name: str
) -> None:
    with pytest.raises(RemotingCommandException, match=f"'{name}' is missing"):
        read({key: value for key, value in fields.items() if key != name})


@pytest.mark.parametrize(
    "text", ["", "x", "1.0", "1_000", " 1", "+1", "0x1", "\u0661", "9223372036854775808", "9" * 5000]
)
def test_ill_formed_number_of_a_response_is_named(text: str) -> None:
    with pytest.raises(RemotingCommandException, match="'offset'"):
        read_long({"offset": text}, "offset")
    with pytest.raises(RemotingCommandException, match="'maxOffset'"):
        PullMessageResponseHeader.from_ext_fields({**PULLED, "maxOffset": text})


def test_check_of_a_transaction_with_every_field() -> None:
    # The request of a 5.5.0 broker. Its topic is the half topic, which is not used.
    fields = {
        "bname": "broker-a",
        "topic": "RMQ_SYS_TRANS_HALF_TOPIC",
        "msgId": "U",
        "transactionId": "X",
        "offsetMsgId": "7F",
        "commitLogOffset": "36804876",
        "tranStateTableOffset": "5",
    }
    assert check_of(fields) == TransactionCheck(
        address="broker:1",
        message=HALF_MESSAGE,
        tran_state_table_offset=5,
        commit_log_offset=36804876,
        msg_id="U",
        transaction_id="X",
        offset_msg_id="7F",
        broker_name="broker-a",
    )


def test_check_of_a_transaction_from_a_proxy_has_no_broker_name() -> None:
    fields = {"commitLogOffset": "1", "tranStateTableOffset": "0", "msgId": "U", "transactionId": "U"}
    assert check_of(fields).broker_name == ""


def test_earliest_store_time_of_minus_one_is_accepted() -> None:
    assert read_long({"timestamp": "-1"}, "timestamp") == -1


def test_negative_offsets_are_accepted() -> None:
    assert read_long({"offset": "-9223372036854775808"}, "offset") == -(2**63)


def test_heart_beat_lists_each_group_once_and_in_order() -> None:
    body = heart_beat_body("10.0.0.1@größe", {"pg2", "pg1"})
    assert json.loads(body) == {
        "clientID": "10.0.0.1@größe",
        "producerDataSet": [{"groupName": "pg1"}, {"groupName": "pg2"}],
        "consumerDataSet": [],
    }
    assert body == heart_beat_body("10.0.0.1@größe", ["pg1", "pg2"])


def test_heartbeat_of_a_consumer_names_its_groups_without_subscriptions() -> None:
    [consumer] = json.loads(heart_beat_body("10.0.0.1@spark#1", consumer_groups=["cg"]))["consumerDataSet"]
    assert consumer == {
        "groupName": "cg",
        "consumeType": "CONSUME_ACTIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "unitMode": False,
        "subscriptionDataSet": [],
    }
