"""The keys of the decision log, and the signatures of its messages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.deliveries.log.keys import NO_KEYS, LogKeys, fingerprint_of, keys_of, unsigned
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions

OLD, NEW = b"the-old-key-of-the-log", b"the-new-key-of-the-log"
BOTH = LogKeys.of(NEW, OLD)
LOG, QUEUE = "job#T", MessageQueue("decisions", "a", 2)
GIVEN = {"nameServer": "a:9876", "topic": "T", "delivery": "effectivelyOnce", "transactionalId": "job"}
BODY = b'{"kind": "done"}'
MESSAGE = LogKeys.of(OLD).sealed(BODY, LOG, QUEUE, 17)


def options(key: str) -> SinkOptions:
    return parse_sink_options({**GIVEN, "transactionalKey": key}, {})


def test_the_first_key_signs_and_all_verify() -> None:
    assert BOTH.opened(MESSAGE, LOG, QUEUE) == (BODY, 17, fingerprint_of(OLD))
    own = BOTH.sealed(BODY, LOG, QUEUE, 2**63 - 1)
    assert BOTH.opened(own, LOG, QUEUE) == (BODY, 2**63 - 1, fingerprint_of(NEW))
    assert LogKeys.of(OLD).opened(own, LOG, QUEUE) is None
    assert BOTH.fingerprints == (fingerprint_of(NEW), fingerprint_of(OLD))
    assert (BOTH.signs, BOTH.key_of(BOTH.signs), BOTH.key_of("")) == (fingerprint_of(NEW), NEW, b"")


@pytest.mark.parametrize(
    ("log", "queue"),
    [
        ("job#U", QUEUE),
        ("job", QUEUE),
        (LOG, MessageQueue("decisions", "a", 1)),
        (LOG, MessageQueue("decisions", "b", 2)),
        (LOG, MessageQueue("others", "a", 2)),
        # Names whose concatenation is the same.
        ("job#Td", MessageQueue("ecisions", "a", 2)),
        (LOG, MessageQueue("decisionsa", "", 2)),
    ],
)
def test_a_signature_is_valid_in_one_queue_of_one_log(log: str, queue: MessageQueue) -> None:
    assert BOTH.opened(MESSAGE, log, queue) is None


@pytest.mark.parametrize("change", [b"", BODY, BODY + b"\n17.", MESSAGE + b" ", MESSAGE + b"\n", b" " + MESSAGE])
def test_a_message_without_its_signature_is_not_valid(change: bytes) -> None:
    assert BOTH.opened(change, LOG, QUEUE) is None


@given(st.integers(0, len(MESSAGE) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(position: int, change: int) -> None:
    message = bytearray(MESSAGE)
    message[position] ^= change
    assert BOTH.opened(bytes(message), LOG, QUEUE) is None


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_not_valid(message: bytes) -> None:
    assert BOTH.opened(message, LOG, QUEUE) is None
    unsigned(message)


def test_without_keys_nothing_is_signed() -> None:
    assert NO_KEYS.sealed(BODY, LOG, QUEUE, 17) == BODY
    assert NO_KEYS.opened(MESSAGE, LOG, QUEUE) is None
    assert unsigned(BODY) is None
    assert unsigned(MESSAGE) == BODY
    assert not NO_KEYS
    assert NO_KEYS.signs == ""


def test_a_task_signs_with_the_key_of_its_driver() -> None:
    keys = BOTH.signing_with(fingerprint_of(OLD))
    assert keys.signs == fingerprint_of(OLD)
    assert set(keys.fingerprints) == set(BOTH.fingerprints)
    assert BOTH.signing_with(BOTH.signs) is BOTH
    for keys, signs in ((LogKeys.of(NEW), fingerprint_of(OLD)), (BOTH, ""), (NO_KEYS, fingerprint_of(OLD))):
        with pytest.raises(OptionError, match="transactionalKey: the driver signs the records of this write with"):
            keys.signing_with(signs)


def test_keys_are_neither_pickled_nor_shown() -> None:
    assert b"the-" not in repr(BOTH).encode() + str(BOTH).encode()
    with pytest.raises(TypeError, match="keys are not pickled"):
        pickle.dumps(BOTH)


def test_keys_come_from_text_variable_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{NEW.decode()},{OLD.decode()}"
    (tmp_path / "keys").write_text(f"{text}\n")
    monkeypatch.setenv("LOG_KEYS", text)
    for value in (text, f"file:{tmp_path}/keys", "env:LOG_KEYS"):
        assert keys_of(options(value)).fingerprints == BOTH.fingerprints
    assert keys_of(parse_sink_options(GIVEN, {})) is NO_KEYS


BAD = ["short-key", f"{NEW.decode()},short-key", f"{NEW.decode()},", f"{NEW.decode()}, {OLD.decode()}", "k" * 15]


@pytest.mark.parametrize("text", [*BAD, ",".join(f"the-key-number-{number:02}" for number in range(9))])
def test_a_short_key_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    for value in (text, f"file:{tmp_path}/keys"):
        with pytest.raises(OptionError, match=r"transactionalKey.* at least 16 bytes") as refused:
            keys_of(options(value))
        assert not {part for part in text.split(",") if part} & set(str(refused.value).replace(",", " ").split())
        assert refused.value.__context__ is None


def test_an_allowed_reference_is_needed_where_references_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_KEYS", NEW.decode())
    given_before = options("env:LOG_KEYS")
    monkeypatch.setenv("ROCKETMQ_SPARK_REFERENCES", "none")
    with pytest.raises(OptionError, match="not allowed here"):
        options("env:LOG_KEYS")
    with pytest.raises(OptionError, match="not allowed here"):
        keys_of(given_before)
