"""Topics whose segments are damaged at known batches."""

from __future__ import annotations

import pathlib
import struct

from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import start_embedded
from tailrace.format.record_batch.batch_header import header_position
from tailrace.format.record_batch.header_peek import frame_at

BATCHES = 12
PER_BATCH = 5
TOTAL = BATCHES * PER_BATCH


def places(data: bytes) -> list[tuple[int, int]]:
    """(where it begins, how long it is) of each batch in a segment."""
    found = []
    at = 8 + struct.unpack_from("<I", data, 4)[0]  # behind the schema
    while (frame := frame_at(data, at, len(data))) is not None and frame[0]:
        found.append((at, frame[0]))
        at += frame[0]
    assert len(found) == BATCHES
    return found


def damage(data_dir: pathlib.Path, topic: str, numbers: list[int], where: str) -> None:
    (path,) = (data_dir / f"{topic}-0").glob("*.arrows")
    data = bytearray(path.read_bytes())
    batches = places(bytes(data))
    for number in numbers:
        at, length = batches[number]
        position = header_position(data, at)
        flip = {
            "body": at + length - 40,
            "metadata": at + 60,
            "header": position + 40,
            "magic": position + 133,
            "length": position + 12,
        }[where]
        data[flip] ^= 0x10
    path.write_bytes(data)


def fill(data_dir: pathlib.Path, *topics: str) -> None:
    """Topics of one segment of BATCHES batches each, of an appliance that was stopped."""
    running = start_embedded(data_dir=str(data_dir), auto_create_topics=False)
    try:
        with Admin(running.address) as admin:
            admin.create_topics([NewTopic(topic) for topic in topics])
        with Producer(running.address, linger_ms=60_000) as producer:
            for number in range(TOTAL):
                for topic in topics:
                    producer.send(topic, b"%04d:" % number + b"x" * 300)
                if number % PER_BATCH == PER_BATCH - 1:
                    producer.flush(60)
    finally:
        assert running.stop() == 0
