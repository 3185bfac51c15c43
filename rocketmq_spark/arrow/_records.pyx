# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, show_performance_hints=False
"""Reads the messages of pulls to Arrow arrays (`CompiledMessages`), with the results of `NumpyMessages`.

The constructor walks through the records of each answer once (docs/internals/messages.md#stored-record). It checks
every record, and keeps a `Message` for each message: its numbers, and where its body and its properties are. A method
then fills the buffers of one column from these. Property strings are parsed at the first column that needs them. For
each of them, `_entries` has where its names and values are.

Senders and brokers choose the bytes of an answer. So these rules hold:

* Only `take` in `_reading.pxi` moves through an answer. It compares each size with what is left, and refuses a size
  that does not fit. All other code reads only bytes that it returned.
* A size is read once. `Message` and `Entry` keep the checked value, so bytes that change later cannot move a border.
* Bytes of a result are written only where `room` in `_writing.pxi` allows it. Arrays of numbers check their bounds.
* `Memory` has no such check. Before an item is added, `_add` and `_add_entries` compare the number of items with the
  capacity. A loop that fills `Spans` fills as many as they were made for.
* What is malformed or rare raises Irregular, and `decode_rows` reads it: unreadable messages, inner batches that are
  compressed, an unusual INNER_NUM, repeated properties, more than 64 properties, times that no timestamp can hold,
  columns of more than 2 GiB.

Loops run without the GIL. An object is for one thread.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, to_arrow
from rocketmq_spark.arrow.messages import Irregular, host_texts
from rocketmq_spark.arrow.read_columns import LAST_TIME, US_PER_MS

include "_reading.pxi"
include "_writing.pxi"


cdef class CompiledMessages:
    """Implements `Messages`."""

    cdef Py_buffer *_answers
    cdef Py_ssize_t _answer_count
    cdef Memory _message_memory
    cdef Message *_messages
    cdef Py_ssize_t _count
    cdef Py_ssize_t _most
    cdef Memory _entry_memory
    cdef Entry *_entries
    cdef Py_ssize_t _entry_count
    cdef object _entry_offsets  # Message k owns the entries from `_entry_offsets[k]` up to `_entry_offsets[k + 1]`

    def __cinit__(self, bodies, starts, ends, Py_ssize_t most):
        cdef int64_t start, end, offsets = 0, nbytes = 0
        cdef int32_t pull
        bodies, starts, ends = tuple(bodies), tuple(starts), tuple(ends)
        self._answers = <Py_buffer *>malloc(max(len(bodies), 1) * sizeof(Py_buffer))
        if self._answers == NULL:
            raise MemoryError
        for body, first, after in zip(bodies, starts, ends, strict=True):
            PyObject_GetBuffer(body, &self._answers[self._answer_count], PyBUF_SIMPLE)
            nbytes += self._answers[self._answer_count].len
            offsets += min(max(after - first, 0), INT32_MAX)
            self._answer_count += 1
        self._most = most
        # Room for all messages of a plain read.
        self._message_memory = Memory(min(offsets, nbytes // SMALLEST_RECORD), sizeof(Message))
        self._messages = <Message *>self._message_memory.items
        for pull, (start, end) in enumerate(zip(starts, ends)):
            with nogil:
                self._add_answer(&self._answers[pull], pull, start, end)

    def __dealloc__(self):
        cdef Py_ssize_t answer
        for answer in range(self._answer_count):
            PyBuffer_Release(&self._answers[answer])
        free(self._answers)

    def __len__(self):
        return self._count

    cdef int _add_answer(self, const Py_buffer *answer, int32_t pull, int64_t start, int64_t end) except -1 nogil:
        cdef Cursor left
        cdef Message message
        if answer.len > INT32_MAX:
            refuse()
        left.at = <const uint8_t *>answer.buf
        left.end = left.at + answer.len
        message.pull = pull
        while left.at != left.end:
            read_record(&left, &message)
            if message.sys_flag & INNER_BATCH == INNER_BATCH:
                self._add_items(&message, start, end)
            else:
                if message.sys_flag & COUNTED_BY_SENDER and offsets_of(&message) != 1:
                    refuse()
                self._add(&message, start, end)
        return 0

    cdef int _add_items(self, const Message *batch, int64_t start, int64_t end) except -1 nogil:
        cdef Cursor left = inside(&batch.body)
        cdef Message item = batch[0]
        cdef int count = 0
        if batch.sys_flag & COMPRESSED or batch.queue_offset > INT64_MAX - MOST_ITEMS:
            refuse()
        while left.at != left.end:
            if count == MOST_ITEMS:
                refuse()
            read_item(&left, &item)
            self._add(&item, start, end)
            item.queue_offset += 1
            count += 1
        if count != offsets_of(batch):
            refuse()
        return 0

    cdef inline int _add(self, const Message *message, int64_t start, int64_t end) except -1 nogil:
        if not start <= message.queue_offset < end or self._count > self._most:
            return 0
        if self._count == self._message_memory.capacity:
            self._message_memory.double()
            self._messages = <Message *>self._message_memory.items
        self._messages[self._count] = message[0]
        self._count += 1
        return 0

    def pulls(self):
        return self._ints(PULL)

    def queue_offsets(self):
        cdef Py_ssize_t row
        values = empty(self._count, np.int64)
        cdef int64_t[::1] out = values
        with nogil:
            for row in range(self._count):
                out[row] = self._messages[row].queue_offset
        return to_arrow(values)

    def flags(self):
        return self._ints(FLAG)

    def sys_flags(self):
        return self._ints(SYS_FLAG)

    def reconsume_times(self):
        return self._ints(RECONSUME_TIMES)

    def born_times(self):
        return self._times(BORN_TIME)

    def store_times(self):
        return self._times(STORE_TIME)

    cdef object _ints(self, Number number):
        cdef Py_ssize_t row
        values = empty(self._count, np.int32)
        cdef int32_t[::1] out = values
        with nogil:
            for row in range(self._count):
                out[row] = <int32_t>number_of(&self._messages[row], number)
        return to_arrow(values)

    cdef object _times(self, Number number):
        cdef Py_ssize_t row
        cdef int64_t time
        values = empty(self._count, np.int64)
        cdef int64_t[::1] out = values
        with nogil:
            for row in range(self._count):
                time = number_of(&self._messages[row], number)
                if not -MOST_MS <= time <= MOST_MS:
                    refuse()
                out[row] = time * PER_MS
        return to_arrow(values)

    def born_hosts(self):
        # One element for each run of messages with the same host.
        cdef Spans hosts = Spans(self._count)
        cdef Py_ssize_t row
        cdef Span host
        cdef int32_t last = -1
        runs = empty(self._count, np.int32)
        cdef int32_t[::1] out = runs
        with nogil:
            for row in range(self._count):
                host.at = self._messages[row].born_host
                host.size = born_host_size(&self._messages[row])
                if last < 0 or not equal(host, hosts.items[last]):
                    last += 1
                    hosts.items[last] = host
                out[row] = last
        hosts.count = last + 1
        return host_texts(hosts.copied()).take(to_arrow(runs))

    def offset_ids(self):
        cdef Py_ssize_t row
        cdef int64_t total = 0
        cdef int size
        offsets = empty(self._count + 1, np.int32)
        cdef int32_t[::1] ends = offsets
        with nogil:
            ends[0] = 0
            for row in range(self._count):
                total += 2 * (store_host_size(&self._messages[row]) + 8)
                if total > INT32_MAX:
                    refuse()
                ends[row + 1] = <int32_t>total
        content = empty(total, np.uint8)
        cdef uint8_t[::1] data = content
        with nogil:
            for row in range(self._count):
                size = store_host_size(&self._messages[row]) + 8
                write_hex(room(data, ends[row], 2 * size), self._messages[row].offset_id, size)
        return ByteColumn(offsets, content).to_arrow().view(pa.string())

    def bodies(self):
        cdef Spans bodies = Spans(self._count)
        cdef Py_ssize_t row
        with nogil:
            for row in range(self._count):
                bodies.items[row] = self._messages[row].body
        return bodies.copied()

    def values(self, str name not None):
        cdef bytes encoded = name.encode()
        cdef Spans values = Spans(self._count)
        cdef Py_ssize_t row
        cdef Span wanted
        self.split()
        cdef const int32_t[::1] offsets = self._entry_offsets
        wanted.at = <const uint8_t *><const char *>encoded
        wanted.size = <int32_t>len(encoded)
        with nogil:
            for row in range(self._count):
                values.items[row] = self._value_in(&self._messages[row], offsets[row], offsets[row + 1], wanted)
        return values.copied().view(pa.string())

    cdef inline Span _value_in(self, const Message *message, int32_t first, int32_t end, Span name) noexcept nogil:
        """Return the value of a message's property, null if it is missing."""
        cdef int32_t place
        cdef Span missing
        for place in range(first, end):
            if equal(name_of(message, &self._entries[place]), name):
                return value_of(message, &self._entries[place])
        missing.at = NULL
        missing.size = 0
        return missing

    def maps(self, kind):
        self.split()
        cdef Spans names = Spans(self._entry_count)
        cdef Spans values = Spans(self._entry_count)
        cdef const int32_t[::1] offsets = self._entry_offsets
        cdef Py_ssize_t row
        cdef int32_t place
        with nogil:
            for row in range(self._count):
                for place in range(offsets[row], offsets[row + 1]):
                    names.items[place] = name_of(&self._messages[row], &self._entries[place])
                    values.items[place] = value_of(&self._messages[row], &self._entries[place])
        columns = [names.copied().view(pa.string()), values.copied().view(pa.string())]
        entries = pa.StructArray.from_arrays(columns, fields=[kind.key_field, kind.item_field])
        return pa.Array.from_buffers(
            kind, self._count, [None, pa.py_buffer(self._entry_offsets)], children=[entries]
        )

    def split(self):
        cdef Py_ssize_t row
        if self._entry_offsets is not None:
            return
        ends = np.zeros(self._count + 1, np.int32)
        cdef int32_t[::1] out = ends
        self._entry_memory = Memory(4 * self._count, sizeof(Entry))
        self._entries = <Entry *>self._entry_memory.items
        self._entry_count = 0
        with nogil:
            for row in range(self._count):
                self._add_entries(&self._messages[row], out[max(row - 1, 0)], row)
                out[row + 1] = <int32_t>self._entry_count
        self._entry_offsets = ends

    cdef int _add_entries(self, const Message *message, Py_ssize_t previous, Py_ssize_t row) except -1 nogil:
        """Parse a property string; `previous` is the first entry of the message before."""
        cdef Cursor left = inside(&message.properties)
        cdef Py_ssize_t first = self._entry_count
        if not is_utf8(message.properties.at, message.properties.size):
            refuse()
        while True:
            if self._entry_count == self._entry_memory.capacity:
                self._entry_memory.double()
                self._entries = <Entry *>self._entry_memory.items
            if not next_entry(&left, message.properties.at, &self._entries[self._entry_count]):
                break
            self._entry_count += 1
        if self._entry_count > INT32_MAX:
            refuse()
        if row and self._names_as_before(message, previous, first):
            return 0
        return self._refuse_repeats(message, first)

    cdef inline bint _names_as_before(
        self, const Message *message, Py_ssize_t previous, Py_ssize_t first
    ) noexcept nogil:
        """Return whether a message has the names of the message before it: then they differ from each other."""
        cdef Py_ssize_t count = first - previous, place
        cdef const Message *before = message - 1
        if self._entry_count - first != count:
            return False
        for place in range(count):
            if not equal(
                name_of(before, &self._entries[previous + place]), name_of(message, &self._entries[first + place])
            ):
                return False
        return True

    cdef int _refuse_repeats(self, const Message *message, Py_ssize_t first) except -1 nogil:
        cdef Py_ssize_t one, other
        if self._entry_count - first > MOST_ENTRIES:
            refuse()
        for one in range(first, self._entry_count):
            for other in range(first, one):
                if equal(name_of(message, &self._entries[one]), name_of(message, &self._entries[other])):
                    refuse()
        return 0


def has_each_offset(const uint8_t[::1] body not None, int64_t start, int64_t end):
    """Return what `rocketmq_spark.protocol.remoting.records.has_each_offset` does."""
    cdef Cursor left
    left.at = &body[0] if body.shape[0] else NULL
    left.end = left.at + body.shape[0]
    try:
        with nogil:
            while left.at != left.end:
                if start >= end or read_offset(&left) != start:
                    refuse()
                start += 1
    except Irregular:
        return False
    return start == end


def crc32(const uint8_t[::1] data not None, *, bint by_table=False):
    """Return the CRC-32 of bytes, with `by_table` as on a processor without carry-less multiplication; for tests."""
    cdef const uint8_t *start = &data[0] if data.shape[0] else NULL
    if by_table:
        return crc32_by_table(0xFFFFFFFF, start, data.shape[0]) ^ 0xFFFFFFFF
    return crc32_of(start, data.shape[0])
