# The head of a PRODUCE request and its batches: the twin of `reference_codec.read_produce`, whose
# truth is `tailrace.protocol.produce_messages`.

cdef extern from *:
    """ typedef struct { uint32_t magic; uint16_t api, version; uint64_t correlation_id; uint32_t
    flags, body_length; } RequestHead; _Static_assert(sizeof(RequestHead) == 24,
    "REQUEST_HEADER_BYTES"); typedef struct { int32_t acks; uint32_t timeout_ms, count, reserved; }
    ProduceHead; typedef struct { char topic_id[16]; int32_t partition; uint32_t slot_map_version,
    length, reserved; } ProduceEntry; _Static_assert(sizeof(ProduceEntry) == 32, "_PRODUCE_ENTRY");
    """
    ctypedef struct RequestHead:
        uint32_t magic
        uint16_t api, version
        uint64_t correlation_id
        uint32_t flags, body_length

    ctypedef struct ProduceHead:
        int32_t acks
        uint32_t timeout_ms, count, reserved

    ctypedef struct ProduceEntry:
        char topic_id[16]
        int32_t partition
        uint32_t slot_map_version, length, reserved

cdef enum:
    REQUEST_MAGIC = 0x51525254
    PRODUCE_API = 3
    PRODUCE_VERSION = 2  # and 3, without a trace id
    PRODUCE_FRAMES = 8  # wire.PRODUCE_FRAMES_MAX
    PRODUCE_BATCHES = 4096  # requests.PRODUCE_BATCHES_MAX


def read_produce(list frames not None):
    cdef Py_ssize_t frame_count = PyList_GET_SIZE(frames), number, at = 0, size, length
    cdef uint64_t body_length = 0
    cdef uint32_t index
    cdef RequestHead head
    cdef ProduceHead asked
    cdef ProduceEntry e
    cdef object frame, view = None
    if not 4 <= frame_count <= 3 + PRODUCE_FRAMES:
        return None
    for number in range(1, frame_count):
        frame = frames[number]
        if type(frame) is not bytes and (number < 3 or type(frame) is not memoryview):
            return None
        if number > 1:
            body_length += <uint64_t>len(frame)
    frame = frames[1]
    if PyBytes_GET_SIZE(frame) != sizeof(RequestHead):
        return None
    memcpy(&head, PyBytes_AS_STRING(frame), sizeof(RequestHead))
    if (
        head.magic != REQUEST_MAGIC or head.api != PRODUCE_API or head.version - PRODUCE_VERSION > 1 or head.version < PRODUCE_VERSION or head.flags
        or head.body_length != body_length
    ):
        return None
    frame = frames[2]
    size = PyBytes_GET_SIZE(frame)
    if <size_t>size < sizeof(ProduceHead):
        return None
    memcpy(&asked, PyBytes_AS_STRING(frame), sizeof(ProduceHead))
    if not -1 <= asked.acks <= 1 or not 1 <= asked.count <= PRODUCE_BATCHES:
        return None
    if <size_t>size != sizeof(ProduceHead) + asked.count * sizeof(ProduceEntry):
        return None
    cdef const char* place = PyBytes_AS_STRING(frame) + sizeof(ProduceHead)
    cdef list entries = []
    cdef list batches = []
    cdef object kept = frame  # `place` points into it
    number = 3
    frame = frames[3]
    size = len(frame)
    for index in range(asked.count):
        memcpy(&e, place + index * sizeof(ProduceEntry), sizeof(ProduceEntry))
        length = e.length
        while at == size and length and number + 1 < frame_count:
            number += 1
            frame = frames[number]
            view = None
            at, size = 0, len(frame)
        if length > size - at:
            return None
        entries.append((PyBytes_FromStringAndSize(e.topic_id, 16), e.partition, e.slot_map_version, e.length))
        if length == size:
            batches.append(frame)
        else:
            if view is None:
                view = memoryview(frame)
            batches.append(view[at : at + length])
        at += length
    if at != size:
        return None
    for number in range(number + 1, frame_count):
        if len(frames[number]):
            return None
    return head.version, head.correlation_id, asked.acks, asked.timeout_ms, entries, batches, body_length - <uint64_t>PyBytes_GET_SIZE(kept)
