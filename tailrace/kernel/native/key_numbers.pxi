# Numbers of distinct keys: an open hash table (linear probing) over one arena of key bytes.
#
#     slots     [ tag | number + 1 ]   a power of two of them, at most three quarters taken
#     positions [ 0, end of key 0, end of key 1, ... ]
#     arena     key 0, key 1, ...
#
# The tag is 32 bits of the hash (wyhash's final version 4, public domain, with a secret of each
# table): its low bits choose the slot, all of it is compared before the key is. Growing reads tags.

cdef extern from *:
    """
    typedef struct { uint32_t tag, number; } key_slot;
    static inline uint64_t key_mix(uint64_t a, uint64_t b) {
        __uint128_t product = (__uint128_t)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    static inline uint64_t key_read8(const uint8_t* p) { uint64_t v; memcpy(&v, p, 8); return v; }
    static inline uint64_t key_read4(const uint8_t* p) { uint32_t v; memcpy(&v, p, 4); return v; }
    static inline uint32_t key_tag(const uint8_t* p, size_t n, uint64_t seed, uint64_t secret) {
        uint64_t a, b;
        seed ^= key_mix(seed ^ 0x2d358dccaa6c78a5ull, secret);
        if (n <= 16) {
            if (n >= 4) {
                size_t middle = (n >> 3) << 2;
                a = key_read4(p) << 32 | key_read4(p + middle);
                b = key_read4(p + n - 4) << 32 | key_read4(p + n - 4 - middle);
            } else if (n > 0) {
                a = (uint64_t)p[0] << 16 | (uint64_t)p[n >> 1] << 8 | p[n - 1];
                b = 0;
            } else a = b = 0;
        } else {
            size_t i = n;
            while (i > 16) {
                seed = key_mix(key_read8(p) ^ secret, key_read8(p + 8) ^ seed);
                i -= 16; p += 16;
            }
            a = key_read8(p + i - 16);
            b = key_read8(p + i - 8);
        }
        a ^= secret; b ^= seed;
        __uint128_t product = (__uint128_t)a * b;
        return (uint32_t)(key_mix((uint64_t)product ^ 0x8bb84b93962eacc9ull ^ n,
                                  (uint64_t)(product >> 64) ^ secret) >> 16);
    }
    #define KEY_PREFETCH(address) __builtin_prefetch(address)
    """
    ctypedef struct key_slot:
        uint32_t tag
        uint32_t number
    uint32_t key_tag(const uint8_t* data, size_t length, uint64_t seed, uint64_t secret) nogil
    void KEY_PREFETCH(const void* address) nogil

cdef extern from "string.h" nogil:
    int memcmp(const void* one, const void* other, size_t length)

cdef enum:
    KEY_BLOCK = 64
    KEY_SLOTS_MIN = 1024

cdef int64_t KEY_NUMBER_MAX = 2147483646


cdef class KeyNumbers:
    """See `reference_keys.KeyNumbers`."""
    cdef key_slot* slots
    cdef int64_t* positions
    cdef uint8_t* arena
    cdef int64_t slot_count, position_max, arena_bytes, count
    cdef uint64_t seed, secret

    def __cinit__(self, bytes secret=None):
        if secret is None:
            secret = os.urandom(16)
        if len(secret) != 16:
            raise ValueError(f"a secret has 16 bytes, not {len(secret)}")
        memcpy(&self.seed, PyBytes_AS_STRING(secret), 8)
        memcpy(&self.secret, PyBytes_AS_STRING(secret) + 8, 8)
        self.secret |= 1
        self._begin(KEY_SLOTS_MIN, KEY_SLOTS_MIN, 1 << 14)

    def __dealloc__(self):
        free(self.slots)
        free(self.positions)
        free(self.arena)

    cdef int _begin(self, int64_t slot_count, int64_t position_max, int64_t arena_bytes) except -1:
        """Be empty, with room for so much."""
        free(self.slots)
        free(self.positions)
        free(self.arena)
        self.slots = <key_slot*>realloc(NULL, slot_count * sizeof(key_slot))
        self.positions = <int64_t*>realloc(NULL, (position_max + 1) * sizeof(int64_t))
        self.arena = <uint8_t*>realloc(NULL, arena_bytes)
        if self.slots == NULL or self.positions == NULL or self.arena == NULL:
            raise MemoryError
        memset(self.slots, 0, slot_count * sizeof(key_slot))
        self.slot_count, self.position_max, self.arena_bytes = slot_count, position_max, arena_bytes
        self.positions[0] = 0
        self.count = 0
        return 0

    def __len__(self):
        return self.count

    @property
    def byte_count(self):
        return self.slot_count * <int64_t>sizeof(key_slot) + self.position_max * 8 + self.arena_bytes

    cdef int _grow_slots(self) except -1:
        cdef int64_t new_count = self.slot_count * 2, at, mask = self.slot_count * 2 - 1, i
        cdef key_slot* new = <key_slot*>realloc(NULL, new_count * sizeof(key_slot))
        if new == NULL:
            raise MemoryError
        memset(new, 0, new_count * sizeof(key_slot))
        for i in range(self.slot_count):
            if self.slots[i].number:
                at = self.slots[i].tag & mask
                while new[at].number:
                    at = (at + 1) & mask
                new[at] = self.slots[i]
        free(self.slots)
        self.slots, self.slot_count = new, new_count
        return 0

    cdef int64_t _slot_of(self, const uint8_t* key, int64_t length, uint32_t tag) noexcept nogil:
        """The slot of this key, or the empty one where it belongs."""
        cdef int64_t mask = self.slot_count - 1, at = tag & mask, begin
        cdef uint32_t number
        while True:
            number = self.slots[at].number
            if not number:
                return at
            if self.slots[at].tag == tag:
                begin = self.positions[number - 1]
                if self.positions[number] - begin == length and not memcmp(self.arena + begin, key, length):
                    return at
            at = (at + 1) & mask

    cdef int64_t _add(self, const uint8_t* key, int64_t length, uint32_t tag) except -2:
        """The number of this key, a new one if it is new."""
        cdef int64_t at = self._slot_of(key, length, tag), end, room
        cdef void* larger
        if self.slots[at].number:
            return self.slots[at].number - 1
        if self.count >= KEY_NUMBER_MAX:
            raise OverflowError("there are more than 2,147,483,646 distinct keys")
        end = self.positions[self.count]
        if end + length > self.arena_bytes:
            room = max(self.arena_bytes + self.arena_bytes // 2, end + length)
            larger = realloc(self.arena, room)
            if larger == NULL:
                raise MemoryError
            self.arena, self.arena_bytes = <uint8_t*>larger, room
        if self.count == self.position_max:
            room = self.position_max + self.position_max // 2 + KEY_BLOCK
            larger = realloc(self.positions, (room + 1) * sizeof(int64_t))
            if larger == NULL:
                raise MemoryError
            self.positions, self.position_max = <int64_t*>larger, room
        if (self.count + 1) * 4 > self.slot_count * 3:
            self._grow_slots()
            at = self._slot_of(key, length, tag)
        memcpy(self.arena + end, key, length)
        self.count += 1
        self.positions[self.count] = end + length
        self.slots[at].tag, self.slots[at].number = tag, <uint32_t>self.count
        return self.count - 1

    def numbers(self, validity, ends, data, int64_t start, int64_t count, int64_t width, out,
                uint32_t low=0, uint64_t high=0x100000000ULL):
        cdef Py_buffer valid_view, ends_view, data_view, out_view
        cdef const uint8_t* valid = NULL
        cdef const int32_t* offsets = NULL
        cdef const uint8_t* keys = NULL
        cdef int32_t* found
        cdef const uint8_t* places[KEY_BLOCK]
        cdef int64_t lengths[KEY_BLOCK]
        cdef uint32_t tags[KEY_BLOCK]
        cdef int64_t row, block, i, n, data_bytes = 0
        cdef uint32_t number
        cdef int has_valid = 0, has_ends = 0, has_data = 0, has_out = 0
        try:
            if validity is not None:
                PyObject_GetBuffer(validity, &valid_view, PyBUF_SIMPLE)
                has_valid = 1
                valid = <const uint8_t*>valid_view.buf
                if valid_view.len * 8 < start + count:
                    raise ValueError("the validity bits are fewer than the rows")
            if ends is not None:
                PyObject_GetBuffer(ends, &ends_view, PyBUF_SIMPLE)
                has_ends = 1
                offsets = <const int32_t*>ends_view.buf
                if ends_view.len < (start + count + 1) * 4 and count:
                    raise ValueError("the offsets are fewer than the rows")
            if data is not None:
                PyObject_GetBuffer(data, &data_view, PyBUF_SIMPLE)
                has_data = 1
                keys = <const uint8_t*>data_view.buf
                data_bytes = data_view.len
            PyObject_GetBuffer(out, &out_view, PyBUF_WRITABLE)
            has_out = 1
            found = <int32_t*>out_view.buf
            if out_view.len < count * 4:
                raise ValueError("out is shorter than the rows")
            if start < 0 or count < 0 or (offsets == NULL and (width <= 0 or (start + count) * width > data_bytes) and count):
                raise ValueError("the rows are outside the column")
            row = 0
            while row < count:
                n = min(<int64_t>KEY_BLOCK, count - row)
                for i in range(n):
                    block = start + row + i
                    if valid != NULL and not valid[block >> 3] >> (block & 7) & 1:
                        lengths[i] = -1
                        continue
                    if offsets != NULL:
                        if offsets[block] < 0 or offsets[block + 1] < offsets[block] or offsets[block + 1] > data_bytes:
                            raise ValueError("the offsets are outside the data")
                        places[i] = keys + offsets[block]
                        lengths[i] = offsets[block + 1] - offsets[block]
                    else:
                        places[i] = keys + block * width
                        lengths[i] = width
                    tags[i] = key_tag(places[i], lengths[i], self.seed, self.secret)
                    if tags[i] < low or tags[i] >= high:
                        lengths[i] = -1
                    else:
                        KEY_PREFETCH(self.slots + (tags[i] & (self.slot_count - 1)))
                for i in range(n):
                    if lengths[i] >= 0:
                        number = self.slots[tags[i] & (self.slot_count - 1)].number
                        if number:
                            KEY_PREFETCH(self.positions + number - 1)
                for i in range(n):
                    if lengths[i] >= 0:
                        number = self.slots[tags[i] & (self.slot_count - 1)].number
                        if number:
                            KEY_PREFETCH(self.arena + self.positions[number - 1])
                for i in range(n):
                    found[row + i] = -1 if lengths[i] < 0 else <int32_t>self._add(places[i], lengths[i], tags[i])
                row += n
        finally:
            if has_valid:
                PyBuffer_Release(&valid_view)
            if has_ends:
                PyBuffer_Release(&ends_view)
            if has_data:
                PyBuffer_Release(&data_view)
            if has_out:
                PyBuffer_Release(&out_view)

    def find(self, bytes key not None):
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(key)
        cdef Py_ssize_t length = PyBytes_GET_SIZE(key)
        return <int64_t>self.slots[self._slot_of(data, length, key_tag(data, length, self.seed, self.secret))].number - 1

    def tags(self):
        cdef bytes result = PyBytes_FromStringAndSize(NULL, self.count * 4)
        cdef uint32_t* tags = <uint32_t*>PyBytes_AS_STRING(result)
        cdef int64_t i
        for i in range(self.slot_count):
            if self.slots[i].number:
                tags[self.slots[i].number - 1] = self.slots[i].tag
        return result

    def retain(self, kept):
        cdef bytes tags = self.tags()
        cdef const uint32_t* tag = <const uint32_t*>PyBytes_AS_STRING(tags)
        cdef Py_buffer view
        cdef const int32_t* numbers
        cdef int64_t i, n, slot_count = KEY_SLOTS_MIN, needed = 0, before = -1
        cdef KeyNumbers other
        PyObject_GetBuffer(kept, &view, PyBUF_SIMPLE)
        try:
            numbers = <const int32_t*>view.buf
            n = view.len // 4
            for i in range(n):
                if numbers[i] <= before or numbers[i] >= self.count:
                    raise ValueError("the numbers to keep must ascend, and must exist")
                before = numbers[i]
                needed += self.positions[numbers[i] + 1] - self.positions[numbers[i]]
            while slot_count * 3 < (n + 1) * 4:
                slot_count *= 2
            other = KeyNumbers(b"\0" * 16)
            other._begin(slot_count, n + 1, needed + 1)
            for i in range(n):
                other._add(self.arena + self.positions[numbers[i]],
                           self.positions[numbers[i] + 1] - self.positions[numbers[i]], tag[numbers[i]])
        finally:
            PyBuffer_Release(&view)
        self.slots, other.slots = other.slots, self.slots
        self.positions, other.positions = other.positions, self.positions
        self.arena, other.arena = other.arena, self.arena
        self.slot_count, self.position_max, self.arena_bytes = other.slot_count, other.position_max, other.arena_bytes
        self.count = other.count

    def keys(self):
        return (
            PyBytes_FromStringAndSize(<char*>self.positions, (self.count + 1) * 8),
            PyBytes_FromStringAndSize(<char*>self.arena, self.positions[self.count]),
        )
