"""The choice of a kernel, and what only the compiled one has."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_spark.arrow.columns import ByteColumn
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.kernel import NUMPY, Kernel, choose
from rocketmq_spark.arrow.messages import Irregular
from rocketmq_spark.arrow.numpy_hashes import KEYS, Strings
from tests.support.kernels import check_built, compiled_or_skip
from tests.support.strategies import HALF, encode_stored_record
from tests.tools.layers import PACKAGE


@pytest.fixture
def compiled() -> Kernel:
    return compiled_or_skip()


def raising(error: Exception) -> Callable[[], Kernel]:
    def load() -> Kernel:
        raise error

    return load


MISSING = ModuleNotFoundError("x", name="rocketmq_spark.arrow._records")


@pytest.mark.parametrize(
    ("environ", "load", "name", "reason", "fix"),
    [
        ({}, lambda: replace(NUMPY, name="other"), "other", "installed", ""),
        ({"ROCKETMQ_SPARK_KERNEL": "0"}, raising(MISSING), "numpy", "ROCKETMQ_SPARK_KERNEL=0", ""),
        ({"ROCKETMQ_SPARK_KERNEL": "1"}, raising(MISSING), "numpy", "not installed", "with a C compiler"),
        ({}, raising(ModuleNotFoundError("No module 'q'", name="q")), "numpy", "failed: No module 'q'", "again"),
        ({}, raising(ImportError("undefined symbol")), "numpy", "failed: undefined symbol", "again"),
        ({}, raising(AttributeError("no CompiledMessages")), "numpy", "failed: no CompiledMessages", "again"),
    ],
    ids=["installed", "switched off", "missing", "missing requirement", "broken", "other module"],
)
def test_numpy_replaces_a_kernel_that_is_off_or_missing_or_broken(
    environ: dict[str, str], load: Callable[[], Kernel], name: str, reason: str, fix: str
) -> None:
    choice = choose(environ, load)
    assert choice.kernel.name == name
    assert reason in choice.reason
    assert fix in choice.fix
    assert bool(fix) == bool(choice.fix)


@pytest.mark.parametrize(("value", "level"), [("0", "DEBUG"), ("1", "WARNING")])
def test_a_process_logs_once_which_kernel_it_uses(value: str, level: str, tmp_path: Path) -> None:
    # A copy of the package without the compiled modules.
    shutil.copytree(PACKAGE, tmp_path / "rocketmq_spark", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "from rocketmq_spark.arrow.kernel import default_kernel\n"
        "assert default_kernel() is default_kernel()"
    )
    environ = {**os.environ, "ROCKETMQ_SPARK_KERNEL": value}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True)
    lines = run.stderr.splitlines()
    assert [line.startswith(f"{level}:rocketmq_spark.arrow:kernel numpy: ") for line in lines] == [True]


def test_ci_has_the_kernel_that_its_machine_can_build() -> None:
    if not os.environ.get("CI"):
        pytest.skip("outside of CI, a compiler may be newer than the install")
    check_built()


@pytest.mark.parametrize("by_table", [False, True])
def test_crc_equals_that_of_zlib(by_table: bool) -> None:
    compiled_or_skip()
    from rocketmq_spark.arrow._records import crc32

    data = random.Random(1).randbytes(70_000)
    for size in (*range(400), 4096, 65_537):
        for start in (0, 1, 7, 16):
            part = data[start : start + size]
            assert crc32(part, by_table=by_table) == zlib.crc32(part), (start, size)


def with_topic(topic: bytes) -> bytes:
    """Return a record whose topic is any bytes."""
    crc = zlib.crc32(HALF.body) & 0x7FFFFFFF
    record = encode_stored_record(replace(HALF, topic="", properties={}, body_crc=crc))
    return struct.pack(">i", len(record) + len(topic)) + record[4:-3] + bytes([len(topic)]) + topic + bytes(2)


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_text_is_utf8_as_for_python(compiled: Kernel) -> None:
    edges = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF]
    texts = [bytes(text) for text in itertools.product(range(0x80, 0x100), edges)]
    leads = [0xDF, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5]
    texts += [
        bytes(text) for text in itertools.product(leads, edges, [0x7F, 0x80, 0xBF, 0xC0], [0x7F, 0x80, 0xBF, 0xC0])
    ]
    texts += [text[:3] for text in texts if len(text) == 4]
    for text in texts:
        for around in (b"", b"eight by"):
            record = with_topic(around + text)
            try:
                read = len(compiled.messages([record], [0], [9], 1))
            except Irregular:
                read = 0
            assert read == is_text(text), text


def test_borders_outside_of_a_column_are_refused(compiled: Kernel) -> None:
    for offsets in ([0, 5], [-1, 2], [3, 2]):
        strings = Strings(ByteColumn(np.array(offsets), np.zeros(4, np.uint8)), b"\x02")
        with pytest.raises(ValueError, match="in 4 bytes"):
            compiled.hash_sums([strings], Workspace(), (0,))
        with pytest.raises(ValueError, match="in 4 bytes"):
            compiled.nh_sums([strings], Workspace(), np.zeros(KEYS, np.uint64))
    with pytest.raises(ValueError, match="3 keys"):
        compiled.nh_sums([strings], Workspace(), np.zeros(3, np.uint64))
