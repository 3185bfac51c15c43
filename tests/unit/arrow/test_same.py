"""A column with one value for all rows is encoded as a literal, with the same bytes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.columns import byte_column


@pytest.mark.parametrize(
    ("rows", "same"),
    [
        (["tag"] * 3, b"tag"),
        (["tag"], b"tag"),
        (["aa", "aa", "ab"], None),
        (["ab", "ba"], None),
        (["a", "aa"], None),
        (["aa", "a", "aaa"], None),
        (["tag", None], None),
        ([""] * 3, None),
    ],
)
def test_same_returns_the_value_shared_by_all_rows(rows: list[str | None], same: bytes | None) -> None:
    for padded in (rows, ["x", *rows, "yy"]):
        array = pa.array(padded, pa.string())
        column = byte_column(array if padded is rows else array.slice(1, len(rows)))
        assert column is not None
        assert column.slice(0, 0).common_value() is None
        assert column.common_value() == same
