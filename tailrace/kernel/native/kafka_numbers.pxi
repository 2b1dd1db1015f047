# Numbers of Kafka's records: varints, zigzag, sizes; and what all files of its records share.
# `reference_kafka.py` has the specification.

cdef extern from *:
    """
    /* faults: 1 cut off, 2 too long, 3 a length below -1 */

    static inline __attribute__((always_inline)) int kafka_varint(const uint8_t** at, const uint8_t* end, int32_t* number) {
        const uint8_t* p = *at;
        uint32_t bits, byte;
        if (p >= end) return 1;
        bits = *p++;
        if (bits >= 128) {
            int shift = 7;
            if (p < end && *p < 128) { /* two bytes, as most */
                bits = (bits & 127) | (uint32_t)*p++ << 7;
                *at = p;
                *number = (int32_t)(bits >> 1) ^ -(int32_t)(bits & 1);
                return 0;
            }
            bits &= 127;
            do {
                if (p >= end) return 1;
                byte = *p++;
                if (shift == 28 && byte > 15) return 2;
                bits |= (byte & 127) << shift;
                shift += 7;
            } while (byte >= 128);
        }
        *at = p;
        *number = (int32_t)(bits >> 1) ^ -(int32_t)(bits & 1);
        return 0;
    }

    static inline __attribute__((always_inline)) int kafka_varlong(const uint8_t** at, const uint8_t* end, int64_t* number) {
        const uint8_t* p = *at;
        uint64_t bits = 0, byte;
        int shift = 0;
        if (end - p >= 2 && p[1] < 128 && p[0] >= 128) {
            bits = (p[0] & 127) | (uint64_t)p[1] << 7;
            *at = p + 2;
            *number = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
            return 0;
        }
        do {
            if (p >= end) return 1;
            byte = *p++;
            if (shift == 63 && byte > 1) return 2;
            bits |= (byte & 127) << shift;
            shift += 7;
        } while (byte >= 128);
        *at = p;
        *number = (int64_t)(bits >> 1) ^ -(int64_t)(bits & 1);
        return 0;
    }

    /* The next length, and its bytes, are the cell of a row: where they begin (KAFKA_NULL: nowhere),
       and where they end among the bytes of the column. Returns a fault or 0. */
    static inline __attribute__((always_inline)) int kafka_cell(
        const uint8_t* records, const uint8_t** at, const uint8_t* end, int32_t* ends, uint32_t* places, int64_t* nulls, int64_t row
    ) {
        int32_t length = 0;
        int fault = kafka_varint(at, end, &length);
        if (fault) return fault;
        if (length < 0) {
            if (length < -1) return 3;
            ++*nulls;
            places[row] = 0xFFFFFFFFu;
            ends[row + 1] = ends[row];
            return 0;
        }
        if (length > end - *at) return 1;
        places[row] = (uint32_t)(*at - records);
        ends[row + 1] = ends[row] + length;
        *at += length;
        return 0;
    }

    static inline uint64_t kafka_zigzag(int64_t number) {
        return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
    }

    static inline __attribute__((always_inline)) int kafka_size(uint64_t bits) {
        if (bits < 128) return 1;
        if (bits < 1 << 14) return 2;
        return (70 - __builtin_clzll(bits | 1)) / 7;
    }

    static inline __attribute__((always_inline)) uint8_t* kafka_put(uint8_t* at, uint64_t bits) {
        if (bits >= 128 && bits < 1 << 14) { /* two bytes, as most */
            at[0] = (uint8_t)(bits | 128);
            at[1] = (uint8_t)(bits >> 7);
            return at + 2;
        }
        while (bits > 127) {
            *at++ = (uint8_t)(bits | 128);
            bits >>= 7;
        }
        *at++ = (uint8_t)bits;
        return at;
    }

    /* `room`: the bytes, from both places on, that may be read and written: those behind the length
       are written again later. */
    static inline void kafka_copy(void* to, const void* from, int64_t length, int64_t room) {
        if (length <= 256 && ((length + 15) & ~(int64_t)15) <= room) {
            int64_t done;
            for (done = 0; done < length; done += 16)
                __builtin_memcpy((char*)to + done, (const char*)from + done, 16);
        } else
            memcpy(to, from, (size_t)length);
    }

    static inline int kafka_is_ascii(const uint8_t* p, int64_t n) {
        uint64_t seen = 0, some;
        for (; n >= 8; n -= 8, p += 8) {
            __builtin_memcpy(&some, p, 8);
            seen |= some;
        }
        for (; n > 0; n--, p++) seen |= *p;
        return !(seen & 0x8080808080808080ull);
    }

    static inline int64_t kafka_ms(int64_t us) {
        return us / 1000 - (us % 1000 < 0);
    }
    """
    int kafka_varint(const uint8_t** at, const uint8_t* end, int32_t* number) noexcept nogil
    int kafka_varlong(const uint8_t** at, const uint8_t* end, int64_t* number) noexcept nogil
    int kafka_cell(const uint8_t* records, const uint8_t** at, const uint8_t* end, int32_t* ends, uint32_t* places, int64_t* nulls, int64_t row) noexcept nogil
    uint64_t kafka_zigzag(int64_t number) noexcept nogil
    int kafka_size(uint64_t bits) noexcept nogil
    uint8_t* kafka_put(uint8_t* at, uint64_t bits) noexcept nogil
    void kafka_copy(void* to, const void* source, int64_t length, int64_t room) noexcept nogil
    int kafka_is_ascii(const uint8_t* data, int64_t length) noexcept nogil
    int64_t kafka_ms(int64_t us) noexcept nogil
    bint __builtin_add_overflow(int64_t first, int64_t second, int64_t* sum) noexcept nogil

cdef enum:
    # reference_kafka.Fault
    KAFKA_CUT_OFF = 1
    KAFKA_NEGATIVE_LENGTH = 3
    KAFKA_BYTES_LEFT = 4
    KAFKA_OFFSET_DELTA = 5
    KAFKA_TIMESTAMP = 6
    KAFKA_HEADER_COUNT = 7
    KAFKA_HEADER_NAME_NULL = 8
    KAFKA_HEADER_NAME_NOT_UTF8 = 9
    KAFKA_KEY_MISSING = 10
    KAFKA_RECORD_TOO_LARGE = 11
    KAFKA_RECORDS_LEFT = 12
    KAFKA_COLUMNS = 13
    KAFKA_RECORD_MIN = 7  # RECORD_MIN_BYTES
    KAFKA_RECORDS_MAX = 1 << 30  # RECORDS_MAX_BYTES
    KAFKA_KEPT_BYTES = 8 << 20
    # A record's numbers at their longest: its length, attributes, both deltas, two lengths, a count.
    KAFKA_NUMBERS_MAX = 5 + 1 + 10 + 5 + 5 + 5 + 5
    KAFKA_BUFFERS = 17  # COLUMN_BUFFERS
    KAFKA_SCRATCH = 8

cdef uint32_t KAFKA_NULL = 0xFFFFFFFFU


cdef object _RecordFault = None


cdef int raise_fault(int fault, int64_t row) except -1:
    global _RecordFault
    if _RecordFault is None:
        from tailrace.kernel.reference_kafka import RecordFault

        _RecordFault = RecordFault
    raise _RecordFault(fault, row)
