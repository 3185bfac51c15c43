"""The table of the columns of a read."""

from __future__ import annotations

import re

import pytest
from pyspark.sql.pandas.types import from_arrow_type

from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names, spark_schema_of
from tests.support.markdown import ROOT

_SPARK_TYPES = {"map of string to string": "map<string,string>"}


def documented() -> dict[str, str]:
    """Return the columns in docs/reading.md, and their types."""
    section = (ROOT / "docs/reading.md").read_text("utf-8").partition("\n## Columns\n")[2].partition("\n## ")[0]
    columns: dict[str, str] = {}
    for names, types in re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE):
        of_row = re.findall(r"`(\w+)`", names)
        kinds = types.split(", ")
        columns |= dict(zip(of_row, kinds * len(of_row) if len(kinds) == 1 else kinds, strict=len(kinds) > 1))
    return columns


def test_documentation_has_every_column_and_its_type() -> None:
    spark = dict(column.split(" ", 1) for column in spark_schema_of(column_names(raw=True)).split(", "))
    assert {name: _SPARK_TYPES.get(kind, kind) for name, kind in documented().items()} == spark


@pytest.mark.parametrize("name", column_names(raw=True))
def test_types_of_spark_and_arrow_are_the_same(name: str) -> None:
    [arrow_type] = arrow_schema_of([name]).types
    assert spark_schema_of([name]) == f"{name} {from_arrow_type(arrow_type).simpleString()}"
