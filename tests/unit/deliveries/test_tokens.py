"""The tokens of attempts: each attempt has one, and it needs the key."""

from __future__ import annotations

import itertools
import re

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.tokens import TOKEN_LENGTH, attempt_token
from rocketmq_spark.deliveries.log.keys import NO_KEYS, LogKeys
from rocketmq_spark.errors import OptionError

OLD, NEW = b"old key of 16 bytes", b"new key of 16 bytes"


def test_each_attempt_and_key_has_a_token_of_its_own() -> None:
    keys = LogKeys.of(NEW, OLD)
    # Names that are equal when they are joined.
    writes = [Write("1", "a"), Write("1a"), Write("a1"), Write("1", "a,1"), Write('1","a')]
    places = itertools.product(["log", "lo"], writes, [0, 1, 11], ["1", "11", ""])
    tokens = [
        attempt_token(some, key_id, *place)
        for place in places
        for some, key_id in [(NO_KEYS, ""), *((keys, fingerprint) for fingerprint in keys.fingerprints)]
    ]
    assert len(set(tokens)) == len(tokens) == 2 * 5 * 3 * 3 * 3
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", token) and len(token) == TOKEN_LENGTH for token in tokens)
    old = LogKeys.of(OLD)
    assert attempt_token(keys, old.signs, "log", Write("1"), 0, "1") == attempt_token(
        old, old.signs, "log", Write("1"), 0, "1"
    )


def test_a_missing_key_is_named_by_its_fingerprint() -> None:
    with pytest.raises(OptionError, match=LogKeys.of(OLD).signs):
        attempt_token(LogKeys.of(NEW), LogKeys.of(OLD).signs, "log", Write("1"), 0, "1")
