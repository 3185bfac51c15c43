"""What a read does about messages that are gone: ``failOnDataLoss`` decides."""

from __future__ import annotations

import logging

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions

logger = logging.getLogger("rocketmq_spark.consumer")


def lost(options: ReaderOptions, text: str) -> None:
    """Raise `DataLossError`, or with ``failOnDataLoss=false`` log it."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{text}. To go on with what is left, set failOnDataLoss=false")
    logger.warning("%s; failOnDataLoss=false goes on with what is left", text)


def expired(options: ReaderOptions, queue: MessageQueue, start: int, end: int, first: int) -> None:
    """Report the messages from offset `start` up to `end`: the queue begins at offset `first` now."""
    lost(
        options,
        f"messages {start} to {end - 1} of {queue} are not there any more, the first one left is {first}: they "
        "expired (fileReservedTime), or the topic was made anew",
    )
