"""The names of message properties, how each protocol carries them, and checks of the properties that users set.

See docs/internals/messages.md#properties. A property's name or value is "blank" if nothing is left after Java's
``String.trim``, which removes only characters up to U+0020.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

from rocketmq_spark.errors import ReservedPropertyError
from rocketmq_spark.model.names import trim

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"

TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMERS: Final = frozenset((TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS))
"""The times of delivery, which brokers before 5.0 ignore."""
SHARDING_KEY: Final = "__SHARDINGKEY"
PRIORITY: Final = "_SYS_MSG_PRIORITY_"
LITE_TOPIC: Final = "__LITE_TOPIC"
START_DELIVER_TIME: Final = "__STARTDELIVERTIME"
INSTANCE_ID: Final = "INSTANCE_ID"
BUYER_ID: Final = "BUYER_ID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
TRAN_MSG: Final = "TRAN_MSG"
PGROUP: Final = "PGROUP"
TRANSACTION_ID: Final = "__transactionId__"
CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
MSG_TYPE: Final = "MSG_TYPE"
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
ROW_ID: Final = "SPARK_ROW_ID"
ATTEMPT: Final = "SPARK_ATTEMPT"


class Carried(enum.Enum):
    """How a request carries a property of a message."""

    PROPERTY = "in the property string, over gRPC among the user properties"
    FIELD = "in a separate field"
    ALONE = "only in a single message, never in a batch; over gRPC in a separate field"
    DROPPED = "not at all, because the server does not use it"
    REFUSED = "not at all: the message is rejected"


class Carriage(NamedTuple):
    """How batches over remoting, single messages over remoting, and gRPC carry a property."""

    batch: Carried
    single: Carried
    grpc: Carried
    hashed: bool = False  # The hash in ``SPARK_ROW_ID`` covers it


_ANYWHERE: Final = Carriage(Carried.PROPERTY, Carried.PROPERTY, Carried.PROPERTY)
_DROPPED_BY_GRPC: Final = _ANYWHERE._replace(grpc=Carried.DROPPED)
_GRPC_FIELD: Final = _ANYWHERE._replace(grpc=Carried.FIELD)
_NOT_OVER_GRPC: Final = _ANYWHERE._replace(grpc=Carried.REFUSED)
_ALONE: Final = Carriage(Carried.ALONE, Carried.PROPERTY, Carried.ALONE)

# Every name above. The encoders use this table, so a property without an entry raises a KeyError.
CARRIED: Final[Mapping[str, Carriage]] = {
    TAGS: _GRPC_FIELD._replace(hashed=True),
    KEYS: _GRPC_FIELD._replace(hashed=True),
    UNIQ_KEY: _GRPC_FIELD,
    ROW_ID: _ANYWHERE,
    ATTEMPT: _ANYWHERE,
    WAIT: _DROPPED_BY_GRPC,
    INSTANCE_ID: _DROPPED_BY_GRPC,
    PGROUP: _DROPPED_BY_GRPC,
    SHARDING_KEY: _ANYWHERE._replace(grpc=Carried.ALONE, hashed=True),
    DELAY: _ALONE._replace(grpc=Carried.REFUSED, hashed=True),
    TIMER_DELAY_SEC: _ALONE,
    TIMER_DELAY_MS: _ALONE._replace(hashed=True),
    TIMER_DELIVER_MS: _ALONE._replace(hashed=True),
    PRIORITY: _ALONE._replace(hashed=True),
    LITE_TOPIC: _ALONE._replace(hashed=True),
    TRAN_MSG: _ALONE,
    START_DELIVER_TIME: _ANYWHERE,
    TRANSACTION_ID: _ANYWHERE,
    CHECK_IMMUNITY_TIME_IN_SECONDS: _ANYWHERE,
    INNER_MULTI_DISPATCH: _ANYWHERE,
    BUYER_ID: _NOT_OVER_GRPC,
    RECONSUME_TIME: _NOT_OVER_GRPC,
    MAX_RECONSUME_TIMES: _NOT_OVER_GRPC,
    MSG_TYPE: _NOT_OVER_GRPC,
    CORRELATION_ID: _NOT_OVER_GRPC,
    REPLY_TO_CLIENT: _NOT_OVER_GRPC,
    TTL: _NOT_OVER_GRPC,
}

# MessageConst.STRING_HASH_SET of 5.5.0.
_RESERVED: Final = (
    "TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET "
    "BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES "
    "CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO "
    "INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE "
    "INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS "
    "TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC "
    "DLQ_ORIGIN_MESSAGE_ID __CRC32# _SYS_MSG_PRIORITY_ ORIGIN_GROUP __LITE_TOPIC"
)
RESERVED_PROPERTIES: Final = frozenset(_RESERVED.split(" "))

# Java allows these user properties, but the broker rejects or misreads a message that has them.
INNER_PROPERTIES: Final = frozenset({"INNER_NUM", "INNER_BASE", INNER_MULTI_DISPATCH})


def check_user_property(name: str | None, value: str | None) -> None:
    """Raise the error that `Message.put_user_property` documents, or a TypeError for anything but texts."""
    if name in RESERVED_PROPERTIES or name == ATTEMPT:
        owner = "only an effectively-once write uses this name" if name == ATTEMPT else "RocketMQ uses this name itself"
        reason = f"user property {name!r}: {owner}"
        raise ReservedPropertyError(
            f"{reason}; use another name, or if Message.of has an argument for it, such as tags, that argument"
        )
    for part, text in (("name", name), ("value", value)):
        if text is None or (isinstance(text, str) and not trim(text)):
            raise ValueError(
                f"user property {name!r}: its {part} is {text!r}; give a {part}, or leave the property out"
            )
        check_property_text(f"user property {name!r}: its {part}", text)


# A broker adds a delay to its clock, and delivers at once if the sum is more than Java's largest long. This limit is
# below that for any clock, and far above every timerMaxDelaySec.
MAX_DELAY_MS: Final = 2**62


def check_property_text(subject: str, text: str) -> None:
    """Raise a ValueError for a text with 0x01 or 0x02, a TypeError for anything but a str."""
    if not isinstance(text, str):
        raise TypeError(f"{subject} must be a str, got {type(text).__name__}; convert it first")
    if NAME_VALUE_SEPARATOR in text or PROPERTY_SEPARATOR in text:
        raise ValueError(f"{subject} holds 0x01 or 0x02, which separate properties; remove them")
