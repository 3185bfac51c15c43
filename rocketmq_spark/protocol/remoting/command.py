"""Encodes the heads of requests and responses, decodes both, and finds their frames in received bytes.

Headers are written as JSON, and read as JSON or binary. The count of ext fields is bounded, and so is the count of
objects and lists in a JSON text. Without a bound, 16 MiB of ``{},`` would become half a gigabyte of objects. Layouts:
docs/internals/remoting.md#frames, docs/internals/remoting.md#header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring as _quoted
from typing import Any, Final

from rocketmq_spark.errors import MQClientException, RemotingCommandException, TooLongFrameException
from rocketmq_spark.model.message import Buffer

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2

MAX_FRAME: Final = 16_777_216
"""``com.rocketmq.remoting.frameMaxLength``: bytes of the largest frame, with its first length word."""

# Ordinal of V5_4_0. Below 401 a name server answers routes in non-standard JSON.
VERSION: Final = 493

LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY"),
    *("OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS"),
)
_OTHER: Final = LANGUAGES.index("OTHER")

# SerializeType.java.
_JSON_HEADER: Final = 0
_BINARY_HEADER: Final = 1

_HEAD: Final = struct.Struct(">iI")
_HEADER_WORD: Final = struct.Struct(">I")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
# code, language, version, opaque, flag
_BINARY_FIXED: Final = struct.Struct(">hbhii")

_MAX_HEADER: Final = 0xFFFFFF
# The most ext fields of a header; servers write a dozen. Their length is not bounded: the msgId for a batch has 33
# characters for each message.
_MAX_FIELDS: Final = 10_000
# The most objects and lists of a JSON text. Entries of servers' lists have 35 bytes or more, so 16 MiB have fewer.
_MAX_CONTAINERS: Final = 500_000
# The most digits of an integer; a long has 19. Python allows 4,300, and before 3.10.7 any number, in quadratic time.
_MAX_DIGITS: Final = 40
_MAX_INT32: Final = 2**31 - 1
_MIN_INT32: Final = -(2**31)

# The most characters of a server's text in an error: enough for the cause in a Java stack trace.
_SHOWN: Final = 4_096

_JSON: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


@dataclass(slots=True)
class RemotingCommand:
    """A request or a response. Its repr shows no values of ext fields, which may be signatures and tokens.

    It is not frozen: a request creates two commands, and frozen ones take three times as long.
    """

    code: int
    opaque: int  # Correlation id (int32), chosen by the sender of the request
    ext_fields: Mapping[str, str] = field(default_factory=dict)  # The custom header, in wire order
    body: Buffer = b""
    flag: int = 0
    remark: str = ""
    language: str = "PYTHON"  # A name of ``LanguageCode.java``
    version: int = VERSION  # Ordinal of ``MQVersion.java``

    @property
    def is_response(self) -> bool:
        """True if it answers a request."""
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """True for a request without an answer."""
        return bool(self.flag & FLAG_ONEWAY)

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        return (
            f"<RemotingCommand {kind} code={int(self.code)} opaque={self.opaque} remark={shortened(self.remark)!r}"
            f" ext_fields={shortened(str(sorted(self.ext_fields)))} body={len(self.body)} bytes>"
        )


def shortened(text: str) -> str:
    """Return the start of a server's text, short enough for an error or a log."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def encode_head(command: RemotingCommand, body_length: int) -> bytes:
    """Return both length words and the header; raise an MQClientException for invalid text or a too large frame."""
    problem = None
    try:
        header = _encode_json(command)
    except UnicodeEncodeError as exc:
        problem = str(exc)
    if problem is not None:
        # Outside the except block, because a UnicodeEncodeError holds the text, which may contain a token.
        raise MQClientException(
            f"encoding the header of {command!r}: {problem}; remove invalid Unicode from the texts that you pass"
        )
    length = 4 + len(header) + body_length
    if len(header) > _MAX_HEADER or not 0 <= body_length <= _MAX_INT32 - 4 - len(header):
        raise MQClientException(
            f"encoding {command!r}: header of {len(header)} bytes (at most {_MAX_HEADER}) and body of {body_length}"
            f" bytes don't fit one frame (at most {_MAX_INT32} bytes); send less per request"
        )
    return _HEAD.pack(length, _JSON_HEADER << 24 | len(header)) + header


def decode_command(frame: Buffer) -> RemotingCommand:
    """Return the command of a frame without its first length word; the body is a slice of it, not a copy."""
    view = memoryview(frame)
    if len(view) < 4:
        raise RemotingCommandException(f"decoding a frame: {len(view)} bytes where a header length of 4 is needed")
    (word,) = _HEADER_WORD.unpack_from(view)
    header_length = word & _MAX_HEADER
    if header_length > len(view) - 4:
        raise RemotingCommandException(
            f"decoding a frame: its header claims {header_length} bytes, only {len(view) - 4} are left"
        )
    header, body = view[4 : 4 + header_length], view[4 + header_length :]
    serialize_type = word >> 24
    if serialize_type == _JSON_HEADER:
        return _decode_json(header, body)
    if serialize_type == _BINARY_HEADER:
        return _decode_binary(header, body)
    raise RemotingCommandException(f"decoding a frame: serialize type {serialize_type}, known are 0 (JSON), 1 (binary)")


def loads(data: Buffer, repair: Callable[[str], str] | None = None) -> Any:
    """Return the value of a server's JSON text. If the text is not JSON, it is decoded once more after `repair`.

    Raises a ValueError if the text is not JSON, exceeds a bound, or has half of a surrogate pair.
    """
    try:
        text = str(data, "utf-8")
        if len(text) > _MAX_CONTAINERS and (containers := text.count("{") + text.count("[")) > _MAX_CONTAINERS:
            raise ValueError(f"{containers} objects and lists, {_MAX_CONTAINERS} are allowed")
        try:
            value = _DECODER.decode(text)
        except json.JSONDecodeError:
            if repair is None:
                raise
            value = _DECODER.decode(repair(text))
        # UTF-8 cannot encode half of a surrogate pair, so only an escape can be one.
        if "\\" in text:
            _JSON.encode(value).encode()
        return value
    except (ValueError, RecursionError) as exc:
        problem = str(exc)
    # Outside the except block, because the exception holds the whole text.
    raise ValueError(problem)


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits, {_MAX_DIGITS} are allowed")
    return int(text)


_DECODER: Final = json.JSONDecoder(parse_int=_integer)


def _encode_json(command: RemotingCommand) -> bytes:
    # A JSON encoder takes twice as long for so few fields.
    text = (
        f'{{"code":{command.code:d},"language":{_quoted(command.language)},"version":{command.version:d},'
        f'"opaque":{command.opaque:d},"flag":{command.flag:d}'
    )
    if command.remark:
        text += f',"remark":{_quoted(command.remark)}'
    if command.ext_fields:
        fields = [f"{_quoted(name)}:{_quoted(value)}" for name, value in command.ext_fields.items()]
        text += f',"extFields":{{{",".join(fields)}}}'
    return f"{text}}}".encode()


def _decode_json(header: memoryview, body: memoryview) -> RemotingCommand:
    # Each ext field has four quotation marks; the remark may have more.
    if len(header) > 5 * _MAX_FIELDS and (quotes := header.tobytes().count(b'"')) > 5 * _MAX_FIELDS:
        raise RemotingCommandException(
            f"decoding a JSON header of {len(header)} bytes: it has {quotes} quotation marks; {5 * _MAX_FIELDS} are "
            f"allowed, for {_MAX_FIELDS} ext fields"
        )
    try:
        fields = loads(header)
    except ValueError as exc:
        raise RemotingCommandException(f"decoding a JSON header of {len(header)} bytes: {exc}") from exc
    if not isinstance(fields, dict):
        raise RemotingCommandException(
            f"decoding a JSON header: {type(fields).__name__} instead of an object; check that "
            "the address is a RocketMQ server's"
        )
    language, remark = fields.get("language"), fields.get("remark")
    if not isinstance(language, str | None) or not isinstance(remark, str | None):
        raise RemotingCommandException("decoding a JSON header: fields 'language' and 'remark' must be strings")
    return RemotingCommand(
        code=_json_int(fields, "code"),
        opaque=_json_int(fields, "opaque"),
        ext_fields=_json_ext_fields(fields.get("extFields")),
        body=body,
        flag=_json_int(fields, "flag", 0),
        remark=remark or "",
        language=language or LANGUAGES[_OTHER],
        version=_json_int(fields, "version", 0),
    )


def _json_int(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if value is None:
        raise RemotingCommandException(f"decoding a JSON header: field {name!r} is missing")
    if type(value) is not int or not _MIN_INT32 <= value <= _MAX_INT32:
        raise RemotingCommandException(f"decoding a JSON header: field {name!r} must be a 32-bit integer")
    return value


def _json_ext_fields(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RemotingCommandException(f"decoding a JSON header: 'extFields' is a {type(value).__name__}, no object")
    return {
        name: item if type(item) is str else _json_text(name, item) for name, item in value.items() if item is not None
    }


def _json_text(name: str, value: object) -> str:
    # Servers may write numbers and booleans without quotation marks. Java would read the same texts.
    if isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    raise RemotingCommandException(f"decoding a JSON header: ext field {shortened(name)!r} is a {type(value).__name__}")


def _decode_binary(header: memoryview, body: memoryview) -> RemotingCommand:
    if len(header) < _BINARY_FIXED.size:
        raise RemotingCommandException(f"decoding a binary header: {len(header)} bytes, 21 or more are needed")
    code, language, version, opaque, flag = _BINARY_FIXED.unpack_from(header)
    remark, at = _binary_text(header, _BINARY_FIXED.size, _INT32, "remark")
    ext, _ = _binary_slice(header, at, _INT32, "extFields")
    ext_fields: dict[str, str] = {}
    at = 0
    while at < len(ext):
        key, at = _binary_text(ext, at, _INT16, "ext field name")
        value, at = _binary_text(ext, at, _INT32, f"ext field {shortened(key)!r}")
        if len(ext_fields) == _MAX_FIELDS:
            raise RemotingCommandException(f"decoding a binary header: more than {_MAX_FIELDS} ext fields")
        # Java reads a zero length as null.
        if key and value:
            ext_fields[key] = value
    return RemotingCommand(
        code=code,
        opaque=opaque,
        ext_fields=ext_fields,
        body=body,
        flag=flag,
        remark=remark,
        language=LANGUAGES[language if 0 <= language < len(LANGUAGES) else _OTHER],
        version=version,
    )


def _binary_slice(data: memoryview, at: int, length: struct.Struct, what: str) -> tuple[memoryview, int]:
    start = at + length.size
    if start > len(data):
        raise RemotingCommandException(f"decoding a binary header: it ends within the length of {what}")
    (size,) = length.unpack_from(data, at)
    if not 0 <= size <= len(data) - start:
        raise RemotingCommandException(
            f"decoding a binary header: {what} claims {size} bytes, {len(data) - start} are left"
        )
    return data[start : start + size], start + size


def _binary_text(data: memoryview, at: int, length: struct.Struct, what: str) -> tuple[str, int]:
    piece, end = _binary_slice(data, at, length, what)
    try:
        return str(piece, "utf-8"), end
    except UnicodeDecodeError as exc:
        raise RemotingCommandException(f"decoding a binary header: {what} is not UTF-8: {exc}") from exc


class FrameBuffer:
    """Collects received bytes, copies each a bounded number of times, and returns the commands in them."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_length = max_frame - _INT32.size
        self._data = bytearray()

    def __repr__(self) -> str:
        return f"<FrameBuffer waiting={len(self._data)} bytes max_frame={self._max_length + _INT32.size}>"

    @property
    def pending(self) -> int:
        """Number of bytes of an incomplete command."""
        return len(self._data)

    def feed(self, data: Buffer) -> None:
        """Add received bytes; the caller may reuse `data` afterwards."""
        self._data += data

    def take(self) -> RemotingCommand | None:
        """Return the next whole command, or None until more bytes arrive.

        Its body is a slice of a copy of the frame, which it keeps alive. A broken frame raises a
        RemotingCommandException now and on every later call, because the place of the next frame is unknown.
        """
        if len(self._data) < _INT32.size:
            return None
        (length,) = _INT32.unpack_from(self._data)
        if not _HEADER_WORD.size <= length <= self._max_length:
            kind = TooLongFrameException if length > self._max_length else RemotingCommandException
            raise kind(
                f"receiving a frame: length {length}, allowed are {_HEADER_WORD.size} to {self._max_length};"
                " the sender speaks another protocol or TLS, or its frameMaxLength is higher. Check address and useTls"
            )
        end = _INT32.size + length
        if len(self._data) < end:
            return None
        # One copy, so that the body outlives the buffer. Slicing a bytearray directly would make a second one.
        with memoryview(self._data) as received:
            frame = bytes(received[_INT32.size : end])
        command = decode_command(memoryview(frame))
        # This only moves the bytearray's start. Python copies the rest once half of the memory is free.
        del self._data[:end]
        return command
