"""The parser of the decision log's records: it returns written records, and raises an error for any other input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.half import Half
from rocketmq_spark.deliveries.log.records import (
    ANY_WRITE,
    VERSION,
    Begun,
    BegunRecord,
    Decision,
    DoneRecord,
    HomeRecord,
    InvalidRecordError,
    Record,
    StartRecord,
    UnreadableRecordError,
    encode,
    parse,
)
from rocketmq_spark.model.message import MessageQueue

LOG = "decisions"
ID, EFFECTIVE_ID = "job", "job#T"
WRITE, BATCH = Write("write-1"), Write("7", "query")
A0, B1 = MessageQueue("T", "a", 0), MessageQueue("T", "b", 1)
START_OFFSETS = {B1: 3, A0: 2**63 - 1}
HOME = MessageQueue(LOG, "a", 2)
DECISION = Decision(
    write=BATCH,
    since=4,
    round=2,
    group="job#7#2#run-1",
    rows=200_001,
    timeout_ms=3_600_000 + 200_001,
    manifests=(7, 5, 6),
    digest="0f" * 32,
    start_offsets=START_OFFSETS,
    youngest=(Half(A0, 1, 2, 3), Half(B1, 4, 5, 6)),
    claim=0,
)
BEGUN = BegunRecord(write=WRITE, partition=3, attempt="a1", begun=Begun({"a": 4, "b": 0}, {A0: 5}))
OF_DECISIONS = (
    DECISION,
    replace(DECISION, write=WRITE, group="job#write-1#2#r", claim=None),
    HomeRecord(write=WRITE, home=HOME),
    HomeRecord(write=ANY_WRITE, home=HOME, is_claim=True),
    DoneRecord(write=BATCH, since=9),
)
OF_START_OFFSETS = (
    BEGUN,
    replace(BEGUN, begun=Begun({"a": 4}, START_OFFSETS)),
    StartRecord(write=ANY_WRITE, start_offsets=START_OFFSETS, claim=1),
    StartRecord(write=WRITE, start_offsets={}),
    DoneRecord(write=BATCH, start_offsets=START_OFFSETS),
    HomeRecord(write=WRITE, home=HOME),
)
RECORDS = [(record, ID) for record in OF_DECISIONS] + [(record, EFFECTIVE_ID) for record in OF_START_OFFSETS]
TEXTS = [encode(record, name, LOG) for record, name in RECORDS]


@pytest.mark.parametrize(("record", "name"), RECORDS)
def test_a_record_is_read_as_it_was_written(record: Record, name: str) -> None:
    read = parse(encode(record, name, LOG), name, LOG, 100, 1_700_000_000_000)
    assert read == replace(record, offset=100, stored_ms=1_700_000_000_000)


def test_records_of_other_ids_are_left_out() -> None:
    assert parse(TEXTS[0], "other", LOG) is None
    # Their other fields do not matter.
    assert parse(b'{"id": "other", "version": 99, "kind": []}', ID, LOG) is None


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, 2**31 - 1])
def test_a_record_of_another_version_has_a_separate_error(version: int) -> None:
    fields = {"version": version, "kind": "merged", "id": ID, "rows": "many"}
    with pytest.raises(
        UnreadableRecordError, match=rf"^a record of version {version}, and this release reads version {VERSION}$"
    ):
        parse(json.dumps(fields).encode(), ID, LOG)


def changed(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.update({name: value})


def moved(*place: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields["floors"].append([*place, 1])


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "version": changed("version", -1),
    "no version": lambda fields: fields.pop("version"),
    "version is text": changed("version", "3"),
    "kind": changed("kind", "undo"),
    "kind is a list": changed("kind", ["decision"]),
    "kind of another delivery": changed("kind", "begun"),
    "write": changed("write", 7),
    "no write": lambda fields: fields.pop("write"),
    "write of a stream": changed("write", "-1"),
    "write of a stream with blanks": changed("write", " 7"),
    "query": changed("query", "q" * 257),
    "control characters": changed("query", "q\x1b[2J"),
    "half of a surrogate pair": changed("query", "q\ud800"),
    "since": changed("since", 101),
    "since below 0": changed("since", -1),
    "since is a float": changed("since", 4.0),
    "claim": changed("claim", 100),
    "claim below 0": changed("claim", -1),
    "claim is null": changed("claim", None),
    "round": changed("round", 0),
    "round is a truth value": changed("round", True),
    "round beyond all": changed("round", 10**12),
    "group": changed("group", "other#7#2#run-1"),
    "group of another round": changed("group", "job#7#1#run-1"),
    "group without a run": changed("group", "job#7#2#"),
    "rows": changed("rows", -1),
    "rows beyond memory": changed("rows", 2**28 + 1),
    "timeout": changed("timeout_ms", 0),
    "timeout beyond the option": changed("timeout_ms", 3_600_000 + 200_002),
    "timeout for ever": changed("timeout_ms", 10**18),
    "manifests": changed("manifests", [5, 6]),
    "manifest twice": changed("manifests", [5, 6, 6]),
    "manifest after its decision": changed("manifests", [5, 6, 100]),
    "manifest below 0": changed("manifests", [5, 6, -1]),
    "digest": changed("digest", "0g" * 32),
    "digest is short": changed("digest", "0f" * 31),
    "no digest": lambda fields: fields.pop("digest"),
    "manifests is an object": changed("manifests", {"5": 6}),
    "floors": changed("floors", 7),
    "floor without a topic": changed("floors", [["a", 0, 1]]),
    "topic": moved("T T", "a", 1),
    "topic of the broker": moved("RMQ_SYS_TRANS_HALF_TOPIC", "a", 1),
    "topic is long": moved("T" * 128, "a", 1),
    "broker": moved("T", "", 1),
    "broker is long": moved("T", "a" * 513, 1),
    "queue": moved("T", "a", 100_000),
    "queue is text": moved("T", "a", "1"),
    "queue twice": moved("T", "a", 0),
    "floor below 0": changed("floors", [["T", "a", 0, -1]]),
    "floor beyond 64 bits": changed("floors", [["T", "a", 0, 2**63]]),
    "youngest": changed("youngest", [["T", "a", 0, 1, 2]]),
    "youngest in another queue": changed("youngest", [["U", "a", 0, 1, 2, 3]]),
    "youngest twice": changed("youngest", [["T", "a", 0, 1, 2, 3]] * 2),
    "youngest below 0": changed("youngest", [["T", "a", 0, -1, 2, 3]]),
    "youngest is no number": changed("youngest", [["T", "a", 0, float("nan"), 2, 3]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_out_of_bounds_makes_a_record_invalid(change: str) -> None:
    fields = json.loads(TEXTS[0])
    CHANGES[change](fields)
    with pytest.raises(InvalidRecordError):
        parse(json.dumps(fields).encode(), ID, LOG, 100)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", b"[]", b"{}", b"null", b"{" * 100_000, b"[" * 600_000, b'{"id": []}', b"1" * 100, b" " * 5_000_000],
    ids=lambda body: repr(body[:5]),
)
def test_a_message_of_another_program_is_invalid(body: bytes) -> None:
    with pytest.raises(InvalidRecordError):
        parse(body, ID, LOG)


def test_the_reason_is_short_and_shows_no_large_value() -> None:
    fields = json.loads(TEXTS[0])
    for value in ("x" * 100_000, [[0] * 10_000] * 10, {"x": {"y": 0}}, -(10**39)):
        fields["round"] = value
        with pytest.raises(InvalidRecordError) as failed:
            parse(json.dumps(fields).encode(), ID, LOG)
        assert len(str(failed.value)) < 250


def test_start_offsets_of_another_topic_are_invalid() -> None:
    for record in (
        StartRecord(write=WRITE, start_offsets=START_OFFSETS),
        DoneRecord(write=WRITE, start_offsets=START_OFFSETS),
    ):
        body = encode(record, EFFECTIVE_ID, LOG).replace(b"job#T", b"job#U")
        with pytest.raises(InvalidRecordError, match="a floor is in another topic than 'U'"):
            parse(body, "job#U", LOG)


def test_a_record_that_readers_would_ignore_is_not_written() -> None:
    for record in (replace(DECISION, timeout_ms=0), replace(DECISION, manifests=()), replace(DECISION, write=WRITE)):
        with pytest.raises(InvalidRecordError):
            encode(record, ID, LOG)
    with pytest.raises(InvalidRecordError, match="begun"):
        encode(BEGUN, ID, LOG)
    with pytest.raises(InvalidRecordError, match="as another record"):
        encode(HomeRecord(write=WRITE, home=replace(HOME, topic="other")), ID, LOG)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["T", "a", "job", "", 2**63]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def read_by_all(body: bytes) -> None:
    """Parse a body as a record of each id, at any offset; nothing but the errors of the module may be raised."""
    for name in (ID, EFFECTIVE_ID):
        for offset in (0, 8, 2**63 - 1):
            try:
                record = parse(body, name, LOG, offset)
            except (InvalidRecordError, UnreadableRecordError):
                continue
            assert record is None or record.since <= offset
            # Whatever is valid can be written again.
            if record is not None and len(body) < 1_000_000:
                encode(record, name, LOG)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(body: bytes) -> None:
    read_by_all(body)


@given(JSON)
def test_arbitrary_json_raises_nothing_else(value: object) -> None:
    read_by_all(json.dumps(value).encode())


@given(st.data())
def test_damaged_records_raise_nothing_else(data: st.DataObject) -> None:
    value = json.loads(data.draw(st.sampled_from(TEXTS)))
    for _ in range(data.draw(st.integers(1, 3))):
        inner: Any = value
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(inner[key], dict | list) or data.draw(st.booleans()):
                if data.draw(st.booleans()):
                    inner[key] = data.draw(JSON)
                else:
                    del inner[key]
                break
            inner = inner[key]
    read_by_all(json.dumps(value).encode())


@given(st.sampled_from(TEXTS), st.data())
def test_damaged_bytes_raise_nothing_else(text: bytes, data: st.DataObject) -> None:
    body = bytearray(text)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    read_by_all(bytes(body[: data.draw(st.integers(0, len(body)))]) if data.draw(st.booleans()) else bytes(body))
