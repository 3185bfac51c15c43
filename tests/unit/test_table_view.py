"""Tables of texts: what is printed, what a page shows."""

from __future__ import annotations

import io

import pytest

from rocketmq_spark.message import MessageQueue, SendStatus
from rocketmq_spark.route_data import BrokerData, BrokerRoute, QueueData, TopicRouteData
from rocketmq_spark.send_result import LocalTransactionState, SendResult, TransactionSendResult
from rocketmq_spark.table_view import html_table, print_table, printable, text_table


def test_numbers_stand_at_the_right_and_notes_below() -> None:
    text = text_table(["queue", "count"], [["a", "1"], ["b", "1,000"]], right=["count"], notes=["[two] rows"])
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[2:4] == [" a           1", " b       1,000"]
    assert lines[-1] == "[two] rows"


def test_a_long_cell_is_folded_and_never_cut() -> None:
    file = io.StringIO()
    print_table(["body"], [["x" * 500]], file=file)
    assert file.getvalue().count("x") == 500


def test_what_is_empty_says_so_where_there_are_words_for_it() -> None:
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
def test_what_a_terminal_would_obey_is_shown_as_its_code(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert shown in text_table(["body"], [[text]])


def test_markup_in_a_cell_is_text() -> None:
    assert "[bold]x[/]" in text_table(["body"], [["[bold]x[/]"]])


def test_html_is_escaped_and_has_no_colours_of_its_own() -> None:
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
    }
    assert "<td>SEND_OK</td><td>orders</td><td>a</td><td>3</td><td>41</td><td>C0FFEE</td>" in result._repr_html_()


def test_the_receipt_of_a_transaction_says_how_it_ended() -> None:
    commit = LocalTransactionState.COMMIT_MESSAGE
    queue = MessageQueue("orders", "a", 3)
    result = TransactionSendResult(SendStatus.SEND_OK, "1", queue, 41, local_transaction_state=commit)
    assert "<td>COMMIT_MESSAGE</td>" in result._repr_html_()
