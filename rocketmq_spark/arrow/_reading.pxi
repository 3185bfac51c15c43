# Part of `_records.pyx`: what reads the bytes of answers.
#
# `_records.pyx` says which rules hold here.

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
    COUNTED_BY_SENDER = 0x80
    COMPRESSED = 0x1
    MOST_ITEMS = 32_767  # A broker counts the offsets of a batch in 16 bits, with a sign
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


cdef int64_t read_offset(Cursor *answer) except? -1 nogil:
    """Take one record that holds one message, check its size and its magic, and return its offset in the queue."""
    cdef Cursor ahead = answer[0]
    cdef Span whole
    take_span(answer, <int32_t>big_endian_32(take(&ahead, 4)), &whole)
    cdef Cursor left = inside(&whole)
    cdef const uint8_t *head = take(&left, BORN_TIME_AT)
    cdef uint32_t magic = big_endian_32(head + MAGIC_AT)
    if (magic != MAGIC_V1 and magic != MAGIC_V2) or big_endian_32(head + SYS_FLAG_AT) & COUNTED_BY_SENDER:
        refuse()
    return <int64_t>big_endian_64(head + QUEUE_OFFSET_AT)


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


cdef int offsets_of(const Message *message) except -1 nogil:
    """Return how many offsets a broker gave a record: its property INNER_NUM, which the sender chooses, or 1.

    A value that is no plain number, or larger than a broker counts, is refused. So is a second value.
    """
    cdef Span inner_num, value
    cdef Entry entry
    cdef Cursor left = inside(&message.properties)
    cdef int found = 0, number = 1, digit
    inner_num.at = <const uint8_t *>b"INNER_NUM"
    inner_num.size = 9
    while next_entry(&left, message.properties.at, &entry):
        if not equal(name_of(message, &entry), inner_num):
            continue
        value = value_of(message, &entry)
        found += 1
        if found > 1 or value.size > 5 or value.at[0] == c'0':
            refuse()
        number = 0
        for digit in range(value.size):
            if not c'0' <= value.at[digit] <= c'9':
                refuse()
            number = 10 * number + value.at[digit] - c'0'
    if number > MOST_ITEMS:
        refuse()
    return number
