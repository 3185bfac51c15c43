"""Tables as text and as HTML."""

from __future__ import annotations

import io
import re

import pytest

from rocketmq_spark.display.tables import Layout, html_table, print_table, text_table
from rocketmq_spark.errors import escaped
from rocketmq_spark.model.message import MessageQueue, SendStatus
from rocketmq_spark.model.route import BrokerData, BrokerRoute, QueueData, TopicRouteData
from rocketmq_spark.model.send_result import LocalTransactionState, SendResult, TransactionSendResult


def test_numbers_stand_at_the_right_and_notes_below() -> None:
    text = text_table(["queue", "count"], [["a", "1"], ["b", "1,000"]], Layout(right=["count"]), notes=["[two] rows"])
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[2:4] == [" a           1", " b       1,000"]
    assert lines[-1] == "[two] rows"


def test_a_long_cell_is_folded_and_never_cut() -> None:
    file = io.StringIO()
    print_table(["body"], [["x" * 500]], file=file)
    assert file.getvalue().count("x") == 500


HEADINGS = ("broker", "address", "rows", "brokers", "body")
ROWS = (
    (
        "broker-with-a-name",
        "127.0.0.1:10911",
        "1,234,567",
        "broker-0, broker-1, broker-2",
        '{"id": 1, "a": "text"}' * 3,
    ),
    ("broker-0", "127.0.0.1:10921", "3", "broker-0", "x" * 60),
)
LAYOUT = Layout(right=["rows"], listed=["brokers"], free=["body"], spare=["address", "brokers"])
LEFT_OUT = "left out, as the terminal is too narrow: "


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.StringIO()
    print_table(HEADINGS, ROWS, LAYOUT, file=file)
    return re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())


@pytest.mark.parametrize("columns", range(20, 170))
def test_no_name_number_or_address_is_broken_on_any_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = on_a_terminal(monkeypatch, columns)
    left_out = text.partition(LEFT_OUT)[2]
    words = {"broker-with-a-name", "1,234,567"}
    words |= set() if "address" in left_out else {"127.0.0.1:10911", "127.0.0.1:10921"}
    words |= set() if "brokers" in left_out else {"broker-1,", "broker-2"}
    assert words <= set(text.split())
    assert text.count("x") - text.count("text") >= 60
    if "────" in text:
        assert max(map(len, text.splitlines())) <= columns


def test_narrow_terminals_fold_cells_then_omit_columns_then_list_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, folded, less, listed = (on_a_terminal(monkeypatch, columns) for columns in (160, 110, 80, 40))
    assert [line.split() for line in wide.splitlines()][1] == list(HEADINGS)
    assert "x" * 60 in wide
    assert "x" * 60 not in folded
    assert LEFT_OUT not in wide + folded + listed
    assert f"{LEFT_OUT}address\n" in less
    assert listed.splitlines()[:3] == [
        "broker   broker-with-a-name",
        "address  127.0.0.1:10911",
        "rows     1,234,567",
    ]
    assert f"body     {'x' * 60}" in listed


def test_file_output_has_one_complete_line_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    print_table(HEADINGS, [*ROWS, ("b", "a", "1", "y " * 300, "z" * 500)], LAYOUT, notes=["note " * 50], file=file)
    assert len([line for line in file.getvalue().splitlines() if line.strip()]) == 2 + 3 + 1


def test_empty_table_shows_its_empty_text() -> None:
    assert text_table(["queue"], [], empty="Nothing yet.") == "Nothing yet."
    assert text_table(["queue"], []).splitlines()[0].strip() == "queue"
    assert html_table(["queue"], [], empty="Nothing yet.") == "<p>Nothing yet.</p>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("two\nlines\t", r"two\nlines\t"),
        ("\x9b", r"\x9b"),
    ],
)
def test_control_characters_are_shown_as_their_codes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert shown in text_table(["body"], [[text]])


def test_markup_in_a_cell_is_text() -> None:
    assert "[bold]x[/]" in text_table(["body"], [["[bold]x[/]"]])


def test_html_is_escaped_and_has_no_colours() -> None:
    shown = html_table(["<b>"], [["<script>&"]], notes=["<i>"])
    assert "<th>&lt;b&gt;</th>" in shown
    assert "<td>&lt;script&gt;&amp;</td>" in shown
    assert "<p>&lt;i&gt;</p>" in shown
    assert "style" not in shown
    assert "color" not in shown


def test_a_route_shows_each_broker_with_its_addresses_and_queues() -> None:
    route = TopicRouteData(
        (QueueData("a", 4, 8, 6), QueueData("gone", 1, 1, 4)),
        (BrokerData("a", {1: "10.0.0.2:10911", 0: "10.0.0.1:10911"}, "c"),),
        message_types=frozenset({"FIFO"}),
    )
    assert route.by_broker() == (
        BrokerRoute("a", "c", {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}, 4, 8, "rw"),
        BrokerRoute("gone", "", {}, 1, 1, "r"),
    )
    shown = route._repr_html_()
    assert "<td>a</td><td>c</td><td>0=10.0.0.1:10911, 1=10.0.0.2:10911</td><td>4</td><td>8</td><td>rw</td>" in shown
    assert "FIFO" in shown


def test_a_receipt_shows_where_its_message_is() -> None:
    result = SendResult(SendStatus.SEND_OK, "C0FFEE", MessageQueue("orders", "a", 3), 41)
    assert result.facts() == {
        "status": "SEND_OK",
        "topic": "orders",
        "broker_name": "a",
        "queue_id": 3,
        "queue_offset": 41,
        "msg_id": "C0FFEE",
        "offset_msg_id": None,
        "recall_handle": None,
    }
    assert "<td>SEND_OK</td><td>orders</td><td>a</td><td>3</td><td>41</td><td>C0FFEE</td></tr>" in result._repr_html_()


def test_receipt_of_a_transaction_shows_its_state() -> None:
    commit = LocalTransactionState.COMMIT_MESSAGE
    queue = MessageQueue("orders", "a", 3)
    result = TransactionSendResult(SendStatus.SEND_OK, "1", queue, 41, local_transaction_state=commit)
    assert "<td>COMMIT_MESSAGE</td>" in result._repr_html_()
