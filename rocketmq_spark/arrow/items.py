"""Rows of a block -> batch items, or property strings alone, in one buffer each.

Rule 1: this module decides bytes only; which rows go together is the caller's.
Rule 2: a property that a row does not have takes no byte, and its neighbours close up around it.

Follows ``MessageDecoder.encodeMessages`` (spec/remoting.md 6.1) and is held against ``wire.records``. A batch item:

    4  total size      22 + body + properties
    4  magic           0
    4  body CRC        0
    4  flag
    4  body length
       body
    2  properties length
       properties      in the order of block.py, rule 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.block import UNIQ_KEY, MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Workspace, assemble
from rocketmq_spark.arrow.unique_id import UniqueIds
from rocketmq_spark.wire.records import ITEM_OVERHEAD

_END: Final = b"\x02"

_ScalarT = TypeVar("_ScalarT", bound="np.generic[Any]")


def encode_items(
    block: MessageBlock,
    start: int,
    stop: int,
    rows: Ints | None,
    ids: UniqueIds,
    first_id: int,
    workspace: Workspace,
    packed: ByteColumn | None = None,
) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """Encode rows as batch items, back to back.

    Parameters
    ----------
    block : MessageBlock
    start, stop : int
        A range of its rows.
    rows : int array or None
        Which rows of the range, counted from `start`, in the order of the result; None: all of them. At least one.
    ids : UniqueIds
    first_id : int
        The id of the block's first row; row k has the k-th after it.
    workspace : Workspace
    packed : ByteColumn or None, default None
        Bodies of the range that take the place of the block's; null where the block's stays.

    Returns
    -------
    tuple of memoryview and int64 array, shape (items + 1,)
        The items; item k lies between element k and element k + 1.
    """
    bodies = [block.body.slice(start, stop)]
    body_sizes = bodies[0].sizes
    if packed is not None and packed.valid is not None:
        # One of the two is null in each row, and gives nothing.
        bodies = [replace(bodies[0], valid=~packed.valid), packed]
        body_sizes = bodies[0].sizes + packed.sizes
    property_sizes = _picked(block.property_sizes[start:stop], rows)
    body_sizes = _picked(body_sizes, rows)
    item_sizes = property_sizes + body_sizes + ITEM_OVERHEAD
    head = Frame(bytes(20), ((0, ">i4", item_sizes), (16, ">i4", body_sizes)))
    if block.flags is not None:
        head = Frame(head.template, (*head.fields, (12, ">i4", _picked(block.flags[start:stop], rows))))
    parts = [
        head,
        *bodies,
        Frame(bytes(2), ((0, ">i2", property_sizes),)),
        *_property_parts(block, start, stop, rows, ids, first_id),
    ]
    ends = np.zeros(len(item_sizes) + 1, np.int64)
    np.cumsum(item_sizes, out=ends[1:])
    return assemble(parts, len(item_sizes), int(ends[-1]), rows, workspace), ends


def encode_properties(
    block: MessageBlock, start: int, stop: int, rows: Ints, ids: UniqueIds, first_id: int, workspace: Workspace
) -> list[str]:
    """Return the property strings of single messages; parameters as of `encode_items`.

    Bytes that are not UTF-8 become U+FFFD: a request header is text, and this is what any Java consumer makes of such
    bytes where a batch stored them as they are.
    """
    sizes = block.property_sizes[start:stop][rows]
    parts = _property_parts(block, start, stop, rows, ids, first_id)
    data = assemble(parts, len(sizes), int(sizes.sum()), rows, workspace)
    ends = np.cumsum(sizes).tolist()
    return [str(data[begin:end], "utf-8", "replace") for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _property_parts(
    block: MessageBlock, start: int, stop: int, rows: Ints | None, ids: UniqueIds, first_id: int
) -> list[Part]:
    parts: list[Part] = []
    # Which rows have a property already, one value for all where it is the same: 0x02 stands between two properties.
    # It could end each of them instead, but that would be one more part after every value.
    before: Mask | bool = False
    for one in block.properties:
        name = one.name + b"\x01" + one.literal
        if one.valid is None:
            parts.append(_lead(name, before))
            before = True
        else:
            there = _picked(one.valid[start:stop], rows)
            parts.append(Choice((b"", name, _END + name), there * (1 + np.asarray(before, np.int8))))
            before = there | np.asarray(before)
        if one.values is not None:
            parts.append(one.values.slice(start, stop))
    parts.append(_lead(UNIQ_KEY + b"\x01", before))
    template = bytearray(ids.prefix.hex().upper().encode())
    fields: list[tuple[int, str, npt.NDArray[Any]]] = []
    for digits in ids.digits(first_id, np.arange(start, stop) if rows is None else rows + start):
        if isinstance(digits, np.ndarray):
            fields.append((len(template), "=u4", digits))
        template += bytes(4) if isinstance(digits, np.ndarray) else digits
    parts.append(Frame(bytes(template) + _END, tuple(fields)))
    if block.user is not None:
        parts.append(block.user.slice(start, stop))
    return parts


def _lead(name: bytes, before: Mask | bool) -> Part:
    if isinstance(before, bool):
        return Frame(_END + name if before else name)
    return Choice((name, _END + name), before.view(np.int8))


def _picked(values: npt.NDArray[_ScalarT], rows: Ints | None) -> npt.NDArray[_ScalarT]:
    return values if rows is None else values[rows]
