"""No `repr` shows a secret: the test checks every field of every class whose name or type can hold one."""

from __future__ import annotations

import ast
import collections
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import rocketmq_spark
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.options.connection import ConnectionOptions

MARK = "must-not-show"
# Names of fields with secrets, or with fields or metadata of a request.
BY_NAME = re.compile(
    r"secret|token|password|private_?key|key_?pem|credential|authorization|signature|metadata|ext_fields|sent_fields|signed"
)
BY_TYPE = re.compile(r"\b(Credentials|CredentialsProvider|Metadata|ConnectionOptions|Signed)\b")
# Fields that match, and hold no secret.
HARMLESS = {
    ("OptionSpec", "secret"): "a flag",
    ("ConnectionOptions", "credentials_provider"): "the name of a class",
    ("Security", "secret_file"): "a path",
    ("ConnectionOptions", "sign_name_server_requests"): "a flag",
}


def classes() -> Iterator[type[Any]]:
    for info in pkgutil.walk_packages(rocketmq_spark.__path__, "rocketmq_spark."):
        if "_pb" in info.name or info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value
                nested = (inner for inner in vars(value).values() if isinstance(inner, type))
                yield from (inner for inner in nested if inner.__module__ == module.__name__)


CLASSES = sorted(set(classes()), key=lambda cls: (cls.__module__, cls.__qualname__))


def annotations_of(cls: type[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= {name: str(kind) for name, kind in vars(base).get("__annotations__", {}).items()}
    return found


def is_secret(cls: type[Any], name: str, kind: str) -> bool:
    suspicious = BY_NAME.search(name.lower()) or BY_TYPE.search(kind)
    return bool(suspicious) and (cls.__name__, name) not in HARMLESS


def value_of(kind: str) -> object:
    """Return a value of a field's type that contains the mark."""
    if re.search(r"\b(Credentials|CredentialsProvider)\b", kind):
        return Credentials("user", MARK, MARK)
    if "ConnectionOptions" in kind:
        return ConnectionOptions(secret_key=MARK)
    if "Metadata" in kind or "tuple" in kind:
        return ((MARK, MARK),)
    if "apping" in kind or "dict" in kind:
        return {"SecurityToken": MARK}
    return MARK.encode() if kind.startswith("bytes") else MARK


def shown(cls: type[Any], secret: dict[str, str]) -> str:
    """Return the repr of an instance whose secret fields contain the mark."""
    if issubclass(cls, tuple):
        values = {name: value_of(secret[name]) if name in secret else None for name in cls._fields}  # type: ignore[attr-defined]
        shown_object = tuple.__new__(cls, values.values())
    else:
        shown_object = object.__new__(cls)
        for field in dataclasses.fields(cls):
            kind = annotations_of(cls)[field.name]
            other: object = 0 if kind == "int" else "" if kind == "str" else collections.defaultdict(str)
            object.__setattr__(shown_object, field.name, value_of(kind) if field.name in secret else other)
    return f"{shown_object!r} {shown_object}"


def records() -> list[type[Any]]:
    return [cls for cls in CLASSES if dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")]


@pytest.mark.parametrize(
    "cls",
    [cls for cls in records() if any(is_secret(cls, *item) for item in annotations_of(cls).items())],
    ids=lambda cls: cls.__qualname__,
)
def test_record_with_a_secret_field_does_not_show_it(cls: type[Any]) -> None:
    secret = {name: kind for name, kind in annotations_of(cls).items() if is_secret(cls, name, kind)}
    assert MARK not in shown(cls, secret), f"hide {', '.join(secret)} from the repr of {cls.__qualname__}"


def attributes_shown(cls: type[Any], method: str) -> set[str]:
    """Return the attributes that a method reads for anything but a decision."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)[method])))
    decisions = {
        id(node)
        for choice in ast.walk(tree)
        if isinstance(choice, (ast.IfExp, ast.If))
        for node in ast.walk(choice.test)
    }
    # Of self.credentials.access_key the last name counts.
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    shown_nodes = (node for node in ast.walk(tree) if id(node) not in decisions | inner)
    return {node.attr for node in shown_nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    "cls",
    [cls for cls in CLASSES if {"__repr__", "__str__"} & vars(cls).keys() and cls not in records()],
    ids=lambda cls: cls.__qualname__,
)
def test_custom_repr_does_not_use_secrets(cls: type[Any]) -> None:
    for method in {"__repr__", "__str__"} & vars(cls).keys():
        read = attributes_shown(cls, method)
        assert [name for name in read if is_secret(cls, name, annotations_of(cls).get(name, ""))] == []


def test_class_search_finds_the_classes_with_secrets() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert names > {"Credentials", "SinkOptions", "ConnectionOptions", "Signed", "Request"}


def test_new_record_with_a_secret_field_fails() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Leaking:
        name: str
        session_token: str

    kinds = annotations_of(Leaking)
    secret = {name: kind for name, kind in kinds.items() if is_secret(Leaking, name, kind)}
    assert list(secret) == ["session_token"]
    assert MARK in shown(Leaking, secret)
