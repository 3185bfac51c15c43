# Part of `_records.pyx`: what writes the buffers of columns.
#
# `_records.pyx` says which writes are checked, and how.

cdef inline uint8_t *room(uint8_t[::1] data, int64_t at, int64_t size) except NULL nogil:
    """Return where `size` bytes from `at` on can be written; there is at least one."""
    if size < 1 or at < 0 or size > data.shape[0] - at:
        with gil:
            raise IndexError(f"{size} bytes at {at} of {data.shape[0]}")
    return &data[at]


cdef object empty(int64_t count, dtype):
    """Return an array in memory of Arrow's pool, whose pages stay in the process when the memory is free again.

    `malloc` returns much memory to the system. Each page of new memory then costs a page fault.
    """
    return np.ndarray(count, dtype, pa.allocate_buffer(count * np.dtype(dtype).itemsize))


cdef class Memory:
    """Room for `capacity` items, in Arrow's pool; `double` may move them."""

    cdef object buffer
    cdef void *items
    cdef int64_t capacity
    cdef int64_t item_size

    def __cinit__(self, int64_t capacity, int64_t item_size):
        self.item_size = item_size
        self.capacity = max(capacity, 1)
        self.buffer = pa.allocate_buffer(self.capacity * item_size, resizable=True)
        self.items = <void *><uintptr_t>self.buffer.address

    cdef int double(self) except -1 with gil:
        self.buffer.resize(2 * self.capacity * self.item_size)
        self.capacity *= 2
        self.items = <void *><uintptr_t>self.buffer.address
        return 0


cdef class Spans:
    """Where the values of one column are."""

    cdef Memory memory
    cdef Span *items
    cdef Py_ssize_t count

    def __cinit__(self, Py_ssize_t count):
        self.memory = Memory(count, sizeof(Span))
        self.items = <Span *>self.memory.items
        self.count = count

    cdef object copied(self):
        """Return a binary array of the values."""
        cdef Py_ssize_t row
        cdef int64_t total = 0
        cdef Py_ssize_t nulls = 0
        cdef Span span
        offsets = empty(self.count + 1, np.int32)
        cdef int32_t[::1] ends = offsets
        with nogil:
            ends[0] = 0
            for row in range(self.count):
                nulls += self.items[row].at == NULL
                total += self.items[row].size
                if total > INT32_MAX:
                    refuse()
                ends[row + 1] = <int32_t>total
        content = empty(total, np.uint8)
        cdef uint8_t[::1] data = content
        with nogil:
            for row in range(self.count):
                span = self.items[row]
                if span.size:
                    copy_bytes(room(data, ends[row], span.size), span.at, span.size)
        return ByteColumn(offsets, content, self._valid() if nulls else None).to_arrow()

    cdef object _valid(self):
        cdef Py_ssize_t row
        valid = empty(self.count, np.bool_)
        cdef uint8_t[::1] out = valid.view(np.uint8)
        with nogil:
            for row in range(self.count):
                out[row] = self.items[row].at != NULL
        return valid


cdef enum Number:
    PULL
    FLAG
    SYS_FLAG
    RECONSUME_TIMES
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
    if number == BORN_TIME:
        return message.born_time
    return message.store_time
