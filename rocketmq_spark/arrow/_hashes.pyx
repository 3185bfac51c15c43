# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=False, show_performance_hints=False
"""Hashes the strings of whole columns, with the results of `rocketmq_spark.arrow.numpy_hashes`, which defines the hashes.

A string ``head + value + tail`` is copied, piece by piece, into an array of words of 8 bytes, and padded with zeros. The
borders of values come from Arrow arrays of users. They are compared with the size of the data before they are used.
Loops run without the GIL.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from rocketmq_spark.model.hashes import STEP as _STEP

cdef extern from "_bytes.h":
    void copy_bytes(uint8_t *to, const uint8_t *from_, size_t size) noexcept nogil

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "words of 8 bytes are read as little-endian numbers: on this platform the package uses numpy"
    #endif
    """

cdef enum:
    LANES = 2
    WORDS = 2048  # Of a piece
    PIECE = 16384  # Bytes
    LENGTH_KEY = WORDS + 1
    NUMBER_KEY = LENGTH_KEY + LANES
    KEYS = NUMBER_KEY + LANES

cdef uint64_t STEP = _STEP


cdef struct Bytes:
    const uint8_t *at
    int64_t size


cdef struct Text:
    Bytes head
    Bytes value
    Bytes tail


cdef class Column:
    """One column of strings; a row is a `Text`."""

    cdef object strings  # Owns the bytes of `head` and `tail`
    cdef Bytes head
    cdef Bytes tail
    cdef const uint8_t[::1] data
    cdef const int64_t[::1] offsets
    cdef const uint8_t[::1] valid  # None: no row is null
    cdef Py_ssize_t rows

    def __cinit__(self, strings, rows):
        values = strings.values
        if len(values) != rows:
            raise ValueError(f"a column of {len(values)} rows beside one of {rows}")
        self.strings = strings
        self.head, self.tail = bytes_of(strings.head), bytes_of(strings.tail)
        self.data = np.ascontiguousarray(values.data)
        self.offsets = np.ascontiguousarray(values.offsets, np.int64)
        self.valid = None if values.valid is None else np.ascontiguousarray(values.valid).view(np.uint8)
        self.rows = len(values)

    cdef bint text_at(self, Py_ssize_t row, Text *text) except -1 nogil:
        """Return whether a row is not null, and fill its text."""
        cdef int64_t start = self.offsets[row], end = self.offsets[row + 1]
        if self.valid is not None and not self.valid[row]:
            return False
        if not 0 <= start <= end <= self.data.shape[0]:
            with gil:
                raise ValueError(f"a string from {start} to {end} in {self.data.shape[0]} bytes")
        text.head, text.tail = self.head, self.tail
        text.value.at = &self.data[start] if start < end else NULL
        text.value.size = end - start
        return True


cdef Bytes bytes_of(bytes data):
    cdef Bytes found
    found.at = <const uint8_t *><const char *>data
    found.size = len(data)
    return found


cdef int64_t size_of(const Text *text) noexcept nogil:
    return text.head.size + text.value.size + text.tail.size


cdef void copy_part(uint8_t *piece, int64_t first, int64_t *at, Bytes part) noexcept nogil:
    """Copy the bytes of a part that lie in the piece of its string from place `first` on; the part begins at `at`."""
    cdef int64_t start = max(first, at[0]), end = min(first + PIECE, at[0] + part.size)
    if start < end:
        memcpy(piece + (start - first), part.at + (start - at[0]), end - start)
    at[0] += part.size


cdef int64_t fill_piece(uint64_t *words, const Text *text, int64_t first) noexcept nogil:
    """Copy the piece of a string that begins at place `first`, and return how many words it has."""
    cdef uint8_t *piece = <uint8_t *>words
    cdef int64_t at = 0
    cdef int64_t count = (min(size_of(text) - first, PIECE) + 7) // 8
    words[count - 1] = 0
    if size_of(text) <= PIECE:
        copy_bytes(piece, text.head.at, text.head.size)
        copy_bytes(piece + text.head.size, text.value.at, text.value.size)
        copy_bytes(piece + text.head.size + text.value.size, text.tail.at, text.tail.size)
        return count
    copy_part(piece, first, &at, text.head)
    copy_part(piece, first, &at, text.value)
    copy_part(piece, first, &at, text.tail)
    return count


cdef inline uint64_t mixed(uint64_t word) noexcept nogil:
    word = (word ^ word >> 30) * <uint64_t>0xBF58476D1CE4E5B9
    word = (word ^ word >> 27) * <uint64_t>0x94D049BB133111EB
    return word ^ word >> 31


cdef uint64_t row_hash(const Text *text, uint64_t seed) noexcept nogil:
    cdef uint64_t words[WORDS]
    cdef uint64_t step = 0, total = 0
    cdef int64_t first = 0, count, place
    while first < size_of(text):
        count = fill_piece(words, text, first)
        for place in range(count):
            step += STEP
            total += mixed((words[place] + step) ^ seed)
        first += PIECE
    return mixed(total + <uint64_t>size_of(text))


cdef uint64_t products(const uint64_t *words, const uint64_t *keys, int64_t count) noexcept nogil:
    """Return NH of words: the sum of the products of both halves, each plus the half of the word's key."""
    cdef uint64_t total = 0
    cdef uint32_t low, high
    cdef int64_t place
    for place in range(count):
        low = <uint32_t>words[place] + <uint32_t>keys[place]
        high = <uint32_t>(words[place] >> 32) + <uint32_t>(keys[place] >> 32)
        total += <uint64_t>low * high
    return total


cdef void add_nh(const Text *text, const uint64_t *keys, uint64_t *sums) noexcept nogil:
    """Add the hash of a string to the sums of both lanes."""
    cdef uint64_t words[WORDS]
    cdef uint64_t number = 0, before, total
    cdef int64_t first = 0, count
    cdef int lane
    while first < size_of(text):
        count = fill_piece(words, text, first)
        before = 0
        for lane in range(LANES):
            total = products(words, keys + lane, count)
            total += <uint64_t>size_of(text) * keys[LENGTH_KEY + lane] + number * keys[NUMBER_KEY + lane]
            # So rows collide only if both lanes do.
            before = mixed(total ^ before)
            sums[lane] += before
        number += 1
        first += PIECE


def hash_sums(columns, workspace, seeds):
    """Return, for each of `seeds`, the sum of the hashes of each row's strings; a null string adds 0."""
    cdef Column column
    cdef Text text
    cdef Py_ssize_t row
    cdef int lane
    cdef uint64_t seed
    result = np.zeros((len(seeds), len(columns[0].values)), np.uint64)
    cdef uint64_t[:, ::1] sums = result
    for strings in columns:
        column = Column(strings, result.shape[1])
        for lane, seed in enumerate(seeds):
            with nogil:
                for row in range(column.rows):
                    if column.text_at(row, &text):
                        sums[lane, row] += row_hash(&text, seed)
    return result


def nh_sums(columns, workspace, const uint64_t[::1] keys not None):
    """Return, for both lanes, the sum of the hashes of the contents of each row's strings; a null string adds 0."""
    cdef Column column
    cdef Text text
    cdef Py_ssize_t row
    cdef uint64_t of_lanes[LANES]
    if keys.shape[0] != KEYS:
        raise ValueError(f"{keys.shape[0]} keys, {KEYS} are needed")
    result = np.zeros((LANES, len(columns[0].values)), np.uint64)
    cdef uint64_t[:, ::1] sums = result
    for strings in columns:
        column = Column(strings, result.shape[1])
        with nogil:
            for row in range(column.rows):
                if column.text_at(row, &text):
                    of_lanes[0] = of_lanes[1] = 0
                    add_nh(&text, &keys[0], of_lanes)
                    sums[0, row] += of_lanes[0]
                    sums[1, row] += of_lanes[1]
    return result
