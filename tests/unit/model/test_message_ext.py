from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id, encode_message_id, utc
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, TransactionCheck
from tests.support.strategies import HALF, hosts, int64s, stored_messages


def test_offset_message_id_vectors() -> None:
    # An id made by Java, and one made by a real broker.
    assert decode_message_id("7F00000100002A9F000000018A98AEF8") == ("127.0.0.1:10911", 6620229368)
    assert encode_message_id("127.0.0.1:20911", 36_800_285) == "7F000001000051AF000000000231871D"
    assert decode_message_id("7f000001000051af000000000231871d") == ("127.0.0.1:20911", 36_800_285)


@given(hosts(st.ip_addresses(v=4)) | hosts(st.ip_addresses(v=6)), int64s)
def test_offset_message_id_of_any_address_round_trips(host: str, physical_offset: int) -> None:
    message_id = encode_message_id(host, physical_offset)
    assert len(message_id) == (56 if host.startswith("[") else 32)
    assert message_id == message_id.upper()
    assert decode_message_id(message_id) == (host, physical_offset)


@pytest.mark.parametrize(
    "text", ["", "7F", "7F00000100002A9F000000018A98AEF", "x" * 32, "7F " * 32, "é" * 32, f"{'0' * 32},{'0' * 32}"]
)
def test_malformed_offset_message_id_is_rejected(text: str) -> None:
    with pytest.raises(MQClientException, match="is no offset message id: one has 32 hex digits, or 56"):
        decode_message_id(text)


@given(stored_messages())
def test_stored_message_knows_its_offset_message_id(message: MessageExt) -> None:
    assert isinstance(message, Message)
    assert decode_message_id(message.offset_msg_id) == (message.store_host, message.physical_offset)


def half(**properties: str) -> MessageExt:
    return replace(HALF, properties={"TRAN_MSG": "true", **properties}, queue_offset=3, physical_offset=2179)


def test_check_answer_has_the_offsets_of_the_check_and_the_message_topic() -> None:
    # Java sends the topic of the header, the half topic, on which no user has rights.
    check = TransactionCheck(
        address="127.0.0.1:10911",
        message=half(PGROUP="pg", UNIQ_KEY="U1"),
        tran_state_table_offset=30,
        commit_log_offset=4711,
        msg_id="other",
        transaction_id="X1",
        broker_name="broker-a",
    )
    assert check.answer(TRANSACTION_COMMIT_TYPE, "found it") == EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=30,
        commit_log_offset=4711,
        commit_or_rollback=8,
        msg_id="U1",
        transaction_id="X1",
        broker_name="broker-a",
        from_transaction_check=True,
        remark="found it",
    )


def test_checked_message_without_unique_id_or_group_uses_its_offset_id() -> None:
    check = TransactionCheck(address="b:1", message=half(), tran_state_table_offset=0, commit_log_offset=0)
    assert (check.unique_id, check.producer_group) == ("7F00000100002A9F0000000000000883", "")


def test_times_are_printed_in_utc_with_milliseconds() -> None:
    assert utc(1_795_762_693_007) == "2026-11-27 06:58:13.007 UTC"
    assert utc(1_700_000_000) == "1970-01-20 16:13:20.000 UTC"
    assert utc(-1) == "1969-12-31 23:59:59.999 UTC"
    assert utc(253_402_300_799_999) == "9999-12-31 23:59:59.999 UTC"
    assert utc(2**63 - 1) == "9223372036854775807 ms since 1970 (not in the years 1 to 9999)"
    assert utc(-(2**63)).startswith("-9223372036854775808 ms since 1970")
