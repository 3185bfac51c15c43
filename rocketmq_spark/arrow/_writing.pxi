# Part of `_records.pyx`: what writes the buffers of columns.
#
# Only `room` returns where bytes of a result may be written. All other writes are checked by the bounds of arrays.

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
