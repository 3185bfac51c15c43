"""Tables of answers: their types, texts and conversions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import pytest

from rocketmq_spark.admin import QueueOffsets, Table
from rocketmq_spark.admin.answers import BrokerInfo, PeekedMessage, QueueLag, TopicInfo
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import BrokerRoute


@dataclass(frozen=True)
class Row:
    """One value of each kind."""

    broker_name: str | None
    count: int
    used_percent: float
    at: datetime
    body: bytes
    properties: dict[str, str]
    names: tuple[str, ...]
    on: bool


AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, timezone.utc)
ROW = Row("a", 1234, 31.26, AT, b"text \xc3\xa9", {"k": "v"}, ("x", "y"), True)


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
def test_views_have_local_times_short_headings_and_thousands() -> None:
    table = Table(Row, [ROW])
    assert table.headings == ("broker", "count", "used %", "at", "body", "properties", "names", "on")
    assert table.cells() == [["a", "1,234", "31.3", "2026-01-02 04:04:05.678", "text é", "k=v", "x, y", "yes"]]
    assert table.layout.right == ["count", "used %"]
    assert table.layout.listed == ["names"]
    assert table.layout.free == ["body", "properties"]


def test_views_shorten_and_the_row_keeps_everything() -> None:
    row = Row(None, 0, 0.0, AT, b"x" * 100, {}, (), False)
    cells = Table(Row, [row]).cells()[0]
    assert cells[4] == "x" * 60 + "…"
    assert (cells[0], cells[5]) == ("-", "-")
    assert Table(Row, [row])[0].body == b"x" * 100


def test_dicts_are_plain_json_values() -> None:
    (plain,) = Table(Row, [ROW]).to_dicts()
    assert json.loads(json.dumps(plain)) == plain
    assert plain == {
        "broker_name": "a",
        "count": 1234,
        "used_percent": 31.26,
        "at": "2026-01-02T03:04:05.678Z",
        "body": "text é",
        "properties": {"k": "v"},
        "names": ["x", "y"],
        "on": True,
    }


def test_binary_body_is_hex_in_a_view_and_base64_in_a_dict() -> None:
    table = Table(Row, [Row("a", 1, 1.0, AT, b"\xff\x00", {}, (), True)])
    assert table.cells()[0][4] == "2 bytes: ff 00"
    assert table.to_dicts()[0]["body"] == {"base64": "/wA="}


def test_table_is_a_sequence_of_its_rows() -> None:
    rows = [QueueOffsets(MessageQueue("orders", "a", number), 1, 3) for number in (0, 1)]
    table = Table(QueueOffsets, rows)
    assert list(table) == rows
    assert (len(table), table[-1], table[:1]) == (2, rows[1], (rows[0],))
    assert rows[0] in table


def test_columns_are_those_that_the_row_type_names() -> None:
    table = Table(QueueOffsets, [QueueOffsets(MessageQueue("orders", "a", 7), 1, 3)])
    assert table.to_dicts() == [
        {"broker_name": "a", "queue_id": 7, "min_offset": 1, "max_offset": 3, "messages": 2},
    ]


def test_missing_parts_are_shown_in_every_view() -> None:
    table = Table(QueueOffsets, [], missing=["4 queues of b: no connection"], notes=["0 messages"])
    for shown in (repr(table), str(table), table._repr_html_()):
        assert "missing: 4 queues of b: no connection" in shown
        assert "0 messages" in shown


def test_pandas_has_the_values_themselves() -> None:
    pandas: Any = pytest.importorskip("pandas")
    frame = Table(Row, [ROW]).to_pandas()
    assert list(frame.columns) == list(Table(Row, []).columns)
    assert frame.body[0] == b"text \xc3\xa9"
    assert frame["at"][0] == pandas.Timestamp(AT)
    assert len(Table(Row, []).to_pandas()) == 0


def test_text_view_has_no_colours_on_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in repr(Table(Row, [ROW]))


@pytest.mark.parametrize("kind", [BrokerInfo, BrokerRoute, PeekedMessage, QueueOffsets, TopicInfo])
def test_some_but_not_all_columns_of_a_view_are_optional(kind: type) -> None:
    table: Table[Any] = Table(kind, [])
    assert table.layout.spare
    assert set(table.layout.spare) < set(table.headings)


def test_narrow_view_of_rows_without_a_rare_column() -> None:
    rows = [QueueLag(MessageQueue("t" * 60, "b" * 60, 0), 1, 2)]
    assert "read until" not in repr(Table(QueueLag, rows))
    read = [QueueLag(MessageQueue("t", "b", 0), 1, 2, AT)]
    assert "read_until" in Table(QueueLag, read).to_dicts()[0]


def test_addresses_are_not_shortened_as_properties_are() -> None:
    addresses = {number: f"broker-with-a-long-name-{number}.example:10911" for number in range(4)}
    row = BrokerRoute("a", "c", addresses, 8, 8, "rw")
    assert all(address in repr(Table(BrokerRoute, [row])) for address in addresses.values())
    assert Table(BrokerRoute, [row]).layout.listed == ["addresses"]
