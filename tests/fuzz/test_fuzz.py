"""The compiled kernel, numpy and `decode_rows` agree on random answers of brokers, also with sanitizers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import sanitized
from tests.fuzz.compare import KINDS, run
from tests.support.kernels import can_build, compiled_or_skip
from tests.tools.packages import ROOT

PARTS = 4

# Prints by how many MB the memory of the process grows while it decodes an answer of 16 MB, and the rows it yields.
DECODES = """
import json, sys, zlib
from dataclasses import replace
from rocketmq_spark.arrow.decode import batches_of
from rocketmq_spark.arrow.kernel import compiled
from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled
from tests.support.memory import peak_memory
from tests.support.strategies import HALF, encode_stored_record

def sound(**changes):
    body = changes.get("body", HALF.body)
    return encode_stored_record(replace(HALF, body_crc=zlib.crc32(body) & 0x7FFFFFFF, **changes))

if sys.argv[1] == "empty items":
    one = sound(sys_flag=0xC0, body=bytes(22) * 32_767, properties={"INNER_NUM": "32767"})
else:
    one = sound(body=b"", properties={f"{number:x}": "v" for number in range(64)})
answer = one * (2**24 // len(one))

before, rows = peak_memory(), 0
pull, schema = Pulled(MessageQueue("orders", "a", 0), 0, 10**6, answer), arrow_schema_of(column_names())
for batch in batches_of([pull], schema, kernel=compiled()):
    rows += batch.num_rows
    del batch
expected = len(answer) // len(one) * (32_767 if sys.argv[1] == "empty items" else 1)
print(json.dumps({"rows": rows, "held": (peak_memory() - before) // 2**20, "expected": expected}))
"""


@pytest.mark.parametrize("part", range(PARTS))
def test_all_decoders_agree_on_20_000_random_answers(part: int) -> None:
    compiled_or_skip()
    count = 20_000 // PARTS
    outcomes = run(part * count, count)
    assert outcomes["answers"] == count
    # Enough answers are read, and enough are not.
    assert 0.2 * count < outcomes["compiled, read"] < 0.8 * count
    assert 0.2 * count < outcomes["numpy, read"] < 0.8 * count
    for kind in (*KINDS, "mixed hosts", "each offset"):
        assert outcomes[kind] > 0.005 * count, kind


@pytest.mark.parametrize("kind", ["empty items", "many properties"])
def test_the_kernel_decodes_dense_answers_in_bounded_memory(kind: str) -> None:
    compiled_or_skip()
    run = subprocess.run([sys.executable, "-c", DECODES, kind], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["rows"] == found["expected"]
    assert found["held"] < 200


@pytest.mark.long
def test_sanitizers_find_no_fault_of_the_kernel(tmp_path: Path) -> None:
    if not (sanitized.library() and can_build()):
        pytest.skip("needs gcc with its sanitizers")
    sanitized.build(tmp_path)
    said = sanitized.run(tmp_path, 4_000, 1_000_000)
    assert f"kernel: {tmp_path}" in said
    assert "4,000 answers" in said
