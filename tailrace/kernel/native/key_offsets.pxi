# The last offset of each key, in a table of fixed size: open addressing, linear probing, no growing.
#
#     slots   [ hash, 128 bits | offset + 1 ]   at most four fifths taken; 0: empty
#
# The hash is SipHash-2-4 with 128 bits (Aumasson and Bernstein), keyed by a secret of each table. Its
# first half's upper 32 bits are the tag, its second half chooses the slot, and all of it is compared.
# Keys are not kept. The memory is calloc's: pages that no key has touched take none.

cdef extern from *:
    """
    #include <stdlib.h>
    typedef struct { uint64_t first, second; int64_t end; } offset_slot;
    #define SIP_ROTATE(x, b) (uint64_t)(((x) << (b)) | ((x) >> (64 - (b))))
    #define SIP_ROUND \
        v0 += v1; v1 = SIP_ROTATE(v1, 13); v1 ^= v0; v0 = SIP_ROTATE(v0, 32); \
        v2 += v3; v3 = SIP_ROTATE(v3, 16); v3 ^= v2; \
        v0 += v3; v3 = SIP_ROTATE(v3, 21); v3 ^= v0; \
        v2 += v1; v1 = SIP_ROTATE(v1, 17); v1 ^= v2; v2 = SIP_ROTATE(v2, 32);
    static inline void sip_hash(const uint8_t* p, size_t n, uint64_t k0, uint64_t k1, uint64_t out[2]) {
        uint64_t v0 = 0x736f6d6570736575ull ^ k0, v1 = 0x646f72616e646f6dull ^ k1 ^ 0xee;
        uint64_t v2 = 0x6c7967656e657261ull ^ k0, v3 = 0x7465646279746573ull ^ k1;
        uint64_t m, last = (uint64_t)n << 56;
        const uint8_t* end = p + (n & ~(size_t)7);
        size_t i, rest = n & 7;
        for (; p != end; p += 8) {
            memcpy(&m, p, 8);
            v3 ^= m; SIP_ROUND SIP_ROUND v0 ^= m;
        }
        for (i = 0; i < rest; i++) last |= (uint64_t)p[i] << (8 * i);
        v3 ^= last; SIP_ROUND SIP_ROUND v0 ^= last;
        v2 ^= 0xee; SIP_ROUND SIP_ROUND SIP_ROUND SIP_ROUND
        out[0] = v0 ^ v1 ^ v2 ^ v3;
        v1 ^= 0xdd; SIP_ROUND SIP_ROUND SIP_ROUND SIP_ROUND
        out[1] = v0 ^ v1 ^ v2 ^ v3;
    }
    static inline uint64_t slot_at(uint64_t hash, uint64_t slots) {
        return (uint64_t)(((__uint128_t)hash * slots) >> 64);
    }
    #define OFFSET_SLOTS_NEW(count) ((offset_slot*)calloc((count), sizeof(offset_slot)))
    """
    ctypedef struct offset_slot:
        uint64_t first
        uint64_t second
        int64_t end
    void sip_hash(const uint8_t* data, size_t length, uint64_t k0, uint64_t k1, uint64_t* out) nogil
    uint64_t slot_at(uint64_t hash, uint64_t slots) nogil
    offset_slot* OFFSET_SLOTS_NEW(size_t count) nogil


cdef enum:
    OFFSETS_BLOCK = 32


cdef struct KeyCells:
    const uint8_t* valid
    const int32_t* ends
    const uint8_t* data
    int64_t data_bytes, width


cdef class KeyOffsets:
    """See `reference_offsets.KeyOffsets`."""
    cdef offset_slot* slots
    cdef int64_t slot_count, count, count_max
    cdef uint64_t k0, k1

    def __cinit__(self, int64_t slot_count, bytes secret=None):
        if secret is None:
            secret = os.urandom(16)
        if len(secret) != 16:
            raise ValueError(f"a secret has 16 bytes, not {len(secret)}")
        if slot_count < 2:
            raise ValueError(f"a table has at least two slots, not {slot_count}")
        memcpy(&self.k0, PyBytes_AS_STRING(secret), 8)
        memcpy(&self.k1, PyBytes_AS_STRING(secret) + 8, 8)
        self.slots = OFFSET_SLOTS_NEW(slot_count)
        if self.slots == NULL:
            raise MemoryError
        self.slot_count = slot_count
        self.count_max = max(<int64_t>1, slot_count * 4 // 5)

    def __dealloc__(self):
        free(self.slots)

    def __len__(self):
        return self.count

    @property
    def room(self):
        return self.count_max - self.count

    def clear(self):
        cdef offset_slot* slots = OFFSET_SLOTS_NEW(self.slot_count)
        if slots == NULL:
            raise MemoryError
        free(self.slots)
        self.slots, self.count = slots, 0

    cdef int _key_at(self, KeyCells* cells, int64_t row, const uint8_t** key, int64_t* length) except -1:
        """The bytes of a row's key. 0: it has none."""
        if cells.valid != NULL and not cells.valid[row >> 3] >> (row & 7) & 1:
            return 0
        if cells.ends == NULL:
            key[0], length[0] = cells.data + row * cells.width, cells.width
            return 1
        if cells.ends[row] < 0 or cells.ends[row + 1] < cells.ends[row] or cells.ends[row + 1] > cells.data_bytes:
            raise ValueError("the offsets are outside the data")
        key[0], length[0] = cells.data + cells.ends[row], cells.ends[row + 1] - cells.ends[row]
        return 1

    cdef inline int64_t _slot_of(self, uint64_t* hash) noexcept nogil:
        """The slot of this hash, or the empty one where it belongs."""
        cdef int64_t at = <int64_t>slot_at(hash[1], self.slot_count)
        while self.slots[at].end and (self.slots[at].first != hash[0] or self.slots[at].second != hash[1]):
            at += 1
            if at == self.slot_count:
                at = 0
        return at

    def put(self, validity, ends, data, int64_t start, int64_t count, int64_t width, offsets,
            uint64_t low=0, uint64_t high=0x100000000ULL, superseded=None, int64_t base=0):
        return self._walk(validity, ends, data, start, count, width, offsets, superseded, True, base, low, high)

    def mark_latest(self, validity, ends, data, int64_t start, int64_t count, int64_t width, offsets, out,
                    uint64_t low=0, uint64_t high=0x100000000ULL):
        if out is None:
            raise ValueError("there is nowhere to write")
        self._walk(validity, ends, data, start, count, width, offsets, out, False, 0, low, high)

    cdef int64_t _walk(self, validity, ends, data, int64_t start, int64_t count, int64_t width, offsets, out,
                       bint puts, int64_t base, uint64_t low, uint64_t high) except -1:
        """Put the rows, and note in the bits of `out` what they supersede; or look them up, and write
        bytes to `out`. Returns how many were put.
        """
        cdef Py_buffer views[5]
        cdef int taken = 0, i
        cdef KeyCells cells
        cdef const int64_t* numbers
        cdef uint8_t* found = NULL
        cdef int64_t bit_count = 0
        memset(&cells, 0, sizeof(cells))
        cells.width = width
        if start < 0 or count < 0:
            raise ValueError("the rows are outside the column")
        try:
            PyObject_GetBuffer(offsets, &views[taken], PyBUF_SIMPLE)
            taken += 1
            numbers = <const int64_t*>views[taken - 1].buf
            if views[taken - 1].len < count * 8:
                raise ValueError("the offsets of the records are fewer than the rows")
            if out is not None:
                PyObject_GetBuffer(out, &views[taken], PyBUF_WRITABLE)
                taken += 1
                found = <uint8_t*>views[taken - 1].buf
                bit_count = views[taken - 1].len * 8
                if not puts and views[taken - 1].len < count:
                    raise ValueError("out is shorter than the rows")
            if validity is not None:
                PyObject_GetBuffer(validity, &views[taken], PyBUF_SIMPLE)
                taken += 1
                cells.valid = <const uint8_t*>views[taken - 1].buf
                if views[taken - 1].len * 8 < start + count:
                    raise ValueError("the validity bits are fewer than the rows")
            if data is not None:
                PyObject_GetBuffer(data, &views[taken], PyBUF_SIMPLE)
                taken += 1
                cells.data = <const uint8_t*>views[taken - 1].buf
                cells.data_bytes = views[taken - 1].len
            if ends is not None:
                PyObject_GetBuffer(ends, &views[taken], PyBUF_SIMPLE)
                taken += 1
                cells.ends = <const int32_t*>views[taken - 1].buf
                if views[taken - 1].len < (start + count + 1) * 4 and count:
                    raise ValueError("the offsets are fewer than the rows")
            elif count and (width <= 0 or (start + count) * width > cells.data_bytes):
                raise ValueError("the rows are outside the column")
            return self._walk_rows(&cells, start, count, numbers, 0, found, bit_count, puts, base, low, high)
        finally:
            for i in range(taken):
                PyBuffer_Release(&views[i])

    cdef int64_t _walk_rows(self, KeyCells* cells, int64_t start, int64_t count, const int64_t* numbers, int64_t first,
                            uint8_t* found, int64_t bit_count, bint puts, int64_t base, uint64_t low, uint64_t high) except -1:
        """`_walk` of rows whose offsets are `numbers`, or with NULL `first` and those behind it."""
        cdef const uint8_t* key = NULL
        cdef int64_t length = 0, row = 0, n, j, at, number, older
        cdef uint64_t hashes[2 * OFFSETS_BLOCK]
        cdef int is_taken[OFFSETS_BLOCK]
        while row < count:
            n = min(<int64_t>OFFSETS_BLOCK, count - row)
            for j in range(n):
                is_taken[j] = self._key_at(cells, start + row + j, &key, &length)
                if is_taken[j]:
                    sip_hash(key, length, self.k0, self.k1, hashes + 2 * j)
                    is_taken[j] = low <= hashes[2 * j] >> 32 < high
                    if is_taken[j]:
                        KEY_PREFETCH(self.slots + slot_at(hashes[2 * j + 1], self.slot_count))
            for j in range(n):
                if not is_taken[j]:
                    continue
                number = first + row + j if numbers == NULL else numbers[row + j]
                at = self._slot_of(hashes + 2 * j)
                if not puts:
                    if self.slots[at].end > number + 1:
                        found[row + j] = 0
                elif self.slots[at].end:
                    older = min(self.slots[at].end - 1, number) - base
                    if self.slots[at].end != number + 1 and 0 <= older < bit_count:
                        found[older >> 3] |= 1 << (older & 7)
                    self.slots[at].end = max(self.slots[at].end, number + 1)
                elif self.count == self.count_max:
                    return row + j
                else:
                    self.slots[at].first, self.slots[at].second = hashes[2 * j], hashes[2 * j + 1]
                    self.slots[at].end = number + 1
                    self.count += 1
            row += n
        return count

    def put_stored(self, data, int64_t position, uint32_t seed, int64_t following, int64_t end, BatchShape shape not None,
                   int key_node, int64_t schema_id, superseded, int64_t base, uint64_t low=0, uint64_t high=0x100000000ULL):
        cdef Py_buffer views[2]
        cdef int taken = 0, i, key_buffer = 0
        cdef const uint8_t* batch
        cdef const uint8_t* body
        cdef uint8_t* bits = NULL
        cdef const uint8_t* nodes
        cdef const uint8_t* buffers
        cdef int64_t bit_count = 0, at, length, handled, table
        cdef BatchHead head
        cdef Flat flat
        cdef KeyCells cells
        cdef ShapeNode* node
        if not 0 <= key_node < <int>shape.node_count or position < 0:
            raise ValueError("there is no such column, or no such position")
        node = shape.nodes + key_node
        for i in range(key_node):
            key_buffer += shape.nodes[i].buffer_count
        memset(&cells, 0, sizeof(cells))
        if node.buffer_count == 2 and shape.buffers[key_buffer + 1].kind == FIXED:
            cells.width = shape.buffers[key_buffer + 1].bit_width >> 3
            if shape.buffers[key_buffer + 1].bit_width & 7 or not cells.width:
                return position, following
        elif node.buffer_count != 3 or shape.buffers[key_buffer + 1].kind != OFFSETS_32:
            return position, following
        try:
            PyObject_GetBuffer(data, &views[taken], PyBUF_SIMPLE)
            taken += 1
            if superseded is not None:
                PyObject_GetBuffer(superseded, &views[taken], PyBUF_WRITABLE)
                taken += 1
                bits, bit_count = <uint8_t*>views[1].buf, views[1].len * 8
            while following < end:
                length = stored_length(<const uint8_t*>views[0].buf + position, views[0].len - position)
                batch = <const uint8_t*>views[0].buf + position
                if not length or <size_t>batch & 7:
                    break
                at = plain_head(batch, length, &head, seed, shape, UNPACKED_MAX, OF_LOG | LOG_APPEND_TIME)
                if not at or head.attributes & COMPRESSED or head.base_offset != following or head.base_offset + head.record_count > end:
                    break
                if schema_id >= 0 and head.schema_id != schema_id:
                    break
                if not has_right_body(batch, length, at, &head):
                    break
                body = batch + at + BATCH_HEAD_BYTES
                flat.at, flat.size = batch + 8, at - 8
                table = followed(&flat, field_at(&flat, followed(&flat, 0), 2))
                nodes = flat.at + pairs_at(&flat, table, 1, shape.node_count)
                buffers = flat.at + pairs_at(&flat, table, 2, shape.buffer_count)
                cells.valid = body + number_at(buffers, 2 * key_buffer) if number_at(nodes, 2 * key_node + 1) else NULL
                i = key_buffer + node.buffer_count - 1
                cells.data, cells.data_bytes = body + number_at(buffers, 2 * i), number_at(buffers, 2 * i + 1)
                if node.buffer_count == 3:
                    cells.ends = <const int32_t*>(body + number_at(buffers, 2 * key_buffer + 2))
                    if not ends_ascend(cells.ends, head.record_count, cells.data_bytes):
                        break
                handled = self._walk_rows(&cells, 0, head.record_count, NULL, following, bits, bit_count, True, base, low, high)
                if handled < <int64_t>head.record_count:
                    return position, following
                position += length
                following += head.record_count
            return position, following
        finally:
            for i in range(taken):
                PyBuffer_Release(&views[i])


cdef int64_t stored_length(const uint8_t* batch, int64_t size) noexcept nogil:
    """The length that the header of a plain batch says, if the batch lies whole within `size`. 0: it
    does not, or there is none.
    """
    cdef uint32_t continuation, metadata_size
    cdef BatchHead head
    if size < 8 + BATCH_HEAD_BYTES:
        return 0
    memcpy(&continuation, batch, 4)
    memcpy(&metadata_size, batch + 4, 4)
    if continuation != 0xFFFFFFFFU or metadata_size & 7 or metadata_size < BATCH_HEAD_BYTES or metadata_size > METADATA_MAX or 8 + <int64_t>metadata_size > size:
        return 0
    memcpy(&head, batch + 8 + metadata_size - BATCH_HEAD_BYTES, BATCH_HEAD_BYTES)
    return head.batch_length if head.magic == BATCH_MAGIC and head.batch_length <= size else 0


cdef bint ends_ascend(const int32_t* ends, int64_t count, int64_t data_bytes) noexcept nogil:
    """Whether a column's offsets are such that each cell lies in its data."""
    cdef int64_t row
    cdef bint descends = ends[0] < 0 or ends[count] > data_bytes
    for row in range(count):
        descends |= ends[row] > ends[row + 1]
    return not descends
