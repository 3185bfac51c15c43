"""The names that users import from the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rocketmq_spark


@pytest.mark.parametrize("name", rocketmq_spark.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(rocketmq_spark, name).__name__ in (name, f"rocketmq_spark.{name}", f"rocketmq_spark.cli.{name}")
    assert name in dir(rocketmq_spark)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Consumer'"):
        _ = rocketmq_spark.Consumer


def test_importing_the_package_imports_neither_pyspark_nor_the_demo() -> None:
    code = "import sys, rocketmq_spark; print({'pyspark', 'rocketmq_spark.cli'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
