"""Classes of the user's own that an option names, as ``module:Class``.

Rule 1: a class that can't be had is an error of the option that names it, and says where it must be found.
"""

from __future__ import annotations

import importlib
from typing import Any

from rocketmq_spark.errors import OptionError


def load_class(option: str, name: str, method: str) -> type[Any]:
    """Return the class that ``module:Class`` names.

    Parameters
    ----------
    option : str
        What errors call it by.
    name : str
    method : str
        What the class must have.

    Raises
    ------
    OptionError
        It is not there, or has no such method.
    """
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:
        raise OptionError(
            f"{option}={name}: importing module {module_name} failed: {exc!r}; Spark's Python workers must find it, on "
            "the driver and on every executor: install it there, or hand it over with --py-files or addPyFile "
            "(an archive before rocketmq_spark.register(spark))"
        ) from exc
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and callable(getattr(found, method, None))):
        raise OptionError(f"{option}={name}: module {module_name} has no class {class_name} with a method {method}")
    return found


def make(option: str, name: str, method: str) -> Any:
    """Return an instance of the class that ``module:Class`` names, made without arguments.

    Parameters are those of `load_class`.

    Raises
    ------
    OptionError
        The class can't be had, or making it failed.
    """
    made = load_class(option, name, method)
    try:
        return made()
    except Exception as exc:
        raise OptionError(f"{option}={name}: making it without arguments failed: {exc!r}") from exc
