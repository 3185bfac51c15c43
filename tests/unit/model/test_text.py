"""Texts of peers and rows are shown on one line, without control characters, and bounded."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketmq_spark.errors import LONGEST, escaped

JOINERS = "\u200c\u200d"
ANY_TEXT = st.text(st.characters(categories=None, exclude_categories=()), max_size=300)


@given(ANY_TEXT)
@example("\ud83d\ude00")
@example("\U000e0041\U0010ffff\x85\u2028\u202e")
def test_shown_text_has_no_controls_and_can_be_encoded(text: str) -> None:
    shown = escaped(text)
    categories = {unicodedata.category(character) for character in shown if character not in JOINERS}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}
    assert {unicodedata.bidirectional(character) for character in shown}.isdisjoint(
        {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    )
    assert len(shown.splitlines()) <= 1
    shown.encode()


@given(ANY_TEXT, st.integers(50, 400))
def test_shown_text_is_bounded_and_does_not_change_when_escaped_again(text: str, limit: int) -> None:
    shown = escaped(text, limit)
    assert len(shown) <= limit
    assert escaped(shown, limit) == shown


@pytest.mark.parametrize(
    "text",
    ["", "broker-a", "订单 123", "Größe\u00a0€", "نمی\u200cشود", "👩‍👩‍👧", "全角\u3000空格", r"C:\new \x1b", "שלום"],
)
def test_readable_text_is_shown_unchanged(text: str) -> None:
    assert escaped(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ok\n26/11/23 ERROR forged", r"ok\n26/11/23 ERROR forged"),
        ("\x1b[2J\x9b2J\x7f\r\t", r"\x1b[2J\x9b2J\x7f\r\t"),
        ("a\u2028b\u202ec\ud800", r"a\u2028b\u202ec\ud800"),
        ("\U000e0041\ufeff\x00", r"\U000e0041\ufeff\x00"),
    ],
)
def test_control_characters_are_shown_as_their_codes(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_long_text_is_cut_and_ends_with_its_length() -> None:
    shown = escaped("x" * 16_000_000)
    assert len(shown) == LONGEST
    assert shown.endswith("xx… (16000000 characters)")
