"""The signature of a remoting request."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.protocol.remoting.headers import signed

AK_SK = Credentials("ak", "sk")


def by_the_book(ext_fields: dict[str, str], body: bytes, secret_key: str) -> str:
    """Compute the signature independently."""
    content = "".join(ext_fields[name] for name in sorted(ext_fields) if name != "Signature").encode() + body
    return base64.b64encode(hmac.new(secret_key.encode(), content, hashlib.sha1).digest()).decode()


def test_the_vector_of_the_specification() -> None:
    fields = signed({"topic": "T", "queueId": "0"}, (b"BODY",), AK_SK)
    expected = {"topic": "T", "queueId": "0", "AccessKey": "ak", "Signature": "AwpsLgmnmX0qPf8tcPoRgDTEkZ8="}
    assert fields == expected


@pytest.mark.parametrize(
    "body", [(b"BO", b"DY"), (bytearray(b"BODY"),), (b"", memoryview(b"-BODY-")[1:-1]), (b"BODY", b"")]
)
def test_signature_does_not_depend_on_the_parts_of_the_body(body: tuple[bytes, ...]) -> None:
    assert signed({"topic": "T", "queueId": "0"}, body, AK_SK)["Signature"] == "AwpsLgmnmX0qPf8tcPoRgDTEkZ8="


def test_security_token_is_sent_and_signed() -> None:
    fields = signed({"topic": "T"}, (), Credentials("ak", "sk", "token"))
    assert fields["SecurityToken"] == "token"
    assert fields["Signature"] == by_the_book(fields, b"", "sk")
    assert fields["Signature"] != signed({"topic": "T"}, (), AK_SK)["Signature"]


def test_signing_is_idempotent_and_leaves_its_input_unchanged() -> None:
    fields = {"topic": "T"}
    once = signed(fields, (b"BODY",), AK_SK)
    assert fields == {"topic": "T"}
    assert signed(once, (b"BODY",), AK_SK) == once


names = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1)


@given(st.dictionaries(names, st.text()), st.lists(st.binary()), st.text(min_size=1), st.text(min_size=1))
def test_signature_of_any_request_equals_the_reference(
    ext_fields: dict[str, str], body: list[bytes], access_key: str, secret_key: str
) -> None:
    fields = signed(ext_fields, body, Credentials(access_key, secret_key))
    assert fields["Signature"] == by_the_book(fields, b"".join(body), secret_key)
    assert fields["AccessKey"] == access_key


def test_signing_accepts_text_that_is_not_unicode() -> None:
    assert signed({"topic": "\ud800"}, (), AK_SK)["topic"] == "\ud800"


def test_secrets_are_not_shown() -> None:
    credentials = Credentials("the-user", "hush-hush", "token-token")
    for shown in (repr(credentials), str(credentials), f"{[credentials]}"):
        assert "the-user" in shown
        assert "hush-hush" not in shown
        assert "token-token" not in shown
