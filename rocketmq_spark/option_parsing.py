"""Texts to values: any mapping of option texts by any table of options.

Rule 1: what is not in the table is refused, and its value is not shown: it might be a misspelt secret.
Rule 2: the value of a secret option is in no message and no repr.
Rule 3: what Spark puts among a sink's options on its own account is passed over.

Spark hands over keys in lower case: messages show the spelling of the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.foreign_options import name_here
from rocketmq_spark.option_table import OptionSpec

# What Spark puts among a sink's options on its own account: tried on 4.3 (path, checkpointLocation, queryName), the
# reserved table properties are the constants of TableCatalog.java.
_SPARK_KEYS: Final = frozenset(
    {"path", "checkpointlocation", "queryname", "owner", "provider", "location", "external", "comment", "collation",
     "is_managed_location", "table_type"}
)  # fmt: skip
_SPARK_PREFIX: Final = "option."
# Of a value in a message: the receipt of a large write, given as offsets, has many thousands.
_LONGEST_SHOWN: Final = 400


def parse_values(
    table: Sequence[OptionSpec],
    options: Mapping[str, str],
    use: str = "write",
    others: Mapping[str, Sequence[OptionSpec]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the parsed value of every option given, by field; those not given are absent.

    Parameters
    ----------
    table : sequence of OptionSpec
    options : mapping of str to str
    use : {"write", "read"}, default "write"
        What messages call that whose options `table` has.
    others : mapping of str to sequence of OptionSpec, default none
        Tables of other uses, by what messages call these: their options are refused as theirs.

    Raises
    ------
    OptionError
        An option is unknown or malformed, or two names of one option disagree.
    """
    spec_of = {name.lower(): spec for spec in table for name in spec.names}
    own = {key: text for key, text in options.items() if not _is_sparks(key)}
    unknown = [key for key in own if key.lower() not in spec_of]
    if unknown:
        raise OptionError(_unknown_text(unknown, table, use, others))
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, text in own.items():
        spec = spec_of[key.lower()]
        name = next(name for name in spec.names if name.lower() == key.lower())
        value = parse_one(spec, text, name)
        if values.setdefault(spec.field, value) != value:
            raise OptionError(
                f"options {given_as[spec.field]} and {name} are one option with two values: give one of them"
            )
        given_as.setdefault(spec.field, name)
    return values


def parse_environment(
    table: Sequence[OptionSpec], values: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the parsed value, by field, of every option that is not among `values` and that a variable stands in for.

    Raises
    ------
    OptionError
        The variable's text is malformed.
    """
    return {
        spec.field: parse_one(spec, environ[spec.env], f"{spec.name} (environment variable {spec.env})")
        for spec in table
        if spec.env and spec.field not in values and environ.get(spec.env, "").strip()
    }


def redacted_repr(value: Any, table: Sequence[OptionSpec]) -> str:
    """Return the repr of a dataclass of options, without the values of secret ones.

    Parameters
    ----------
    value : dataclass instance
        Its fields are those of `table`.
    table : sequence of OptionSpec
    """
    shown = []
    for spec in table:
        held = getattr(value, spec.field)
        shown.append(f"{spec.field}={'<redacted>' if spec.secret and held is not None else repr(held)}")
    return f"{type(value).__name__}({', '.join(shown)})"


def _is_sparks(key: str) -> bool:
    return key.lower() in _SPARK_KEYS or key.lower().startswith(_SPARK_PREFIX)


def _unknown_text(
    keys: Sequence[str], table: Sequence[OptionSpec], use: str, others: Mapping[str, Sequence[OptionSpec]]
) -> str:
    canonical = {name.lower(): spec.name for spec in table for name in spec.names}
    elsewhere = {
        name.lower(): f"{name} is an option of a {other}"
        for other, specs in others.items()
        for spec in specs
        for name in spec.names
    }
    hints = {}
    for key in keys:
        near = difflib.get_close_matches(key.lower(), canonical, n=1)
        meant = f"did you mean {canonical[near[0]]}?" if near else ""
        hints[key] = elsewhere.get(key.lower()) or name_here(key, use) or meant
    texts = [f"unknown option {key!r}" + (f": {hint}" if hint else "") for key, hint in hints.items()]
    if not all(hints.values()):
        texts.append(f"the options of a {use} are {', '.join(spec.name for spec in table)}")
    return "; ".join(texts)


def parse_one(spec: OptionSpec, text: str, name: str) -> Any:
    """Return the value of one option's text; `name` is what messages call it.

    Raises
    ------
    OptionError
        The text is not allowed.
    """
    why = ""
    try:
        return spec.kind.parse(text)
    except ValueError as exc:
        if spec.kind.explains and not spec.secret:
            why = f"{exc}; "
    # Outside the except block: the parser's own error, which may quote the value, does not become the context.
    value = repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
    shown = "has a value (not shown: it is secret) that" if spec.secret else f"is {value}, which"
    raise OptionError(f"option {name} {shown} is not allowed: {why}allowed is {spec.kind.allowed}")
