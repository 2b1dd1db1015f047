# A batch of a producer, from its records to the bytes that are sent: `reference_codec.py` in one
# step, without a header object between.


cdef uint32_t client_crc(const uint8_t* data, Py_ssize_t length, uint32_t seed) except? 0xFFFFFFFF:
    """`crc`, in a process that has appended nothing."""
    global _crc32c
    if _crc32c is None:
        from tailrace.format.crc32c import crc32c

        _crc32c = crc32c
    return crc(data, length, seed)


def encoded_batch(RecordBuffer rows not None, uint32_t schema_id, uint32_t seed):
    """The batch as bytes, without a producer's identity."""
    cdef Py_ssize_t count = rows.own.values.count, i
    if not count:
        raise ValueError("a batch has a record at least")
    cdef bytearray batch = rows.message(BATCH_HEAD_BYTES)
    cdef uint8_t* at = <uint8_t*>PyByteArray_AS_STRING(batch)
    cdef Py_ssize_t length = len(batch), body_start, place
    cdef uint32_t metadata_size
    cdef int64_t stamp
    cdef BatchHead head
    memcpy(&metadata_size, at + 4, 4)
    body_start = 8 + <Py_ssize_t>metadata_size
    place = body_start - BATCH_HEAD_BYTES
    memset(&head, 0, BATCH_HEAD_BYTES)
    head.batch_length = <uint32_t>length
    head.last_offset_delta = <uint32_t>(count - 1)
    head.record_count = <uint32_t>count
    memcpy(&head.first_timestamp_us, rows.own.stamps.at, 8)
    head.max_timestamp_us = head.first_timestamp_us
    for i in range(1, count):
        memcpy(&stamp, rows.own.stamps.at + 8 * i, 8)
        head.max_timestamp_us = max(head.max_timestamp_us, stamp)
    head.append_time_us = head.producer_id = head.due_us = head.delay_position = head.min_tick = -1
    head.base_sequence = head.leader_epoch = -1
    head.producer_epoch = -1
    head.schema_id = schema_id
    head.header_length, head.version, head.magic = BATCH_HEAD_BYTES, 1, BATCH_MAGIC
    head.body_crc = client_crc(at + body_start, length - body_start, client_crc(at, place, 0))
    head.header_crc = client_crc(<uint8_t*>&head + 4, BATCH_HEAD_BYTES - 4, seed)
    memcpy(at + place, &head, BATCH_HEAD_BYTES)
    return batch


def stamp_batch(bytearray batch not None, int64_t producer_id, int16_t producer_epoch, int32_t base_sequence, uint32_t seed):
    """Write a producer's identity and a sequence into a batch that has a header. The id says if the
    batch belongs to a transaction: then attribute and version say so too. Raises ValueError.
    """
    cdef uint8_t* at = <uint8_t*>PyByteArray_AS_STRING(batch)
    cdef int64_t length = len(batch), place, extension
    cdef uint32_t metadata_size = 0
    cdef BatchHead head
    if length >= 8:
        memcpy(&metadata_size, at + 4, 4)
    place = 8 + <int64_t>metadata_size - BATCH_HEAD_BYTES
    if place < 8 or place + BATCH_HEAD_BYTES > length:
        raise ValueError("a batch without a header")
    memcpy(&head, at + place, BATCH_HEAD_BYTES)
    extension = head.extension_length
    if extension > place:
        raise ValueError("a batch whose header is none")
    head.producer_id, head.base_sequence, head.producer_epoch = producer_id, base_sequence, producer_epoch
    if producer_id >= TRANSACTIONAL_PRODUCER_IDS:
        head.attributes |= TRANSACTIONAL
        head.version = 2
    elif head.attributes & TRANSACTIONAL:
        head.attributes &= ~<uint32_t>TRANSACTIONAL
        head.version = 1
    if extension:
        seed = client_crc(at + place - extension, extension, seed)
    head.header_crc = client_crc(<uint8_t*>&head + 4, BATCH_HEAD_BYTES - 4, seed)
    memcpy(at + place, &head, BATCH_HEAD_BYTES)
