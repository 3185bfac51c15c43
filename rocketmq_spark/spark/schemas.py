"""Columns as Spark and as Arrow say them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

READ_SCHEMA: Final = (
    "topic string, body binary, tags string, keys string, properties map<string,string>, flag int, brokerName string, "
    "queueId int, queueOffset bigint, msgId string, offsetMsgId string, bornTimestamp timestamp, "
    "storeTimestamp timestamp, bornHost string, reconsumeTimes int"
)
"""The columns of a read."""

RAW_READ_SCHEMA: Final = f"{READ_SCHEMA}, unreadable string"
"""The columns of a read with ``onUnreadable=raw``."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark uses for `schema` on its way to and from Python."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # Newer releases must be told a time zone for timestamps; older ones take none, and put UTC. Which one they are
    # shown in is nothing to us.
    told = "timezone" in inspect.signature(to_arrow_schema).parameters
    return to_arrow_schema(schema, timezone="UTC") if told else to_arrow_schema(schema)
