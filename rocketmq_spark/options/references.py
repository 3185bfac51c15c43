"""What options may use on this machine: variables, files, classes and places to write to. Loads these classes.

The administrator of a process limits it with the environment variable ``ROCKETMQ_SPARK_REFERENCES``. Its entries are
separated by semicolons: ``env:NAME``, ``file:/path``, ``class:module:Class``, ``path:/path`` or ``path:s3://bucket``. A
``*`` at the end matches any text.
"""

from __future__ import annotations

import importlib
import os
import re
import urllib.parse
from typing import Any, Final

from rocketmq_spark.errors import OptionError

ENV: Final = "env:"
FILE: Final = "file:"
CLASS: Final = "class:"
PATH: Final = "path:"
_ALLOWED: Final = "ROCKETMQ_SPARK_REFERENCES"


def allowed(option: str, reference: str, shown: str = "") -> str:
    """Return the reference with links and ``..`` resolved; OptionError if the administrator does not allow it.

    The error has the text `shown` instead of the reference.
    """
    entries = os.environ.get(_ALLOWED)
    if entries is None:
        return reference
    # The caller uses the resolved path, so the process opens the file that was checked.
    target = _resolved(reference)
    if any(_allows(entry.strip(), target) for entry in entries.split(";")):
        return target
    raise OptionError(
        f"option {option}={shown or reference}: this reference is not allowed here: the environment variable "
        f"{_ALLOWED} of this process allows {entries or 'none'}. Use an allowed reference, or ask the administrator to "
        f"add this one as {reference.partition(':')[0]}:..."
    )


def _resolved(reference: str) -> str:
    scheme, _, place = reference.partition(":")
    if f"{scheme}:" == PATH and place.lower().startswith("file:"):
        place = urllib.parse.unquote(urllib.parse.urlsplit(place).path)
    if f"{scheme}:" in (FILE, PATH) and not re.match("[A-Za-z][A-Za-z0-9+.-]*://", place):
        place = os.path.realpath(place)
    return f"{scheme}:{place}"


def _allows(entry: str, target: str) -> bool:
    prefix, star = entry.removesuffix("*"), entry.endswith("*")
    if prefix.startswith((f"{FILE}/", f"{PATH}/")):
        scheme, _, path = prefix.partition(":")
        prefix = f"{scheme}:{os.path.realpath(path)}" + ("/" if path.endswith("/") and path.strip("/") else "")
    if not star:
        return target == prefix
    rest = target.removeprefix(prefix)
    # The query of a URI can name another server, and a path may leave the folder.
    leaves = "://" in target and re.search(r"[?%#]|(^|/)\.\.(/|$)", rest)
    return target.startswith(prefix) and not leaves


def load_class(option: str, name: str, method: str) -> type[Any]:
    """Return the class named ``module:Class``; OptionError if it is missing, lacks the method, or is not allowed."""
    allowed(option, f"{CLASS}{name}")
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        raise OptionError(
            f"{option}={name}: importing module {module_name} failed: {exc!r}. Spark's Python workers must find it on "
            "the driver and on every executor: install it there, or distribute it with --py-files or addPyFile "
            "(add an archive before you call rocketmq_spark.register(spark))"
        ) from exc
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and callable(getattr(cls, method, None))):
        raise OptionError(
            f"{option}={name}: module {module_name} has no class {class_name} with a method {method}. Correct the "
            "name, or add the method"
        )
    return cls


def new_instance(option: str, name: str, method: str) -> Any:
    """Return an instance of the class that `load_class` returns, with its errors."""
    cls = load_class(option, name, method)
    try:
        return cls()
    except Exception as exc:
        raise OptionError(
            f"{option}={name}: calling the class without arguments failed: {exc!r}. Its constructor must "
            "work without arguments"
        ) from exc
