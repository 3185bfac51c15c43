"""Finding Java: the candidates, and the meaning of their answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.cluster.process import find_java, parse_java_version
from rocketmq_spark.errors import ClusterError

MakeJava = Callable[[Path, str], Path]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)', 17),
        ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment', 8),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('Picked up JAVA_TOOL_OPTIONS: -Dversion="1.8"\nopenjdk version "17.0.1" 2021-10-19', 17),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_version_is_parsed_from_java_output(text: str, version: int | None) -> None:
    assert parse_java_version(text) == version


def prints(version: str, code: int = 0) -> str:
    return f"echo '{version}' >&2\nexit {code}\n"


def test_java_home_wins_over_path(tmp_path: Path, make_java: MakeJava) -> None:
    home = make_java(tmp_path / "home" / "bin", prints('openjdk version "21"'))
    make_java(tmp_path / "path", prints('openjdk version "17"'))
    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}) == home


def test_path_is_used_when_java_home_has_no_java(tmp_path: Path, make_java: MakeJava) -> None:
    java = make_java(tmp_path / "path", prints('openjdk version "17"'))
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(tmp_path / "path")}) == java


def test_old_java_is_refused_although_path_has_a_newer_one(tmp_path: Path, make_java: MakeJava) -> None:
    make_java(tmp_path / "home" / "bin", prints('openjdk version "11.0.2"'))
    make_java(tmp_path / "path", prints('openjdk version "17"'))
    with pytest.raises(ClusterError, match=r"is Java 11, the RocketMQ server needs 17 or newer; install Java 17"):
        find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})


def test_missing_java_error_names_searched_places_and_advice(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"JAVA_HOME is not set and PATH has none\); install Java 17 or newer"):
        find_java({"PATH": str(tmp_path)})


def test_java_stub_that_only_prints_advice_is_not_java(tmp_path: Path, make_java: MakeJava) -> None:
    make_java(tmp_path, prints("Unable to locate a Java Runtime.", code=1))
    with pytest.raises(ClusterError, match=r"exit code 1 \(Unable to locate a Java Runtime\.\); install Java"):
        find_java({"PATH": str(tmp_path)})


def test_java_that_cannot_be_executed_is_a_cluster_error(tmp_path: Path, make_java: MakeJava) -> None:
    java = make_java(tmp_path, "")
    java.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ClusterError, match=r"asking .* for its version"):
        find_java({"PATH": str(tmp_path)})
