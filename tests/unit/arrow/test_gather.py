from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketmq_spark.arrow.columns import ByteColumn, byte_column
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Workspace, _Elements, assemble, consecutive_decimals


def column(*values: bytes | None) -> ByteColumn:
    found = byte_column(pa.array(values, pa.binary()))
    assert found is not None
    return found


def numbers(*values: int) -> tuple[int, str, np.ndarray]:
    return 1, ">u2", np.array(values)


PARTS: list[Part] = [
    Frame(b"<\0\0", (numbers(1, 2, 3),)),
    column(b"a", None, b"ccc"),
    Frame(b"-"),
    Choice((b"", b"yes", b"no"), np.array([2, 0, 1])),
    Frame(b">\0\0!", (numbers(0x4142, 0x4344, 0x4546),)),
]
WHOLE = b"<\0\x01a-no>AB!" + b"<\0\x02->CD!" + b"<\0\x03ccc-yes>EF!"


def test_assembled_rows_contain_one_element_of_every_part() -> None:
    assert bytes(assemble(PARTS, 3, len(WHOLE))) == WHOLE


@pytest.mark.parametrize("parts", [[PARTS[1]], PARTS[:1], PARTS[:2], PARTS[1:], [Frame(b"xy")], [Frame(b""), PARTS[1]]])
def test_any_part_can_come_first_last_or_alone(parts: list[Part]) -> None:
    whole = b"".join(_element(part, row) for row in range(3) for part in parts)
    assert bytes(assemble(parts, 3, len(whole))) == whole


def _element(part: Part, row: int) -> bytes:
    if isinstance(part, ByteColumn):
        return part.value(row) or b""
    if isinstance(part, Choice):
        return part.literals[int(part.which[row])]
    template = bytearray(part.template)
    for start, dtype, values in part.fields:
        raw = values[row : row + 1].astype(dtype).tobytes()
        template[start : start + len(raw)] = raw
    return bytes(template)


def test_column_values_come_in_the_requested_row_order() -> None:
    parts: list[Part] = [column(b"a", b"bb", None), Frame(b"|")]
    assert bytes(assemble(parts, 4, 8, np.array([1, 2, 0, 0]))) == b"bb||a|a|"


def test_a_slice_of_a_column_is_read_from_its_own_start() -> None:
    assert bytes(assemble([column(b"a", b"bb", b"c", b"dd").slice(1, 3)], 2, 3)) == b"bbc"


def test_sizes_beyond_32_bits_use_64_bit_offsets() -> None:
    # The argument replaces the limit of 2 GiB, which a unit test does not allocate.
    assert bytes(assemble(PARTS, 3, len(WHOLE), workspace=Workspace(int32_end=8))) == WHOLE


def test_a_column_with_32_bit_offsets_may_lie_beyond_two_gib() -> None:
    # `assemble` would have to allocate the 2 GiB before the column.
    values, data = column(b"ab", b"c", b"d"), np.empty(4, np.uint8)
    for at in (2**31 - 3, 2**31, 2**32):
        offsets = np.empty(3, np.int64)
        _Elements(3, 4, values).write(offsets, data, at)
        assert offsets.tolist() == [at, at + 2, at + 3]
        assert data.tobytes() == b"abcd"


def test_reused_workspace_does_not_change_earlier_results() -> None:
    workspace = Workspace()
    first = assemble(PARTS, 3, len(WHOLE), workspace=workspace)
    second = assemble([column(b"overwritten" * 10)], 1, 110, workspace=workspace)
    assert (bytes(first), bytes(second)) == (WHOLE, b"overwritten" * 10)


@given(st.integers(0, 10**18), st.integers(1, 300))
@example(9_990, 10)
@example(1_000, 9_000)
@example(99_999_990, 10)
@example(123_456, 1)
@example(12_345_678, 30_000)
def test_consecutive_numbers_are_written_as_decimals(first: int, count: int) -> None:
    expected = [b"%d" % number for number in range(first, first + count)]
    frame = consecutive_decimals(first, count)
    if len(expected[0]) < 4 or len(expected[0]) != len(expected[-1]):
        assert frame is None
    else:
        assert frame is not None
        assert bytes(frame.rows(count)) == b"".join(expected)
        assert bytes(frame.slice(1, count).rows(count - 1)) == b"".join(expected[1:])
