"""The kinds of values that an option's text may hold: one parser each, with the words for what it allows.

Rule 1: a parser takes text and returns a value, or raises ValueError; who asks says which option it was.
Rule 2: nothing here knows an option, or echoes a value, but for kinds that explain what is wrong with it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rocketmq_spark.names import is_legal

INT_MAX: Final = 2_147_483_647
MIB: Final = 1024 * 1024

# Binary multiples as in Spark's own sizes (JavaUtils.byteStringAs).
_SIZE_SUFFIXES: Final = {"": 1, "b": 1, "k": 1024, "kb": 1024, "m": MIB, "mb": MIB, "g": 1024 * MIB, "gb": 1024 * MIB}
# Those of JavaUtils.timeStringAs that are at least a millisecond.
_TIME_SUFFIXES: Final = {
    "": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueKind:
    """What an option's value may be.

    Parameters
    ----------
    type : str
        One or two words for the documentation.
    allowed : str
        What is allowed, for messages; completes "allowed is ...".
    parse : callable
        Value of an option's text; raises ValueError for a text that is not allowed.
    explains : bool, default False
        The text of that ValueError says what is wrong, and belongs into the message unless the option is secret.
    """

    type: str
    allowed: str
    parse: Callable[[str], Any]
    explains: bool = False


def _parse_boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError
    return lowered == "true"


def _bounded(number: int, lowest: int, highest: int) -> int:
    if not lowest <= number <= highest:
        raise ValueError
    return number


def _plain_int(text: str) -> int:
    # int() alone would also take "1_000" and digits of other scripts.
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip()):
        raise ValueError
    return int(text)


def integer(lowest: int, highest: int = INT_MAX, unit: str = "") -> ValueKind:
    """Return the kind of an integer within bounds, both included."""

    def parse(text: str) -> int:
        return _bounded(_plain_int(text), lowest, highest)

    span = f"from {lowest} to {highest}"
    if not unit:
        return ValueKind("integer", f"an integer {span}", parse)
    return ValueKind(f"integer, {unit}", f"an integer {span} ({unit})", parse)


def size(lowest: int, highest: int) -> ValueKind:
    """Return the kind of a number of bytes within bounds, both included; binary suffixes as Spark takes them."""

    def parse(text: str) -> int:
        return _bounded(_with_suffix(text, _SIZE_SUFFIXES), lowest, highest)

    allowed = f"a size from {_shown_size(lowest)} to {_shown_size(highest)}: bytes, or with a suffix as in 512k or 1m"
    return ValueKind("size, bytes", allowed, parse)


def duration(lowest: int, highest: int = INT_MAX) -> ValueKind:
    """Return the kind of a number of milliseconds within bounds, both included; suffixes as Spark takes them."""

    def parse(text: str) -> int:
        return _bounded(_with_suffix(text, _TIME_SUFFIXES), lowest, highest)

    allowed = f"a time from {lowest} to {highest} ms: milliseconds, or with a suffix as in 90s, 15m or 1h"
    return ValueKind("duration, ms", allowed, parse)


def pattern() -> ValueKind:
    """Return the kind of a regular expression, as text."""

    def parse(text: str) -> str:
        if not text.strip():
            raise ValueError("it is blank")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as exc:
            raise ValueError(" ".join(f"it is no regular expression: {exc}".split())) from None
        return text

    return ValueKind("pattern", "a regular expression of Python, as in orders-.*", parse, explains=True)


def _with_suffix(text: str, suffixes: Mapping[str, int]) -> int:
    found = re.fullmatch(r"([0-9]{1,19})\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in suffixes:
        raise ValueError
    return int(found[1]) * suffixes[found[2]]


def _shown_size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return "1 byte" if nbytes == 1 else f"{nbytes} bytes"


def choice(*values: str) -> ValueKind:
    """Return the kind of a word out of several, in any case; the value has the spelling given here."""
    by_lower = {value.lower(): value for value in values}

    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if lowered not in by_lower:
            raise ValueError
        return by_lower[lowered]

    return ValueKind("one of " + ", ".join(values), "one of " + ", ".join(values), parse)


def choice_or_class(*values: str) -> ValueKind:
    """Return the kind of a word out of several, in any case, or of a class by its name."""
    word = choice(*values)

    def parse(text: str) -> str:
        return _parse_class(text) if ":" in text else str(word.parse(text))

    allowed = f"{word.allowed}, or {CLASS.allowed}"
    return ValueKind(allowed, allowed, parse)


def name(longest: int, refused: Iterable[str]) -> ValueKind:
    """Return the kind of a topic's or group's name (``Validators.java``); no blank fits the alphabet."""
    taken = frozenset(refused)

    def parse(text: str) -> str:
        if len(text) > longest or not is_legal(text) or text in taken:
            raise ValueError
        return text

    allowed = f"1 to {longest} characters of a-z A-Z 0-9 _ - % |, and none of {', '.join(sorted(taken))}"
    return ValueKind("text", allowed, parse)


def text(allowed: str, refused: str) -> ValueKind:
    """Return the kind of a text that is not blank and in which the pattern `refused` is not found."""

    def parse(text: str) -> str:
        if not text.strip() or re.search(refused, text):
            raise ValueError
        return text

    return ValueKind("text", allowed, parse)


ENV: Final = "env:"
FILE: Final = "file:"


def is_printable(text: str) -> bool:
    """Return whether a text is not blank and has no control characters."""
    return bool(text.strip()) and not re.search("[\x00-\x1f\x7f]", text)


def is_padded(text: str) -> bool:
    """Return whether a text has blanks, or a byte-order mark, around it: hardly part of a secret, and hard to see."""
    return text != text.strip().strip("\ufeff").strip()


def is_reference(text: str) -> bool:
    """Return whether a text is taken for the place of a secret: in capital letters too, as the scheme of a URI."""
    return text.strip().lower().startswith((ENV, FILE))


def _parse_secret(text: str) -> str:
    if not is_printable(text):
        raise ValueError
    if is_reference(text):
        kind, _, place = text.strip().partition(":")
        text = f"{kind.lower()}:{place}"
    if is_padded(text):
        raise ValueError
    if text.startswith(ENV) and not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError
    if text.startswith(FILE) and not text.startswith(f"{FILE}/"):
        raise ValueError
    return text.replace(f"{FILE}///", f"{FILE}/", 1) if text.startswith(f"{FILE}///") else text


def _parse_class(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text.strip()):
        raise ValueError
    return text.strip()


def words(allowed: str, pattern: str) -> ValueKind:
    """Return the kind of a list of words, separated by commas, each of which the pattern fits whole."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        if not all(re.fullmatch(pattern, word) for word in found):
            raise ValueError
        return found

    return ValueKind("words", allowed, parse)


def location() -> ValueKind:
    """Return the kind of an absolute local path or a URI: where a relative one would end, nobody could say."""

    def parse(text: str) -> str:
        # A password in a URI would end up in logs: file systems have better places for it.
        if not re.match(r"/|[A-Za-z][A-Za-z0-9+.-]*://(?![^/]*:[^/]*@)", text) or re.search("[\x00-\x1f]", text):
            raise ValueError
        return text

    allowed = "an absolute path, or a URI without a password, as in /var/log/sink.jsonl or s3://bucket/folder"
    return ValueKind("path or URI", allowed, parse)


def ladder(*, strictly: bool) -> ValueKind:
    """Return the kind of a list of ascending milliseconds, as the latency ladder is written."""

    def parse(text: str) -> tuple[int, ...]:
        steps = tuple(_bounded(_plain_int(step), 0, INT_MAX) for step in text.split(","))
        for lower, higher in itertools.pairwise(steps):
            if higher < lower or (strictly and higher == lower):
                raise ValueError
        return steps

    order = "each greater than the one before" if strictly else "none smaller than the one before"
    return ValueKind("integers, ms", f"integers of at least 0 separated by commas, {order}", parse)


def _parse_row_id(text: str) -> bool | tuple[str, ...]:
    head, colon, names = text.partition(":")
    if not colon:
        return _parse_boolean(text)
    columns = tuple(name.strip() for name in names.split(","))
    if head.strip().lower() != "columns" or not all(columns) or len(set(columns)) < len(columns):
        raise ValueError
    return columns


def _parse_addresses(text: str) -> tuple[str, ...]:
    # "http://host/path/a:9876" means a:9876 (spec/producer.md section 2). Java looks at the head of the whole list
    # only; looking at each address gives the same wherever Java's reading makes sense.
    found = []
    for part in re.split("[;,]", text):
        address = part.strip()
        if address.lower().startswith("http://"):
            address = address.rpartition("/")[2]
        if address:
            found.append(_parse_address(address))
        elif part.strip():
            raise ValueError
    if not found:
        raise ValueError
    return tuple(dict.fromkeys(found))


def _parse_endpoints(text: str) -> tuple[str, ...]:
    # As the official clients take them: a scheme is no part of the address. What it says of TLS, whoever knows both
    # options compares (option_transport.py).
    parts = filter(None, map(str.strip, re.split("[;,]", text)))
    found = tuple(dict.fromkeys(_parse_address(re.sub("^https?://", "", part, flags=re.IGNORECASE)) for part in parts))
    if not found:
        raise ValueError
    return found


def _parse_address(text: str) -> str:
    # The last colon splits, so that an IPv6 host may stand bare (spec/remoting.md).
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not re.fullmatch(r"[^\s/\[\]@?#]+", host):
        raise ValueError
    number = _bounded(_plain_int(port), 1, 65535)
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


SECRET: Final = ValueKind(
    "text or reference",
    "a text that is not blank, without control characters and blanks around it; or where to read it: env:NAME or "
    "file:/absolute/path",
    _parse_secret,
)
CLASS: Final = ValueKind("class", "a class of yours as module:Class", _parse_class)
BOOLEAN: Final = ValueKind("boolean", "true or false", _parse_boolean)
ROW_ID: Final = ValueKind("row id", "false, true, or columns:a,b with the names of columns, each once", _parse_row_id)
ADDRESSES: Final = ValueKind(
    "addresses", "host:port;host:port, as in 10.0.0.1:9876;10.0.0.2:9876 or [::1]:9876", _parse_addresses
)
ENDPOINTS: Final = ValueKind(
    "addresses", "host:port;host:port, as in 10.0.0.1:8081;10.0.0.2:8081 or [::1]:8081", _parse_endpoints
)
