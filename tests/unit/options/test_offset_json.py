"""The JSON of offsets, as people, receipts and checkpoints write it."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import (
    EARLIEST,
    LATEST,
    OffsetSpec,
    beginnings_in,
    flat,
    nested,
    parse_end,
    parse_numbers,
    parse_queues,
    parse_start,
    receipt_spans,
    stored_in,
)
from tests.support.pipelines import recorder, success, summary_of

NAMES = st.text(min_size=1, max_size=5)
QUEUES = st.builds(MessageQueue, NAMES, NAMES, st.integers(0, 2**31 - 1))
QUEUE = MessageQueue("t", "b", 0)
parse_offsets = partial(parse_numbers, lowest=EARLIEST)
parse_timestamps = partial(parse_numbers, lowest=0)


def parse_receipt(text: str) -> dict[MessageQueue, tuple[int, int]]:
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError(f"{tree} is not a JSON object")
    return receipt_spans(tree)


def problem(parse: Callable[[Any], Any], value: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(value)
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def receipt(first: Any, last: Any) -> str:
    return json.dumps(
        {"b": {"rows": 3, "queues": {"t": {"0": {"rows": 3, "first_offset": first, "last_offset": last}}}}}
    )


@given(st.dictionaries(QUEUES, st.integers(EARLIEST, 2**63 - 1), min_size=1))
def test_offsets_are_read_back_as_they_were_written(offsets: dict[MessageQueue, int]) -> None:
    assert parse_offsets(json.dumps(nested(offsets))) == offsets


@given(st.dictionaries(QUEUES, st.integers(0, 2**63 - 1)))
def test_flat_is_the_inverse_of_nested(offsets: dict[MessageQueue, int]) -> None:
    assert flat(json.loads(json.dumps(nested(offsets)))) == offsets


SPANS = st.dictionaries(QUEUES, st.tuples(st.integers(0, 2**62), st.integers(0, 2**62 - 1) | st.none()))


@given(SPANS)
def test_beginnings_of_new_queues_are_stored_beside_their_ends(
    spans: dict[MessageQueue, tuple[int, int | None]],
) -> None:
    begins = {queue: begin for queue, (begin, size) in spans.items() if size is not None}
    ends = {queue: begin + (size or 0) for queue, (begin, size) in spans.items()}
    tree = json.loads(json.dumps(nested(ends, begins)))
    assert flat(tree) == ends
    assert beginnings_in(tree) == begins


def test_checkpointed_stream_offset_is_valid_as_start_and_end() -> None:
    text = '{"t":{"b":{"0":[3,7],"1":-2,"2":[5,5]}}}'
    expected = ((QUEUE, 7), (MessageQueue("t", "b", 1), EARLIEST), (MessageQueue("t", "b", 2), 5))
    assert parse_start(text).offsets == parse_end(text).offsets == expected


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("[]", "[] must be one offset, or a list of two: [begin, end]"),
        ("[1]", "[1] must be one offset, or a list of two: [begin, end]"),
        ("[1,2,3]", "[1, 2, 3] must be one offset, or a list of two: [begin, end]"),
        ("[-2,3]", "-2 is not from 0 to 9223372036854775807"),
        ("[0,true]", "true is not an integer"),
        ("[8,7]", "in [8, 7] begin must not be above end"),
        ("[[0,1],2]", "[0, 1] is not an integer"),
    ],
)
def test_malformed_beginning_is_refused(leaf: str, message: str) -> None:
    text = f'{{"t":{{"b":{{"0":{leaf}}}}}}}'
    expected = f"topic 't', broker 'b', queue 0: {message}"
    assert problem(parse_start, text) == expected
    for read in (flat, beginnings_in):
        assert problem(read, json.loads(text)) == expected


TIMED = st.dictionaries(QUEUES, st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1) | st.none()))


@given(TIMED)
def test_store_times_are_kept_beside_the_queues_of_a_broker(timed: dict[MessageQueue, tuple[int, int | None]]) -> None:
    offsets = {queue: offset for queue, (offset, _) in timed.items()}
    times = {queue: time for queue, (_, time) in timed.items() if time is not None}
    text = json.dumps(nested(offsets, None, times))
    assert flat(json.loads(text)) == offsets
    assert stored_in(json.loads(text)) == times
    if offsets:
        assert dict(parse_start(text).offsets) == dict(parse_end(text).offsets) == offsets


@pytest.mark.parametrize(
    "times", ["7", "{}", '{"0":-1}', '{"0":[1,2]}', '{"0":true}', '{"x":1}', '{"storeTimestamp":1}']
)
def test_malformed_store_times_are_refused(times: str) -> None:
    assert "topic 't', broker 'b'" in problem(
        stored_in, json.loads(f'{{"t":{{"b":{{"0":1,"storeTimestamp":{times}}}}}}}')
    )


def test_store_time_of_a_queue_without_an_offset_is_refused() -> None:
    offsets = {"t": {"b": {"0": 1, "storeTimestamp": {"0": 5, "1": 5}}}}
    expected = "topic 't', broker 'b': queue 1 is in storeTimestamp and has no offset: add it, or remove both"
    assert problem(stored_in, offsets) == expected


def test_timestamps_reject_beginnings_and_store_times() -> None:
    assert "'storeTimestamp' is not a queue id" in problem(parse_timestamps, '{"t":{"b":{"storeTimestamp":{"0":1}}}}')
    assert "[0, 1] is not an integer" in problem(parse_timestamps, '{"t":{"b":{"0":[0,1]}}}')


@given(st.dictionaries(QUEUES, st.integers(0), min_size=1))
def test_nested_offsets_are_sorted(offsets: dict[MessageQueue, int]) -> None:
    shuffled = dict(reversed(offsets.items()))
    assert json.dumps(nested(shuffled)) == json.dumps(nested(offsets))


def test_nested_sorts_queues_by_number() -> None:
    found = nested({MessageQueue("t", "b", queue_id): 5 for queue_id in (10, 9, 0)})
    assert list(found["t"]["b"]) == ["0", "9", "10"]


LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.just(0.5) | st.sampled_from(("", "0", "queues"))
KEYS = st.sampled_from(("t", "b", "0", "1", "01", "", "queues", "rows", "first_offset", "last_offset"))
TREES = st.recursive(LEAVES, lambda below: st.dictionaries(KEYS, below, max_size=2) | st.lists(below, max_size=2))


@given(TREES)
def test_any_json_is_parsed_correctly_or_rejected(tree: Any) -> None:
    for parse in (parse_receipt, parse_queues, parse_start):
        with contextlib.suppress(ValueError):
            assert parse(json.dumps(tree))
    with contextlib.suppress(ValueError):
        assert nested(parse_offsets(json.dumps(tree))) == tree


@given(st.text())
def test_arbitrary_text_is_not_parsed_as_offsets(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_start(text) in (OffsetSpec("earliest"), OffsetSpec("latest"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"t":{"b":{"0":1}}', "it is not valid JSON: Expecting ',' delimiter: line 1 column 19 (char 18)"),
        ("[" * 100_000, "the JSON is nested too deeply"),
        ("[]", "[] is not a JSON object"),
        ("{}", "the JSON: the object is empty; give at least one topic"),
        ('{"t":{}}', "topic 't': the object is empty; give at least one broker"),
        ('{"t":{"b":{}}}', "topic 't', broker 'b': the object is empty; give at least one queue id"),
        ('{"":{"b":{"0":1}}}', "the JSON: '' is not the name of a topic"),
        ('{"t":{"":{"0":1}}}', "topic 't': '' is not the name of a broker"),
        ('{"t":5}', "topic 't': 5 is not an object with a broker as key, as in {\"broker\": ...}"),
        (
            '{"t":{"b":[7]}}',
            "topic 't', broker 'b': [7] is not an object with a queue id as key, as in {\"queue id\": ...}",
        ),
        ('{"t":{"b":{"x":1}}}', "topic 't', broker 'b': 'x' is not a queue id, which is a quoted number from 0"),
        ('{"t":{"b":{"0":1.0}}}', "topic 't', broker 'b', queue 0: 1.0 is not an integer"),
        ('{"t":{"b":{"0":true}}}', "topic 't', broker 'b', queue 0: true is not an integer"),
        ('{"t":{"b":{"0":"1"}}}', "topic 't', broker 'b', queue 0: \"1\" is not an integer"),
        ('{"t":{"b":{"0":null}}}', "topic 't', broker 'b', queue 0: null is not an integer"),
        ('{"t":{"b":{"0":-3}}}', "topic 't', broker 'b', queue 0: -3 is not from -2 to 9223372036854775807"),
        (
            '{"t":{"b":{"7":9223372036854775808}}}',
            "topic 't', broker 'b', queue 7: 9223372036854775808 is not from -2 to 9223372036854775807",
        ),
        ('{"t":{"b":{"0":' + "9" * 5000 + "}}}", f"the number {'9' * 40}... has 5000 digits, allowed are 40"),
        ('{"t":{"b":{"0":1,"0":2}}}', "the name '0' occurs twice in one object"),
        ('{"t":{"b":{"0":1}},"t":{"b":{"1":1}}}', "the name 't' occurs twice in one object"),
        (
            '{"t":{"b":"' + "x" * 100 + '"}}',
            (
                f"topic 't', broker 'b': \"{'x' * 59}... is not an object with a queue id as key, as in "
                '{"queue id": ...}'
            ),
        ),
    ],
)
def test_malformed_offsets_error_names_the_problem_and_its_place(text: str, message: str) -> None:
    assert problem(parse_offsets, text) == message


@pytest.mark.parametrize("text", ["-1", "+1", "01", "00", "1.0", " 1", "1 ", "", "٣", "1_0", "2147483648", "1" * 5000])
def test_queue_id_has_a_single_valid_spelling(text: str) -> None:
    assert problem(parse_offsets, json.dumps({"t": {"b": {text: 1}}})).startswith("topic 't', broker 'b': ")


def test_timestamps_are_numbers_from_0() -> None:
    assert parse_timestamps('{"t":{"b":{"0":1700000000000}}}') == {QUEUE: 1_700_000_000_000}
    assert parse_timestamps('{"t":{"b":{"0":0}}}') == {QUEUE: 0}
    assert "queue 0: -1 is not from 0 to" in problem(parse_timestamps, '{"t":{"b":{"0":-1}}}')


@pytest.mark.parametrize(
    "broken", [[], {"t": {}}, {"t": {"b": {"0": -1}}}, {"t": {"b": {0: 1}}}, {"t": {"b": {"0": 1.0}}}]
)
def test_malformed_checkpointed_offsets_are_rejected(broken: Any) -> None:
    problem(flat, broken)


@given(st.sets(QUEUES, min_size=1))
def test_queues_are_parsed(queues: set[MessageQueue]) -> None:
    ids: dict[str, dict[str, list[int]]] = {}
    for queue in queues:
        ids.setdefault(queue.topic, {}).setdefault(queue.broker_name, []).append(queue.queue_id)
    assert parse_queues(json.dumps(ids)) == frozenset(queues)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"t":{"b":[]}}', "topic 't', broker 'b': [] is not a non-empty list of queue ids, as in [0, 1]"),
        ('{"t":{"b":{"0":1}}}', "topic 't', broker 'b': {\"0\": 1} is not a non-empty list of queue ids, as in [0, 1]"),
        ('{"t":[0]}', "topic 't': [0] is not an object with a broker as key, as in {\"broker\": ...}"),
        ('{"t":{"b":[1,0,1]}}', "topic 't', broker 'b': [1, 0, 1] contains a queue id twice"),
        ('{"t":{"b":["0"]}}', "topic 't', broker 'b': \"0\" is not an integer"),
        ('{"t":{"b":[true]}}', "topic 't', broker 'b': true is not an integer"),
        ('{"t":{"b":[[0]]}}', "topic 't', broker 'b': [0] is not an integer"),
        ('{"t":{"b":[-1]}}', "topic 't', broker 'b': -1 is not from 0 to 2147483647"),
        ("{}", "the JSON: the object is empty; give at least one topic"),
    ],
)
def test_malformed_queues_error_names_the_problem_and_its_place(text: str, message: str) -> None:
    assert problem(parse_queues, text) == message


def test_the_receipt_of_a_write_gives_first_and_last_offsets() -> None:
    recording = recorder()
    success(recording, "b", rows=5, offset=3)
    success(recording, "b", rows=1, offset=0, topic="u", queue_id=1)
    success(recording, "c", rows=2, offset=9)
    text = json.dumps(summary_of([recording.snapshot()]).to_dict())
    spans = {QUEUE: (3, 7), MessageQueue("u", "b", 1): (0, 0), MessageQueue("t", "c", 0): (9, 10)}
    assert parse_receipt(text) == spans
    assert dict(parse_start(text).offsets) == {queue: first for queue, (first, _) in spans.items()}
    assert dict(parse_end(text).offsets) == {queue: last + 1 for queue, (_, last) in spans.items()}


def test_broker_without_stored_rows_does_not_invalidate_a_receipt() -> None:
    recording = recorder()
    success(recording, "b", rows=5, offset=3)
    recording.record_failure("c", "SYSTEM_ERROR", 1.0)
    assert parse_receipt(json.dumps(summary_of([recording.snapshot()]).to_dict())) == {QUEUE: (3, 7)}


@pytest.mark.parametrize(("queue_id", "offset"), [(-1, -1), (0, -1)])
def test_receipt_of_a_write_over_grpc_is_rejected_for_missing_offsets(queue_id: int, offset: int) -> None:
    recording = recorder()
    success(recording, "proxy:8081", rows=5, offset=offset, queue_id=queue_id)
    text = json.dumps(summary_of([recording.snapshot()]).to_dict())
    for parse in (parse_receipt, parse_start, parse_end):
        assert "receipts of writes over gRPC have no offsets" in problem(parse, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "the receipt has no queues: no row was acknowledged with an offset"),
        ('{"b":{"rows":0,"queues":{}}}', "the receipt has no queues: no row was acknowledged with an offset"),
        ('{"b":{"rows":0}}', "broker 'b' has no object \"queues\". Give the receipt of a write unchanged"),
        ('{"b":5}', "broker 'b' has no object \"queues\". Give the receipt of a write unchanged"),
        (receipt("1", 2), "topic 't', broker 'b', queue 0: \"1\" is not an integer"),
        (receipt(-1, 2), "topic 't', broker 'b', queue 0: -1 is not from 0 to 9223372036854775806"),
        (
            receipt(0, 2**63 - 1),
            "topic 't', broker 'b', queue 0: 9223372036854775807 is not from 0 to 9223372036854775806",
        ),
        (receipt(3, 2), "topic 't', broker 'b', queue 0: first_offset 3 is above last_offset 2"),
        ('{"b":{"queues":{"t":{"0":{"first_offset":1}}}}}', "topic 't', broker 'b', queue 0: last_offset is missing"),
        (
            '{"b":{"queues":{"t":{"0":1}}}}',
            "topic 't', broker 'b', queue 0: 1 is not an object with \"first_offset\" and \"last_offset\"",
        ),
        ('{"b":{"queues":{"t":{}}}}', "topic 't', broker 'b': the object is empty; give at least one queue id"),
    ],
)
def test_malformed_receipt_error_names_the_problem_and_its_place(text: str, message: str) -> None:
    assert problem(parse_receipt, text) == message


@pytest.mark.parametrize("parse", [parse_start, parse_end])
def test_start_or_end_is_a_keyword_offsets_or_a_receipt(parse: Callable[[str], OffsetSpec]) -> None:
    assert parse(" Earliest ") == OffsetSpec("earliest")
    assert parse("LATEST") == OffsetSpec("latest")
    assert parse(' {"t":{"b":{"0":-1}}}') == OffsetSpec(None, ((QUEUE, LATEST),))
    assert parse(receipt(4, 4)) == OffsetSpec(None, ((QUEUE, 4 if parse is parse_start else 5),), receipt=True)


def test_unknown_keyword_error_lists_the_keywords() -> None:
    assert problem(parse_start, "{}") == "it has no offsets; neither has the receipt of a write without rows"
    assert problem(parse_start, "latst") == "it is neither earliest, latest, committed nor a JSON object"


def test_offsets_of_a_broker_named_queues_are_not_a_receipt() -> None:
    assert parse_start('{"t":{"queues":{"0":5}}}').offsets == ((MessageQueue("t", "queues", 0), 5),)
    assert 'queue 0: "5" is not an integer' in problem(parse_start, '{"t":{"queues":{"0":"5"}}}')


@given(st.dictionaries(QUEUES, st.integers(0)), QUEUES)
def test_offset_of_returns_the_offset_of_each_queue(offsets: dict[MessageQueue, int], other: MessageQueue) -> None:
    spec = OffsetSpec(None, tuple(sorted(offsets.items())))
    assert {queue: spec.offset_of(queue) for queue in offsets} == offsets
    assert spec.offset_of(other) == offsets.get(other)


def test_specs_can_be_pickled_hashed_and_shown() -> None:
    spec = parse_start('{"t":{"b":{"0":7}}}')
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert {spec: 1}[parse_start('{"t":{"b":{"0":7}}}')] == 1
    assert (str(spec), str(OffsetSpec("latest"))) == ('{"t": {"b": {"0": 7}}}', "latest")
