"""A user's class that chooses queues for whole record batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.arrow.split import CustomSelector
from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.references import load_class
from rocketmq_spark.protocol.remoting.records import decode_batch
from tests.support.encoding import batch_options, encode, joined, queues_of


class ByFlag:
    """The flag is the index of the queue; null leaves the choice to the sink."""

    created = 0

    def __init__(self) -> None:
        type(self).created += 1
        self.calls: list[tuple[str, int]] = []

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
        self.calls.append((queues[0].topic, rows.num_rows))
        return rows.column("flag")


class Answers:
    """Returns the test's choice."""

    answer: Any = None

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class NoChoice:
    """Has no method select."""


class NeedsArguments(ByFlag):
    """Needs an argument, which the sink does not give."""

    def __init__(self, argument: object) -> None:
        super().__init__()


HERE = __name__


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_custom_selector_chooses_queues_once_per_topic() -> None:
    batch = batch_of(
        body=[b"a", b"b", b"c", b"", b"e", b"f"],
        topic=["orders", "orders", "refunds", "orders", "orders", "orders"],
        flag=pa.array([1, None, 2, 0, -1, 0]),
    )
    created, custom = ByFlag.created, CustomSelector(f"{HERE}:ByFlag")
    done = encode([batch, batch], batch_options(), custom=custom, on_invalid=lambda _: None)
    places = {item.body: queue for one, queue in done for item in decode_batch(joined(one))}
    orders, refunds = queues_of("orders"), queues_of("refunds")
    assert places == {b"a": orders[1], b"b": None, b"c": refunds[2], b"e": None, b"f": orders[0]}
    assert ByFlag.created == created + 1
    assert custom._selector.calls == [("orders", 4), ("refunds", 1)] * 2  # type: ignore[attr-defined]


def test_custom_selector_gets_the_rows_of_views() -> None:
    text, data = pa.string_view(), pa.binary_view()
    offsets = pa.array([0, 1, 3, 4], pa.int32())
    values = pa.array(["u", "v", "w", "a-text-of-more-than-12-bytes"]).cast(text)
    batch = batch_of(
        body=pa.array([b"a", b"b", b"c"]).cast(data),
        topic=pa.array(["orders", "refunds", "orders"]).cast(text),
        keys=pa.ListArray.from_arrays(offsets, values),
        properties=pa.MapArray.from_arrays(offsets, pa.array(["k", "k", "l", "k"]), values),
        flag=pa.array([1, 2, None]),
    )
    seen = []

    class Seen(CustomSelector):
        def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
            seen.append(rows.to_pylist())
            return super().select(queues, rows)

    done = encode([batch], batch_options(), custom=Seen(f"{HERE}:ByFlag"))
    assert seen == [batch.slice(0, 1).to_pylist() + batch.slice(2, 1).to_pylist(), batch.slice(1, 1).to_pylist()]
    places = {item.body: queue for one, queue in done for item in decode_batch(joined(one))}
    assert places == {b"a": queues_of("orders")[1], b"b": queues_of("refunds")[2], b"c": None}


@pytest.mark.parametrize("answer", [[0, None], np.array([0, -1], np.int8), pa.chunked_array([[0], [None]])])
def test_any_array_of_integers_is_accepted(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    chosen = CustomSelector(f"{HERE}:Answers").select(queues_of("orders"), batch_of(body=[b"a", b"b"]))
    assert chosen.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([0], r"it returned 1 values of type int64; return 2 whole numbers, one per row"),
        ([0.5, 1.0], r"2 values of type double"),
        (["0", "1"], r"2 values of type string"),
        ([0, 3], r"it returned 3 for row 1 of 2; allowed is 0 to 2, and -1 or null for any queue"),
        ([-2, 0], r"it returned -2 for row 0 of 2"),
        (None, r"for 2 rows failed: TypeError"),
        (7, r"for 2 rows failed: TypeError"),
        (KeyError("region"), r"for 2 rows failed: KeyError\('region'\)"),
    ],
)
def test_invalid_selector_result_fails_the_task_with_the_reason(
    answer: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(
        MQClientException, match=rf"queueSelector={HERE}:Answers, choosing among 3 queues of orders.*{text}"
    ):
        CustomSelector(f"{HERE}:Answers").select(queues_of("orders"), batch_of(body=[b"a", b"b"]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:Thing", "importing module no_such_module failed: ModuleNotFoundError"),
        (f"{HERE}:Missing", "has no class Missing with a method select"),
        (f"{HERE}:NoChoice", "has no class NoChoice with a method select"),
        (f"{HERE}:HERE", "has no class HERE with a method select"),
    ],
)
def test_a_class_that_is_not_there_is_named(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        load_class("queueSelector", name, "select")


def test_a_class_that_needs_arguments_is_named() -> None:
    with pytest.raises(OptionError, match="calling the class without arguments failed: TypeError"):
        CustomSelector(f"{HERE}:NeedsArguments")
