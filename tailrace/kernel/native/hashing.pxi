# Kafka's murmur2.

cdef uint32_t _murmur2(const uint8_t* data, Py_ssize_t length) noexcept nogil:
    cdef uint32_t m = 0x5BD1E995
    cdef uint32_t h = 0x9747B28CU ^ <uint32_t>length
    cdef uint32_t k
    cdef Py_ssize_t whole = length & ~<Py_ssize_t>3
    cdef Py_ssize_t i
    for i in range(0, whole, 4):
        memcpy(&k, data + i, 4)
        k *= m
        k ^= k >> 24
        h *= m
        h ^= k * m
    cdef Py_ssize_t rest = length & 3
    if rest:
        if rest == 3:
            h ^= <uint32_t>data[whole + 2] << 16
        if rest >= 2:
            h ^= <uint32_t>data[whole + 1] << 8
        h ^= data[whole]
        h *= m
    h ^= h >> 13
    h *= m
    return h ^ (h >> 15)


def murmur2(data):
    """Kafka's murmur2 of `data`, as an unsigned 32-bit number."""
    # of a subclass, too, which the type in a signature would refuse
    if not isinstance(data, bytes):
        raise TypeError(f"a key is bytes, not {type(data).__name__}")
    return _murmur2(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
