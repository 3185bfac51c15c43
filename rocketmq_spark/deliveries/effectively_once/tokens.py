"""The tokens by which a recovery knows which attempt has stored a message (`SPARK_ATTEMPT`)."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Final

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.keys import LogKeys

TOKEN_LENGTH: Final = 22


def attempt_token(keys: LogKeys, key_id: str, log_name: str, write: Write, partition_id: int, attempt_id: str) -> str:
    """Return the token of the rows of an attempt, made with the key that signs its record.

    Without the key a user can make no token. Without keys, everyone can. A missing key is an OptionError.
    """
    key = keys.signing_with(key_id).key_of(key_id)
    text = json.dumps([log_name, write.query, write.name, partition_id, attempt_id]).encode()
    digest = hmac.digest(key, b"rocketmq_spark attempt\n" + text, "sha256")
    return base64.urlsafe_b64encode(digest[:16]).decode().rstrip("=")
