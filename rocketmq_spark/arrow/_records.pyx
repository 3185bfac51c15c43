# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, show_performance_hints=False
"""Reads the messages of pulls to Arrow arrays (`CompiledMessages`), with the results of `NumpyMessages`.

The constructor walks through the records of each answer once (docs/internals/messages.md#stored-record). It checks
every record, and keeps a `Message` for each message: its numbers, and where its body and its properties are. A method
then fills the buffers of one column from these. Property strings are parsed at the first column that needs them. For
each of them, `_entries` has where its names and values are.

Senders and brokers choose the bytes of an answer. So these rules hold:

* Only `take` moves through an answer. It compares each size with what is left, and refuses a size that does not fit. All
  other functions read only bytes that it returned.
* A size is read once. `Message` and `Entry` keep the checked value, so bytes that change later cannot move a border.
* Only `room` returns where bytes of a result may be written. All other writes are checked by the bounds of arrays.
* What is malformed or rare raises Irregular, and `decode_rows` reads it: unreadable messages, inner batches that are
  compressed, repeated properties, more than 64 properties, columns of more than 2 GiB.

Loops run without the GIL. An object is for one thread.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memchr

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, to_arrow
from rocketmq_spark.arrow.messages import Irregular, host_texts
from rocketmq_spark.arrow.read_columns import LAST_TIME, US_PER_MS

cdef extern from "_bytes.h":
    uint32_t big_endian_32(const uint8_t *data) noexcept nogil
    uint64_t big_endian_64(const uint8_t *data) noexcept nogil
    void copy_bytes(uint8_t *to, const uint8_t *from_, size_t size) noexcept nogil
    bint equal_bytes(const uint8_t *one, const uint8_t *other, size_t size) noexcept nogil
    void write_hex(uint8_t *out, const uint8_t *data, size_t size) noexcept nogil
    void crc32_prepare() noexcept nogil
    uint32_t crc32_by_table(uint32_t crc, const uint8_t *data, size_t size) noexcept nogil
    uint32_t crc32_of(const uint8_t *data, size_t size) noexcept nogil
    bint is_utf8(const uint8_t *data, size_t size) noexcept nogil

crc32_prepare()

# The head of a record up to the time of birth, and the places of its fields.
cdef enum:
    HEAD_SIZE = 48
    MAGIC_AT = 4
    CRC_AT = 8
    FLAG_AT = 16
    QUEUE_OFFSET_AT = 20
    PHYSICAL_OFFSET_AT = 28
    SYS_FLAG_AT = 36
    BORN_TIME_AT = 40
    # After the hosts: reconsume times, prepared transaction offset, body length.
    TAIL_SIZE = 16
    BODY_LENGTH_AT = 12
    # The head of an item of an inner batch.
    ITEM_HEAD_SIZE = 20
    ITEM_FLAG_AT = 12
    ITEM_BODY_LENGTH_AT = 16
    # Two hosts of 8 bytes; empty body, topic and properties.
    SMALLEST_RECORD = 91

cdef enum:
    BORN_HOST_V6 = 0x10
    STORE_HOST_V6 = 0x20
    INNER_BATCH = 0xC0
    COMPRESSED = 0x1
    MOST_ITEMS = 65_535
    MOST_ENTRIES = 64  # Of one message, because each name is compared with all others
    NAME_END = 1
    VALUE_END = 2

cdef uint32_t MAGIC_V1 = 0xDAA320A7
cdef uint32_t MAGIC_V2 = 0xDAA320AB
cdef uint32_t CRC_MASK = 0x7FFFFFFF
cdef int64_t MOST_MS = LAST_TIME
cdef int64_t PER_MS = US_PER_MS


cdef struct Cursor:
    const uint8_t *at
    const uint8_t *end


cdef struct Span:
    const uint8_t *at  # NULL: null
    int32_t size


cdef struct Message:
    Span body
    Span properties
    # Copies, because the methods would read the whole answer again for them.
    uint8_t born_host[20]  # 8 bytes of an IPv4 host, 20 of an IPv6 host
    uint8_t offset_id[28]  # Store host and physical offset
    int64_t queue_offset
    int64_t born_time
    int64_t store_time
    int32_t pull
    int32_t flag
    int32_t sys_flag
    int32_t reconsume_times


cdef struct Entry:
    # Of a property string, which has at most 32,767 bytes.
    uint16_t name_at
    uint16_t name_size
    uint16_t value_at
    uint16_t value_size


# What reads the bytes of answers.


cdef int refuse() except -1 with gil:
    raise Irregular


cdef inline const uint8_t *take(Cursor *left, int64_t size) except NULL nogil:
    """Return where the next `size` bytes are, and move behind them; refuse a size that is negative or too large."""
    cdef const uint8_t *taken = left.at
    if size < 0 or size > left.end - left.at:
        refuse()
    left.at += size
    return taken


cdef inline int take_span(Cursor *left, int64_t size, Span *span) except -1 nogil:
    span.at = take(left, size)
    span.size = <int32_t>size  # No answer is larger
    return 0


cdef inline int take_sized(Cursor *left, int width, Span *span) except -1 nogil:
    """Take a size of one or two bytes, signed as in Java, and then as many bytes."""
    cdef const uint8_t *prefix = take(left, width)
    cdef int size = prefix[0] if width == 1 else prefix[0] << 8 | prefix[1]
    if size >> (8 * width - 1):
        refuse()
    return take_span(left, size, span)


cdef inline Cursor inside(const Span *span) noexcept nogil:
    cdef Cursor left
    left.at = span.at
    left.end = span.at + span.size
    return left


cdef inline int born_host_size(const Message *message) noexcept nogil:
    return 20 if message.sys_flag & BORN_HOST_V6 else 8


cdef inline int store_host_size(const Message *message) noexcept nogil:
    return 20 if message.sys_flag & STORE_HOST_V6 else 8


cdef int read_record(Cursor *answer, Message *message) except -1 nogil:
    """Take one record, and check all of it but its properties."""
    cdef Cursor ahead = answer[0]
    cdef Span whole, topic
    take_span(answer, <int32_t>big_endian_32(take(&ahead, 4)), &whole)
    cdef Cursor left = inside(&whole)
    cdef const uint8_t *head = take(&left, HEAD_SIZE)
    cdef uint32_t magic = big_endian_32(head + MAGIC_AT)
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        refuse()
    message.sys_flag = <int32_t>big_endian_32(head + SYS_FLAG_AT)
    message.flag = <int32_t>big_endian_32(head + FLAG_AT)
    message.queue_offset = <int64_t>big_endian_64(head + QUEUE_OFFSET_AT)
    message.born_time = <int64_t>big_endian_64(head + BORN_TIME_AT)
    copy_bytes(message.born_host, take(&left, born_host_size(message)), born_host_size(message))
    message.store_time = <int64_t>big_endian_64(take(&left, 8))
    copy_bytes(message.offset_id, take(&left, store_host_size(message)), store_host_size(message))
    copy_bytes(message.offset_id + store_host_size(message), head + PHYSICAL_OFFSET_AT, 8)
    cdef const uint8_t *tail = take(&left, TAIL_SIZE)
    message.reconsume_times = <int32_t>big_endian_32(tail)
    take_span(&left, <int32_t>big_endian_32(tail + BODY_LENGTH_AT), &message.body)
    take_sized(&left, 1 if magic == MAGIC_V1 else 2, &topic)
    take_sized(&left, 2, &message.properties)
    if left.at != left.end or not is_utf8(topic.at, topic.size):
        refuse()
    if crc32_of(message.body.at, message.body.size) & CRC_MASK != big_endian_32(head + CRC_AT):
        refuse()
    return 0


cdef int read_item(Cursor *batch, Message *message) except -1 nogil:
    """Take one item of an inner batch; as in brokers, its size, magic and checksum do not count."""
    cdef const uint8_t *head = take(batch, ITEM_HEAD_SIZE)
    message.flag = <int32_t>big_endian_32(head + ITEM_FLAG_AT)
    take_span(batch, <int32_t>big_endian_32(head + ITEM_BODY_LENGTH_AT), &message.body)
    return take_sized(batch, 2, &message.properties)


cdef bint next_entry(Cursor *left, const uint8_t *start, Entry *entry) except -1 nogil:
    """Take the next entry of the property string at `start`, and return whether there was one.

    As in clients, entries without a name or a value do not count. An entry without a separator is refused.
    """
    cdef const uint8_t *at
    cdef const uint8_t *name_end
    cdef const uint8_t *end
    while left.at != left.end:
        at = left.at
        end = <const uint8_t *>memchr(at, VALUE_END, left.end - at)
        if end == NULL:
            end = left.end
            take(left, end - at)
        else:
            take(left, end + 1 - at)
        if end == at:
            continue
        name_end = <const uint8_t *>memchr(at, NAME_END, end - at)
        if name_end == NULL:
            refuse()
        if name_end == at or name_end + 1 == end:
            continue
        entry.name_at = <uint16_t>(at - start)
        entry.name_size = <uint16_t>(name_end - at)
        entry.value_at = <uint16_t>(name_end + 1 - start)
        entry.value_size = <uint16_t>(end - name_end - 1)
        return True
    return False


cdef inline Span name_of(const Message *message, const Entry *entry) noexcept nogil:
    cdef Span name
    name.at = message.properties.at + entry.name_at
    name.size = entry.name_size
    return name


cdef inline Span value_of(const Message *message, const Entry *entry) noexcept nogil:
    cdef Span value
    value.at = message.properties.at + entry.value_at
    value.size = entry.value_size
    return value


cdef inline bint equal(Span one, Span other) noexcept nogil:
    return one.size == other.size and equal_bytes(one.at, other.at, one.size)


cdef int claimed_items(const Message *batch) except -1 nogil:
    """Return how many offsets a broker gave an inner batch: its property INNER_NUM, which a sender may forge."""
    cdef Span inner_num, value
    cdef Entry entry
    cdef Cursor left = inside(&batch.properties)
    cdef int claimed = 1, number, digit
    inner_num.at = <const uint8_t *>b"INNER_NUM"
    inner_num.size = 9
    while next_entry(&left, batch.properties.at, &entry):
        value = value_of(batch, &entry)
        if not equal(name_of(batch, &entry), inner_num) or value.size > 5:
            continue
        number = 0
        for digit in range(value.size):
            if not c'0' <= value.at[digit] <= c'9':
                number = 0
                break
            number = 10 * number + value.at[digit] - c'0'
        claimed = max(claimed, number)
    return claimed


# What writes results.


cdef inline uint8_t *room(uint8_t[::1] data, int64_t at, int64_t size) except? NULL nogil:
    """Return where `size` bytes from `at` on can be written."""
    if size < 0 or at < 0 or size > data.shape[0] - at:
        with gil:
            raise IndexError(f"{size} bytes at {at} of {data.shape[0]}")
    return &data[at] if size else NULL


cdef class Spans:
    """Where the values of one column are."""

    cdef Span *items
    cdef Py_ssize_t count

    def __cinit__(self, Py_ssize_t count):
        self.items = <Span *>malloc(max(count, 1) * sizeof(Span))
        self.count = count
        if self.items == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.items)

    cdef object copied(self):
        """Return a binary array of the values."""
        cdef Py_ssize_t row
        cdef int64_t total = 0
        cdef Py_ssize_t nulls = 0
        cdef Span span
        offsets = np.empty(self.count + 1, np.int32)
        cdef int32_t[::1] ends = offsets
        with nogil:
            ends[0] = 0
            for row in range(self.count):
                nulls += self.items[row].at == NULL
                total += self.items[row].size
                if total > INT32_MAX:
                    refuse()
                ends[row + 1] = <int32_t>total
        content = np.empty(total, np.uint8)
        cdef uint8_t[::1] data = content
        with nogil:
            for row in range(self.count):
                span = self.items[row]
                if span.size:
                    copy_bytes(room(data, ends[row], span.size), span.at, span.size)
        return ByteColumn(offsets, content, self._valid() if nulls else None).to_arrow()

    cdef object _valid(self):
        cdef Py_ssize_t row
        valid = np.empty(self.count, np.bool_)
        cdef uint8_t[::1] out = valid.view(np.uint8)
        with nogil:
            for row in range(self.count):
                out[row] = self.items[row].at != NULL
        return valid


cdef void *grown(void *items, Py_ssize_t *capacity, size_t item_size) except NULL nogil:
    """Return the items in memory for `capacity` of them, or a few more."""
    capacity[0] = max(capacity[0], 256)
    cdef void *moved = realloc(items, capacity[0] * item_size)
    if moved == NULL:
        with gil:
            raise MemoryError
    return moved


cdef enum Number:
    PULL
    FLAG
    SYS_FLAG
    RECONSUME_TIMES
    QUEUE_OFFSET
    BORN_TIME
    STORE_TIME


cdef inline int64_t number_of(const Message *message, Number number) noexcept nogil:
    if number == PULL:
        return message.pull
    if number == FLAG:
        return message.flag
    if number == SYS_FLAG:
        return message.sys_flag
    if number == RECONSUME_TIMES:
        return message.reconsume_times
    if number == QUEUE_OFFSET:
        return message.queue_offset
    if number == BORN_TIME:
        return message.born_time
    return message.store_time


cdef class CompiledMessages:
    """Implements `Messages`."""

    cdef Py_buffer *_answers
    cdef Py_ssize_t _answer_count
    cdef Message *_messages
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity
    cdef Entry *_entries
    cdef Py_ssize_t _entry_count
    cdef Py_ssize_t _entry_capacity
    cdef object _entry_offsets  # Message k owns the entries from `_entry_offsets[k]` up to `_entry_offsets[k + 1]`

    def __cinit__(self, bodies, starts, ends):
        cdef int64_t start, end, offsets = 0, nbytes = 0
        cdef int32_t pull
        self._answers = <Py_buffer *>malloc(max(len(bodies), 1) * sizeof(Py_buffer))
        if self._answers == NULL:
            raise MemoryError
        for body, first, after in zip(bodies, starts, ends, strict=True):
            PyObject_GetBuffer(body, &self._answers[self._answer_count], PyBUF_SIMPLE)
            nbytes += self._answers[self._answer_count].len
            offsets += min(max(after - first, 0), INT32_MAX)
            self._answer_count += 1
        # Room for all messages of a plain read.
        self._capacity = min(offsets, nbytes // SMALLEST_RECORD)
        self._messages = <Message *>grown(NULL, &self._capacity, sizeof(Message))
        for pull, (start, end) in enumerate(zip(starts, ends)):
            with nogil:
                self._add_answer(&self._answers[pull], pull, start, end)

    def __dealloc__(self):
        cdef Py_ssize_t answer
        for answer in range(self._answer_count):
            PyBuffer_Release(&self._answers[answer])
        free(self._answers)
        free(self._messages)
        free(self._entries)

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
        if count < claimed_items(batch):
            refuse()
        return 0

    cdef inline int _add(self, const Message *message, int64_t start, int64_t end) except -1 nogil:
        if not start <= message.queue_offset < end:
            return 0
        if self._count == self._capacity:
            self._capacity *= 2
            self._messages = <Message *>grown(self._messages, &self._capacity, sizeof(Message))
        self._messages[self._count] = message[0]
        self._count += 1
        return 0

    def pulls(self):
        return self._ints(PULL)

    def queue_offsets(self):
        return self._longs(QUEUE_OFFSET)

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
        values = np.empty(self._count, np.int32)
        cdef int32_t[::1] out = values
        with nogil:
            for row in range(self._count):
                out[row] = <int32_t>number_of(&self._messages[row], number)
        return to_arrow(values)

    cdef object _longs(self, Number number):
        cdef Py_ssize_t row
        values = np.empty(self._count, np.int64)
        cdef int64_t[::1] out = values
        with nogil:
            for row in range(self._count):
                out[row] = number_of(&self._messages[row], number)
        return to_arrow(values)

    cdef object _times(self, Number number):
        cdef Py_ssize_t row
        cdef int64_t time
        values = np.empty(self._count, np.int64)
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
        runs = np.empty(self._count, np.int32)
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
        offsets = np.empty(self._count + 1, np.int32)
        cdef int32_t[::1] ends = offsets
        with nogil:
            ends[0] = 0
            for row in range(self._count):
                total += 2 * (store_host_size(&self._messages[row]) + 8)
                if total > INT32_MAX:
                    refuse()
                ends[row + 1] = <int32_t>total
        content = np.empty(total, np.uint8)
        cdef uint8_t[::1] data = content
        with nogil:
            for row in range(self._count):
                size = store_host_size(&self._messages[row]) + 8
                write_hex(room(data, ends[row], 2 * size), self._messages[row].offset_id, size)
        return ByteColumn(offsets, content).to_arrow().view(pa.string())

    def bodies(self):
        cdef Spans bodies = Spans(self._count)
        cdef Py_ssize_t row
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
        """Return the value of a message's property."""
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
            if self._entry_count == self._entry_capacity:
                self._entry_capacity *= 2
                self._entries = <Entry *>grown(self._entries, &self._entry_capacity, sizeof(Entry))
            if not next_entry(&left, message.properties.at, &self._entries[self._entry_count]):
                break
            self._entry_count += 1
        if row and self._names_as_before(message, previous, first):
            return 0
        return self._refuse_repeats(message, first)

    cdef inline bint _names_as_before(self, const Message *message, Py_ssize_t previous, Py_ssize_t first) noexcept nogil:
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


def crc32(const uint8_t[::1] data not None, *, bint by_table=False):
    """Return the CRC-32 of bytes, with `by_table` as on a processor without carry-less multiplication; for tests."""
    cdef const uint8_t *start = &data[0] if data.shape[0] else NULL
    if by_table:
        return crc32_by_table(0xFFFFFFFF, start, data.shape[0]) ^ 0xFFFFFFFF
    return crc32_of(start, data.shape[0])
