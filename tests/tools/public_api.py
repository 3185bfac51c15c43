"""The public API as text: every name that users may use, with its signature.

Run: make api (python -m tests.tools.public_api), which writes tests/unit/public_api.txt. A test compares the file with
the code, so a change of the API is a change of the file.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

LISTED: Final = Path(__file__).parents[1] / "unit" / "public_api.txt"
# What users import, and what these modules offer.
MODULES: Final = (
    "rocketmq_spark",
    "rocketmq_spark.aio",
    "rocketmq_spark.errors",
    "rocketmq_spark.testing",
    "rocketmq_spark.producer.hooks",
)


def lines() -> Iterator[str]:
    """Yield a line for each public name."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or sorted(_defined_here(module))
        for name in names:
            found = getattr(module, name)
            if not inspect.ismodule(found):
                yield from _described(f"{module_name}.{name}", found)


def _defined_here(module: ModuleType) -> set[str]:
    """Return the public names that a module itself defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def _described(path: str, found: object) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{path}{_signature(found)}" if callable(found) else path
        return
    bases = [base.__name__ for base in found.__bases__ if base is not object and not base.__name__.startswith("_")]
    defines_init = any(
        "__init__" in vars(base) for base in found.__mro__ if base.__module__.startswith("rocketmq_spark")
    )
    init = _signature(found) if defines_init and not issubclass(found, enum.Enum) else ""
    yield f"class {path}{init}{' < ' + ', '.join(bases) if bases else ''}"
    if issubclass(found, enum.Enum):
        yield from (f"  {member.name} = {member.value!r}" for member in found)
        return
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    for name in sorted(dir(found)):
        ours = any(name in vars(base) for base in found.__mro__ if base.__module__.startswith("rocketmq_spark"))
        if name.startswith("_") or not ours or name in fields:
            continue
        member = inspect.getattr_static(found, name)
        if isinstance(member, property):
            yield f"  {name}: property"
        elif isinstance(member, classmethod | staticmethod):
            yield f"  {name}{_signature(getattr(found, name))} [{type(member).__name__}]"
        elif inspect.isfunction(member):
            yield f"  {name}{_signature(member)}"
        elif not isinstance(member, bool):
            yield f"  {name}"
        elif name in vars(found):
            yield f"  {name} = {member}"


def _signature(found: object) -> str:
    signature = inspect.signature(found)  # type: ignore[arg-type]
    # Addresses of objects differ from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", str(signature))


if __name__ == "__main__":
    LISTED.write_text("\n".join(lines()) + "\n", encoding="utf-8")
