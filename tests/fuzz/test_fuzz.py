"""The compiled kernel, numpy and `decode_rows` agree on random answers of brokers, also with sanitizers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz import sanitized
from tests.fuzz.compare import run
from tests.support.kernels import compiled_or_skip

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_all_decoders_agree_on_20_000_damaged_answers(part: int) -> None:
    compiled_or_skip()
    count = 20_000 // PARTS
    outcomes = run(part * count, count)
    assert outcomes["answers"] == count
    # Enough answers are read, and enough are not.
    assert 0.2 * count < outcomes["compiled, read"] < 0.8 * count
    assert 0.2 * count < outcomes["numpy, read"] <= outcomes["compiled, read"]


def test_sanitizers_find_no_fault_of_the_kernel(tmp_path: Path) -> None:
    if not (os.environ.get("CI") or shutil.which("gcc")):
        pytest.skip("needs gcc with its sanitizers")
    sanitized.build(tmp_path)
    said = sanitized.run(tmp_path, 4_000, 1_000_000)
    assert f"kernel: {tmp_path}" in said
    assert "4,000 answers" in said
