"""The stream writer of PySpark 4.0, which gets rows one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import Row

from rocketmq_spark.spark.row_chunks import chunks_of

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "row",
    [
        Row(body=bytes(MIB)),
        Row(body="x" * MIB),
        Row(body=b"x", keys=["k" * (MIB // 4)] * 4),
        Row(body=b"x", properties={"n": "v" * MIB}),
        Row(body=b"x", properties={"n" * MIB: "v"}),
    ],
)
def test_rows_of_one_mib_are_collected_up_to_four_mib(row: Row) -> None:
    taken = 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for _ in range(10):
            taken += 1
            yield row

    sizes = []
    for chunk in chunks_of(rows()):
        sizes.append(len(chunk))
        assert taken == sum(sizes)
    assert sizes == [4, 4, 2]


def test_small_rows_are_collected_in_chunks_of_10_000() -> None:
    rows = [Row(body=b"%d" % number) for number in range(25_000)]
    chunks = list(chunks_of(rows))
    assert [len(chunk) for chunk in chunks] == [10_000, 10_000, 5_000]
    assert [row for chunk in chunks for row in chunk] == rows
    assert list(chunks_of([])) == []
