"""The results of the matrix: what a second run leaves out, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.matrix import LOWEST, ON_ALL, WITH_SPARK, Pair, Results, table
from tests.tools.packages import ROOT


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results(tmp_path / "build" / "matrix.json", "commit")
    results.add(Pair("3.10.13", LOWEST, "4.0.0", "9 passed", "7 passed"))
    results.add(Pair("3.10.13", "3.5", "3.5.9", spark="3 passed"))
    results.add(Pair("3.10.13", "4.3", "4.3", spark="not available"))
    results.add(Pair("3.9.7", "3.5", "3.5.8", spark="3 passed"))
    results.add(Pair("3.10.13", "4.2", "4.2.1", "8 passed, 1 failed", "7 passed", failed=True))
    return results


@pytest.mark.parametrize("file", [*WITH_SPARK, *ON_ALL])
def test_each_file_of_tests_exists(file: str) -> None:
    assert (ROOT / file).is_file()


def test_second_run_tests_pairs_that_have_not_passed(results: Results, tmp_path: Path) -> None:
    again = Results(tmp_path / "build" / "matrix.json", "commit")
    assert again.pairs == results.pairs
    assert [again.passed("3.10.13", asked) for asked in (LOWEST, "3.5", "4.3", "4.2", "4.1")] == [True] * 3 + [
        False
    ] * 2
    assert not again.has_units("3.10.13")
    again.add(Pair("3.10.13", "4.2", "4.2.1", "9 passed", "7 passed"))
    assert len(again.pairs) == len(results.pairs)
    assert again.has_units("3.10.13")


def test_another_commit_is_tested_anew(results: Results, tmp_path: Path) -> None:
    assert results.pairs
    assert Results(tmp_path / "build" / "matrix.json", "another commit").pairs == []


def test_table_has_a_line_for_each_python(results: Results) -> None:
    assert table(results.pairs).splitlines() == [
        "| Python | unit tests | 4.0.0, all at its lowest | 3.5.8 | 4.2.1 |",
        "|---|---|---|---|---|",
        "| 3.9.7 |  |  | 3 passed |  |",
        "| 3.10.13 | 8 passed, 1 failed | 7 passed | 3 passed | 7 passed |",
    ]
