"""Declares options, and parses an option's text by the kind of its value, such as an integer, a size or a choice.

An option is one dataclass field, made by `option`. Parsing, error texts, docs/options.md and redaction derive from it.
`parse_one` raises an `OptionError` for a text that is not allowed. This error never shows the value of a secret option.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, MAX_TOPIC_LENGTH, is_legal, namespace_of
from rocketmq_spark.options import references
from rocketmq_spark.options.references import ENV, FILE

_Value = TypeVar("_Value")

INT_MAX: Final = 2_147_483_647
# Maximum characters of a value in an error. The receipt of a large write, given as offsets, has many thousands.
_LONGEST_SHOWN: Final = 400
MIB: Final = 1024 * 1024

# Binary multiples as in Spark's own sizes (JavaUtils.byteStringAs).
_SIZE_SUFFIXES: Final = {"": 1, "b": 1, "k": 1024, "kb": 1024, "m": MIB, "mb": MIB, "g": 1024 * MIB, "gb": 1024 * MIB}
# As in JavaUtils.timeStringAs, without the units below a millisecond.
_TIME_SUFFIXES: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# Keys of the decision log: as long as a key of AES-128.
_SHORTEST_KEY: Final = 16
_MOST_KEYS: Final = 8


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The values that an option accepts; `allowed` completes "allowed is ..." in error texts."""

    allowed: str
    parse: Callable[[str], Any]  # Raises a ValueError, whose text may say what is wrong
    # Returns what a value reaches on the machine, such as "path:/var/log/sink.jsonl"; "" if nothing
    reference: Callable[[str], str] | None = None


def _checked(value: _Value, is_allowed: object) -> _Value:
    """Return the value; ValueError if `is_allowed` is false."""
    if not is_allowed:
        raise ValueError
    return value


def _parse_boolean(text: str) -> bool:
    lowered = text.strip().lower()
    return _checked(lowered, lowered in ("true", "false")) == "true"


def _bounded(number: int, lowest: int, highest: int) -> int:
    return _checked(number, lowest <= number <= highest)


def _plain_int(text: str) -> int:
    # int() alone would also accept "1_000" and digits of other scripts.
    return int(_checked(text, re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip())))


def integer(lowest: int, highest: int = INT_MAX, unit: str = "") -> ValueKind:
    """Return the kind of an integer within bounds, both included."""
    allowed = f"an integer from {lowest} to {highest}" + (f" ({unit})" if unit else "")
    return ValueKind(allowed, lambda text: _bounded(_plain_int(text), lowest, highest))


def size(lowest: int, highest: int) -> ValueKind:
    """Return the kind of a number of bytes within bounds, both included, with Spark's binary suffixes."""
    allowed = f"a size from {_shown_size(lowest)} to {_shown_size(highest)}: bytes, or with a suffix as in 512k or 1m"
    return ValueKind(allowed, lambda text: _bounded(_with_suffix(text, _SIZE_SUFFIXES), lowest, highest))


def duration(lowest: int) -> ValueKind:
    """Return the kind of a number of milliseconds, from a lower bound on, with Spark's suffixes."""
    allowed = f"a time from {lowest} to {INT_MAX} ms: milliseconds, or with a suffix as in 90s, 15m or 1h"
    return ValueKind(allowed, lambda text: _bounded(_with_suffix(text, _TIME_SUFFIXES), lowest, INT_MAX))


def _parse_pattern(text: str) -> str:
    if not text.strip():
        raise ValueError("it is blank")
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(" ".join(f"it is not a valid regular expression: {exc}".split())) from None
    return text


def _with_suffix(text: str, suffixes: Mapping[str, int]) -> int:
    match = re.fullmatch(r"([0-9]{1,19})\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in suffixes:
        raise ValueError
    return int(match[1]) * suffixes[match[2]]


def _shown_size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return "1 byte" if nbytes == 1 else f"{nbytes} bytes"


def choice(*values: str, or_class: bool = False) -> ValueKind:
    """Return the kind of one of several words, in any case; with `or_class` a class name is also accepted."""
    by_lower = {value.lower(): value for value in values}

    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if or_class and ":" in text:
            return str(CLASS.parse(text))
        return by_lower[_checked(lowered, lowered in by_lower)]

    allowed = f"one of {', '.join(values)}" + (f", or {CLASS.allowed}" if or_class else "")
    return ValueKind(allowed, parse, reference=_class_in if or_class else None)


def name(longest: int, refused: Iterable[str]) -> ValueKind:
    """Return the kind of a name of a topic or group (``Validators.java``). The alphabet has no blank."""
    taken = frozenset(refused)
    none_of = f", and none of {', '.join(sorted(taken))}" if taken else ""
    allowed = f"1 to {longest} characters of a-z A-Z 0-9 _ - % |{none_of}"
    return ValueKind(
        allowed, lambda text: _checked(text, len(text) <= longest and is_legal(text) and text not in taken)
    )


def text(allowed: str, refused: str) -> ValueKind:
    """Return the kind of a non-blank text in which the pattern `refused` does not occur."""
    return ValueKind(allowed, lambda text: _checked(text, text.strip() and not re.search(refused, text)))


def is_printable(text: str) -> bool:
    """Return whether a text is not blank and has no control characters."""
    return bool(text.strip()) and not re.search("[\x00-\x1f\x7f]", text)


def is_padded(text: str) -> bool:
    """Return whether a text begins or ends with blanks or a byte-order mark: unlikely in a secret, and invisible."""
    return text != text.strip().strip("\ufeff").strip()


def _class_in(text: str) -> str:
    return f"{references.CLASS}{text}" if ":" in text else ""


def is_reference(text: str) -> bool:
    """Return whether a text names the place of a secret; the scheme may be in upper case."""
    return text.strip().lower().startswith((ENV, FILE))


def _parse_secret(text: str) -> str:
    _checked(text, is_printable(text))
    if is_reference(text):
        kind, _, place = text.strip().partition(":")
        text = f"{kind.lower()}:{place}"
        _checked(text, re.fullmatch("env:[A-Za-z_][A-Za-z0-9_]*|file:/.*", text))
    return re.sub("^file:///", "file:/", _checked(text, not is_padded(text)))


def split_keys(text: str) -> tuple[bytes, ...]:
    """Return the keys in a text; ValueError, without a text, if one is too short or there are too many."""
    keys = tuple(part.encode() for part in text.split(","))
    _checked(keys, len(keys) <= _MOST_KEYS and all(len(key) >= _SHORTEST_KEY for key in keys))
    return _checked(keys, not any(map(is_padded, text.split(","))))


def _parse_keys(text: str) -> str:
    text = _parse_secret(text)
    if not is_reference(text):
        split_keys(text)
    return text


def words(allowed: str, pattern: str) -> ValueKind:
    """Return the kind of a comma-separated list of words that match the whole pattern."""

    def parse(text: str) -> tuple[str, ...]:
        items = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        return _checked(items, all(re.fullmatch(pattern, item) for item in items))

    return ValueKind(allowed, parse)


def ladder(*, strictly: bool) -> ValueKind:
    """Return the kind of a comma-separated list of ascending milliseconds."""

    def parse(text: str) -> tuple[int, ...]:
        steps = tuple(_bounded(_plain_int(step), 0, INT_MAX) for step in text.split(","))
        return _checked(steps, list(steps) == sorted(set(steps) if strictly else steps))

    order = "each greater than the previous one" if strictly else "none smaller than the previous one"
    return ValueKind(f"integers of at least 0 separated by commas, {order}", parse)


def _parse_row_id(text: str) -> bool | tuple[str, ...]:
    head, colon, names = text.partition(":")
    if not colon:
        return _parse_boolean(text)
    columns = tuple(name.strip() for name in names.split(","))
    return _checked(columns, head.strip().lower() == "columns" and all(columns) and len(set(columns)) == len(columns))


def addresses(port: int, prefix: str) -> ValueKind:
    """Return the kind of a list of servers; a part that matches the pattern `prefix` is removed from each address."""

    def parse(text: str) -> tuple[str, ...]:
        parts = filter(None, map(str.strip, re.split("[;,]", text)))
        servers = tuple(dict.fromkeys(_parse_address(re.sub(prefix, "", part, flags=re.IGNORECASE)) for part in parts))
        return _checked(servers, servers)

    return ValueKind(f"host:port;host:port, as in 10.0.0.1:{port};10.0.0.2:{port} or [::1]:{port}", parse)


class NameServers(tuple[str, ...]):
    """The addresses of the option ``nameServer``, with the namespace that its text has (``ClientConfig``)."""

    namespace: str | None = None


def _parse_name_servers(text: str) -> NameServers:
    # "http://host/path/a:9876" means a:9876, as in NameServerAddressUtils.java, which looks at the first address only.
    servers = NameServers(addresses(9876, "^http://([^;,]*/)?").parse(text))
    # As in Java, an address after a path sets no namespace.
    servers.namespace = namespace_of(text.strip())
    return servers


def effective_namespace(values: Mapping[str, Any]) -> str | None:
    """Return a client's namespace, from parsed options by field: the option's, else that of ``nameServer``."""
    return values.get("namespace") or getattr(values.get("name_server"), "namespace", None)


def _parse_address(text: str) -> str:
    # Split at the last colon, so that an IPv6 host needs no brackets.
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    _checked(host, re.fullmatch(r"[^\s/\[\]@?#]+", host))
    number = _bounded(_plain_int(port), 1, 65535)
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


SECRET: Final = ValueKind(
    "a non-blank text without control characters and surrounding blanks, or the place of the secret as env:NAME or "
    "file:/absolute/path",
    _parse_secret,
    reference=lambda text: text if is_reference(text) else "",
)
KEYS: Final = ValueKind(
    f"one key, or up to {_MOST_KEYS} keys separated by commas, each of at least {_SHORTEST_KEY} bytes without control "
    "characters and surrounding blanks, or the place of such a text as env:NAME or file:/absolute/path",
    _parse_keys,
    reference=SECRET.reference,
)
CLASS: Final = ValueKind(
    "your class as module:Class",
    lambda text: _checked(text.strip(), re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text.strip())),
    reference=_class_in,
)
# A file that is read.
READ_FILE: Final = replace(
    text("a non-blank text without control characters", "[\x00-\x1f\x7f]"),
    reference=lambda path: f"{FILE}{os.path.abspath(path)}",
)
PATTERN: Final = ValueKind("a Python regular expression, as in orders-.*", _parse_pattern)
# A password in a URI would end up in logs; file systems have better places for it. A password may hold slashes, so
# what follows a colon before the first slash is one if there is an @ behind it, unless it is a port.
_LOCATION: Final = r"(?:/|[A-Za-z][A-Za-z0-9+.-]*://(?![^/]*:(?!\d+/)[^@]*@))[^\x00-\x1f]*"
LOCATION: Final = ValueKind(
    "an absolute path, or a URI without a password, as in /var/log/sink.jsonl or s3://bucket/folder",
    lambda text: _checked(text, re.fullmatch(_LOCATION, text)),
    reference=lambda place: f"{references.PATH}{place}",
)
BOOLEAN: Final = ValueKind("true or false", _parse_boolean)
ROW_ID: Final = ValueKind("false, true, or columns:a,b with distinct column names", _parse_row_id)
ADDRESSES: Final = ValueKind(addresses(9876, "").allowed, _parse_name_servers)
# `refused_over_grpc` compares the scheme with the option useTls.
ENDPOINTS: Final = addresses(8081, "^https?://")
# A topic that a client may send to.
TOPIC: Final = name(MAX_TOPIC_LENGTH, FORBIDDEN_TOPICS)
INSTANCE_NAME: Final = text("a non-blank text", "[\x00-\x1f]")
MILLISECONDS: Final = integer(1, unit="ms")

# What an option is used for: a write, a read, or a producer in plain Python.
WRITE: Final = "write"
READ: Final = "read"
PRODUCER: Final = "producer"
SENDING: Final = (WRITE, PRODUCER)
BATCH: Final = "batch"
STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """The declaration of one option."""

    name: str  # In camelCase, as users of Spark write it
    kind: ValueKind
    doc: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    env: str = ""  # The environment variable that is read if the option is not given
    secret: bool = False  # No error and no repr shows the value
    section: str = ""  # Of docs/options.md; empty: the section of the previous option
    uses: tuple[str, ...] = (WRITE, READ, PRODUCER)
    reads: str = ""  # BATCH or STREAM if only that kind of read has the option
    flag_help: str = ""  # Help of the commands' flag; empty: the first sentence of `doc`

    @property
    def field(self) -> str:
        """The name of the dataclass field: the option's name in snake_case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @property
    def names(self) -> tuple[str, ...]:
        """Every accepted name, the canonical one first."""
        return (self.name, *self.aliases)


def option(name: str, default: Any, kind: ValueKind, doc: str, **more: Any) -> Any:
    """Return the dataclass field that declares an option; `more` has parameters of `OptionSpec`."""
    spec = OptionSpec(name, kind, doc, default, **more)
    return dataclasses.field(default=default, repr=not spec.secret, metadata={"option": spec})


def specs_of(options: type[Any], use: str) -> tuple[OptionSpec, ...]:
    """Return the options for one use, with their sections, of a dataclass and the dataclasses in it."""
    specs: list[OptionSpec] = []
    section = ""
    for field in dataclasses.fields(options):
        spec = field.metadata.get("option")
        if spec is None:
            specs += specs_of(type(field.default), use)
            continue
        section = spec.section or section
        if use in spec.uses:
            specs.append(replace(spec, section=section))
    return tuple(specs)


def parse_one(spec: OptionSpec, value: Any, name: str, noun: str = "option") -> Any:
    """Return the parsed value of an option; an OptionError that uses `name` says what is allowed."""
    why = ""
    try:
        parsed = spec.kind.parse(option_text(value))
    except ValueError as exc:
        if str(exc) and not spec.secret:
            why = f"{exc}; "
    else:
        if spec.kind.reference is not None and (reference := spec.kind.reference(parsed)):
            # The query of a URI may have a secret. The name of a variable or file with a secret is not secret.
            is_shown = not spec.secret or is_reference(reference)
            references.allowed(name, reference, "" if is_shown else "(not shown)")
        return parsed
    # Outside the except block, because the parser's error may quote the value and must not become the context.
    text = repr(f"{value[:_LONGEST_SHOWN]}..." if isinstance(value, str) and len(value) > _LONGEST_SHOWN else value)
    shown = "has a value (not shown: it is secret) that" if spec.secret else f"is {text}, which"
    raise OptionError(f"{noun} {name} {shown} is not allowed: {why}allowed is {spec.kind.allowed}")


def parse_environment(
    table: Iterable[OptionSpec], values: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the parsed value, by field, of every option that is not in `values` and whose variable is set."""
    return {
        spec.field: parse_one(spec, environ[spec.env], f"{spec.name} (environment variable {spec.env})")
        for spec in table
        if spec.env and spec.field not in values and environ.get(spec.env, "").strip()
    }


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of options with Python values. None means not given, as for the properties of a producer."""
    return {name: option_text(value) for name, value in options.items() if value is not None}


def option_text(value: Any) -> str:
    """Return an option's Python value as text, as ``DataFrameWriter.option`` writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list, set, frozenset)) else str(value)
